"""Sharded weights and exchanges between ranks: the process groups' side of memswap."""

from memswap.parallel.applied import AppliedContext
from memswap.parallel.attention import causal_attention, causal_mask
from memswap.parallel.context import ContextParallel
from memswap.parallel.describe import describe
from memswap.parallel.exchange import Pending, exchange
from memswap.parallel.fsdp2 import PooledAllGather, pool_all_gathers
from memswap.parallel.layouts import HeadPlan, SequenceShards
from memswap.parallel.redistribute import (
    GatherSequence,
    HeadsToSequence,
    ReduceScatterSequence,
    SequenceToHeads,
)
from memswap.parallel.schedule import ShardContext
from memswap.parallel.shard import ShardedModule, UnshardHandle, shard

__all__ = [
    "AppliedContext",
    "ContextParallel",
    "GatherSequence",
    "HeadPlan",
    "HeadsToSequence",
    "Pending",
    "PooledAllGather",
    "ReduceScatterSequence",
    "SequenceShards",
    "SequenceToHeads",
    "ShardContext",
    "ShardedModule",
    "UnshardHandle",
    "causal_attention",
    "causal_mask",
    "describe",
    "exchange",
    "pool_all_gathers",
    "shard",
]
