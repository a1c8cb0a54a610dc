"""Plans in virtual time: what is predicted is what happens, and a budget holds on every schedule.

Virtual time is taken on the lazy machine, whose host runs ahead of the device as a real one does:
on the others an answered query brings the virtual host to the end of what it asked for.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from planned_stacks import ANY, COMPUTE, ENCODE_SWAP, LAZY, RECOMPUTE, SWAP, Layer, Stack, link
from race_workloads import new_pool

import memswap
from memswap import Rates
from memswap.planning import followed
from memswap.planning.director import BudgetDirector
from simdev import counters, laboratory, virtual_time


class Measured:
    """A steady step of a stack under a budget: its time, its peak, its plan and its gradients."""

    def __init__(
        self,
        seed: int,
        budget: int | str | None,
        gb_per_s: float = 0.5,
        rates: Rates | None = None,
        managed: bool = True,
        policy: memswap.Policy = SWAP,
        depth: int = 8,
        stacks: type[Stack] = Stack,
    ) -> None:
        stack = stacks(seed, depth)
        manager: Any = None
        with virtual_time(
            **COMPUTE, h2d_gb_per_s=gb_per_s, d2h_gb_per_s=gb_per_s, queries_wait=False
        ) as clock:
            if managed:
                manager = memswap.manage(
                    stack.layers,
                    policy,
                    pool=new_pool(),
                    budget=budget,
                    rates=rates or link(gb_per_s),
                )
            for _ in range(5):
                stack.step()
            for _ in range(20 if budget == "auto" else 0):  # of which some are plain, to compare
                stack.step()
                clock.elapsed_us()  # a host is not so many steps ahead
            if manager is not None:
                manager.reset_stats()
            began = clock.elapsed_us()
            stack.step()
            self.us = clock.elapsed_us() - began
        self.found = stack.gradients()
        if manager is not None:
            self.plan = manager.plan
            self.stats = manager.stats()
            manager.remove()


def measured(*arguments: Any, **options: Any) -> Measured:
    """In a laboratory of its own, whose end finds races and leaks."""
    with laboratory(LAZY):
        return Measured(*arguments, **options)


def saved_bytes(seed: int, **options: Any) -> int:
    return measured(seed, "1GiB", **options).plan.kept_peak_bytes


@pytest.mark.own_laboratory
@pytest.mark.one_schedule
@pytest.mark.parametrize("gb_per_s", [0.6, 0.15], ids=["fast", "slow"])
@pytest.mark.parametrize("seed", range(2))
def test_peak_and_exposed_time_are_as_predicted(seed, gb_per_s):
    plain = measured(seed, None, gb_per_s, managed=False)
    kept = saved_bytes(seed)
    for share in (0.7, 0.4):
        try:
            found = measured(seed, int(share * kept), gb_per_s)
        except memswap.BudgetError as error:
            found = measured(seed, error.smallest_bytes, gb_per_s)
        plan, stats = found.plan, found.stats
        largest = max(storage.nbytes for storage in plan.storages)
        assert stats.peak_resident_bytes <= plan.peak_bytes, "more was resident than predicted"
        assert plan.peak_bytes - stats.peak_resident_bytes <= 2 * largest
        assert stats.peak_resident_bytes <= plan.limit_bytes
        exposed_us = found.us - plain.us
        bound_us = 0.03 * plain.us + 0.05 * plan.exposed_s * 1e6
        assert abs(exposed_us - plan.exposed_s * 1e6) <= bound_us, (
            f"{plan.exposed_s * 1e6:.0f} us exposed were predicted, {exposed_us:.0f} found in a "
            f"step of {plain.us:.0f}"
        )


class GatedLayer(Layer):
    """What its products give is saved, and what is made of that, which a recipe can make again."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = x[: self.side, : self.side].clone()
        for _ in range(self.repeats):
            inner = torch.nn.functional.silu(inner @ self.weight)
        return torch.nn.functional.pad(
            inner, (0, x.shape[1] - self.side, 0, x.shape[0] - self.side)
        )


class GatedStack(Stack):
    layer = GatedLayer


@pytest.mark.own_laboratory
@pytest.mark.one_schedule
@pytest.mark.parametrize("policy", [SWAP, RECOMPUTE], ids=["swap", "recompute"])
@pytest.mark.parametrize("seed", range(2))
def test_auto_is_free_of_charge(seed, policy):
    plain = measured(seed, None, 0.3, managed=False, stacks=GatedStack)
    found = measured(seed, "auto", 0.3, policy=policy, stacks=GatedStack)
    assert found.us <= 1.01 * plain.us, f"{found.us:.0f} us beside {plain.us:.0f}"
    assert found.plan.held, "the plan was compared with plain steps"
    assert found.plan.moved_bytes > 0, "nothing moved, although something could be hidden"
    assert found.stats.peak_resident_bytes <= found.plan.peak_bytes < found.plan.kept_peak_bytes


@pytest.mark.own_laboratory
@pytest.mark.one_schedule
@pytest.mark.parametrize("seed", range(2))
def test_a_plan_is_never_slower_than_keeping_less(seed):
    """A smaller budget, or moving everything, takes as long or longer."""
    kept = saved_bytes(seed)
    times = [measured(seed, int(share * kept), 0.15).us for share in (0.8, 0.5)]
    everything = measured(seed, None, 0.15).us
    for less, more in itertools.pairwise([*times, everything]):
        assert less <= 1.03 * more, f"us by budget, then without one: {times}, {everything}"


@pytest.mark.own_laboratory
@pytest.mark.one_schedule
@pytest.mark.parametrize("off_by", [0.1, 10.0])
def test_a_wrong_profile_costs_time_and_never_a_bit_or_a_byte(off_by):
    plain = measured(1, None, 0.3, managed=False)
    kept = saved_bytes(1)
    found = measured(1, int(0.5 * kept), 0.3, rates=link(0.3 * off_by))
    assert all(map(torch.equal, found.found, plain.found)), "a gradient differs"
    assert found.stats.peak_resident_bytes <= 0.5 * kept, "the budget was exceeded"


@pytest.mark.parametrize("policy", [SWAP, ANY, ENCODE_SWAP], ids=["swap", "any", "encode_swap"])
def test_a_budget_is_never_exceeded_and_no_bit_differs(policy):
    """On every schedule, with the race detector on."""
    plain = Measured(2, None, managed=False, depth=5)
    kept = Measured(2, "1GiB", depth=5).plan.kept_peak_bytes
    budget = int(0.6 * kept)
    found = Measured(2, budget, policy=policy, depth=5)
    assert found.plan is not None and found.plan.moved_bytes > 0
    assert all(map(torch.equal, found.found, plain.found)), "a gradient differs"
    assert found.stats.peak_resident_bytes <= budget, (
        f"{found.stats.peak_resident_bytes} bytes were resident under a budget of {budget}"
    )
    assert found.stats.away_bytes == 0 and found.stats.resident_bytes == 0


@pytest.mark.own_laboratory
@pytest.mark.one_schedule
def test_without_the_waits_of_a_script_its_budget_is_exceeded(monkeypatch):
    """Unless somebody waits who sees that there is no room, which is there for other sizes."""
    kept = saved_bytes(1)
    made = followed.native_plan
    monkeypatch.setattr(
        followed, "native_plan", lambda plan, *rest: made(replace(plan, releases={}), *rest)
    )
    found = measured(1, int(0.5 * kept), 0.15)
    assert found.stats.peak_resident_bytes <= 0.5 * kept
    monkeypatch.setattr(BudgetDirector, "_set_limit", lambda self: None)
    found = measured(1, int(0.5 * kept), 0.15)
    assert found.stats.peak_resident_bytes > 0.5 * kept


@pytest.mark.own_laboratory
@pytest.mark.one_schedule
def test_planned_steps_do_not_synchronise():
    with laboratory(LAZY):
        stack = Stack(3)
        pool = new_pool()
        with memswap.manage(stack.layers, SWAP, pool=pool, budget="120KiB", rates=link(0.3)) as m:
            for _ in range(8):
                stack.step()
            assert m.plan is not None and m.plan.moved_bytes > 0
            counters.reset()
            for _ in range(3):
                stack.step()
            assert counters.host_syncs() == 0, "a planned step waits for the device"
        del stack, m, pool
