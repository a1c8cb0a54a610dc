"""Random stacks of layers under plans, on the lazy machine and a link of a chosen speed."""

from __future__ import annotations

import random

import torch
from race_workloads import DEVICE
from torch import nn

import memswap
from memswap import Action, Rates
from simdev import SCHEDULES

LAZY = next(schedule for schedule in SCHEDULES if schedule.policy == "lazy")
COMPUTE = {"host_us": 0.05, "launch_us": 0.5, "hbm_gb_per_s": 3.0}
SWAP = memswap.Policy(action=Action.SWAP, min_bytes=1)
#: Whatever copies and codec can do: what tests of these compare is not recomputed instead.
ANY = memswap.Policy(min_bytes=1, recipes=False)
ENCODE_SWAP = memswap.Policy(action=Action.ENCODE_SWAP, min_bytes=1)
RECOMPUTE = memswap.Policy(action=Action.RECOMPUTE, min_bytes=1)

SIDES = (32, 64, 96)


class Layer(nn.Module):
    """Saves a few storages of its own size and takes `repeats` products of time."""

    def __init__(self, side: int, repeats: int, generator: torch.Generator) -> None:
        super().__init__()
        self.side, self.repeats = side, repeats
        self.weight = nn.Parameter(torch.randn(side, side, generator=generator) / side**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = x[: self.side, : self.side].clone()
        for _ in range(self.repeats):
            inner = (inner @ self.weight).tanh()
        return nn.functional.pad(inner, (0, x.shape[1] - self.side, 0, x.shape[0] - self.side))


class Stack:
    """A random stack of layers, and its steps."""

    layer: type[Layer] = Layer
    sides = SIDES
    most_repeats = 3
    dtype = torch.float32

    def __init__(self, seed: int, depth: int = 8) -> None:
        chosen = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.layers = nn.ModuleList(
            self.layer(
                chosen.choice(self.sides), chosen.randint(1, self.most_repeats), self.generator
            )
            for _ in range(depth)
        ).to(DEVICE, self.dtype)
        side = self.sides[-1]
        self.x = torch.randn(side, side, generator=self.generator).to(DEVICE, self.dtype)

    def step(self) -> None:
        for parameter in self.layers.parameters():
            parameter.grad = None
        x = self.x
        for layer in self.layers:
            x = layer(x)
        loss = x.float().sum()
        del x
        loss.backward()

    def gradients(self) -> list[torch.Tensor]:
        return [parameter.grad.cpu() for parameter in self.layers.parameters()]


def link(gb_per_s: float) -> Rates:
    return Rates("simulated", *(gb_per_s * 1e9,) * 4, copy_latency_s=0.5e-6)
