"""budget="auto" is held by measurement: a plan that costs too much backs off, or declines."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from budget_layers import FAST, managed, new_layers, rates_for, step
from helpers import assert_released, assert_same_gradients

import memswap
from memswap import Action, Rates
from memswap._native import native
from memswap.planning import learner, verdicts
from memswap.planning.holding import SAMPLES, Holding, Sample, sample_of

pytestmark = pytest.mark.one_schedule

ENCODE = memswap.Policy(action=Action.ENCODE, min_bytes=1)
SWAP = memswap.Policy(action=Action.SWAP, min_bytes=1)


class Recorded:
    """The columns of a record that a sample is made of."""

    def __init__(self, gaps: list[float], costs: list[float], saves: int) -> None:
        self.nbytes = [1] * saves
        self.order = list(reversed(range(saves)))
        self.gaps_s, self.costs_s = gaps, costs


def test_what_marks_cost_beyond_those_of_what_stays_is_the_plans():
    """The recorder takes a millisecond at each mark; an encode and its decode 4 and 2 more."""
    found = sample_of(Recorded([10.0] * 4, [1.0, 5.0, 3.0, 1.0], 2), [True, False])
    assert found.total_s == 50.0 and found.cost_s == 6.0


def holding(planned: list[float], plain: list[float], cost_s: float = 0.0) -> Holding:
    made = Holding(kept=object())  # type: ignore[arg-type]
    made.planned = [Sample(one, cost_s) for one in planned]
    made.plain = [Sample(one, 0.0) for one in plain]
    return made


def test_a_difference_counts_only_beyond_chance():
    sure = holding([1.05, 1.051, 1.049, 1.05], [1.0, 1.001, 0.999, 1.0])
    assert 0.04 < sure.cost_s() <= 0.05
    noise = holding([1.0, 1.2, 0.9, 1.1], [1.1, 0.9, 1.0, 1.05])
    assert noise.cost_s() == 0.0, "chance was taken for a cost"
    assert holding([1.0] * 4, [1.0] * 4, cost_s=0.3).cost_s() == 0.3, "marks tell by themselves"


def test_one_slow_iteration_decides_nothing():
    slow = holding([1.0, 1.001, 7.0, 1.0], [1.0, 0.999, 1.0, 1.001])
    assert slow.cost_s() < 0.01


def test_plain_and_planned_iterations_are_mixed_evenly_over_every_second_and_fourth():
    made = Holding(kept=object())  # type: ignore[arg-type]
    plain = [made.begin() for _ in range(8)]
    assert sum(plain) == SAMPLES
    for period in (2, 4):
        counts = {sum(plain[start::period]) for start in range(period)}
        assert counts == {SAMPLES // period}, f"not even over every {period}th"
    assert not any(Holding(kept=None).begin() for _ in range(8)), "there is no memory for it"


@pytest.mark.cpu_only
def test_a_plan_that_costs_more_than_it_may_backs_off_and_then_declines():
    """The machine's rates promise a codec that takes no time; on this CPU it takes some."""
    device = torch.device("cpu")
    layers, rows = new_layers(device), 1024
    plain = step(layers, rows, device)
    moved = []
    with memswap.manage(layers, ENCODE, budget="auto", rates=rates_for(device)) as manager:
        for _ in range(200):  # other processes may make a plain step as slow as a planned one
            assert_same_gradients(step(layers, rows, device), plain)
            plan = manager.wait_for_plan()
            if plan is not None:
                moved.append(plan.moved_bytes)
                if plan.declined:
                    break
        assert moved[0] > 0, "nothing was to be given up"
        assert plan is not None and plan.moved_bytes == 0 and plan.declined
        assert plan.peak_bytes == plan.kept_peak_bytes
        text = str(plan)
        assert "declined, everything stays: moving" in text and "longer" in text
        manager.reset_stats()
        assert_same_gradients(step(layers, rows, device), plain)
        assert manager.stats().moved_storages == 0, "a plan that was declined is still followed"


def test_a_plan_that_costs_what_it_may_is_held_and_says_so(device, new_pool, monkeypatch):
    monkeypatch.setattr(verdicts, "AUTO_SLOWDOWN", 1e3)  # whatever this busy machine takes
    layers, pool = new_layers(device), new_pool()
    plain = step(layers, 32, device)
    rates = Rates(**{**FAST.as_dict(), "inline_codec": device.type == "cpu"})
    with memswap.manage(layers, SWAP, pool=pool, budget="auto", rates=rates) as manager:
        for _ in range(60):  # times of so small a step are noise, and lead to other plans
            assert_same_gradients(step(layers, 32, device), plain)
            plan = manager.wait_for_plan()
            if plan is not None and plan.held:
                break
        assert plan is not None and plan.moved_bytes > 0
        assert plan.held and not plan.declined
        assert "(held, over several steps)" in str(plan)
        manager.reset_stats()
        step(layers, 32, device)
        assert manager.stats().moved_storages > 0, "steps stay plain after they were compared"
    assert_released(manager, pool)


def test_free_memory_is_what_was_free_where_the_most_was_there(device, monkeypatch):
    """Where a forward begins, the least is there: a step may need at its peak what is free then."""
    of_machine = SimpleNamespace(limits=SimpleNamespace(free_bytes=1 << 40))  # others take some
    monkeypatch.setattr(learner, "host_share", lambda: of_machine)
    nbytes = 1 << 26
    gauge = native.MemoryGauge(device)
    beyond = gauge.peak - gauge.now + nbytes  # a process has had its peak long ago
    free = learner.free_bytes(device)
    step_peak = torch.ones(beyond, dtype=torch.uint8, device=device)
    del step_peak
    assert free - learner.free_bytes(device) >= nbytes // 2, "what the peak took counts as free"


def test_without_memory_for_a_plain_step_marks_alone_tell(device, new_pool, monkeypatch):
    monkeypatch.setattr(learner, "free_bytes", lambda device: 0)
    monkeypatch.setattr(verdicts, "AUTO_SLOWDOWN", 1e3)
    layers, pool = new_layers(device), new_pool()
    plain = step(layers, 32, device)
    with managed(layers, pool, "auto") as manager:
        kept = []
        for _ in range(60):
            manager.reset_stats()
            assert_same_gradients(step(layers, 32, device), plain)
            plan = manager.wait_for_plan()
            kept.append(manager.stats().moved_storages == 0)
            if plan is not None and plan.held:
                break
        assert not any(kept), "a step kept everything where there is no memory for that"
        assert plan is not None and plan.held
    assert_released(manager, pool)
