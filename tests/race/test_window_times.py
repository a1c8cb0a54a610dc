"""Virtual time: what waits for a window really runs beside matrix products.

The simulated machine is given an engine for matrix products beside the one that moves memory. An
encode under a product costs nothing there; beside an elementwise operator both take longer.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from helpers import nothing_measured
from race_workloads import DEVICE, open_small_arenas
from timed_layers import HOST, ROOMY, Product
from torch import nn

import memswap
from memswap import Action, Policy, Windows
from simdev import NAME, counters, virtual_time

SIDE = 128
NBYTES = SIDE * SIDE * 2
LAYERS = 10
device_module = getattr(torch, NAME)
ENCODE = Policy(action=Action.ENCODE, min_bytes=1)

#: A product takes less time than the encode of what one layer saves.
TIGHT = {**HOST, "hbm_gb_per_s": 5.0, "matrix_gb_per_s": 10.0}

pytestmark = pytest.mark.one_schedule

AHEAD = 4 * NBYTES  # what may be on its way back
ARENA_BYTES = 1 << 20


@pytest.fixture(autouse=True)
def _a_small_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be the peak of memory of models as small as these."""

    open_small_arenas(monkeypatch, ARENA_BYTES, chunks=16)


class Step:
    """One steady step: its virtual time, its peak, and what became of encodes and decodes."""

    def __init__(
        self,
        machine: dict[str, float],
        managed: bool,
        measured: bool = True,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        layers = nn.ModuleList(Product(SIDE) for _ in range(LAYERS)).to(DEVICE, torch.bfloat16)
        batch = torch.randn(SIDE, SIDE).to(DEVICE, torch.bfloat16)
        manager: Any = None
        if managed:
            manager = memswap.manage(layers, ENCODE, prefetch_bytes=AHEAD, **options)

        def step() -> None:
            layers.zero_grad(set_to_none=True)
            x = batch
            for layer in layers:
                x = layer(x)
            x.float().sum().backward()

        unmeasured = contextlib.nullcontext() if measured else nothing_measured()
        with virtual_time(**machine) as clock, unmeasured:
            for _ in range(5):  # the second and third are measured
                step()
                torch.accelerator.synchronize()
            device_module.reset_peak_memory_stats()
            if managed:
                manager.reset_stats()
            # No reset: events of earlier steps have their times, and somebody may still ask.
            begin_us = clock.elapsed_us()
            counters.reset()
            step()
            self.host_syncs = counters.host_syncs()
            self.us = clock.elapsed_us() - begin_us
            self.peak_bytes = device_module.max_memory_allocated()
        if managed:
            self.stats, self.windows = manager.stats(), manager.window_stats()
            manager.remove()


def test_with_room_under_products_a_step_is_as_long_as_without_memswap() -> None:
    plain, at_once = Step(ROOMY, False), Step(ROOMY, True)
    hidden = Step(ROOMY, True, windows=Windows())
    windows = hidden.windows
    assert windows.encoded_in_windows == hidden.stats.encoded_storages >= 2 * LAYERS - 4
    assert windows.decoded_in_windows == hidden.stats.returned_storages
    assert windows.started_at_end == windows.kept_storages == hidden.stats.stalls == 0
    assert hidden.us <= 1.001 * plain.us, f"{hidden.us:.1f} us, without memswap {plain.us:.1f}"
    assert at_once.us > 1.01 * plain.us, "there was nothing to hide, so nothing was shown"
    assert hidden.peak_bytes <= at_once.peak_bytes


def test_without_room_nothing_is_lost_and_less_is_exposed_than_at_once() -> None:
    plain, at_once = Step(TIGHT, False), Step(TIGHT, True)
    hidden = Step(TIGHT, True, windows=Windows())
    assert hidden.stats.moved_bytes == at_once.stats.moved_bytes
    assert hidden.windows.started_at_end > 0, "there was room after all"
    assert plain.us < hidden.us < at_once.us


def test_a_steady_step_never_waits_on_the_host() -> None:
    assert Step(ROOMY, True, windows=Windows()).host_syncs == 0


def test_a_duration_that_is_far_too_long_costs_no_more_than_starting_at_once() -> None:
    """Everything is started under the first product, and joined as early as can be."""
    plain, at_once = Step(TIGHT, False), Step(TIGHT, True)

    def exaggerated(op: str, shapes: Any) -> float:
        return 1.0

    hidden = Step(TIGHT, True, measured=False, windows=Windows(seconds=exaggerated))
    assert hidden.us <= plain.us + 1.1 * (at_once.us - plain.us)
