"""Which tensors MindSpeed's handler may swap, and the numbers that they go by."""

from __future__ import annotations

import enum
from collections.abc import Callable

import torch

from memswap._native import native
from memswap.engine.autograd import is_parameter

CheckFn = Callable[[torch.Tensor], bool]
TensorKey = tuple[int, int]


class TensorLocation(enum.Enum):
    """Where a swapped tensor's bytes are."""

    DEVICE = "device"
    HOST = "host"


def is_valid_for_swap(tensor: torch.Tensor, custom_check_fn: CheckFn | None = None) -> bool:
    """Whether a tensor may be swapped: a plain one with bytes, no parameter nor a view of one."""
    if is_parameter(tensor) or native.capture(tensor) is None:
        return False
    return custom_check_fn is None or bool(custom_check_fn(tensor))


class TensorKeyManager:
    """Numbers the tensors of each layer, in the order in which they are saved."""

    def __init__(self) -> None:
        self._layer = -1
        self._counts: dict[int, int] = {}

    def get_key(self, layer_idx: int) -> tuple[TensorKey, bool]:
        """``(layer, index)``, and whether the layer before has completed."""
        completed = False
        if layer_idx < self._layer:
            self._counts = {}
        elif layer_idx > self._layer:
            completed = layer_idx != 0
        if layer_idx != self._layer:
            self._counts[layer_idx] = 0
        self._layer = layer_idx
        self._counts[layer_idx] += 1
        return (layer_idx, self._counts[layer_idx] - 1), completed

    def get_prefetch_keys(self, layer_idx: int, tensor_idx: int) -> list[TensorKey]:
        """The keys of the layer before that belong to a tensor, in proportion to its place.

        Empty where that layer saved nothing.
        """
        before, here = self._counts.get(layer_idx - 1, 0), self._counts.get(layer_idx, 0)
        if not before or not here:
            return []
        first, last = tensor_idx * before // here, (tensor_idx + 1) * before // here
        return [(layer_idx - 1, index) for index in range(first, last)]
