"""memswap: saved activations swapped off the accelerator and back, without changing one bit."""

from memswap.activations import Manager, manage, saved_tensors
from memswap.codec import Frame, decode, encode
from memswap.engine.action import Action, TensorInfo
from memswap.engine.pools import DiskPool, HostPool
from memswap.engine.stats import Count, Stats
from memswap.engine.windows import WindowStats
from memswap.errors import (
    EntryStateError,
    FrameError,
    InplaceEditError,
    MemswapError,
    NotSwappedError,
    SharedStorageError,
    TransferError,
)
from memswap.inplace import swap_in, swap_out
from memswap.planning.policy import Policy
from memswap.windows import Window, Windows, select_layers, window

__version__ = "0.1.0"

__all__ = [
    "Action",
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
    "SharedStorageError",
    "Stats",
    "TensorInfo",
    "TransferError",
    "Window",
    "WindowStats",
    "Windows",
    "decode",
    "encode",
    "manage",
    "saved_tensors",
    "select_layers",
    "swap_in",
    "swap_out",
    "window",
]
