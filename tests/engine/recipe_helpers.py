"""What the tests of recipes share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from budget_layers import rates_for
from helpers import assert_nothing_left, assert_same_gradients, collect
from torch import nn

import memswap
from memswap import Rates

RECOMPUTE = memswap.Policy(action="recompute", min_bytes=1)

#: Entered around a forward: memswap's block, or nothing.
Region = Callable[[], Any]


def words_of(block: memswap.saved_tensors | memswap.types.Manager) -> set[str]:
    """All recipes that were seen, in words, whether in force or not."""
    known = block._engine.recipes
    assert known is not None
    return {words for _, (words, _, _) in known.learnt()}


def check_steps(
    program: Callable[[Region], list[torch.Tensor]],
    *,
    steps: int = 1,
    runs: bool | None = True,
    policy: memswap.Policy = RECOMPUTE,
    **options: Any,
) -> memswap.saved_tensors:
    """Run a program plain and with recipes, step by step; its results have the same bits.

    Args:
        program: gets what it enters around its forward. Begins from the same state each time.
        steps: of the program under the same block.
        runs: whether something has to be run again; None: it does not matter.
        policy: of the block.
        options: of the block.
    """
    expected = [program(contextlib.nullcontext) for _ in range(steps)]
    block = memswap.saved_tensors(policy, **options)
    for right in expected:
        assert_same_gradients(program(lambda: block), right)
    collect()
    stats = block.stats()
    assert_nothing_left(stats)
    if runs is not None:
        assert (stats.recipe_runs > 0) == runs, f"{stats.recipe_runs} runs; {words_of(block)}"
    return block


class Gated(nn.Module):
    """A SwiGLU feed-forward behind a norm, and a residual sum."""

    def __init__(self, width: int = 16, last: type[nn.Module] = nn.Tanh) -> None:
        super().__init__()
        self.last = last()
        self.norm = nn.LayerNorm(width)
        self.gate, self.up = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.last(self.down(nn.functional.silu(self.gate(y)) * self.up(y)))


def slow_rates(device: torch.device) -> Rates:
    """Of a machine whose codec and link take so long that a recipe is cheap beside them.

    A step's own times are measured, and a copy costs nothing that is over in them: one of hours is
    not, however busy the machine is that the test runs on.
    """
    slow = dict.fromkeys(
        (
            "d2h_bytes_per_s",
            "h2d_bytes_per_s",
            "duplex_d2h_bytes_per_s",
            "duplex_h2d_bytes_per_s",
            "encode_bytes_per_s",
            "decode_bytes_per_s",
        ),
        1.0,
    )
    return Rates(**{**rates_for(device).as_dict(), **slow})
