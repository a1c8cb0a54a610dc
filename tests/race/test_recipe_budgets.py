"""Recipes under a budget, in virtual time and on every schedule: no race, no byte too many."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from planned_stacks import COMPUTE, LAZY, Layer, Stack, link
from race_workloads import new_pool
from torch import nn

import memswap
from memswap import Action
from simdev import laboratory, virtual_time

POLICY = memswap.Policy(min_bytes=1)


class GatedLayer(Layer):
    """The same with a gate: `silu` and the product are made of what is saved as well."""

    def __init__(self, side: int, repeats: int, generator: torch.Generator) -> None:
        super().__init__(side, repeats, generator)
        self.gate = nn.Parameter(torch.randn(side, side, generator=generator) / side**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = x[: self.side, : self.side].clone()
        for _ in range(self.repeats):
            inner = (nn.functional.silu(inner @ self.gate) * (inner @ self.weight)) @ self.weight
        return nn.functional.pad(inner, (0, x.shape[1] - self.side, 0, x.shape[0] - self.side))


class GatedStack(Stack):
    layer = GatedLayer


class NormedLayer(Layer):
    """A norm in float32 behind a bfloat16 stream, which no operator saves."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.repeats):
            wide = x.float()
            normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
            x = x + normed.bfloat16()[:, : self.side] @ self.weight
        return x


class NormedStack(Stack):
    layer = NormedLayer
    sides = (64,)
    dtype = torch.bfloat16


class Found:
    """A steady step of a gated stack: its time, its gradients, and its plan under a budget."""

    def __init__(
        self,
        seed: int,
        budget: int | str | None,
        clock: Any,
        policy: memswap.Policy = POLICY,
        layers: type[Stack] = GatedStack,
    ) -> None:
        stack = layers(seed, depth=5)
        manager: Any = None
        if budget is not None:
            manager = memswap.manage(
                stack.layers, policy, pool=new_pool(), budget=budget, rates=link(0.05)
            )
        for _ in range(6):
            stack.step()
            if manager is not None:
                manager.wait_for_plan()
        if manager is not None:
            manager.reset_stats()
        began = clock.elapsed_us()
        stack.step()
        self.us = clock.elapsed_us() - began
        self.gradients = stack.gradients()
        if manager is not None:
            self.plan, self.stats = manager.plan, manager.stats()
            manager.remove()


def timed(*arguments: Any) -> Found:
    """On the lazy machine, in a laboratory of its own."""
    with (
        laboratory(LAZY),
        virtual_time(**COMPUTE, h2d_gb_per_s=0.05, d2h_gb_per_s=0.05, queries_wait=False) as clock,
    ):
        return Found(*arguments[:2], clock, *arguments[2:])


class NoClock:
    """Where only order counts."""

    def elapsed_us(self) -> float:
        return 0.0


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for ours, plain in zip(found, expected, strict=True):
        assert torch.equal(ours.view(torch.uint8), plain.view(torch.uint8)), "a gradient differs"


@pytest.mark.parametrize("share", [80, 60])
def test_a_budget_holds_with_recipes_and_no_bit_differs(share: int) -> None:
    expected = Found(0, None, NoClock()).gradients
    found = Found(0, f"{share}%", NoClock())
    assert_same(found.gradients, expected)
    assert found.stats.recipe_storages > 0, "nothing was recomputed: the test says nothing"
    assert found.plan.measured_peak_bytes == found.plan.peak_bytes
    assert found.stats.peak_resident_bytes <= found.plan.budget_bytes


@pytest.mark.parametrize("share", [60, 40, 25])
def test_what_autograd_does_not_save_is_kept_or_moved_for_a_recipe(share: int) -> None:
    expected = Found(0, None, NoClock(), layers=NormedStack).gradients
    found = Found(0, f"{share}%", NoClock(), layers=NormedStack)
    assert_same(found.gradients, expected)
    sources = found.plan.step.sources
    assert sources, "the plan keeps nothing for a recipe: the test says nothing"
    moved = {found.plan.storages[index].action for index in sources}
    assert share > 25 or moved != {Action.KEEP}, "no source goes away and comes back"
    assert found.plan.measured_peak_bytes == found.plan.peak_bytes
    assert found.stats.peak_resident_bytes <= found.plan.budget_bytes


@pytest.mark.own_laboratory
@pytest.mark.one_schedule
@pytest.mark.parametrize("seed", range(2))
def test_what_recipes_take_is_what_their_trials_took(seed: int) -> None:
    """In virtual time the device's own clock tells, and a plan is held to what it predicts."""
    plain, found = timed(seed, None), timed(seed, "65%")
    recomputed = [one for one in found.plan.storages if one.action is Action.RECOMPUTE]
    assert recomputed and all(one.exposed_s > 0 for one in recomputed)
    exposed_us, predicted_us = found.us - plain.us, found.plan.exposed_s * 1e6
    bound_us = 0.03 * plain.us + 0.1 * predicted_us
    assert abs(exposed_us - predicted_us) <= bound_us, (
        f"{predicted_us:.0f} us exposed were predicted, {exposed_us:.0f} found in a step of "
        f"{plain.us:.0f}"
    )


@pytest.mark.own_laboratory
@pytest.mark.one_schedule
def test_where_the_link_is_slow_recipes_cost_less_than_going_without() -> None:
    without = memswap.Policy(min_bytes=1, recipes=False)
    one, other = timed(1, "65%"), timed(1, "65%", without)
    assert one.plan.exposed_s < other.plan.exposed_s
    assert one.us < other.us, "the plan with recipes is slower than the one without"
