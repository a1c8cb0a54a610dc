"""What autograd does not save, kept in place of what it does: chosen for a forward at once."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from helpers import assert_nothing_left, assert_same_gradients, collect, random
from torch import nn

import memswap

pytestmark = pytest.mark.own_form("its recipes are learnt, which takes proofs")

ROWS, WIDTH, LAYERS = 256, 32, 6

#: Bytes of the float32 stream, and of what a layer adds to it.
WIDE_NBYTES, NARROW_NBYTES = 4 * ROWS * WIDTH, 2 * ROWS * WIDTH

POLICY = memswap.Policy(action="recompute", min_bytes=NARROW_NBYTES)


class Adding(nn.Module):
    """A float32 stream to which bfloat16 is added, as under autocast. The sine saves the stream;
    the addend is gone by then, and no operator has saved it."""

    def __init__(self, edits: bool = False) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)
        self.edits = edits

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        added = torch.cumsum(self.into(stream.sin().bfloat16()), 0)  # is not run again
        total = stream + added
        if self.edits:
            added.mul_(3)  # autograd allows it
        return total


def new_model(device: torch.device, edits: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Adding(edits) for _ in range(LAYERS))).to(device)


def gradients_of(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(model(x).square().mean(), list(model.parameters())))


def in_force(manager: memswap.types.Manager) -> list[str]:
    known = manager._engine.recipes
    assert known is not None
    return [words for _, (words, proofs, failed) in known.learnt() if proofs >= 2 and not failed]


@pytest.fixture
def managed(device, new_pool) -> Any:
    @contextlib.contextmanager
    def managing(model: nn.Module) -> Any:
        pool = None if device.type == "cpu" else new_pool()
        with memswap.manage(model, POLICY, pool=pool) as manager:
            yield manager

    return managing


def test_an_addend_that_is_gone_stays_in_place_of_the_sum(device, managed):
    model, x = new_model(device), random(device, ROWS, WIDTH)
    expected = gradients_of(model, x)
    with managed(model) as manager:
        for _ in range(6):
            manager.reset_stats()
            assert_same_gradients(gradients_of(model, x), expected)
        words = in_force(manager)
        assert words.count("add(saved, kept)") >= 2, words
        assert_nothing_left(manager.stats())


def test_what_is_held_is_counted_while_it_is_away(device, managed):
    """Everything that a forward leaves behind is in the account: the addends, too."""
    model, x = new_model(device), random(device, ROWS, WIDTH)
    with managed(model) as manager:
        for _ in range(5):
            gradients_of(model, x)
        held = in_force(manager).count("add(saved, kept)")
        assert held
        manager.reset_stats()
        loss = model(x).square().mean()
        collect()
        stats = manager.stats()
        moved = stats.moved_bytes - stats.recipe_bytes
        assert moved >= held * NARROW_NBYTES, "held sources were not sent like saved storages"
        if device.type == "cpu":  # frames, which count as resident
            assert stats.resident_bytes >= held * NARROW_NBYTES // 2
        else:
            assert stats.away_bytes >= held * NARROW_NBYTES
        torch.autograd.grad(loss, list(model.parameters()))
        assert_nothing_left(manager.stats())


def test_a_held_source_that_is_edited_was_read_before(device, managed):
    model, x = new_model(device, edits=True), random(device, ROWS, WIDTH)
    expected = gradients_of(model, x)
    with managed(model) as manager:
        for _ in range(6):
            assert_same_gradients(gradients_of(model, x), expected)
        assert_nothing_left(manager.stats())


def test_a_held_source_is_there_for_each_backward_of_a_graph(device, managed):
    model, x = new_model(device), random(device, ROWS, WIDTH)
    expected = gradients_of(model, x)
    with managed(model) as manager:
        for _ in range(5):
            gradients_of(model, x)
        loss = model(x).square().mean()
        for _ in range(2):
            found = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
            assert_same_gradients(found, expected)
        del loss, found
        collect()
        assert_nothing_left(manager.stats())


def test_a_graph_that_is_dropped_lets_go_of_what_was_held(device, managed):
    model, x = new_model(device), random(device, ROWS, WIDTH)
    with managed(model) as manager:
        for _ in range(5):
            gradients_of(model, x)
        loss = model(x).square().mean()
        del loss
        collect()
        assert_nothing_left(manager.stats())


def test_another_program_after_the_choice_keeps_its_bits(device, managed):
    """The choice is of one forward; another one that runs in between is right, too."""
    model, x = new_model(device), random(device, ROWS, WIDTH)
    short = nn.Sequential(*list(model)[::2])
    expected = gradients_of(model, x), gradients_of(short, x)
    with managed(model):
        for step in range(9):
            one, wanted = (short, expected[1]) if step % 3 == 2 else (model, expected[0])
            assert_same_gradients(gradients_of(one, x), wanted)
