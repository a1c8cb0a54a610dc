"""Stacks of layers whose storages are all alike, so that a share of a budget is easy to tell."""

from __future__ import annotations

from typing import Any

import torch
from helpers import gradients
from torch import nn

import memswap
from memswap import Action, Rates

WIDTH = 64
FAST = Rates("a fast machine", 1e12, 1e12, 1e12, 1e12, 1e12, 1e12, 0.0, 0.0)
SWAP = memswap.Policy(action=Action.SWAP, min_bytes=1)


class Layer(nn.Module):
    """Saves two storages of `rows` rows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).tanh()


class Scaled(nn.Module):
    """Saves a storage whose exponents are as far apart as its scales."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.ones(512, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).tanh() * self.scale


def new_layers(device: torch.device, depth: int = 6) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList([Layer() for _ in range(depth)]).to(device)


def forward(layers: nn.ModuleList, rows: int, device: torch.device) -> torch.Tensor:
    x = torch.linspace(-1, 1, rows * WIDTH).reshape(rows, WIDTH).to(device)
    for layer in layers:
        x = layer(x)
    return x.square().mean()


def step(layers: nn.ModuleList, rows: int, device: torch.device) -> list[torch.Tensor | None]:
    layers.zero_grad(set_to_none=True)
    forward(layers, rows, device).backward()
    return gradients(layers)


def rates_for(device: torch.device) -> Rates:
    values = {**FAST.as_dict(), "inline_codec": device.type == "cpu"}
    return Rates(**values)


def managed(
    layers: nn.ModuleList, pool: Any, budget: int | str, policy: memswap.Policy = SWAP
) -> memswap.types.Manager:
    """Layers under a budget, planned for a machine that is the same everywhere."""
    device = next(layers.parameters()).device
    return memswap.manage(layers, policy, pool=pool, budget=budget, rates=rates_for(device))


def kept_peak(device: torch.device, pool: Any, rows: int = 32) -> int:
    layers = new_layers(device)
    with managed(layers, pool, "1GiB") as manager:
        for _ in range(4):
            step(layers, rows, device)
        plan = manager.wait_for_plan()
        assert plan is not None
        return plan.kept_peak_bytes
