"""Recipes and checkpoint regions in one plan: its peak is what happens, and no bit differs."""

from __future__ import annotations

import functools
from itertools import pairwise
from typing import Any

import pytest
import torch
from helpers import assert_nothing_left, assert_released, assert_same_gradients, random, train_step
from recipe_helpers import Gated, slow_rates
from torch import nn
from torch.utils.checkpoint import checkpoint

import memswap
from memswap import Action

pytestmark = pytest.mark.one_schedule

ANY = memswap.Policy(min_bytes=1)
WITHOUT_RECIPES = memswap.Policy(min_bytes=1, recipes=False)


class Products(nn.Sequential):
    """Saves results of matrix products, which have no recipe: a region frees them."""

    def __init__(self, width: int = 16) -> None:
        widths = (width, 2 * width, 2 * width, 2 * width, width)
        super().__init__(*(nn.Linear(one, next_) for one, next_ in pairwise(widths)))


class Planned:
    """Two layers with recipes around two with products, trained until there is a plan."""

    def __init__(
        self,
        device: torch.device,
        pool: Any,
        budget: int | str,
        regions: str = "none",
        policy: memswap.Policy = ANY,
    ) -> None:
        torch.manual_seed(0)
        self.layers = nn.Sequential(Gated(), Products(), Products(), Gated()).to(device)
        self.x = random(device, 64, 16)
        self.plain = self._train()
        self.regions = None
        if regions == "memswap":
            self.regions = memswap.checkpoint_module([self.layers[1], self.layers[2]])
        elif regions == "torch":
            for layer in (self.layers[1], self.layers[2]):
                layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
        self.manager = memswap.manage(
            self.layers, policy, pool=pool, budget=budget, rates=slow_rates(device)
        )
        for _ in range(7):
            self.step()

    def _train(self) -> list[torch.Tensor | None]:
        return train_step(self.layers, lambda: self.layers(self.x).square().mean())

    def step(self) -> memswap.types.Stats:
        """A step, and what it did."""
        self.manager.reset_stats()
        assert_same_gradients(self._train(), self.plain)
        self.manager.wait_for_plan()
        return self.manager.stats()

    @property
    def plan(self) -> memswap.types.Plan:
        plan = self.manager.plan
        assert plan is not None
        return plan

    def actions(self) -> set[Action]:
        return {one.action for one in self.plan.storages}

    def remove(self) -> None:
        self.manager.remove()
        if self.regions is not None:
            self.regions.remove()


@pytest.mark.parametrize("share", [0.6, 0.5])
@pytest.mark.parametrize("regions", ["memswap", "torch"])
def test_a_plan_has_both_where_neither_would_do_and_its_peak_is_exact(
    device, new_pool, regions, share
):
    everything = Planned(device, new_pool(), "1GiB")
    budget = int(share * everything.plan.kept_peak_bytes)
    everything.remove()

    pool = new_pool()
    one = Planned(device, pool, budget, regions)
    stats, plan = one.step(), one.plan
    if regions == "memswap":
        assert set(plan.recompute) == {"1", "2"}, "a region that is needed is off"
    planned = [saved for saved in plan.storages if saved.action is Action.RECOMPUTE]
    assert stats.recipe_storages == len(planned) > 0, "a recipe that was planned was not used"
    assert one.actions() == {Action.KEEP, Action.RECOMPUTE}, "something else was needed as well"
    assert stats.peak_resident_bytes == plan.measured_peak_bytes == plan.peak_bytes <= budget
    assert plan.over_budget_bytes == 0
    assert_nothing_left(stats)
    one.remove()
    assert_released(one.manager, pool)


@pytest.mark.parametrize(("regions", "policy"), [("none", ANY), ("memswap", WITHOUT_RECIPES)])
def test_one_of_them_alone_needs_another_form_for_that_budget(device, new_pool, regions, policy):
    """Or the test above would say nothing of the two together."""
    everything = Planned(device, new_pool(), "1GiB")
    budget = int(0.6 * everything.plan.kept_peak_bytes)
    everything.remove()
    one = Planned(device, new_pool(), budget, regions, policy)
    stats = one.step()
    assert one.actions() & {Action.SWAP, Action.ENCODE, Action.ENCODE_SWAP}
    assert stats.peak_resident_bytes == one.plan.peak_bytes <= budget
    one.remove()
