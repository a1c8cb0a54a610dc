"""Sharded weights and exchanges between ranks: the process groups' side of memswap."""

from memswap.parallel.schedule import Context
from memswap.parallel.shard import ShardedModule, UnshardHandle, shard

__all__ = ["Context", "ShardedModule", "UnshardHandle", "shard"]
