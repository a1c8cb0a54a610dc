"""Checkpoint regions under a budget, in virtual time: cheaper than either way alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from planned_stacks import COMPUTE, LAZY, SWAP, Stack, link
from race_workloads import DEVICE, new_pool
from torch import nn

import memswap
from simdev import laboratory, virtual_time

pytestmark = [pytest.mark.own_laboratory, pytest.mark.one_schedule]

SLOW = 0.04
DEPTH, SIDE = 6, 64


class Deep(nn.Module):
    """Saves its input and what each of a few products gives."""

    def __init__(self, products: int, generator: torch.Generator) -> None:
        super().__init__()
        self.products = products
        self.weight = nn.Parameter(torch.randn(SIDE, SIDE, generator=generator) / SIDE**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.products):
            x = (x @ self.weight).tanh()
        return x


class DeepStack(Stack):
    """Layers of several products each."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        layers = [Deep(3 + number % 2, generator) for number in range(DEPTH)]
        self.layers = nn.ModuleList(layers).to(DEVICE)
        self.x = torch.randn(SIDE, SIDE, generator=generator).to(DEVICE)


class Timed:
    """A steady step of a checkpointed stack: its time, its gradients, its plan."""

    def __init__(self, budget: int | str | None, regions: bool, managed: bool = True) -> None:
        with laboratory(LAZY):
            self.run(budget, regions, managed)

    def run(self, budget: int | str | None, regions: bool, managed: bool) -> None:
        stack = DeepStack()
        kept: list[Any] = []
        if regions:
            kept.append(memswap.checkpoint_module(stack.layers))
        with virtual_time(**COMPUTE, h2d_gb_per_s=SLOW, d2h_gb_per_s=SLOW) as clock:
            if managed:
                kept.append(
                    memswap.manage(
                        stack.layers, SWAP, pool=new_pool(), budget=budget, rates=link(SLOW)
                    )
                )
            for _ in range(7):
                stack.step()
            manager = kept[-1] if managed else None
            if manager is not None:
                manager.reset_stats()
            began = clock.elapsed_us()
            stack.step()
            self.us = clock.elapsed_us() - began
        self.found = stack.gradients()
        if manager is not None:
            self.plan, self.stats = manager.plan, manager.stats()
        for one in reversed(kept):
            one.remove()


@pytest.fixture(scope="module")
def plain() -> Timed:
    return Timed(None, False, managed=False)


@pytest.fixture(scope="module")
def everything() -> Timed:
    """Everything is recomputed."""
    return Timed(None, True, managed=False)


@pytest.fixture(scope="module")
def kept_bytes() -> int:
    return Timed("1GiB", True).plan.kept_peak_bytes


@pytest.mark.parametrize("share", [0.75, 0.5])
def test_recomputing_some_beats_swapping_and_recomputing_all(plain, everything, kept_bytes, share):
    budget = int(share * kept_bytes)
    swapped, found = Timed(budget, False), Timed(budget, True)
    assert found.plan.recompute
    assert found.us < 0.9 * swapped.us, f"{found.us:.0f} us, and {swapped.us:.0f} by swapping alone"
    assert found.us <= 1.01 * everything.us, "slower than recomputing everything"
    assert all(map(torch.equal, found.found, plain.found)), "a gradient differs"


@pytest.mark.parametrize("share", [0.75, 0.5])
def test_peak_and_time_are_as_predicted(plain, kept_bytes, share):
    budget = int(share * kept_bytes)
    found = Timed(budget, True)
    plan = found.plan
    largest = max(storage.nbytes for storage in plan.storages)
    assert found.stats.peak_resident_bytes <= plan.peak_bytes <= budget
    assert plan.peak_bytes - found.stats.peak_resident_bytes <= 2 * largest
    exposed_us, planned_us = found.us - plain.us, plan.exposed_s * 1e6
    assert abs(exposed_us - planned_us) <= 0.06 * plain.us + 0.15 * planned_us, (
        f"{planned_us:.0f} us were predicted, {exposed_us:.0f} found in {plain.us:.0f}"
    )
