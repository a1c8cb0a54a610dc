"""HyperParallel's swap groups and context parallelism: their names and call patterns on memswap.

``SwapManager()`` is the process's one manager. Copies run on the engine's own streams, so a
``copy_stream`` is taken and not used. A tensor's memory is free once nobody but
its :class:`SwapTensor` holds the tensor; nothing is resized under anybody else.
docs/migration.md shows before and after.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from memswap.checkpointing import CheckpointPolicy
from memswap.checkpointing import keep_collectives as keep_collectives_policy
from memswap.compat.hyper_parallel.groups import SwapGroup
from memswap.compat.hyper_parallel.manager import SwapManager
from memswap.compat.hyper_parallel.tensors import Storage, SwapTensor
from memswap.compat.hyper_parallel.wrappers import (
    ActivationPolicy,
    checkpoint,
    checkpoint_wrapper,
    swap,
    swap_wrapper,
)

if TYPE_CHECKING:
    from memswap.compat.hyper_parallel.context import AsyncContextParallel, ContextParallel

__all__ = [
    "ActivationPolicy",
    "AsyncContextParallel",
    "CheckpointPolicy",
    "ContextParallel",
    "Storage",
    "SwapGroup",
    "SwapManager",
    "SwapTensor",
    "checkpoint",
    "checkpoint_wrapper",
    "keep_collectives_policy",
    "swap",
    "swap_wrapper",
]


def __getattr__(name: str) -> Any:
    if name in ("AsyncContextParallel", "ContextParallel"):  # they import torch.distributed.fsdp
        return getattr(import_module(f"{__name__}.context"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
