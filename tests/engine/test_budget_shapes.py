"""Budgets under shapes that differ in each step: lengths drawn anew, and experts out of balance.

Planning takes as long as many steps, and a step without a plan moves everything. So what is counted
here is how often somebody plans, and how many iterations go without one.
"""

from __future__ import annotations

import random
import traceback
import warnings
from collections import Counter

import pytest
import torch
from budget_layers import forward, kept_peak, managed, new_layers, step
from helpers import assert_same_gradients, gradients
from moe_layers import STEPS, Experts
from torch import nn

import memswap
from memswap._native import native
from memswap.planning import learner, making, verdicts
from memswap.planning.director import BudgetDirector

LONG = 48

pytestmark = pytest.mark.one_schedule


@pytest.fixture
def counted(monkeypatch):
    """How often a plan was made, and how many iterations had none.

    Beside that, which functions of the learner had it made: a failure says why there are so many.
    """
    found: Counter[str] = Counter()
    make_plan, began = making.make_plan, BudgetDirector._begin

    def count_plan(*arguments, **options):
        found["plans"] += 1
        callers = [
            one.name for one in traceback.extract_stack() if one.filename == learner.__file__
        ]
        found["for " + " > ".join(dict.fromkeys(callers))] += 1
        return make_plan(*arguments, **options)

    def count_iteration(self, *arguments):
        one = began(self, *arguments)
        found["without a plan"] += one.plan is None
        return one

    monkeypatch.setattr(making, "make_plan", count_plan)
    monkeypatch.setattr(BudgetDirector, "_begin", count_iteration)
    return found


def lengths(count: int, steps: int) -> list[int]:
    """So many different lengths, an octave and a half apart, drawn anew in each step."""
    drawn = random.Random(0)
    return [drawn.choice(range(16, 16 + count)) for _ in range(steps)]


def step_of_two(layers: nn.ModuleList, device: torch.device) -> list[torch.Tensor | None]:
    """Two forwards in flight."""
    layers.zero_grad(set_to_none=True)
    long, short = (forward(layers, rows, device) for rows in (LONG, LONG // 2))
    short.backward()
    long.backward()
    return gradients(layers)


@pytest.mark.parametrize("budget", ["auto", 0.6])
def test_a_length_that_is_drawn_anew_in_each_step_is_not_planned_in_each_step(
    device, new_pool, counted, budget, monkeypatch
):
    # Steps of microseconds cost more than 1 %: what follows from that is test_held_plans.py's.
    monkeypatch.setattr(verdicts, "AUTO_SLOWDOWN", 1e3)
    layers = new_layers(device)
    drawn = lengths(33, 40)
    if budget != "auto":
        largest = 2 * len(layers) * 48 * 64 * 4
        budget = int(budget * largest)
    plain = {rows: step(layers, rows, device) for rows in set(drawn)}
    with managed(layers, new_pool(), budget) as manager:
        for number, rows in enumerate(drawn):
            if number == 4:
                manager.reset_stats()
            assert_same_gradients(step(layers, rows, device), plain[rows])
            if number == 25:
                plans = counted["plans"]
        peak = manager.stats().peak_resident_bytes
    assert counted["without a plan"] == 3, f"each length learns for itself: {counted}"
    assert counted["plans"] <= 16, f"plans that were made in {len(drawn)} steps: {counted}"
    assert counted["plans"] - plans <= 1, f"planning does not end: {counted}"
    if budget != "auto":
        assert peak <= budget


def test_a_few_shapes_have_a_plan_each_and_the_second_one_at_once(device, new_pool, counted):
    layers = new_layers(device)
    with managed(layers, new_pool(), "60%") as manager:
        for _ in range(5):
            step(layers, 32, device)
        counted.clear()
        for rows in (40, 24) * 2:
            step(layers, rows, device)
            kept = manager.plan.kept_peak_bytes
            assert kept == sum(one.nbytes for one in manager.plan.storages)
            assert 0 < manager.plan.measured_peak_bytes <= manager.plan.peak_bytes <= 0.6 * kept
        assert counted["plans"] == 2 and not counted["without a plan"]


def test_a_length_that_would_fit_the_last_ones_plan_has_its_own(device, new_pool):
    layers = new_layers(device)
    with managed(layers, new_pool(), "60%") as manager:
        for _ in range(5):
            step(layers, 32, device)
        kept = manager.plan.kept_peak_bytes
        for rows in (28, 28, 32, 28, 32):  # the engine follows plans for up to a quarter less
            step(layers, rows, device)
            assert manager.plan.kept_peak_bytes * 32 == kept * rows, "another length's plan"


def test_lengths_that_are_in_flight_together_share_the_budget(device, new_pool):
    """Also the one that always begins first, when nothing is in flight yet."""
    layers = new_layers(device)
    plain = step_of_two(layers, device)
    budget = int(0.6 * kept_peak(device, new_pool(), LONG))
    with managed(layers, new_pool(), budget) as manager:
        for _ in range(5):
            step(layers, LONG, device)
        with pytest.warns(UserWarning, match="more forwards are in flight than before"):
            for number in range(4):
                assert_same_gradients(step_of_two(layers, device), plain)
                if number == 0:  # nobody knew that there would be two
                    manager.reset_stats()
        assert manager.stats().peak_resident_bytes <= budget
        assert manager.plan.in_flight == 2


def test_a_share_of_a_short_step_is_no_bound_for_a_long_one_beside_it(device, new_pool):
    layers = new_layers(device)
    plain = step_of_two(layers, device)
    with (
        warnings.catch_warnings(),
        managed(layers, new_pool(), "60%") as manager,
    ):
        warnings.simplefilter("error")  # more than the budget would be told
        for _ in range(6):
            assert_same_gradients(step_of_two(layers, device), plain)
        plan = manager.plan
        assert plan is not None and plan.in_flight == 2
        # The plan is the short one's: its own share is less than what the two have together.
        assert plan.measured_peak_bytes > plan.budget_bytes
        assert plan.over_budget_bytes == 0 and "beyond the budget" not in str(plan)


def test_an_evaluation_without_no_grad_does_not_cost_the_training_its_plan(
    device, new_pool, counted
):
    """It begins like a step, saves fewer storages, and nobody runs its backward."""
    layers = new_layers(device)
    drop = layers[2].register_forward_hook(
        lambda module, _, y: nn.functional.dropout(y, 0.5) if module.training else None
    )
    with managed(layers, new_pool(), "70%") as manager:
        for _ in range(4):
            step(layers, 32, device)
        assert manager.plan is not None
        counted.clear()
        layers.eval()
        for _ in range(3):
            forward(layers, 32, device)
        layers.train()
        step(layers, 32, device)
        assert counted["without a plan"] == 0
    drop.remove()


def test_forwards_without_a_backward_are_not_waited_for_each_time(device, new_pool, monkeypatch):
    layers = new_layers(device)
    waits, wait = Counter(), native.Recorder.wait

    def counted_wait(recorder):
        waits["forwards"] += 1
        wait(recorder)

    monkeypatch.setattr(native.Recorder, "wait", counted_wait)
    with managed(layers, new_pool(), "70%") as manager:
        with pytest.warns(UserWarning, match="8 forwards had no backward"):
            for _ in range(40):
                forward(layers, 32, device)
        assert waits["forwards"] <= 8 + 40 // 8
        for _ in range(9):
            step(layers, 32, device)
        assert manager.plan is not None, "training began, and gets its plan"


@pytest.mark.parametrize("recovers", [False, True], ids=["same storages", "other storages"])
@pytest.mark.parametrize("share", [None, 0.7], ids=["auto", "bytes"])
def test_experts_out_of_balance_train_within_a_budget_without_a_storm_of_plans(
    device, new_pool, counted, share, recovers
):
    """Sizes differ in each step; where balance comes back, so does what is too small to count."""
    experts = Experts(device, recovers)
    budget = "auto" if share is None else int(share * experts.kept_bytes(new_pool()))
    counted.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # more than the budget would be told
        stats = experts.stats(new_pool(), budget)
    assert stats.moved_storages > 0
    assert counted["plans"] <= 8, f"plans that were made in {STEPS} steps: {counted}"
    assert counted["without a plan"] <= 5
    if share is not None:
        assert stats.peak_resident_bytes <= budget


@pytest.mark.own_form("it is about frames")
@pytest.mark.cpu_only
@pytest.mark.parametrize("share", [None, 0.97], ids=["auto", "bytes"])
def test_on_a_cpu_experts_are_encoded_without_a_storm_of_plans(counted, share):
    """Frames are as long as they become there: what exceeds the budget for that is told."""
    experts = Experts(torch.device("cpu"), False)
    experts.policy = memswap.Policy(min_bytes=1)
    budget = "auto" if share is None else int(share * experts.kept_bytes(None))
    counted.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        stats = experts.stats(None, budget)
    assert counted["plans"] <= 8 and counted["without a plan"] <= 5
    if share is not None:
        told = any("beyond the budget" in str(one.message) for one in caught)
        assert stats.peak_resident_bytes <= budget or told
        assert stats.peak_resident_bytes <= 1.05 * budget
