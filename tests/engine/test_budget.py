"""manage(budget=...): what users see, on every device. tests/race/test_plans.py has the schedules.

Budgets here are for stacks whose storages are all alike, so that a share of them is easy to tell.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import sys
import warnings
import weakref
from collections import Counter
from pathlib import Path

import pytest
import torch
from budget_layers import (
    SWAP,
    Layer,
    Scaled,
    forward,
    kept_peak,
    managed,
    new_layers,
    rates_for,
    step,
)
from helpers import assert_released, assert_same_gradients, gradients
from torch import nn

import memswap
from memswap import Action, BudgetError
from memswap.planning import kinds, verdicts
from memswap.planning.search import Search

pytestmark = pytest.mark.one_schedule


def test_the_first_steps_learn_and_the_fourth_begins_with_a_plan(device, new_pool, caplog):
    caplog.set_level("INFO", "memswap")
    layers = new_layers(device)
    plain = step(layers, 32, device)
    pool = new_pool()
    with managed(layers, pool, "1GiB") as manager:
        for number in range(1, 8):
            assert_same_gradients(step(layers, 32, device), plain)
            assert (manager.plan is not None) == (number >= 4), f"after step {number}"
            told = "no plan yet" if number < 4 else "peak of saved activations"
            assert f"budget 1.00 GiB: {told}" in manager.report()
        plan = manager.plan
        assert plan.moved_bytes == 0, "there was room for everything"
        assert plan.measured_peak_bytes is not None
        assert plan.measured_exposed_s is not None, "the second planned step was to be timed"
        assert "measured" in str(plan)
    assert_released(manager, pool)
    told = [one.getMessage() for one in caplog.records if one.getMessage().startswith("budget ")]
    assert len(told) == 1 and "peak of saved activations" in told[0], "a plan is logged when made"


class Chain(nn.Module):
    """One unit that saves so many storages, and statistics of norms that wait to be saved."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))
        self.count = count

    def forward(self, x):
        for _ in range(self.count):
            x = nn.functional.layer_norm((x * self.weight).tanh(), (64,))
        return x


def python_calls(device, pool, count):
    """Calls of memswap's Python functions in a step under a plan that moves something."""
    found = Counter()
    package = str(Path(memswap.__file__).parent)

    def seen(frame, event, argument):
        if event == "call" and frame.f_code.co_filename.startswith(package):
            found[frame.f_code.co_qualname] += 1

    chain = Chain(count).to(device)
    x = torch.ones(32, 64, device=device)
    with memswap.manage([chain], SWAP, pool=pool, budget="60%", rates=rates_for(device)) as manager:
        for number in range(8):
            if number == 7:  # the sixth was timed, and looked at in the seventh
                sys.setprofile(seen)
            try:
                chain(x).sum().backward()
            finally:
                sys.setprofile(None)
        assert manager.plan.moved_bytes > 0
        assert len(manager.plan.storages) >= count
    return found


def test_a_step_under_a_plan_calls_no_more_python_for_more_storages(device, new_pool):
    few, many = (python_calls(device, new_pool(), count) for count in (6, 40))
    assert few, "nothing was counted"
    assert few == many, f"more calls for more storages: {many - few}"


class SavesInHostMemory(torch.autograd.Function):
    """As CUDA's attention saves its seed."""

    @staticmethod
    def forward(ctx, x, seed):
        ctx.save_for_backward(seed)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        (seed,) = ctx.saved_tensors
        return gradient * seed.item(), None


class Seeded(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x):
        seed = torch.full((1 << 14,), 2.0)[:1]  # on the host, longer than what a layer saves
        return SavesInHostMemory.apply(self.inner(x), seed)


@pytest.mark.accelerator
def test_what_is_saved_in_host_memory_is_no_part_of_an_accelerators_budget(device, new_pool):
    layers = nn.Sequential(*(Seeded(layer) for layer in new_layers(device)))
    plain = step(layers, 32, device)
    pool = new_pool()
    with managed(layers, pool, "60%") as manager:
        for _ in range(6):
            assert_same_gradients(step(layers, 32, device), plain)
        manager.reset_stats()
        assert_same_gradients(step(layers, 32, device), plain)
        stats, plan = manager.stats(), manager.plan
    assert stats.kept["host memory beside an accelerator"].tensors == len(layers)
    assert stats.peak_resident_bytes <= plan.budget_bytes
    assert plan.measured_peak_bytes == plan.peak_bytes
    assert_released(manager, pool)


def test_a_trace_of_a_training_is_one_call(device, new_pool, tmp_path):
    layers = new_layers(device)
    with memswap.manage(layers, SWAP, pool=new_pool()) as manager:
        with pytest.raises(memswap.MemswapError, match=r"found no budget, expected a training"):
            manager.trace(tmp_path / "none")
    rates = rates_for(device)
    pool = new_pool()
    with memswap.manage(layers, SWAP, pool=pool, budget="60%", rates=rates) as manager:
        with pytest.raises(memswap.MemswapError, match=r"found no plan yet"):
            manager.trace(tmp_path / "none")
        for _ in range(5):
            step(layers, 32, device)
        written = manager.trace(tmp_path / "there")
    assert not (tmp_path / "none").exists()
    names = ["trace.json", *(["memory.png"] if importlib.util.find_spec("matplotlib") else [])]
    assert [one.name for one in written] == names and all(map(Path.exists, written))
    events = json.loads(written[0].read_text())["traceEvents"]
    assert {"plain", "memswap"} <= {one["args"]["name"] for one in events if one["ph"] == "M"}
    assert any(one["name"].startswith("forward 0") for one in events), "no unit is named"
    assert_released(manager, pool)


def test_without_a_budget_there_is_no_plan_and_everything_moves(device, new_pool):
    layers = new_layers(device)
    with memswap.manage(layers, SWAP, pool=new_pool()) as manager:
        for _ in range(6):
            step(layers, 32, device)
        assert manager.plan is None and manager.learnt is None
        assert manager.stats().moved_storages > 0


def test_steps_leave_nothing_that_only_a_collection_of_cycles_frees(device, new_pool):
    """Training loops turn the collector off."""
    layers = new_layers(device)
    with managed(layers, new_pool(), "70%"):
        for _ in range(12):  # a timeline remembers the last few iterations
            step(layers, 32, device)
        gc.collect()
        gc.disable()
        try:
            for _ in range(10):
                step(layers, 32, device)
            assert gc.collect() < 10, "one object or more for each step"
        finally:
            gc.enable()


@pytest.mark.parametrize("steps", [0, 1, 3, 6])  # not begun, learning, with a plan
def test_a_manager_that_is_removed_leaves_its_pool_to_nobody(device, new_pool, steps):
    """Between a forward and its backward; pinned memory must not wait for the cycle collector."""
    layers = new_layers(device)
    plain = step(layers, 32, device)
    pool = new_pool()
    manager = managed(layers, pool, "60%")
    for _ in range(steps):
        step(layers, 32, device)
    for parameter in layers.parameters():
        parameter.grad = None
    loss = forward(layers, 32, device)
    manager.remove()
    assert (manager.plan is not None) == (steps >= 3)
    loss.backward()
    assert_same_gradients(gradients(layers), plain)
    del loss
    assert_released(manager, pool)
    alive = weakref.ref(pool)
    gc.collect()
    gc.disable()
    try:
        del manager, pool
        assert alive() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("share", [0.7, 0.45])
def test_a_budget_is_kept_and_gradients_are_the_same(device, new_pool, share):
    budget = int(share * kept_peak(device, new_pool()))
    layers = new_layers(device)
    plain = step(layers, 32, device)
    pool = new_pool()
    with managed(layers, pool, budget) as manager:
        for _ in range(4):
            step(layers, 32, device)
        manager.reset_stats()
        for _ in range(2):
            assert_same_gradients(step(layers, 32, device), plain)
        stats = manager.stats()
        assert stats.moved_storages > 0
        assert stats.peak_resident_bytes <= budget
        assert manager.plan.measured_peak_bytes <= manager.plan.peak_bytes <= budget
    assert_released(manager, pool)


@pytest.mark.parametrize("again", [False, True])
def test_a_graph_that_is_retained_is_run_twice_within_a_budget(device, new_pool, again):
    """It used to need all of its bytes at a time, by the plan: its entries live on, empty."""

    def twice(layers: nn.ModuleList) -> list[torch.Tensor | None]:
        layers.zero_grad(set_to_none=True)
        loss = forward(layers, 32, device)
        loss.backward(retain_graph=True)
        if again:
            loss.backward()
        return gradients(layers)

    budget = int(0.6 * kept_peak(device, new_pool()))
    layers = new_layers(device)
    plain = twice(layers)
    pool = new_pool()
    with managed(layers, pool, budget) as manager:
        for _ in range(4):
            twice(layers)
        manager.reset_stats()
        for _ in range(3):
            assert_same_gradients(twice(layers), plain)
        assert manager.stats().moved_storages > 0
        assert manager.stats().peak_resident_bytes <= budget
        assert manager.plan.measured_peak_bytes <= manager.plan.peak_bytes <= budget
    assert_released(manager, pool)


@pytest.mark.parametrize("flights", [2, 3])
@pytest.mark.parametrize("order", ["first-in-first-out", "last-in-first-out", "one-by-one"])
def test_forwards_in_flight_share_a_budget(device, new_pool, flights, order):
    """GPipe, its reverse, and 1F1B: a forward, a backward, with so many waiting all the time."""

    def microbatches(layers: nn.ModuleList) -> list[torch.Tensor | None]:
        layers.zero_grad(set_to_none=True)
        waiting: list[torch.Tensor] = []
        for number in range(2 * flights):
            waiting.append(forward(layers, 32, device))
            if order == "one-by-one":
                if len(waiting) == flights:
                    waiting.pop(0).backward()
            elif number % flights == flights - 1:
                for loss in waiting if order[0] == "f" else reversed(waiting):
                    loss.backward()
                del loss
                waiting.clear()
        while waiting:
            waiting.pop(0).backward()
        return gradients(layers)

    layers = new_layers(device)
    plain = microbatches(layers)
    budget = int(0.6 * flights * kept_peak(device, new_pool()))
    pool = new_pool()
    with managed(layers, pool, budget) as manager:
        for _ in range(3):
            assert_same_gradients(microbatches(layers), plain)
        manager.reset_stats()
        for _ in range(2):
            assert_same_gradients(microbatches(layers), plain)
        plan = manager.plan
        assert plan is not None and plan.in_flight == flights and plan.moved_bytes > 0
        assert plan.peak_bytes * flights <= budget
        assert manager.stats().peak_resident_bytes <= budget
    assert_released(manager, pool)


def test_more_forwards_in_flight_than_planned_for_get_a_plan_at_once(device, new_pool):
    layers = new_layers(device)
    plain = step(layers, 32, device)
    budget = int(1.3 * kept_peak(device, new_pool()))
    with managed(layers, new_pool(), budget) as manager:
        for _ in range(5):
            assert_same_gradients(step(layers, 32, device), plain)
        assert manager.plan.moved_bytes == 0 and manager.plan.in_flight == 1
        manager.reset_stats()
        for _ in range(3):
            losses = [forward(layers, 32, device) for _ in range(2)]
            for loss in losses:
                layers.zero_grad(set_to_none=True)
                loss.backward()
                assert_same_gradients(gradients(layers), plain)
            del loss, losses
        assert manager.plan.in_flight == 2 and manager.plan.moved_bytes > 0


def test_a_budget_that_cannot_be_met_says_which_one_can(device, new_pool):
    layers = new_layers(device)
    with managed(layers, new_pool(), 1) as manager:
        for _ in range(3):
            plain = step(layers, 32, device)
        with pytest.raises(BudgetError, match="at least") as raised:
            step(layers, 32, device)
    smallest = raised.value.smallest_bytes
    assert_same_gradients(step(layers, 32, device), plain)  # nothing is lost
    with managed(layers, new_pool(), smallest) as manager:
        for _ in range(6):
            assert_same_gradients(step(layers, 32, device), plain)
        assert manager.plan.measured_peak_bytes <= smallest


def test_a_longer_batch_in_the_middle_of_a_run_does_not_end_it(device, new_pool):
    layers = new_layers(device)
    plain = {rows: step(layers, rows, device) for rows in (16, 256)}
    budget = kept_peak(device, new_pool(), rows=16)
    with managed(layers, new_pool(), budget) as manager:
        for _ in range(5):
            assert_same_gradients(step(layers, 16, device), plain[16])
        with pytest.warns(UserWarning, match="beyond the budget"):
            for _ in range(5):
                assert_same_gradients(step(layers, 256, device), plain[256])
        assert manager.plan.peak_bytes > budget


def test_other_shapes_get_a_plan_of_their_own(device, new_pool):
    budget = kept_peak(device, new_pool(), rows=48) // 2
    layers = new_layers(device)
    plain = {rows: step(layers, rows, device) for rows in (32, 48)}
    with managed(layers, new_pool(), budget) as manager:
        plans = {}
        for rows in (32,) * 5 + (48,) * 5 + (32, 48) * 2:
            assert_same_gradients(step(layers, rows, device), plain[rows])
            plans[rows] = manager.plan
        assert all(plan is not None for plan in plans.values())
        assert plans[48].kept_peak_bytes > plans[32].kept_peak_bytes


def test_a_model_that_changes_is_learnt_again(device, new_pool):
    """Longer on its way, with the same first storage: the old plan does not fit any more."""
    layers = new_layers(device, depth=6)
    used = layers[:4]
    with managed(layers, new_pool(), "1GiB") as manager:
        for _ in range(5):
            step(used, 32, device)
        before = manager.plan
        plain = None
        for _ in range(6):
            found = step(layers, 32, device)
            plain = plain or found
            assert_same_gradients(found, plain)
        after = manager.plan
        assert len(after.storages) > len(before.storages)


def test_a_later_plan_that_cannot_meet_the_budget_warns_and_trains_on(device, new_pool):
    layers = new_layers(device)
    budget = kept_peak(device, new_pool(), rows=16)
    with managed(layers, new_pool(), budget) as manager:
        for _ in range(5):
            step(layers, 16, device)
        director = manager._director
        kind = director._latest
        assert kind.plan is not None
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            learner = director._learner
            learner._budget = 1
            learner.make_room(kind)
            learner.collect()
            manager._engine.tell()  # as the next save does
        assert any("beyond the budget" in str(one.message) for one in caught)
        assert kind.plan.moved_bytes > 0


def test_evaluation_between_steps_changes_nothing(device, new_pool):
    layers = new_layers(device)
    plain = step(layers, 32, device)
    with managed(layers, new_pool(), "1GiB") as manager:
        for number in range(8):
            if number in (2, 4):
                with torch.no_grad():
                    forward(layers, 32, device)
                del number
            assert_same_gradients(step(layers, 32, device), plain)
        assert manager.plan is not None


def test_a_forward_without_a_backward_is_not_learnt_from(device, new_pool):
    layers = new_layers(device)
    plain = step(layers, 32, device)
    with managed(layers, new_pool(), "1GiB") as manager:
        for _ in range(3):
            loss = forward(layers, 32, device)
            del loss
        for _ in range(5):
            assert_same_gradients(step(layers, 32, device), plain)
        assert manager.plan is not None


def test_a_policys_action_is_the_only_one_and_what_it_keeps_stays(device, new_pool):
    layers = new_layers(device)

    def fn(tensor: torch.Tensor, info: memswap.TensorInfo) -> Action:
        return Action.KEEP if info.unit in ("0", "1") else Action.SWAP

    policy = memswap.Policy(fn=fn, min_bytes=1)
    with managed(layers, new_pool(), "1GiB", policy) as manager:
        for _ in range(4):
            step(layers, 32, device)
        budget = Search(*manager.learnt).smallest_bytes()
    layers = new_layers(device)
    with managed(layers, new_pool(), budget, policy) as manager:
        for _ in range(6):
            step(layers, 32, device)
        actions = {(one.unit, one.action) for one in manager.plan.storages}
        assert all(action is Action.KEEP for unit, action in actions if unit in ("0", "1"))
        assert Action.SWAP in {action for _, action in actions}
        assert {action for _, action in actions} <= {Action.KEEP, Action.SWAP}


@pytest.mark.cpu_only
def test_on_a_cpu_a_budget_encodes_what_is_needed_and_no_more():
    device = torch.device("cpu")
    policy = memswap.Policy(min_bytes=1)

    def wide(depth: int = 6) -> nn.ModuleList:
        return new_layers(device, depth)

    layers = wide()
    rows = 512
    plain = step(layers, rows, device)
    with memswap.manage(layers, policy, budget="1GiB", rates=rates_for(device)) as manager:
        for _ in range(4):
            step(layers, rows, device)
        kept = manager.plan.kept_peak_bytes
    budget = int(0.95 * kept)
    with memswap.manage(layers, policy, budget=budget, rates=rates_for(device)) as manager:
        for _ in range(4):
            step(layers, rows, device)
        manager.reset_stats()
        assert_same_gradients(step(layers, rows, device), plain)
        found = manager.plan
        actions = [one.action for one in found.storages]
        assert 0 < actions.count(Action.ENCODE) < len(actions)
        assert set(actions) <= {Action.KEEP, Action.ENCODE}
        assert manager.stats().peak_resident_bytes <= budget


@pytest.mark.own_form("it is about frames")
@pytest.mark.cpu_only
def test_on_a_cpu_frames_that_become_longer_lead_to_another_plan_and_to_no_other_bit(monkeypatch):
    """There is nowhere else for the bytes to go: the next plan encodes more, or warns."""
    monkeypatch.setattr(verdicts, "REFRAME_AFTER", 1)
    device = torch.device("cpu")
    torch.manual_seed(0)
    layers = nn.ModuleList([Scaled() for _ in range(6)])
    policy = memswap.Policy(min_bytes=1)
    with memswap.manage(layers, policy, budget="1GiB", rates=rates_for(device)) as manager:
        for _ in range(4):
            step(layers, 512, device)
        budget = int(0.88 * manager.plan.kept_peak_bytes)
    with memswap.manage(layers, policy, budget=budget, rates=rates_for(device)) as manager:
        for _ in range(3):
            step(layers, 512, device)
        manager.reset_stats()
        for _ in range(2):
            step(layers, 512, device)
        assert manager.stats().peak_resident_bytes <= budget, "not from the first planned step on"
        before = manager.plan
        for layer in layers:
            layer.scale.copy_(2.0 ** torch.randint(-20, 20, layer.scale.shape))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(5):
                found = step(layers, 512, device)
        assert manager.plan.storages != before.storages, "the plan still hopes for shorter frames"
    assert_same_gradients(found, step(layers, 512, device))


@pytest.mark.parametrize(
    ("budget", "error", "words"),
    [("a lot", ValueError, "a lot"), (-1, ValueError, "negative"), (1.5, ValueError, "1.5")],
)
def test_a_budget_that_cannot_be_read_is_refused_at_once(device, budget, error, words):
    with pytest.raises(error, match=words):
        memswap.manage(nn.Linear(2, 2), budget=budget)


class MustSwap(nn.Module):
    """A layer with a checkpoint region inside, whose products must be swapped."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Layer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        swap = memswap.CheckpointPolicy.MUST_SWAP
        return memswap.checkpoint(self.inner, x + 1, policy_fn=lambda *unused, **ignored: swap)


def test_what_somebody_insists_on_is_done_whatever_the_plan_says(device, new_pool):
    """A MUST_SWAP inside a managed layer leaves although there is room for it."""
    torch.manual_seed(0)
    layers = nn.ModuleList([MustSwap() for _ in range(4)]).to(device)
    plain = step(layers, 32, device)
    with managed(layers, new_pool(), "1GiB") as manager:
        for _ in range(4):
            assert_same_gradients(step(layers, 32, device), plain)
        assert manager.plan is not None
        manager.reset_stats()
        for _ in range(2):
            assert_same_gradients(step(layers, 32, device), plain)
        assert manager.stats().moved_storages > 0, "nothing moved although somebody insists"
        assert manager.stats().peak_resident_bytes <= manager.plan.peak_bytes


def test_a_step_with_two_forwards_in_flight_does_not_cost_all_later_ones_half_of_their_budget(
    device, new_pool
):
    layers = new_layers(device)
    budget = int(1.3 * kept_peak(device, new_pool()))
    with managed(layers, new_pool(), budget) as manager:
        for _ in range(5):
            step(layers, 32, device)
        before = manager.plan.moved_bytes
        losses = [forward(layers, 32, device) for _ in range(2)]
        for loss in losses:
            loss.backward()
        del loss, losses
        step(layers, 32, device)
        assert manager.plan.in_flight == 2 and manager.plan.moved_bytes > before
        for _ in range(2 * kinds.FLIGHTS_PATIENCE):
            step(layers, 32, device)
        assert manager.plan.in_flight == 1 and manager.plan.moved_bytes == before


def test_forwards_in_flight_that_come_back_are_remembered_for_longer():
    flights = kinds.Flights()

    def forwards_until_forgotten() -> int:
        assert flights.see(2)
        for count in range(1, 1000):
            if flights.count():
                return count
            flights.see(1)
        return 0

    first, second = forwards_until_forgotten(), forwards_until_forgotten()
    assert flights.number == 1
    assert second >= 1.5 * first >= kinds.FLIGHTS_PATIENCE, "a plan again and again"


def test_forwards_that_are_in_flight_now_and_then_are_not_forgotten():
    flights = kinds.Flights()
    flights.see(3)
    for number in range(200):
        flights.see(3 if number % 10 == 0 else 1)
        assert not flights.count()
    assert flights.number == 3
