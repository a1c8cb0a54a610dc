"""What backward has in use counts as resident for as long as it is there, whoever holds it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from checkpoint_helpers import DOUBLE, LEAVE, CheckpointPolicy, double, policy_of
from helpers import Stack, assert_released, assert_same_gradients, new_input, new_stack, train_step
from torch import nn

import memswap
from memswap import Action, Rates

SWAP = memswap.Policy(action=Action.SWAP, min_bytes=1)
#: So fast that what moves is a question of bytes alone.
FAST = Rates("a machine with a fast link", 1e12, 1e12, 1e12, 1e12)
DEPTH = 3
#: Outputs that a layer's policy saves: more than one operator could ask for in a row.
SAVED = 12


class Chained(nn.Module):
    """Costly outputs, each of which the next operator saves as well; as the first one does `x`."""

    def __init__(self, seen: list[tuple[int, int]]) -> None:
        super().__init__()
        self.seen = seen
        self.engine: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = x.sin()
        for _ in range(SAVED):
            hidden = double(hidden).cos()
            hidden.register_hook(self.look)
        return hidden

    def look(self, gradient: torch.Tensor) -> None:
        """Backward is here: what counts now, and what is alive of what the iteration saved."""
        if self.engine is not None:
            with self.engine.lock:
                counted = self.engine.ledger.counters.resident_bytes
                self.seen.append((counted, self.engine.iteration.present_bytes(1)))


class Chains:
    """Layers that are regions with a policy, under a budget."""

    def __init__(self, device: torch.device, pool: Any, budget: int | str, decision: Any) -> None:
        self.seen: list[tuple[int, int]] = []
        self.model, self.x = chains(device, self.seen), new_input(device)
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


def chains(device: torch.device, seen: list[tuple[int, int]]) -> Stack:
    model = new_stack(device, depth=0)
    model.layers.extend(Chained(seen) for _ in range(DEPTH))
    return model


def plain_gradients(device: torch.device) -> list[torch.Tensor | None]:
    model = chains(device, [])
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
    most = max(alive for _, alive in one.seen)
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
