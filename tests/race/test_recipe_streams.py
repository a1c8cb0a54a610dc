"""Recipes in stream order: on whatever stream backward asks, no access is unordered."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from helpers import assert_nothing_left, assert_same_gradients
from race_workloads import (
    Region,
    backward_on_another_stream,
    new_pool,
    one_stream_of_the_users_own,
    plain,
    source_freed_elsewhere,
)

import memswap
from memswap.engine import recipes

RECOMPUTE = memswap.Policy(action="recompute", min_bytes=1)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recipes are used before they are proven."""
    monkeypatch.setattr(recipes, "PROOFS", 0)


def check(program: Callable[[Region], list[torch.Tensor]]) -> None:
    """The program plain and with recipes, in the laboratory of the running test."""
    expected = program(plain)
    saved = memswap.saved_tensors(RECOMPUTE, pool=new_pool(), prefetch_bytes=0)
    assert_same_gradients(program(lambda: saved), expected)
    torch.accelerator.synchronize()
    stats = saved.stats()
    assert stats.recipe_runs > 0, "nothing was run again: the test says nothing"
    assert_nothing_left(stats)


@pytest.mark.parametrize("proofs", [0, recipes.PROOFS])
def test_steps_on_a_stream_of_the_users_own(monkeypatch: pytest.MonkeyPatch, proofs: int) -> None:
    monkeypatch.setattr(recipes, "PROOFS", proofs)

    check(partial(one_stream_of_the_users_own, steps=4))


def test_forward_on_one_stream_and_backward_on_another() -> None:
    check(backward_on_another_stream)


def test_a_source_is_freed_after_another_stream_has_read_it() -> None:
    check(source_freed_elsewhere)
