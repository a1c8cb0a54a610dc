"""Ranks that plan together make one plan, from the slowest one's times."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import memswap
from memswap import Action, Rates
from memswap.planning import kinds
from memswap.planning.agreement import MARGIN
from ranks import Rank, distributed

#: Steps in which a plan is made, however slow the machine is; it takes about ten.
MOST_STEPS = 1000


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).tanh()


class Gate(torch.autograd.Function):
    """A sigmoid that saves what it returns, which one operator has made, or has written."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, written: bool) -> torch.Tensor:
        y = torch.sigmoid(x, out=torch.empty_like(x)) if written else torch.sigmoid(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (y,) = ctx.saved_tensors
        return gradient * y * (1 - y), None


class GatedLayer(Layer):
    """Its gate is a recipe, but where it was written into memory that was there."""

    written = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.linear(x)
        return gate.cos() * Gate.apply(gate, self.written)


def managed(layers: nn.ModuleList, budget: int | str, rates: Rates) -> memswap.types.Manager:
    """Everything may be swapped, to a pool that holds it, by a plan of all ranks."""
    return memswap.manage(
        layers,
        memswap.Policy(action=Action.SWAP, min_bytes=1),
        pool=memswap.DiskPool(budget="16MiB"),
        budget=budget,
        rates=rates,
        group="world",
    )


def step(rank: Rank, layers: Iterable[nn.Module], held: bool = False) -> torch.Tensor:
    """A forward of inputs that differ by rank, without its backward.

    Args:
        held: have it hold what each layer returns until the next layer has returned.
    """
    x = before = torch.ones(32, 64) * (1 + rank.rank)
    for layer in layers:
        x = layer(x)
        before = x if held else before
    return x.sum()


def trained(
    rank: Rank,
    manager: memswap.types.Manager,
    layers: Sequence[nn.Module],
    wanted: Callable[[memswap.types.Plan], bool],
    held: bool = False,
) -> memswap.types.Plan:
    """The first plan that is wanted. How many steps lead to it is nobody's promise."""
    for number in range(MOST_STEPS):
        step(rank, layers, held).backward()
        plan = manager.wait_for_plan()
        rank.same_everywhere(plan is not None and wanted(plan), f"a plan after step {number}")
        if plan is not None and wanted(plan):
            return plan
    raise AssertionError(f"no such plan in {MOST_STEPS} steps, now {manager.plan}")


@distributed(2)
def test_ranks_that_measured_different_times_have_the_same_plan(rank: Rank) -> None:
    torch.manual_seed(0)
    layers = nn.ModuleList([Layer() for _ in range(6)])
    own = 1e9 / (1 + 9 * rank.rank)  # a link ten times slower on rank 1
    rates = Rates(f"rank {rank.rank}", own, own, own, own)
    with managed(layers, 5 * 32 * 64 * 4, rates) as manager:
        plan = trained(rank, manager, layers, lambda plan: plan.moved_bytes > 0)
        same_plan(rank, plan)
        assert manager.learnt is not None and manager.learnt[1].d2h_bytes_per_s in (own, 1e8)
    same_layers_are_recomputed(rank, layers)


@distributed(2)
def test_ranks_run_again_what_all_of_them_have_proven(rank: Rank) -> None:
    """On rank 1 the first layer's gate is no recipe, so that nobody runs it again."""
    torch.manual_seed(0)
    layers = nn.ModuleList([GatedLayer() for _ in range(4)])
    layers[0].written = rank.rank == 1
    own = 1e9 / (1 + 9 * rank.rank)
    rates = Rates(f"rank {rank.rank}", own, own, own, own)
    step(rank, layers).backward()
    expected = [one.grad.clone() for one in layers.parameters() if one.grad is not None]
    policy = memswap.Policy(action=Action.RECOMPUTE, min_bytes=1)
    with memswap.manage(layers, policy, budget="75%", rates=rates, group="world") as manager:
        plan = trained(rank, manager, layers, lambda plan: bool(again(plan)))
        same_plan(rank, plan)
        rank.same_everywhere(again(plan), "what is run again")
        assert "0" not in {unit for unit, _ in again(plan)}, again(plan)
        for _ in range(3):
            layers.zero_grad()
            runs = manager.stats().recipe_runs
            step(rank, layers).backward()
            assert manager.stats().recipe_runs > runs
            found = [one.grad for one in layers.parameters()]
            assert all(map(torch.equal, found, expected))


def again(plan: memswap.types.Plan) -> list[tuple[str, str]]:
    """Units and recipes of what a plan runs again."""
    return [(one.unit, one.recipe) for one in plan.storages if one.action is Action.RECOMPUTE]


def same_plan(rank: Rank, plan: memswap.types.Plan) -> None:
    """All ranks have it."""
    rank.same_everywhere(str(plan).partition("measured")[0], "the plan")
    rank.same_everywhere(dict(plan.releases), "when it releases")


def same_layers_are_recomputed(rank: Rank, layers: nn.ModuleList) -> None:
    """Where nothing else fits: every rank records the same trial and makes the same plan of it."""
    rates = Rates("any", 1e9, 1e9, 1e9, 1e9)
    keep = memswap.Policy(action=Action.KEEP, min_bytes=1)
    pairs = [nn.Sequential(*layers[i : i + 2]) for i in range(0, len(layers), 2)]
    regions = memswap.checkpoint_module(pairs)
    with memswap.manage(
        pairs, keep, budget=6 * 32 * 64 * 4, rates=rates, group=dist.group.WORLD
    ) as manager:
        plan = trained(rank, manager, pairs, lambda plan: bool(plan.recompute))
        rank.same_everywhere(plan.recompute, "which layers are recomputed")
        rank.same_everywhere(dict(plan.fetches), "when it fetches")
    regions.remove()


@distributed(2)
def test_a_rank_that_holds_storages_for_longer_has_no_other_step(rank: Rank) -> None:
    """When a worker thread lets go of what has left is noise; ranks had no plan for it."""
    torch.manual_seed(0)
    layers = nn.ModuleList([Layer() for _ in range(6)])
    with managed(layers, "80%", Rates("any", 1e9, 1e9, 1e9, 1e9)) as manager:
        for _ in range(3 + MARGIN):  # the third is timed; a few more may begin meanwhile
            assert manager.plan is None
            step(rank, layers, held=rank.rank == 1).backward()
            manager.wait_for_plan()
        assert manager.plan is not None, "the ranks agreed to have no plan"
        same_plan(rank, manager.plan)


@distributed(2)
def test_ranks_whose_steps_differ_agree_to_have_no_plan(rank: Rank) -> None:
    torch.manual_seed(0)
    layers = nn.ModuleList([Layer() for _ in range(3 + rank.rank)])
    with managed(layers, "1GiB", Rates("any", 1e9, 1e9, 1e9, 1e9)) as manager:
        for _ in range(5 + MARGIN):
            x = torch.ones(32, 64)
            for layer in layers:
                x = layer(x)
            x.sum().backward()
            manager.wait_for_plan()
        assert manager.plan is None


@distributed(2)
def test_a_rank_that_saves_other_storages_does_not_miss_when_ranks_compare(rank: Rank) -> None:
    """Whoever stayed away would be waited for, or meet another collective instead."""
    kinds.RETIME_AFTER = 3  # of this process
    torch.manual_seed(0)
    layers = nn.ModuleList([Layer() for _ in range(4)])
    with managed(layers, "80%", Rates("any", 1e9, 1e9, 1e9, 1e9)) as manager:
        for number in range(10 + 3 * MARGIN):
            x = torch.ones(32, 64)
            for layer in layers[: 4 - (rank.rank == 1 and number - MARGIN in (5, 6))]:
                x = layer(x)
            x.sum().backward()
            manager.wait_for_plan()
            rank.same_everywhere(number, "the step")
        assert manager.plan is not None
        rank.same_everywhere(dict(manager.plan.releases), "when it releases")


@distributed(3)
def test_ranks_follow_a_plan_from_the_same_forward_on_whatever_each_of_them_keeps(
    rank: Rank,
) -> None:
    """One keeps its graphs for longer and one is slow; collectives of training's stand between."""
    kinds.RETIME_AFTER = 5  # of this process
    torch.manual_seed(0)
    layers = nn.ModuleList([Layer() for _ in range(6)])
    own = 1e9 / (1 + 9 * rank.rank)
    with managed(layers, "80%", Rates("any", own, own, own, own)) as manager:
        kept: list[torch.Tensor] = []
        since = 0
        for number in range(MOST_STEPS):
            loss = step(rank, layers)
            plan = manager.plan
            rank.same_everywhere(plan and (plan.in_flight, plan.compute_s), f"plan {number}")
            keeps = rank.rank == 1 and number in (2, 3, 4)  # when the first plan is made
            loss.backward(retain_graph=keeps)
            kept = [*kept, loss] if keeps else kept[1:]
            if rank.rank == 2:
                time.sleep(0.002)
            since += plan is not None
            if since == 30:  # it was timed again meanwhile
                break
        assert since == 30, "no plan was made"


@distributed(2)
def test_a_rank_with_more_forwards_in_flight_has_all_ranks_plan_for_them(rank: Rank) -> None:
    """What it times says nothing of the plan's times, and must not have it plan alone."""
    kinds.RETIME_AFTER = 3  # of this process
    torch.manual_seed(0)
    layers = nn.ModuleList([Layer() for _ in range(6)])
    with managed(layers, "80%", Rates("any", 1e9, 1e9, 1e9, 1e9)) as manager:
        kept: list[torch.Tensor] = []
        seen = [0]  # the forwards that plans are for
        for number in range(MOST_STEPS):
            loss = step(rank, layers)
            flights = 0 if manager.plan is None else manager.plan.in_flight
            rank.same_everywhere(flights, f"the forwards that the plan of step {number} is for")
            seen += [flights] if flights != seen[-1] else []
            keeps = rank.rank == 1 and flights > 0
            loss.backward(retain_graph=keeps)
            kept = [loss] if keeps else []
            time.sleep(0.005)
            if flights == 2:
                break
        assert seen == [0, 1, 2], seen
        kept.clear()
