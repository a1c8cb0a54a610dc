"""What backward has in use counts as resident for as long as it is there, whoever holds it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from checkpoint_helpers import DOUBLE, LEAVE, CheckpointPolicy, double, policy_of, runs
from helpers import (
    Stack,
    assert_released,
    assert_same_gradients,
    let_sends_end,
    new_input,
    new_stack,
    train_step,
)
from torch import nn

import memswap
from memswap import Action, Rates

SWAP = memswap.Policy(action=Action.SWAP, min_bytes=1)
#: So fast that what moves is a question of bytes alone.
FAST = Rates("a machine with a fast link", 1e12, 1e12, 1e12, 1e12)
DEPTH = 3
#: Outputs that a layer's policy saves: more than one operator could ask for in a row.
SAVED = 12
ALIKE = (SAVED,) * DEPTH


class Chained(nn.Module):
    """Costly outputs, each of which the next operator saves as well; as the first one does `x`."""

    def __init__(self, seen: list[tuple[int, int]], saved: int = SAVED) -> None:
        super().__init__()
        self.seen, self.saved = seen, saved
        self.engine: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = x.sin()
        for _ in range(self.saved):
            hidden = double(hidden).cos()
            hidden.register_hook(self.look)
        return hidden

    def look(self, gradient: torch.Tensor) -> None:
        """Backward is here: what counts now, and what is alive of what the iteration saved."""
        if self.engine is not None:
            self.engine.lock.run(self.note)

    def note(self) -> None:
        counted = self.engine.ledger.counters.resident_bytes
        self.seen.append((counted, self.engine.iteration.present_bytes(1)))


class Chains:
    """Layers that are regions with a policy, under a budget."""

    def __init__(
        self,
        device: torch.device,
        pool: Any,
        budget: int | str,
        decision: Any,
        saved: tuple[int, ...] = ALIKE,
    ) -> None:
        self.seen: list[tuple[int, int]] = []
        self.model, self.x = chains(device, self.seen, saved), new_input(device)
        policy_fn = policy_of(decision, [DOUBLE])
        self.regions = memswap.checkpoint_module(self.model.layers, policy_fn=policy_fn)
        self.manager = memswap.manage(
            self.model.layers, SWAP, pool=pool, budget=budget, rates=FAST, prefetch_bytes=0
        )
        for layer in self.model.layers:
            layer.engine = self.manager._engine

    def steps(self, plain: list[torch.Tensor | None], count: int) -> memswap.types.Plan | None:
        for _ in range(count):
            assert_same_gradients(train_step(self.model, lambda: self.model(self.x)), plain)
        return self.manager.plan

    def remove(self) -> None:
        for layer in self.model.layers:
            layer.engine = None
        self.manager.remove()
        self.regions.remove()


def chains(
    device: torch.device, seen: list[tuple[int, int]], saved: tuple[int, ...] = ALIKE
) -> Stack:
    model = new_stack(device, depth=0)
    model.layers.extend(Chained(seen, number) for number in saved)
    return model


def plain_gradients(
    device: torch.device, saved: tuple[int, ...] = ALIKE
) -> list[torch.Tensor | None]:
    model = chains(device, [], saved)
    return train_step(model, lambda: model(new_input(device)))


@pytest.mark.parametrize("way", LEAVE)
def test_what_recomputed_operators_hold_counts_for_as_long_as_they_do(device, new_pool, way):
    """Also where every save of it has been read: torch's frame of the region has it then."""
    plain, pool = plain_gradients(device), new_pool()
    one = Chains(device, pool, "1GiB", LEAVE[way])
    one.steps(plain, 7)
    assert len(one.seen) == 7 * DEPTH * SAVED
    for counted, alive in one.seen:
        assert counted >= alive, f"{alive - counted} bytes are in use, and on no account"
    storage_bytes = one.x.numel() * one.x.element_size()
    most = max(alive for _, alive in one.seen[-DEPTH * SAVED :])  # in a step under the plan
    assert most >= (SAVED - 1) * storage_bytes, "nothing is in use for long: the test shows nothing"
    plan = one.manager.plan
    assert most <= plan.measured_peak_bytes <= plan.peak_bytes
    one.remove()
    assert_released(one.manager, pool)


def test_what_is_gone_counts_no_more(device, new_pool):
    plain = plain_gradients(device)
    one = Chains(device, new_pool(), "1GiB", CheckpointPolicy.MUST_SWAP)
    one.steps(plain, 6)
    one.seen.clear()
    one.steps(plain, 1)
    storage_bytes = one.x.numel() * one.x.element_size()
    for counted, alive in one.seen:  # marks are demands: nothing is looked at in between
        assert counted - alive <= SAVED * storage_bytes
    assert one.manager.stats().resident_bytes == 0
    one.remove()


# --- what a policy prefers to save, which a plan may move ---


def test_a_plan_moves_what_a_policy_prefers_to_save_and_nothing_runs_again(device, new_pool):
    """Exactly within its budget, though all of a region's outputs come back at once."""
    plain, decision = plain_gradients(device), CheckpointPolicy.PREFER_SAVE
    kept = Chains(device, new_pool(), "1GiB", decision)
    plan = kept.steps(plain, 6)
    assert plan.moved_bytes == 0, "with room for everything something moves"
    kept.remove()
    storage_bytes = kept.x.numel() * kept.x.element_size()
    # Beside a region's own outputs and input there is room for a few of the others.
    pool, budget = new_pool(), (SAVED + 6) * storage_bytes
    assert budget < plan.kept_peak_bytes
    one = Chains(device, pool, budget, decision)
    one.steps(plain, 7)
    runs.clear()
    one.seen.clear()
    one.manager.reset_stats()
    plan = one.steps(plain, 2)
    assert len(runs) == 2 * DEPTH * SAVED, "an operator whose output was saved ran again"
    assert plan.moved_bytes > 0 and one.manager.stats().moved_storages > 0
    assert plan.over_budget_bytes == 0
    most = max(alive for _, alive in one.seen)
    assert most > SAVED * storage_bytes, "nothing is in use for long: the test shows nothing"
    assert most <= plan.measured_peak_bytes <= plan.peak_bytes <= budget
    assert plan.peak_bytes - most <= 2 * storage_bytes, "the prediction is far off"
    one.remove()
    assert_released(one.manager, pool)


def test_the_smallest_budget_has_room_for_all_that_a_region_has_in_use(device, new_pool):
    """What the region was given first is in use when the last one comes."""
    saved, decision = (SAVED, 2, 2), CheckpointPolicy.PREFER_SAVE
    plain = plain_gradients(device, saved)
    one = Chains(device, new_pool(), 1, decision, saved)
    with pytest.raises(memswap.BudgetError, match="at least") as raised:
        one.steps(plain, 9)
    one.remove()
    smallest, pool = raised.value.smallest_bytes, new_pool()
    one = Chains(device, pool, smallest, decision, saved)
    one.steps(plain, 6)
    one.seen.clear()
    plan = one.steps(plain, 2)
    most = max(alive for _, alive in one.seen)
    assert most <= plan.measured_peak_bytes <= plan.peak_bytes <= smallest
    one.remove()
    assert_released(one.manager, pool)


class Edited(Chained):
    """Edits one of its outputs in place, once that has been used."""

    def __init__(self, seen: list[tuple[int, int]], before: Any) -> None:
        super().__init__(seen)
        self.before = before

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        doubled = double(x.sin())
        hidden = super().forward(doubled.cos())
        self.before()
        with torch.no_grad():
            doubled.mul_(0)
        return hidden


def test_an_edit_of_what_a_plan_has_moved_runs_the_operator_again(device, new_pool):
    """As autograd would use what is there now, and so does the recomputation."""

    def edited(before: Any) -> Stack:
        model = new_stack(device, depth=0)
        model.layers.extend(Edited([], before) for _ in range(DEPTH))
        return model

    x = new_input(device)

    def sends_end() -> None:
        """The copy would race with the edit, though nobody will read its bytes."""
        let_sends_end(manager, device)

    # An edit in place of what backward needs is an error without regions.
    unedited = new_stack(device, depth=0)
    unedited.layers.extend(Unedited([]) for _ in range(DEPTH))
    plain = train_step(unedited, lambda: unedited(x))
    model = edited(sends_end)
    policy_fn = policy_of(CheckpointPolicy.PREFER_SAVE, [DOUBLE])
    regions = memswap.checkpoint_module(model.layers, policy_fn=policy_fn)
    manager = memswap.manage(model.layers, SWAP, pool=new_pool(), budget="70%", rates=FAST)
    runs.clear()
    for _ in range(7):
        assert_same_gradients(train_step(model, lambda: model(x)), plain)
    forward, again = DEPTH * (SAVED + 1), DEPTH
    assert len(runs) == 7 * (forward + again), "other operators than the edited ones ran again"
    assert manager.stats().moved_storages > DEPTH, "nothing that was edited had left"
    manager.remove()
    regions.remove()


class Unedited(Chained):
    """The same without the edit."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(double(x.sin()).cos())
