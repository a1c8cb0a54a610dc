"""Budgets as shares, and budgets at their limits: what is told, and what is done about it."""

from __future__ import annotations

import warnings

import pytest
import torch
from budget_layers import Scaled, forward, kept_peak, managed, new_layers, rates_for, step
from helpers import assert_same_gradients
from torch import nn

import memswap
from memswap import Action, BudgetError

pytestmark = pytest.mark.one_schedule


def test_a_share_is_one_of_what_the_same_step_saves(device, new_pool):
    layers = new_layers(device)
    plain = {rows: step(layers, rows, device) for rows in (32, 64)}
    with managed(layers, new_pool(), "60%") as manager:
        kept = {}
        for rows in (32,) * 6 + (64,) * 6:
            assert_same_gradients(step(layers, rows, device), plain[rows])
            plan = manager.plan
            if plan is not None:
                kept[rows] = plan.kept_peak_bytes
                assert plan.budget == "60%" and plan.budget_bytes == int(0.6 * kept[rows])
                assert plan.peak_bytes <= plan.budget_bytes and plan.moved_bytes > 0
                assert plan.over_budget_bytes == 0
        assert kept[64] == 2 * kept[32]
        assert "budget 60%" in str(manager.plan)


def test_a_share_is_one_of_each_forward_in_flight(device, new_pool):
    layers = new_layers(device)
    with managed(layers, new_pool(), "70%") as manager:
        for turn in range(5):
            losses = [forward(layers, 32, device) for _ in range(2)]
            if turn == 4:
                manager.reset_stats()
            for loss in losses:
                loss.backward()
            del loss, losses
        plan = manager.plan
        assert plan.in_flight == 2 and plan.budget_bytes == 2 * int(0.7 * plan.kept_peak_bytes)
        assert plan.peak_bytes <= plan.budget_bytes // 2
        assert manager.stats().peak_resident_bytes <= plan.budget_bytes


@pytest.mark.parametrize("budget", ["0%", "101%", "x%", "nan%", "-5%", "%"])
def test_what_is_no_share_is_refused_at_once(device, budget):
    with pytest.raises(ValueError, match=r"manage\(budget=\.\.\.\).*up to 100%, found"):
        memswap.manage(nn.Linear(2, 2), budget=budget)


# --- pools that are too small ---------------------------------------------------------------------


def accelerator(device: torch.device) -> torch.device:
    if device.type == "cpu":
        pytest.skip("a file grows by extents")
    return device


def test_a_plan_sends_no_more_than_the_pool_can_hold(device, new_pool):
    """What has no place there is encoded on the device, if that meets the budget."""
    accelerator(device)
    rows, anything = 512, memswap.Policy(min_bytes=1)
    nbytes = kept_peak(device, new_pool(), rows)
    layers = new_layers(device)
    plain = step(layers, rows, device)
    pool, rates = (
        memswap.HostPool(budget=nbytes // 3, slab="64KiB", device=device),
        rates_for(device),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # while it learns, the pool is full
        with memswap.manage(layers, anything, pool=pool, budget="75%", rates=rates) as manager:
            for _ in range(5):
                assert_same_gradients(step(layers, rows, device), plain)
            manager.reset_stats()
            assert_same_gradients(step(layers, rows, device), plain)
            plan, stats = manager.plan, manager.stats()
    assert plan.moved_bytes > 0 and plan.away_bytes <= pool.budget_bytes
    assert stats.kept.keys() <= {"planned", "parameter"}, f"something was refused: {stats.kept}"
    assert stats.peak_resident_bytes <= plan.budget_bytes


def test_a_budget_that_the_pool_is_too_small_for_says_so(device, new_pool):
    accelerator(device)
    nbytes = kept_peak(device, new_pool(), rows=512)
    layers = new_layers(device)
    pool = memswap.HostPool(budget=nbytes // 8, slab="64KiB", device=device)
    with (
        warnings.catch_warnings(),
        managed(layers, pool, nbytes // 2),
    ):
        warnings.simplefilter("ignore")
        for _ in range(3):
            step(layers, 512, device)
        with pytest.raises(BudgetError, match="of room in the pool"):
            step(layers, 512, device)


def test_a_pool_that_fills_up_later_is_told_and_planned_around_once(device, new_pool):
    accelerator(device)
    rows = 512
    nbytes = kept_peak(device, new_pool(), rows)
    layers = new_layers(device)
    plain = step(layers, rows, device)
    pool = memswap.HostPool(budget=2 * nbytes, slab="64KiB", device=device)
    with managed(layers, pool, int(0.6 * nbytes)) as manager:
        for _ in range(6):
            step(layers, rows, device)
        assert manager.plan.over_budget_bytes == 0
        somebody = []  # takes most of what is left
        while (block := pool.native.allocate(1 << 16)) is not None:
            somebody.append(block)
        del somebody[:2]
        with pytest.warns(UserWarning) as told:
            for _ in range(2):
                assert_same_gradients(step(layers, rows, device), plain)
        words = " ".join(str(one.message) for one in told)
        assert "stays on" in words and "beyond the budget" in words
        plans = manager._director._latest.plans
        assert plans >= 2
        for _ in range(6):
            assert_same_gradients(step(layers, rows, device), plain)
        assert manager._director._latest.plans <= plans + 1, "a plan for each step"


@pytest.mark.own_form("it is about frames")
@pytest.mark.cpu_only
def test_where_longer_frames_have_nowhere_to_go_it_is_told_and_planned_at_once():
    device = torch.device("cpu")
    torch.manual_seed(0)
    layers = nn.ModuleList([Scaled() for _ in range(6)])
    policy = memswap.Policy(min_bytes=1)
    with memswap.manage(layers, policy, budget="88%", rates=rates_for(device)) as manager:
        for _ in range(6):
            step(layers, 512, device)
        before = manager.plan
        assert before.over_budget_bytes == 0
        assert any(one.action is Action.ENCODE for one in before.storages)
        for layer in layers:
            layer.scale.copy_(2.0 ** torch.randint(-20, 20, layer.scale.shape))
        with pytest.warns(UserWarning, match="beyond the budget") as told:
            step(layers, 512, device)
            assert manager.plan.over_budget_bytes > 0 and "beyond the budget" in str(manager.plan)
            for _ in range(2):
                found = step(layers, 512, device)
        assert sum("were on the device at a time" in str(one.message) for one in told) == 1
        assert manager.plan.storages != before.storages, "the plan still hopes for shorter frames"
    assert_same_gradients(found, step(layers, 512, device))
