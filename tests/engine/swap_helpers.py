"""What tests of chain and swap_modules share: a model's layers under either, and simple models."""

from __future__ import annotations

from typing import Any

import torch
from helpers import EVERYTHING
from torch import nn

import memswap
from memswap.schedules.scheduled import ScheduledModules

DOORS = ("chain", "swap_modules")


def open_door(
    name: str, model: nn.Module, pool: Any, policy: memswap.Policy = EVERYTHING
) -> ScheduledModules:
    """Puts memswap on all layers of a model, as a chain or as modules found by a pattern."""
    if name == "chain":
        return memswap.chain(model.layers, policy, pool=pool)
    return memswap.swap_modules(model, "layers.{*}", policy=policy, pool=pool)


class Layered(nn.Module):
    """Layers one after another, made by hand."""

    def __init__(self, layers: list[nn.Module], device: torch.device) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers).to(device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()
