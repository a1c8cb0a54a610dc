"""Checkpoint regions under a budget: the plan says which are recomputed, and no bit differs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from checkpoint_helpers import DOUBLE, CheckpointPolicy, aten, double, policy_of
from helpers import (
    Stack,
    assert_released,
    assert_same_gradients,
    new_input,
    new_stack,
    train_step,
)
from torch import nn

import memswap
from memswap import Action, BudgetError, Rates
from memswap.engine.hook_scope import current_scope
from memswap.planning.plan import describe

pytestmark = pytest.mark.one_schedule

SWAP = memswap.Policy(action=Action.SWAP, min_bytes=1)
KEEP = memswap.Policy(action=Action.KEEP, min_bytes=1)
#: So slow that nothing else than recomputing is worth its time.
NO_LINK = Rates("a machine with a slow link", 1e3, 1e3, 1e3, 1e3)
DEPTH = 5


class Planned:
    """A stack of checkpointed layers under a budget, trained until there is a plan."""

    def __init__(
        self,
        device: torch.device,
        pool: Any,
        budget: int | str,
        policy: memswap.Policy = SWAP,
        rates: Rates = NO_LINK,
        checkpointed: bool = True,
        model: Any = None,
        **options: Any,
    ) -> None:
        self.model = new_stack(device, DEPTH) if model is None else model
        self.x = new_input(device)
        self.regions = None
        if checkpointed:
            self.regions = memswap.checkpoint_module(self.model.layers, **options)
        self.manager = memswap.manage(
            self.model.layers, policy, pool=pool, budget=budget, rates=rates
        )

    def step(self) -> list[torch.Tensor | None]:
        return train_step(self.model, lambda: self.model(self.x))

    def steps(self, plain: list[torch.Tensor | None], count: int = 6) -> memswap.types.Plan:
        for _ in range(count):
            assert_same_gradients(self.step(), plain)
        plan = self.manager.plan
        assert plan is not None
        return plan

    def remove(self) -> None:
        self.manager.remove()
        if self.regions is not None:
            self.regions.remove()


def plain_gradients(device: torch.device) -> list[torch.Tensor | None]:
    model = new_stack(device, DEPTH)
    return train_step(model, lambda: model(new_input(device)))


def kept_peak(device: torch.device, pool: Any) -> int:
    one = Planned(device, pool, "1GiB")
    plan = one.steps(plain_gradients(device))
    assert plan.recompute == (), "there was room for everything, and something is recomputed"
    one.remove()
    return plan.kept_peak_bytes


def test_with_room_for_everything_no_region_is_recomputed(device, new_pool):
    """The user checkpointed for want of memory; with a budget that fits, that time comes back."""
    runs = []
    one = Planned(device, new_pool(), "1GiB")
    for layer in one.model.layers:
        layer.up.register_forward_hook(
            lambda *unused: runs.append(torch._C._current_graph_task_id())
        )
    one.steps(plain_gradients(device), 5)
    runs.clear()
    one.step()
    assert len(runs) == DEPTH and set(runs) == {-1}, "a layer ran again in backward"
    one.remove()


@pytest.mark.parametrize("share", [0.8, 0.55])
def test_regions_are_recomputed_as_the_budget_needs_it_and_no_bit_differs(device, new_pool, share):
    plain = plain_gradients(device)
    budget = int(share * kept_peak(device, new_pool()))
    pool = new_pool()
    one = Planned(device, pool, budget)
    plan = one.steps(plain, 7)
    assert 0 < len(plan.recompute) < DEPTH
    one.manager.reset_stats()
    one.steps(plain, 2)
    stats, plan = one.manager.stats(), one.manager.plan
    assert stats.peak_resident_bytes <= budget
    assert plan.measured_peak_bytes <= plan.peak_bytes <= budget
    largest = max(storage.nbytes for storage in plan.storages)
    assert plan.peak_bytes - plan.measured_peak_bytes <= 2 * largest, "the prediction is far off"
    for unit in plan.units:
        assert ("recompute" in describe(unit)) == (unit.name in plan.recompute)
    one.remove()
    assert_released(one.manager, pool, moved=False)


def test_a_budget_that_swapping_cannot_meet_is_met_by_recomputing(device, new_pool):
    """Nothing may move, so without regions only everything fits."""
    plain = plain_gradients(device)
    budget = int(0.7 * kept_peak(device, new_pool()))
    without = Planned(device, new_pool(), budget, KEEP, checkpointed=False)
    for _ in range(3):
        without.step()
    with pytest.raises(BudgetError):
        without.step()
    without.remove()
    one = Planned(device, new_pool(), budget, KEEP)
    plan = one.steps(plain, 6)
    assert plan.recompute and plan.moved_bytes == 0
    assert one.manager.plan.measured_peak_bytes <= budget
    one.remove()


def test_a_budget_that_recomputing_cannot_meet_either_says_which_one_can(device, new_pool):
    plain = plain_gradients(device)
    one = Planned(device, new_pool(), 1)
    with pytest.raises(BudgetError, match="at least") as raised:
        for _ in range(9):
            assert_same_gradients(one.step(), plain)
    one.remove()
    smallest = raised.value.smallest_bytes
    again = Planned(device, new_pool(), smallest)
    again.steps(plain, 8)
    assert again.manager.plan.measured_peak_bytes <= smallest
    again.remove()


def test_auto_leaves_regions_as_they_are(device, new_pool):
    """Recomputing is never free of charge, and whoever checkpointed had no room for more."""
    one = Planned(device, new_pool(), "auto")
    runs = []
    one.model.layers[0].up.register_forward_hook(lambda *unused: runs.append(1))
    one.steps(plain_gradients(device), 5)
    runs.clear()
    one.step()
    assert len(runs) == 2
    one.remove()


def test_a_region_with_a_policy_of_its_own_is_the_users_word(device, new_pool):
    plain = plain_gradients(device)
    one = Planned(device, new_pool(), "1GiB", policy_fn=memswap.keep_collectives)
    runs = []
    one.model.layers[0].up.register_forward_hook(lambda *unused: runs.append(1))
    one.steps(plain, 5)
    runs.clear()
    assert_same_gradients(one.step(), plain)
    assert len(runs) == 2, "a region with a policy was switched off"
    one.remove()


# --- regions with a policy ---


class Doubling(nn.Module):
    """A layer whose costly operator counts its runs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(double(self.up(x).sin()).cos())


def doubling(device: torch.device) -> Stack:
    model = new_stack(device, depth=0)
    model.layers.extend(Doubling(16).to(device) for _ in range(DEPTH))
    return model


def doubled_bytes() -> int:
    return DEPTH * 2 * 8 * 64 * 4


SAVES = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)


@pytest.mark.parametrize("decision", SAVES, ids=lambda policy: policy.name)
def test_what_a_policy_saves_is_in_the_account(device, new_pool, decision):
    model, x = doubling(device), new_input(device)
    plain = train_step(model, lambda: model(x))
    peaks = {}
    for saved in (decision, CheckpointPolicy.PREFER_RECOMPUTE):
        policy_fn = policy_of(saved, [DOUBLE])
        one = Planned(device, new_pool(), "1GiB", model=doubling(device), policy_fn=policy_fn)
        plan = one.steps(plain)
        assert plan.measured_peak_bytes <= plan.peak_bytes and plan.moved_bytes == 0
        assert plan.peak_bytes - plan.measured_peak_bytes <= 4096
        peaks[saved] = plan.measured_peak_bytes
        one.remove()
    more = peaks[decision] - peaks[CheckpointPolicy.PREFER_RECOMPUTE]
    assert more >= doubled_bytes() * (DEPTH - 1) // DEPTH, "what the policy saves is not counted"


@pytest.mark.parametrize("policy_fn", [[aten.mm.default, aten.addmm.default]])
def test_products_that_a_policy_saves_are_planned_to_the_byte(device, new_pool, policy_fn):
    """With memory that is used again at once: a storage may have the address of one that left."""
    plain = plain_gradients(device)
    one = Planned(device, new_pool(), "1GiB", policy_fn=policy_fn)
    kept = one.steps(plain, 8)
    assert kept.measured_peak_bytes <= kept.peak_bytes
    one.remove()
    pool = new_pool()
    one = Planned(device, pool, kept.peak_bytes, policy_fn=policy_fn)
    plan = one.steps(plain, 8)
    assert plan.measured_peak_bytes <= plan.peak_bytes <= kept.peak_bytes
    one.remove()
    assert_released(one.manager, pool)


def test_what_a_policy_insists_on_saving_moves_under_no_plan(device, new_pool):
    model, x = doubling(device), new_input(device)
    plain = train_step(model, lambda: model(x))
    policy_fn = policy_of(CheckpointPolicy.MUST_SAVE, [DOUBLE])
    one = Planned(device, new_pool(), 1, model=doubling(device), policy_fn=policy_fn)
    with pytest.raises(BudgetError, match="at least") as raised:
        for _ in range(9):
            assert_same_gradients(one.step(), plain)
    one.remove()
    assert raised.value.smallest_bytes >= doubled_bytes()


class Alternating:
    """A director that switches regions by the step, and plans nothing."""

    def __init__(self) -> None:
        self.on = True

    def recomputes(self, module: nn.Module, args: tuple[Any, ...]) -> bool:
        assert current_scope() is not None
        self.on = not self.on
        return self.on

    def choose(self, *unused: Any) -> Action:
        return Action.KEEP

    def begin(self, iteration: Any) -> None: ...


class Noisy(nn.Module):
    """Draws random numbers, and edits what it computed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(self.linear(x).tanh(), 0.3).mul(2).add_(x)


def noisy_step(model: Stack, x: torch.Tensor) -> list[torch.Tensor | None]:
    torch.manual_seed(7)
    return train_step(model, lambda: model(x))


def test_switching_a_region_on_and_off_per_step_changes_no_bit(device, new_pool):
    """Dropout included: a region draws the same numbers whether it is on or off."""
    model = new_stack(device, 0)
    model.layers.extend([Noisy().to(device) for _ in range(3)])
    x = new_input(device)
    plain = noisy_step(model, x)
    regions = memswap.checkpoint_module(model.layers)
    with memswap.manage(model.layers, SWAP, pool=new_pool()) as manager:
        director = manager._engine.director = Alternating()  # three layers: it differs by the step
        for _ in range(4):
            assert_same_gradients(noisy_step(model, x), plain)
        assert director.on
    regions.remove()


def test_what_recomputing_saves_again_counts_as_resident_while_it_is_there(device, new_pool):
    """Or a budget would be one for everything but what backward holds at its peak."""
    pool = new_pool()
    budget = int(0.55 * kept_peak(device, new_pool()))
    one = Planned(device, pool, budget)
    plain = plain_gradients(device)
    plan = one.steps(plain, 7)
    unit = max(plan.units, key=lambda one: one.recompute)
    assert max(plan.step.extra_nbytes) > 0.5 * unit.nbytes
    engine = one.manager._engine
    seen = []
    layer = one.model.layers[int(plan.recompute[-1])]
    layer.up.weight.register_hook(lambda unused: seen.append(engine.ledger.counters.resident_bytes))
    one.step()
    assert max(seen) > 0.4 * unit.nbytes
    assert one.manager.stats().resident_bytes == 0, "something recomputed is still on the books"
    one.remove()
