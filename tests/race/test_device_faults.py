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
from staging import WHERE, finish_writes, little_staging, pool_at
from torch import nn

import memswap
from simdev import _C, counters, faults, laboratory

pytestmark = [pytest.mark.own_laboratory, pytest.mark.one_schedule]

WIDTH = 32
LAZY = MATRIX[1]


@pytest.fixture(autouse=True)
def _little_staging(monkeypatch: pytest.MonkeyPatch) -> None:
    little_staging(monkeypatch)


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
    """Five steps, after which something of everything is away.

    Under one number, by a plan. Where a file is behind, all of it, without one: how long a disk
    takes differs from run to run, and so does what a plan would choose.
    """

    def __init__(self, pool: Any = None, planned: bool = True) -> None:
        torch.manual_seed(0)
        self.model = Stack().to(DEVICE)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), foreach=True)
        self.x = torch.linspace(-1, 1, 64 * WIDTH).reshape(64, WIDTH).to(DEVICE)
        self.manager: Any = None
        self.pool = pool
        if pool is not None:
            self.manager = memswap.manage(
                self.model,
                memswap.Policy(action=memswap.Action.SWAP, min_bytes=1),
                optimizer=self.optimizer,
                budget=f"device:{BUDGET}B" if planned else None,
                pool=pool,
                rates=rates_for(torch.device(DEVICE)) if planned else None,
            )
        for _ in range(5):
            self.gradients()
            self.optimizer.step()
            if self.manager is not None and planned:
                self.manager.wait_for_plan()

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
    finish_writes(trained.pool)
    pool = trained.pool.statistics()
    device = _C.memory_stats(0)
    return counters.device_allocations(), device["allocated"], pool.slabs_acquired, pool.blocks


@pytest.mark.parametrize("steps", [80, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("where", WHERE)
def test_a_thousand_steps_take_what_twenty_took(where: str, steps: int, tmp_path: Any) -> None:
    with laboratory(LAZY, allow_pinned_growth=True):
        trained = Trained(pool_at(where, tmp_path), planned=where == "host")
        found = []
        for step in range(steps):
            trained.gradients()
            trained.optimizer.step()
            if step in (20, steps - 1):
                found.append(taken(trained))
        if where == "host":
            assert trained.manager.plan.measured_device_bytes <= BUDGET
        assert (trained.pool.written_bytes() > 0) == (where != "host")
        del trained
        gc.collect()
    told = f"device allocations, bytes, slabs, blocks: {found}"
    assert found[0][1:] == found[1][1:], told
    # Which memory is free when a read has ended depends on the disk; it does not add up.
    slack = 0 if where == "host" else 5
    assert found[1][0] - found[0][0] <= slack, told


#: Where bytes go, and the schedule.
CASES = [
    ("host", EAGER),
    ("host", LAZY),
    ("disk", LAZY),
    pytest.param("disk", EAGER, marks=pytest.mark.slow),
    pytest.param("overflow", EAGER, marks=pytest.mark.slow),
    pytest.param("overflow", LAZY, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("where", "schedule"), CASES, ids=str)
def test_forward_and_backward_survive_each_failing_allocation_or_can_be_done_again(
    where: str, schedule: Any, tmp_path: Any
) -> None:
    with laboratory(schedule, allow_pinned_growth=True):
        plain = Trained()
        plain.gradients()
        plain.optimizer.step()
        expected = plain.parameters()
        del plain
        raised = survived = 0
        for after in range(200):
            trained = Trained(pool_at(where, tmp_path), planned=where == "host")
            assert trained.manager.stats().moved_storages > 0
            if where == "host":
                plan = trained.manager.plan
                assert plan is not None and plan.moved_bytes > 0, "nothing is away under the plan"
            struck, failed = step_under_fault(trained, "gradients", after)
            assert_same_gradients(trained.parameters(), expected)
            raised, survived = raised + failed, survived + (struck and not failed)
            finish_writes(trained.pool)
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
            trained = Trained(new_pool())
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
