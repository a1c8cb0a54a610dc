"""Plans that are followed: an engine does by itself what the director would have it do."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from budget_layers import forward, kept_peak, managed, new_layers, step
from helpers import assert_released, assert_same_gradients

import memswap
from memswap import Action
from memswap._native import native
from memswap.engine.engine import Engine
from memswap.planning import followed, kinds
from memswap.planning.director import BudgetDirector

pytestmark = pytest.mark.one_schedule


def counting(monkeypatch, counted: Counter[str], asked: type, name: str) -> None:
    called = getattr(asked, name)

    def count(self: Any, *arguments: Any) -> Any:
        counted[name] += 1
        return called(self, *arguments)

    monkeypatch.setattr(asked, name, count)


@pytest.fixture
def calls(monkeypatch):
    """How often Python was asked about a storage, by the name of what was called."""
    counted: Counter[str] = Counter()
    counting(monkeypatch, counted, BudgetDirector, "choose")
    counting(monkeypatch, counted, Engine, "decide")  # native code asks nothing else about one
    return counted


@pytest.fixture
def begins(monkeypatch):
    """How often it was asked when a forward began."""
    counted: Counter[str] = Counter()
    counting(monkeypatch, counted, BudgetDirector, "begin")
    return counted


def asks_about_everything(monkeypatch) -> None:
    made = followed.native_plan
    monkeypatch.setattr(followed, "native_plan", lambda plan, keys, *rest: made(plan, (), *rest))


@pytest.mark.parametrize("share", [0.7, 0.45])
def test_a_plan_that_is_followed_asks_nobody_and_does_the_same(
    device, new_pool, share, calls, monkeypatch
):
    budget = int(share * kept_peak(device, new_pool()))

    def train() -> tuple[Any, Any, int, dict[str, int]]:
        layers = new_layers(device)
        pool = new_pool()
        with managed(layers, pool, budget) as manager:
            for _ in range(6):
                step(layers, 32, device)
            manager.reset_stats()
            calls.clear()
            found = step(layers, 32, device)
            asked = dict(calls)
            stats, peak = manager.stats(), manager.plan.measured_peak_bytes
        assert_released(manager, pool)
        return found, stats, peak, asked

    alone = train()
    asks_about_everything(monkeypatch)
    asking = train()
    assert not alone[3], f"asked although the step is as planned: {alone[3]}"
    assert asking[3]["choose"] > 5
    assert_same_gradients(alone[0], asking[0])
    assert alone[2] == asking[2], "another peak was measured"
    for name in ("moved_storages", "returned_storages", "freed_bytes", "stalls", "kept"):
        assert getattr(alone[1], name) == getattr(asking[1], name), name
    assert alone[1].peak_resident_bytes == asking[1].peak_resident_bytes


def test_who_looks_before_a_forward_saves_finds_the_same_plan(device, new_pool, calls):
    """What an iteration was offered is taken back then, and its first storage is asked about."""
    layers = new_layers(device)
    plain = step(layers, 32, device)
    budget = int(0.5 * kept_peak(device, new_pool()))
    with managed(layers, new_pool(), budget) as manager:
        for _ in range(6):
            step(layers, 32, device)
        plan = manager.plan
        looking = layers[0].register_forward_pre_hook(lambda *unused: manager.plan and None)
        calls.clear()
        assert_same_gradients(step(layers, 32, device), plain)
        looking.remove()
        assert calls == {"choose": 1}
        assert manager._engine.iteration.course.follows_plan
        assert manager.plan.storages is plan.storages
        assert manager.plan.measured_peak_bytes <= budget


def test_a_streak_asks_nobody_and_what_it_has_shown_is_known_afterwards(
    device, new_pool, begins, monkeypatch
):
    """Every forward asked, or none of a streak: what is known of the plan is the same."""
    budget = int(0.5 * kept_peak(device, new_pool()))

    def train() -> tuple[Any, ...]:
        layers = new_layers(device)
        with managed(layers, new_pool(), budget) as manager:
            for _ in range(4):
                step(layers, 32, device)
                manager.wait_for_plan()
            for _ in range(4):  # the second under the plan is timed, and looked at
                step(layers, 32, device)
            manager.wait_for_plan()
            step(layers, 32, device)
            begins.clear()
            for _ in range(40):
                found = step(layers, 32, device)
            asked = begins["begin"]
            director = manager._director
            peak, kind = manager.plan.measured_peak_bytes, director._latest
            known = (kind.measured.iterations, kind.measured.alike, kind.flights.iterations)
            return asked, found, (peak, kind.patience, *known)

    alone = train()
    monkeypatch.setattr(kinds.StepKind, "until_asked", lambda kind: 1)
    asking = train()
    assert alone[0] <= 1 and asking[0] == 40
    assert_same_gradients(alone[1], asking[1])
    assert alone[2] == asking[2], "what a streak has shown is lost"


@pytest.mark.parametrize("other", ["shorter", "no backward", "two at a time"])
def test_a_streak_ends_with_the_first_forward_after_what_was_not_as_planned(
    device, new_pool, begins, other
):
    layers = new_layers(device)
    plain = step(layers, 32, device)
    with managed(layers, new_pool(), int(1.2 * kept_peak(device, new_pool()))) as manager:
        for _ in range(8):
            step(layers, 32, device)
            manager.wait_for_plan()
        step(layers, 32, device)
        begins.clear()
        step(layers, 32, device)
        assert not begins["begin"], "no streak to end"
        if other == "shorter":
            step(layers[:4], 32, device)
        elif other == "no backward":
            forward(layers, 32, device)
        else:
            waiting = forward(layers, 32, device)
        assert not begins["begin"]
        step(layers, 32, device)
        assert begins["begin"] == 1
        if other == "two at a time":
            waiting.backward()
            assert manager.wait_for_plan().in_flight == 2
        assert_same_gradients(step(layers, 32, device), plain)


def test_planned_frames_are_followed_without_asking(device, new_pool, calls):
    """But where room has to be made."""
    layers = new_layers(device, depth=12)
    plain = step(layers, 32, device)
    policy = memswap.Policy(action=Action.ENCODE_SWAP, min_bytes=1)
    with managed(layers, new_pool(), "80%", policy) as manager:
        for _ in range(8):
            step(layers, 32, device)
        calls.clear()
        assert_same_gradients(step(layers, 32, device), plain)
        storages = manager.plan.storages
        assert any(one.action is Action.ENCODE_SWAP for one in storages), "no frame was planned"
        assert calls["choose"] <= 3 < len(storages) / 4, "each storage is asked about"


def test_a_step_that_leaves_the_plan_asks_from_there_on(device, new_pool, calls):
    budget = int(0.5 * kept_peak(device, new_pool()))
    layers = new_layers(device)
    plain = {depth: step(layers[:depth], 32, device) for depth in (4, 6)}
    with managed(layers, new_pool(), budget) as manager:
        for _ in range(6):
            step(layers, 32, device)
        for depth in (4, 6):  # the first ends before the plan does
            calls.clear()
            assert_same_gradients(step(layers[:depth], 32, device), plain[depth])
            assert not calls
            followed = manager._engine.iteration.course.follows_plan
            assert followed == (depth == 6), "a backward has another plan than its forward"
        assert manager.plan is not None


def test_backwards_that_take_turns_each_follow_their_own_plan(device, new_pool, calls):
    """Nobody is asked where one backward follows another."""
    layers = new_layers(device)
    plain = step(layers, 32, device)
    budget = int(1.2 * kept_peak(device, new_pool()))
    with managed(layers, new_pool(), budget) as manager:
        for turn in range(8):
            layers.zero_grad(set_to_none=True)
            losses = [forward(layers, 32, device) for _ in range(2)]
            calls.clear()
            for loss in losses:
                loss.backward()
            del loss, losses
            if turn == 6:
                assert not calls, "a demand asks Python"
        found = [parameter.grad / 2 for parameter in layers.parameters()]
        assert_same_gradients(found, plain)
        assert manager.plan.in_flight == 2 and manager.plan.moved_bytes > 0
        assert manager.plan.measured_peak_bytes <= budget


def test_a_plan_says_what_is_wrong_with_it():
    cpu = torch.device("cpu")

    def made(
        dtype: Any = torch.float32,
        action: Any = Action.SWAP,
        releases: Any = (),
        fetches: Any = (),
    ) -> Any:
        place = ("0", 0, 8, dtype, action, releases, (), fetches, False, None, False)
        return native.Plan(cpu, 0, [place])

    assert len(made()) == 1
    with pytest.raises(TypeError, match="places"):
        native.Plan(cpu, 0, [("0", 0)])
    with pytest.raises(TypeError, match=r"memswap\.Action"):
        made(action="burn")
    with pytest.raises(ValueError, match="nothing later"):
        made(releases=(1,))
    with pytest.raises(ValueError, match="fetches what it has a place for"):
        made(fetches=(0, 1))
    with pytest.raises(TypeError, match=r"torch\.dtype"):
        made(dtype="float32")
    with pytest.raises(TypeError, match="Plan"):
        native.Timeline(None).begin().course.follow(3, 0.0, 0, None)
