"""Ranks that plan for their whole devices together: one plan, and each rank's own budget is met."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from resident_training import map_storages
from torch import nn

import memswap
from memswap import Action, Rates
from memswap._native import native
from memswap.planning import kinds
from memswap.planning.device import DevicePlan
from ranks import Rank, distributed

MIB = 1 << 20
RATES = Rates("any", 1e12, 1e12, 1e12, 1e12, 1e12, 1e12, 0.0, 0.0, inline_codec=True)

#: Steps in which ranks have a plan, however slow the machine is; it takes about ten.
MOST_STEPS = 100


class Layer(nn.Module):
    """Saves two storages of 20 MiB, which malloc takes from the system and gives back at once."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1024))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.scale).tanh()


def step_once() -> None:
    """So that what a first step imports, tens of MiB, is resident before training begins."""
    layer = Layer()
    layer(torch.ones(1, 1024)).mean().backward()
    torch.optim.AdamW(layer.parameters()).step()


class Training:
    """Three layers and their optimizer; under a device budget if `room` is given.

    Args:
        rank: inputs differ by rank.
        room: bytes beyond what is resident when training begins.
    """

    def __init__(self, rank: Rank, room: int | None) -> None:
        map_storages()  # in this rank's process, from now on
        step_once()
        self.layers = nn.Sequential(*(Layer() for _ in range(3)))
        self.optimizer = torch.optim.AdamW(self.layers.parameters(), lr=0.1)
        self.x = torch.linspace(-2, 2 + rank.rank, 5120 * 1024).reshape(5120, 1024)
        self.budget = 0
        self.manager: memswap.types.Manager | None = None
        if room is not None:
            self.budget = native.MemoryGauge(torch.device("cpu")).now + room
            self.manager = memswap.manage(
                self.layers,
                memswap.Policy(action=Action.SWAP, min_bytes=1),
                optimizer=self.optimizer,
                budget=f"device:{self.budget}B",
                pool=memswap.DiskPool(tempfile.gettempdir(), budget="512MiB"),
                rates=RATES,
                group=dist.group.WORLD,
            )

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.layers(self.x).mean().backward()
        self.optimizer.step()

    @property
    def plan(self) -> DevicePlan | None:
        assert self.manager is not None
        plan = self.manager.wait_for_plan()
        assert plan is None or isinstance(plan, DevicePlan)
        return plan

    def until(self, rank: Rank, wanted: Callable[[DevicePlan], bool]) -> DevicePlan:
        """The first plan that is wanted, on all ranks with the same step."""
        for number in range(MOST_STEPS):
            self.step()
            plan = self.plan
            has = plan is not None and wanted(plan)
            rank.same_everywhere(has, f"a plan after step {number}")
            if has:
                assert plan is not None
                return plan
        raise AssertionError(f"no such plan in {MOST_STEPS} steps")


def decisions(plan: DevicePlan) -> tuple[Any, ...]:
    """What ranks do alike."""
    return [one.action.value for one in plan.storages], plan.state_stays_bytes, dict(plan.releases)


@distributed(2)
def test_each_rank_keeps_its_own_device_budget_by_one_plan(rank: Rank) -> None:
    """Rank 1 has more memory and needs more of it for other things: both have the same plan."""
    others = [torch.ones(10 * MIB // 4) for _ in range(rank.rank)]
    training = Training(rank, (100 + 20 * rank.rank) * MIB)
    more = [torch.ones(20 * MIB // 4) for _ in range(rank.rank)]
    plan = training.until(rank, lambda plan: plan.moved_bytes > 0)
    rank.same_everywhere(decisions(plan), "the plan")
    for _ in range(3):
        training.step()
    plan = training.plan
    assert plan is not None and plan.measured_device_bytes is not None
    assert plan.measured_device_bytes <= training.budget, "a rank's own budget is not met"
    steps = training.optimizer.state[next(iter(training.layers.parameters()))]["step"]
    with memswap.optimizers.managed_optimizer(training.optimizer).present():  # type: ignore
        found = [one.detach().clone() for one in training.layers.parameters()]
    assert training.manager is not None
    training.manager.remove()
    plain = Training(rank, None)
    for _ in range(int(steps)):
        plain.step()
    for ours, expected in zip(found, plain.layers.parameters(), strict=True):
        assert torch.equal(ours.view(torch.int32), expected.detach().view(torch.int32))
    del others, more


@distributed(2)
def test_what_one_rank_alone_has_more_of_all_learn_again(rank: Rank) -> None:
    """Nobody follows another plan than the others while they find out."""
    kinds.RETIME_DEVICES_AFTER = 3  # of this process
    training = Training(rank, 150 * MIB)
    first = training.until(rank, lambda plan: plan.moved_bytes == 0)
    more = [torch.ones(55 * MIB // 4) for _ in range(rank.rank)]
    second = training.until(rank, lambda plan: plan.moved_bytes > 0)
    rank.same_everywhere(decisions(second), "the plan")
    assert decisions(first) != decisions(second)
    for _ in range(3):
        training.step()
    plan = training.plan
    assert plan is not None and plan.measured_device_bytes is not None
    assert plan.measured_device_bytes <= training.budget
    assert training.manager is not None
    training.manager.remove()
    del more
