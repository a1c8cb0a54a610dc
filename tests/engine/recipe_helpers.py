"""What the tests of recipes share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from helpers import assert_nothing_left, assert_same_gradients, collect

import memswap

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
