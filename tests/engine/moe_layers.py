"""A mixture of experts: token counts that vary by step, one expert with four times its share."""

from __future__ import annotations

from typing import Any

import torch
from budget_layers import rates_for
from helpers import assert_same_gradients, train_step
from torch import nn

import memswap

EXPERTS, WIDTH = 4, 32

#: Of a training under a budget.
STEPS = 20


class Layer(nn.Module):
    """Tokens are sorted by expert; each expert gets its own part."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, x: torch.Tensor, counts: tuple[int, ...]) -> torch.Tensor:
        parts = x.split(counts)
        out = [nn.functional.silu(part @ self.up[e]) @ self.down[e] for e, part in enumerate(parts)]
        return x + torch.cat(out)


class Model(nn.Module):
    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(depth))

    def forward(self, x: torch.Tensor, counts: list[tuple[int, ...]]) -> torch.Tensor:
        for layer, each in zip(self.layers, counts, strict=True):
            x = layer(x, each)
        return x.square().mean()


def routed(step: int, balanced: bool = False) -> tuple[int, list[tuple[int, ...]]]:
    """How many tokens, and how many go to each expert of each layer; one gets four shares."""
    tokens = 448 + 16 * (7 * step % 5)
    counts = []
    for layer in range(3):
        share = tokens // (EXPERTS if balanced else EXPERTS + 3)
        each = [share] * EXPERTS
        each[(step + layer) % EXPERTS] = tokens - share * (EXPERTS - 1)
        counts.append(tuple(each))
    return tokens, counts


def inputs(
    device: torch.device, step: int, balanced: bool = False
) -> tuple[torch.Tensor, list[tuple[int, ...]]]:
    tokens, counts = routed(step, balanced)
    generator = torch.Generator().manual_seed(step)
    return torch.randn(tokens, WIDTH, generator=generator).to(device, torch.bfloat16), counts


class Experts:
    """Layers of experts that are out of balance; with `recovers`, not in each step."""

    def __init__(self, device: torch.device, recovers: bool) -> None:
        torch.manual_seed(0)
        self.model = Model().to(device, torch.bfloat16)
        self.device, self.recovers = device, recovers
        # Where balance comes back, experts are large enough to count, and not only the favourite.
        least = 12 << 10 if recovers else 1
        self.policy = memswap.Policy(action=memswap.Action.SWAP, min_bytes=least)
        self.plain = [self.train(number) for number in range(STEPS)]

    def train(self, number: int) -> list[torch.Tensor | None]:
        balanced = self.recovers and number % 3 == 1
        return train_step(self.model, lambda: self.model(*inputs(self.device, number, balanced)))

    def managed(self, pool: Any, budget: int | str) -> memswap.types.Manager:
        return memswap.manage(
            self.model.layers, self.policy, pool=pool, budget=budget, rates=rates_for(self.device)
        )

    def kept_bytes(self, pool: Any) -> int:
        with self.managed(pool, "1GiB") as manager:
            for _ in range(4):
                self.train(0)
            return manager.plan.kept_peak_bytes

    def stats(self, pool: Any, budget: int | str) -> memswap.types.Stats:
        """Of the steps that have a plan."""
        with self.managed(pool, budget) as manager:
            for number in range(STEPS):
                if number == 4:
                    manager.reset_stats()
                assert_same_gradients(self.train(number), self.plain[number])
            assert manager.plan is not None
            return manager.stats()
