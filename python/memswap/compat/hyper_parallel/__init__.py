"""HyperParallel's swap groups: their names and call patterns on memswap's groups.

A :class:`SwapManager` is an object like any other: each model has one. Copies run on the engine's
own streams, so a ``copy_stream`` is taken and not used. A tensor's memory is free once nobody but
its :class:`SwapTensor` holds the tensor; nothing is resized under anybody else.
docs/migration.md shows before and after.
"""

from memswap.compat.hyper_parallel.checkpoint import (
    ActivationPolicy,
    CheckpointPolicy,
    checkpoint,
    checkpoint_wrapper,
    swap_wrapper,
)
from memswap.compat.hyper_parallel.groups import SwapGroup, SwapManager
from memswap.compat.hyper_parallel.tensors import Storage, SwapTensor

__all__ = [
    "ActivationPolicy",
    "CheckpointPolicy",
    "Storage",
    "SwapGroup",
    "SwapManager",
    "SwapTensor",
    "checkpoint",
    "checkpoint_wrapper",
    "swap_wrapper",
]
