"""memswap: saved activations swapped off the accelerator and back, without changing one bit."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

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
    RankMismatchError,
    RecomputeError,
    SharedStorageError,
    SlotError,
    TransferError,
    UnitStateError,
)
from memswap.inplace import swap_in, swap_out
from memswap.planning.policy import Policy

if TYPE_CHECKING:
    from memswap import parallel as parallel

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
    "RankMismatchError",
    "RecomputeError",
    "SharedStorageError",
    "SlotError",
    "Stats",
    "TensorInfo",
    "TransferError",
    "UnitStateError",
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


def __getattr__(name: str) -> Any:
    if name == "parallel":  # when it is asked for: it imports torch.distributed.fsdp
        return import_module("memswap.parallel")
    raise AttributeError(f"module 'memswap' has no attribute {name!r}")
