"""A steady step on a real GPU: no wait on the host, nothing from the driver, a lower peak.

CUDA's own tools say so: the sync debug mode and memory statistics. Needs --device cuda.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu_training import Region, new_input, new_model, new_pool
from helpers import EVERYTHING, assert_nothing_left

import memswap

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]


class Steady:
    """A managed model after some steps."""

    def __init__(self, device: torch.device, how: str, policy: memswap.Policy = EVERYTHING) -> None:
        self.pool = new_pool(device)
        self.model, self.x = new_model(device), new_input(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4, foreach=True)
        self.region: Region = contextlib.nullcontext
        self.swap: Any = None
        if how == "saved_tensors":
            self.swap = memswap.saved_tensors(policy, pool=self.pool)
            self.region = lambda: self.swap
        elif how == "manage":
            self.swap = memswap.manage(self.model.layers, policy, pool=self.pool)
        for _ in range(5):
            self.step()
        torch.cuda.synchronize(device)

    def step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        with self.region():
            loss = self.model(self.x)
        loss.backward()
        self.optimizer.step()


@pytest.mark.parametrize("how", ["saved_tensors", "manage"])
@pytest.mark.parametrize("action", ["swap", "encode", "encode_swap"])
def test_a_steady_step_never_waits_on_the_host(device: torch.device, how: str, action: str) -> None:
    steady = Steady(device, how, memswap.Policy(action=memswap.Action(action), min_bytes=1))
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(10):
            steady.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert steady.swap.stats().moved_storages > 0


@pytest.mark.parametrize("how", ["saved_tensors", "manage"])
def test_a_steady_step_takes_nothing_from_the_driver(device: torch.device, how: str) -> None:
    steady = Steady(device, how)

    def taken() -> tuple[int, int]:
        torch.cuda.synchronize(device)
        segments = torch.cuda.memory_stats(device)["num_device_alloc"]
        return segments, steady.pool.statistics().slabs_acquired

    # How far the host is ahead varies, and with it what is alive at once and where free pieces lie:
    # nobody can say in which step the last segment is taken.
    counts = [taken()]
    for _ in range(5):
        for _ in range(50):
            steady.step()
        counts.append(taken())
        if counts[-1] == counts[-2]:
            break
    assert counts[-1] == counts[-2], f"segments and slabs after each 50 steps: {counts}"
    assert_nothing_left(steady.swap.stats())


def peak_of(steady: Steady, before_step: Callable[[], object] = lambda: None) -> tuple[int, Any]:
    """What one more step takes of the device at its peak, and memswap's account of it."""
    device = steady.x.device
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    if steady.swap is not None:
        steady.swap.reset_stats()
    before_step()
    steady.step()
    torch.cuda.synchronize(device)
    stats = steady.swap.stats() if steady.swap is not None else None
    return torch.cuda.max_memory_allocated(device) - before, stats


def test_the_peak_of_device_memory_is_lower(device: torch.device) -> None:
    plain, _ = peak_of(Steady(device, "plain"))
    managed, stats = peak_of(Steady(device, "manage"))
    assert stats.freed_bytes > 0
    # Gradients are as large as here as the activations of a layer, and what is in flight counts.
    assert managed < plain - stats.freed_bytes // 4, (
        f"the peak of a step fell from {plain} to {managed} bytes; {stats.freed_bytes} were freed"
    )


def test_frames_lower_the_peak_although_the_host_is_a_step_ahead(device: torch.device) -> None:
    """The device sleeps until the host has submitted all of the step."""

    def sleep() -> None:
        torch.cuda._sleep(1_000_000_000)  # about half a second

    policy = memswap.Policy(action=memswap.Action.ENCODE, min_bytes=1)
    plain, _ = peak_of(Steady(device, "plain", policy), sleep)
    managed, stats = peak_of(Steady(device, "saved_tensors", policy), sleep)
    assert "codec room" not in stats.kept
    saved = stats.encoded_bytes - stats.frame_bytes
    assert managed <= plain - 0.8 * saved, (
        f"frames saved {saved} bytes, and the peak fell from {plain} to {managed}"
    )
