"""Virtual time: what a chain and buckets cost and hide, by the cost model of the machine."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from helpers import EVERYTHING
from race_workloads import DEVICE, new_pool
from timed_layers import COMPUTE, LINK, TwoSaved
from torch import nn

import memswap
from simdev import virtual_time

SIDE, LAYERS = 96, 12
NBYTES = SIDE * SIDE * 4

pytestmark = pytest.mark.one_schedule


def step_us(distance: int | None, ahead: bool = True) -> tuple[float, Any]:
    """Virtual microseconds of a steady step, and the statistics; None: without memswap."""
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(SIDE, SIDE, generator=generator) / SIDE**0.5).to(DEVICE)
    weight.requires_grad_()
    start = torch.randn(SIDE, SIDE, generator=generator).to(DEVICE)
    layers = nn.ModuleList([TwoSaved(weight) for _ in range(LAYERS)])
    swap: Any = contextlib.nullcontext()
    if distance is not None:
        swap = memswap.chain(layers, EVERYTHING, distance=distance, pool=new_pool())
        # Each storage travels alone: this machine's memory is as slow as its link, so gathering
        # small ones would cost here what it costs nowhere.
        swap._engine.batch_limits.small_bytes = 0

    def step() -> None:
        x = start
        for layer in layers:
            x = layer(x)
        loss = x.sum()
        del x
        loss.backward()
        weight.grad = None

    with swap:
        if distance is not None and not ahead:
            swap.schedule._distance = 0  # broken on purpose: nothing is loaded before it is needed
        for _ in range(2):
            step()
        torch.accelerator.synchronize()
        with virtual_time(**COMPUTE, **LINK) as clock:
            if distance is not None:
                swap.reset_stats()
            step()
            elapsed = clock.elapsed_us()
        return elapsed, None if distance is None else swap.stats()


def test_a_chain_hides_what_the_link_can_carry() -> None:
    plain, _ = step_us(None)
    chained, stats = step_us(1)
    assert stats.moved_storages >= LAYERS - 2 and stats.stalls == 0
    assert chained <= 1.1 * plain, f"a chained step takes {chained:.0f} us, a plain one {plain:.0f}"


def test_a_chain_that_loads_nothing_ahead_is_exposed() -> None:
    ahead, _ = step_us(1)
    behind, stats = step_us(1, ahead=False)
    one_return_us = NBYTES / (LINK["h2d_gb_per_s"] * 1e3)
    assert stats.stalls == LAYERS - 1, "one for each layer that left"
    assert behind - ahead > 0.5 * one_return_us * stats.stalls


def test_small_storages_leave_sooner_together() -> None:
    """See [Note: When storages travel together]: by launches that are saved."""
    times = {}
    for together in (True, False):
        group = memswap.Group("small", EVERYTHING, pool=new_pool())
        if not together:
            group._groups.engine.batch_limits.small_bytes = 0
        x = torch.ones(1024, device=DEVICE).requires_grad_()
        with group as batch:
            y = x
            for _ in range(64):
                y = (y * 1.5).sin()
        loss = y.sum()
        del y
        torch.accelerator.synchronize()
        with virtual_time(host_us=5.0, launch_us=5.0, hbm_gb_per_s=3000.0, **LINK) as clock:
            batch.launch_offload()
            batch.wait_offload()
            batch.launch_load()
            batch.wait_load()
            times[together] = clock.elapsed_us()
        loss.backward()
        del loss, x
    assert times[True] < 0.5 * times[False], f"virtual us: {times}"
