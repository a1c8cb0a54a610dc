"""InternEvo's ISP: its names and call patterns on memswap.parallel; docs/migration.md shows how."""

from memswap.compat.internevo.all_to_all import _SeqAllToAll
from memswap.compat.internevo.attention import (
    DistributedAttention,
    auto_wrap_distributed_attention,
    auto_wrap_func_distributed_attention,
)
from memswap.compat.internevo.ends import (
    EmbeddingWeightParallelCommunicator,
    HeadWeightParallelCommunicator,
)
from memswap.compat.internevo.pool import ISPCommModelConfig, MemoryPool
from memswap.compat.internevo.raw import WPCommunicator
from memswap.compat.internevo.scheduler import (
    ISPCommunicatorSchedulerHook,
    ISPCommunicatorWrapper,
)
from memswap.compat.internevo.structure import ISPOverlapState
from memswap.compat.internevo.weights import ISPCommunicator

__all__ = [
    "DistributedAttention",
    "EmbeddingWeightParallelCommunicator",
    "HeadWeightParallelCommunicator",
    "ISPCommModelConfig",
    "ISPCommunicator",
    "ISPCommunicatorSchedulerHook",
    "ISPCommunicatorWrapper",
    "ISPOverlapState",
    "MemoryPool",
    "WPCommunicator",
    "_SeqAllToAll",
    "auto_wrap_distributed_attention",
    "auto_wrap_func_distributed_attention",
]
