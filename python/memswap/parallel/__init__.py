"""Sharded weights and exchanges between ranks: the process groups' side of memswap."""

from memswap.parallel.describe import describe
from memswap.parallel.fsdp2 import PooledAllGather, pool_all_gathers
from memswap.parallel.schedule import Context
from memswap.parallel.shard import ShardedModule, UnshardHandle, shard

__all__ = [
    "Context",
    "PooledAllGather",
    "ShardedModule",
    "UnshardHandle",
    "describe",
    "pool_all_gathers",
    "shard",
]
