"""ENCODE without a budget, with a host that is a whole forward ahead of the device.

An H100 showed it: a host that is that far ahead has seen no header of this forward's frames, so all
of them might turn out as long as their tensors. What is set aside for that must not be memory of
the device, or nothing is saved.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from helpers import same_bits
from race_workloads import DEVICE, MATRIX
from torch import nn

import memswap
from memswap._native import native
from memswap.engine import transfers
from simdev import NAME, Schedule, counters, run_in

pytestmark = [pytest.mark.own_laboratory, pytest.mark.one_schedule]

device_module = getattr(torch, NAME)
ENCODE = memswap.Policy(action=memswap.Action.ENCODE, min_bytes=1)
LAYERS, ROWS, WIDTH = 24, 128, 64
STEADY = 5  # from this step on everything is known of the frames


class Layer(nn.Module):
    """A product and what follows it: two storages of one size are saved, and a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.product = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.gelu(self.product(x))


@dataclass
class Found:
    """What a training took in its last step, and what it came to."""

    peak_bytes: int
    gradients: list[torch.Tensor]
    host_syncs: int = 0
    saved_bytes: int = 0  # by frames
    kept: Any = None
    arena: Any = None


def train(schedule: Schedule, way: Callable[[], Any], steps: int = STEADY + 2) -> Found:
    """Steps of which the device runs none before the host has submitted all of it."""

    def body() -> Found:
        torch.manual_seed(0)
        layers = nn.Sequential(*(Layer() for _ in range(LAYERS))).to(DEVICE, torch.bfloat16)
        x = torch.randn(ROWS, WIDTH).to(DEVICE, torch.bfloat16)
        saved = way()
        found = Found(0, [])
        for number in range(steps):
            for parameter in layers.parameters():
                parameter.grad = None
            torch.accelerator.synchronize()
            if saved is not None:
                saved.reset_stats()
            counters.reset()
            device_module.reset_peak_memory_stats()
            if saved is None:
                loss = layers(x * (number + 1)).float().sum()
            else:
                with saved:
                    loss = layers(x * (number + 1)).float().sum()
            loss.backward()
            del loss
            found.host_syncs = counters.host_syncs()
            found.peak_bytes = device_module.max_memory_allocated()
        torch.accelerator.synchronize()
        found.gradients = [parameter.grad.cpu() for parameter in layers.parameters()]
        if saved is not None:
            stats = saved.stats()
            found.saved_bytes = stats.encoded_bytes - stats.frame_bytes
            found.kept = stats.kept
            (sent_by,) = saved._engine._transfers.all()
            found.arena = sent_by.codec_lane.arena_statistics()
        return found

    return run_in(schedule, body, allow_pinned_growth=True)


def encoded() -> Any:
    return memswap.saved_tensors(ENCODE)


@pytest.mark.parametrize("schedule", MATRIX, ids=str)
def test_what_frames_save_is_saved_however_far_the_host_is_ahead(schedule: Schedule) -> None:
    plain = train(schedule, lambda: None)
    found = train(schedule, encoded)
    assert all(map(same_bits, found.gradients, plain.gradients))
    assert found.saved_bytes > LAYERS * ROWS * WIDTH // 2, "frames saved too little to tell"
    assert "codec room" not in found.kept
    assert found.host_syncs == 0, "the host waited for the device in a steady step"
    gained = plain.peak_bytes - found.peak_bytes
    assert gained >= 0.8 * found.saved_bytes, (
        f"frames saved {found.saved_bytes} bytes, and the peak fell by {gained}: {found.arena}"
    )


def test_with_room_on_the_device_alone_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the test above can fail."""

    def open_codec_lane(device: torch.device, frames: Any = None) -> Any:
        return native.StreamCodecLane(device, arena_budget=1 << 30, arena_chunk=1 << 16)

    lazy = next(schedule for schedule in MATRIX if schedule.policy == "lazy")
    plain = train(lazy, lambda: None)
    monkeypatch.setattr(transfers, "open_codec_lane", open_codec_lane)
    found = train(lazy, encoded)
    assert all(map(same_bits, found.gradients, plain.gradients))
    assert plain.peak_bytes - found.peak_bytes < 0.5 * found.saved_bytes
