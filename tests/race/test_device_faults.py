"""A step under one number for the device, with every one of its allocations failing in turn.

Memory that cannot be had either is not missed (what comes back ahead of its use, an optimizer's
next chunk), or the step raises torch.OutOfMemoryError, as it would without memswap. Then nothing is
lost: the step can be done again and gives the same bits.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from budget_layers import rates_for
from helpers import assert_same_gradients
from race_workloads import DEVICE, EAGER, MATRIX, new_pool, on_host
from torch import nn

import memswap
from simdev import _C, counters, faults, laboratory

pytestmark = [pytest.mark.own_laboratory, pytest.mark.one_schedule]

WIDTH = 32
LAZY = MATRIX[1]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).tanh()


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Trained:
    """Five steps to a plan under which some of everything is away."""

    def __init__(self, managed: bool) -> None:
        torch.manual_seed(0)
        self.model = Stack().to(DEVICE)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), foreach=True)
        self.x = torch.linspace(-1, 1, 64 * WIDTH).reshape(64, WIDTH).to(DEVICE)
        self.manager: Any = None
        self.pool = new_pool()
        if managed:
            self.manager = memswap.manage(
                self.model,
                memswap.Policy(action=memswap.Action.SWAP, min_bytes=1),
                optimizer=self.optimizer,
                budget=f"device:{BUDGET}B",
                pool=self.pool,
                rates=rates_for(torch.device(DEVICE)),
            )
        for _ in range(5):
            self.gradients()
            self.optimizer.step()

    def gradients(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.x).backward()

    def parameters(self) -> list[torch.Tensor]:
        torch.accelerator.synchronize()
        return on_host([one.detach() for one in self.model.parameters()])


#: Of which a part of the activations and of the state has to be away.
BUDGET = 100_000


def step_under_fault(trained: Trained, phase: str, after: int) -> tuple[bool, bool]:
    """One step whose allocation number `after` in a phase fails: whether one did, and raised."""
    if phase == "step":
        trained.gradients()
    before = _C.memory_stats(0)["out_of_memory"]
    raised = False
    with faults.fail_device(1, after):
        try:
            trained.gradients() if phase == "gradients" else trained.optimizer.step()
        except torch.OutOfMemoryError:
            raised = True
    struck = _C.memory_stats(0)["out_of_memory"] > before
    if phase == "gradients":
        if raised:
            trained.gradients()
        trained.optimizer.step()
    return struck, raised


def taken(trained: Trained) -> tuple[int, ...]:
    torch.accelerator.synchronize()
    pool = trained.pool.statistics()
    device = _C.memory_stats(0)
    return counters.device_allocations(), device["allocated"], pool.slabs_acquired, pool.blocks


@pytest.mark.slow
def test_a_thousand_steps_take_what_twenty_took() -> None:
    with laboratory(LAZY, allow_pinned_growth=True):
        trained = Trained(managed=True)
        found = []
        for step in range(1000):
            trained.gradients()
            trained.optimizer.step()
            if step in (20, 999):
                found.append(taken(trained))
        assert trained.manager.plan.measured_device_bytes <= BUDGET
        del trained
        gc.collect()
    assert found[0] == found[1], f"device allocations, bytes, slabs, blocks: {found}"


@pytest.mark.parametrize("schedule", [EAGER, LAZY], ids=str)
def test_forward_and_backward_survive_each_failing_allocation_or_can_be_done_again(
    schedule: Any,
) -> None:
    with laboratory(schedule, allow_pinned_growth=True):
        plain = Trained(managed=False)
        plain.gradients()
        plain.optimizer.step()
        expected = plain.parameters()
        del plain
        raised = survived = 0
        for after in range(200):
            trained = Trained(managed=True)
            assert trained.manager.plan is not None
            assert trained.manager.plan.moved_bytes > 0, "nothing is away: the test shows little"
            struck, failed = step_under_fault(trained, "gradients", after)
            assert_same_gradients(trained.parameters(), expected)
            raised, survived = raised + failed, survived + (struck and not failed)
            del trained
            gc.collect()
            if not struck:
                break
        else:
            pytest.fail("a step makes more than 200 allocations: this test would be incomplete")
    assert raised > 5


@pytest.mark.parametrize("schedule", [EAGER, LAZY], ids=str)
def test_an_optimizers_step_survives_each_failing_allocation_or_raises_and_keeps_its_state(
    schedule: Any,
) -> None:
    """A step that raised half-way has stepped some parameters, as without memswap.

    So what is compared is the state: all of it can be had afterwards, and training goes on.
    """
    with laboratory(schedule, allow_pinned_growth=True):
        raised = 0
        for after in range(200):
            trained = Trained(managed=True)
            struck, failed = step_under_fault(trained, "step", after)
            raised += failed
            saved = trained.optimizer.state_dict()["state"]
            assert len(saved) == len(list(trained.model.parameters())), "a parameter lost its state"
            for state in saved.values():
                for name in ("exp_avg", "exp_avg_sq"):
                    assert torch.isfinite(state[name]).all(), f"{name} was read after it was freed"
            for _ in range(2):
                trained.gradients()
                trained.optimizer.step()
            assert all(torch.isfinite(one).all() for one in trained.parameters())
            del trained, saved, state
            gc.collect()
            if not struck:
                break
        else:
            pytest.fail("a step makes more than 200 allocations: this test would be incomplete")
    assert raised > 0, "no allocation of a step had to be had: the test shows nothing"
