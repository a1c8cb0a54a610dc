"""Recipes in stream order: on whatever stream backward asks, no access is unordered."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from helpers import assert_nothing_left, assert_same_gradients
from race_workloads import (
    DEVICE,
    Region,
    backward_on_another_stream,
    new_pool,
    on_host,
    one_stream_of_the_users_own,
    plain,
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
    """The operator ran on the main stream, what saved its result on another. Backward runs it again
    there, and then the source's memory goes back to the main stream, which fills it at once."""

    def program(region: Region) -> list[torch.Tensor]:
        main, other = torch.accelerator.current_stream(), torch.Stream(device=DEVICE)
        found = []
        for step in range(3):
            leaf = torch.full((4096,), 0.25 + step, device=DEVICE, requires_grad=True)
            with region():
                source = leaf * 2
                made = source.sin() + source.cos()  # both save the source
                other.wait_stream(main)
                with other:
                    loss = (made * made).sum()
                made.record_stream(other)  # the program's own: memory of the main stream
            del source, made
            main.wait_stream(other)
            loss.backward()
            del loss
            filled = [torch.full((4096,), 9.0, device=DEVICE) for _ in range(4)]
            main.wait_stream(other)
            assert leaf.grad is not None
            found.append(leaf.grad + filled[0])
        return on_host(found)

    check(program)
