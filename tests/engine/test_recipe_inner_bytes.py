"""What recipes make on the way, and what they read, is in a plan's peak as the ledger has it."""

from __future__ import annotations

import random as dice
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import assert_nothing_left, assert_released, assert_same_gradients, random
from test_recipe_plans import slow_rates
from torch import nn

import memswap
from memswap import Action
from memswap.planning import making, planner
from memswap.planning.replay import replay
from memswap.planning.search import Search
from memswap.planning.step import Step

pytestmark = [
    pytest.mark.one_schedule,
    pytest.mark.own_form("its recipes are learnt, which takes proofs"),
]

#: Rows of the input, and numbers in a row: a storage has 16 KiB.
ROWS, WIDTH = 128, 32

RECOMPUTE = memswap.Policy("recompute", min_bytes=1)


class Chained(nn.Module):
    """Autograd saves the input, the sigmoid and the end of a row of calls that compute in float64,
    of which two results are there at once."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = self.linear(x).sigmoid().double()
        return ((wide * 2 - 1) / 3).float().square()


def step(layers: nn.Module, x: torch.Tensor) -> list[torch.Tensor | None]:
    layers.zero_grad(set_to_none=True)
    layers(x).square().mean().backward()
    return [parameter.grad for parameter in layers.parameters()]


class Forced:
    """In place of `make_plan`: some storages that can be recomputed are, whatever that takes."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __call__(self, step: Step, rates: Any, budget: Any, *unused: Any) -> memswap.types.Plan:
        draw = dice.Random(self.seed)
        again = [i for i, one in enumerate(step.storages) if one.recipe is not None]
        chosen = again if not self.seed else [i for i in again if draw.random() < 0.6] or again
        search = Search(step, rates)
        found = search._forced(dict.fromkeys(chosen, Action.RECOMPUTE))
        return planner._planned(search, found, budget, None, step, ())


def peak_without(plan: memswap.types.Plan, rates: Any) -> int:
    """What a plan's peak would be if recipes made nothing on the way."""
    storages = (
        replace(one, recipe=one.recipe and replace(one.recipe, made_nbytes=0))
        for one in plan.step.storages
    )
    actions = {i: one.action for i, one in enumerate(plan.storages)}
    return replay(replace(plan.step, storages=tuple(storages)), rates, actions, 0).peak_bytes


@pytest.mark.parametrize("seed", range(6))
def test_whatever_is_recomputed_the_planned_peak_is_the_measured_one(
    device, new_pool, monkeypatch, seed
):
    """Of the first seed everything is: there the peak is where a row of calls runs."""
    monkeypatch.setattr(making, "make_plan", Forced(seed))
    torch.manual_seed(0)
    layers = nn.Sequential(*(Chained() for _ in range(3))).to(device)
    x, pool, rates = random(device, ROWS, WIDTH), new_pool(), slow_rates(device)
    plain = step(layers, x)
    manager = memswap.manage(layers, RECOMPUTE, pool=pool, budget="1GiB", rates=rates)
    for _ in range(6):
        manager.reset_stats()
        assert_same_gradients(step(layers, x), plain)
        manager.wait_for_plan()
    plan, stats = manager.plan, manager.stats()
    assert plan is not None
    recomputed = [one for one in plan.storages if one.action is Action.RECOMPUTE]
    assert stats.recipe_storages == len(recomputed) > 0
    assert plan.measured_peak_bytes == plan.peak_bytes == stats.peak_resident_bytes
    if not seed:
        inner = max(one.inner_nbytes for one in plan.step.storages)
        assert inner == 3 * ROWS * WIDTH * 4, "two results in float64 beside one in float32"
        assert peak_without(plan, rates) < plan.peak_bytes, "the peak is elsewhere"
    assert_nothing_left(stats)
    manager.remove()
    assert_released(manager, pool)
