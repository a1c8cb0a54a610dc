"""memswap: saved activations swapped off the accelerator and back, without changing one bit."""

from memswap.activations import Manager, manage, saved_tensors
from memswap.checkpointing import (
    Checkpointing,
    CheckpointPolicy,
    checkpoint,
    checkpoint_module,
    keep_collectives,
)
from memswap.codec import Frame, decode, encode
from memswap.engine.action import Action, TensorInfo
from memswap.engine.pools import DiskPool, HostPool
from memswap.engine.stats import Count, Stats
from memswap.errors import (
    EntryStateError,
    FrameError,
    InplaceEditError,
    MemswapError,
    NotSwappedError,
    RecomputeError,
    SharedStorageError,
    TransferError,
)
from memswap.inplace import swap_in, swap_out
from memswap.planning.policy import Policy

__version__ = "0.1.0"

__all__ = [
    "Action",
    "CheckpointPolicy",
    "Checkpointing",
    "Count",
    "DiskPool",
    "EntryStateError",
    "Frame",
    "FrameError",
    "HostPool",
    "InplaceEditError",
    "Manager",
    "MemswapError",
    "NotSwappedError",
    "Policy",
    "RecomputeError",
    "SharedStorageError",
    "Stats",
    "TensorInfo",
    "TransferError",
    "checkpoint",
    "checkpoint_module",
    "decode",
    "encode",
    "keep_collectives",
    "manage",
    "saved_tensors",
    "swap_in",
    "swap_out",
]
