"""Layers and machines of tests in virtual time: what they save and how long that takes is known."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

#: GB/s and microseconds: a `TwoSaved` layer computes about as long as its tensors take on the link.
COMPUTE = {"host_us": 0.05, "launch_us": 0.5, "hbm_gb_per_s": 3.0}
LINK = {"h2d_gb_per_s": 5.0, "d2h_gb_per_s": 5.0}

#: A host that runs ahead of the device, so that no event has happened by the time it asks.
HOST: dict[str, Any] = {"host_us": 0.05, "launch_us": 0.2, "queries_wait": False}
#: A product takes about ten times as long as an elementwise operator: room for every encode.
ROOMY: dict[str, Any] = {**HOST, "hbm_gb_per_s": 10.0, "matrix_gb_per_s": 1.0}


class TwoSaved(nn.Module):
    """Saves two storages of its own: its input and what tanh gave."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.hidden = [weight]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.hidden[0]).tanh() * 1.5


class Product(nn.Module):
    """A matrix product, which opens a window, and two elementwise operators."""

    def __init__(self, side: int) -> None:
        super().__init__()
        self.linear = nn.Linear(side, side, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.silu(self.linear(x)).tanh()
