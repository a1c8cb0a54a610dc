"""What libraries keep of a device for good, beside a model: cuBLAS's workspaces.

The first product of each thread takes one, and nobody gives it back. On CUDA that is tens of MiB,
many times what a small model takes, so a test of a device's budget has to know of it.
"""

from __future__ import annotations

import functools
import gc
import math
from typing import Any

import torch
from torch import nn


@functools.cache
def kept_bytes(device: torch.device) -> int:
    """All that is there before any model is. The same from then on; of a CPU, nothing."""
    if device.type == "cpu":
        return 0
    layer = nn.Linear(8, 8, device=device)
    layer(torch.ones(8, 8, device=device)).sum().backward()
    del layer
    gc.collect()
    torch.accelerator.synchronize()
    return int(torch.get_device_module(device).memory_allocated(device))


def scale_for(device: torch.device, nbytes: int, share: float = 0.25) -> int:
    """By how much to multiply each of two sizes of a model, so that what libraries keep is small.

    Args:
        nbytes: that the model takes, unscaled; scaled, it takes the square of the scale as much.
        share: of the model's bytes, what libraries may keep.
    """
    return max(1, math.ceil(math.sqrt(kept_bytes(device) / (share * nbytes))))


class Library:
    """Takes memory of the simulated device as cuBLAS does of a GPU: with the first products.

    One forward's on the thread that calls it, and one of autograd's thread.
    """

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self.device, self.nbytes = device, nbytes
        self.kept: dict[str, torch.Tensor] = {}

    def __enter__(self) -> Library:
        kept_bytes.cache_clear()
        self._hook = nn.modules.module.register_module_forward_hook(self._forward)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._hook.remove()
        self.kept.clear()
        kept_bytes.cache_clear()

    def _forward(self, module: nn.Module, arguments: Any, result: Any) -> None:
        if not isinstance(module, nn.Linear):
            return
        self._take("forward")
        if "backward" not in self.kept and result.requires_grad:
            result.register_hook(lambda gradient: self._take("backward"))

    def _take(self, thread: str) -> None:
        if thread not in self.kept:
            self.kept[thread] = torch.empty(self.nbytes, dtype=torch.uint8, device=self.device)
