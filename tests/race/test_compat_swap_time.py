"""Virtual time: other systems' schedules, by their own names, hide what the link can carry."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from race_workloads import DEVICE
from timed_layers import COMPUTE, LINK, TwoSaved
from torch import nn

import memswap
from memswap.compat.hyper_parallel import SwapManager, swap_wrapper
from memswap.compat.hyper_parallel.groups import SwapBatch
from memswap.compat.mindspeed import AsyncSwapHandler, TensorSwapContext
from simdev import virtual_time

SIDE, LAYERS = 96, 12

pytestmark = pytest.mark.one_schedule


def alone(groups: memswap.Groups) -> None:
    """Each storage travels alone: this machine's memory is as slow as its link, so gathering small
    ones would cost here what it costs nowhere."""
    groups.engine.batch_limits.small_bytes = 0


def contexts(layers: nn.ModuleList, prefetch: bool) -> Any:
    for layer in layers:
        context = TensorSwapContext("layers.*", prefetch=prefetch)

        def forward(x: torch.Tensor, plain=layer.forward, context=context) -> torch.Tensor:
            with context:
                return plain(x)

        layer.forward = forward
    alone(AsyncSwapHandler().engine)
    return AsyncSwapHandler().stats


def links(layers: nn.ModuleList, prefetch: bool = True) -> Any:
    for layer in layers:
        swap_wrapper(layer)
    for one, other in pairwise(layers):
        SwapManager().set_forward_prefetch_layer(one, other)
    alone(SwapManager().shared)
    return SwapManager().stats


def step_us(use: Any, prefetch: bool = True) -> tuple[float, Any]:
    """Virtual microseconds of a steady step, and the statistics so far; None: without swapping."""
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(SIDE, SIDE, generator=generator) / SIDE**0.5).to(DEVICE)
    weight.requires_grad_()
    start = torch.randn(SIDE, SIDE, generator=generator).to(DEVICE)
    layers = nn.ModuleList([TwoSaved(weight) for _ in range(LAYERS)])
    stats = None if use is None else use(layers, prefetch)

    def step() -> None:
        x = start
        for layer in layers:
            x = layer(x)
        loss = x.sum()
        del x
        loss.backward()
        weight.grad = None

    for _ in range(2):
        step()
    torch.accelerator.synchronize()
    with virtual_time(**COMPUTE, **LINK) as clock:
        step()
        elapsed = clock.elapsed_us()
    return elapsed, None if stats is None else stats()


@pytest.fixture(autouse=True)
def _ended() -> Iterator[None]:
    """What is the process's, for the next test."""
    yield
    SwapManager().remove()
    gc.collect()


@pytest.mark.parametrize("use", [contexts, links])
def test_that_systems_schedule_hides_what_the_link_can_carry(use: Any) -> None:
    plain, _ = step_us(None)
    swapped, stats = step_us(use)
    assert stats.moved_storages >= 3 * (LAYERS - 2) and stats.stalls == 0
    assert swapped <= 1.1 * plain, f"a swapped step takes {swapped:.0f} us, a plain one {plain:.0f}"


@pytest.mark.parametrize("use", [contexts, links])
def test_what_is_not_asked_for_ahead_is_exposed(use: Any, monkeypatch: Any) -> None:
    ahead, _ = step_us(use)
    gc.collect()
    SwapManager().remove()
    monkeypatch.setattr(SwapBatch, "reached", lambda batch, wait: None)  # links broken on purpose
    behind, stats = step_us(use, prefetch=False)
    one_return_us = SIDE * SIDE * 4 / (LINK["h2d_gb_per_s"] * 1e3)
    assert stats.stalls >= 3 * (LAYERS - 2)
    assert behind - ahead > 0.5 * one_return_us * (LAYERS - 1)
