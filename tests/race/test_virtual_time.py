"""Virtual time: prefetch really hides transfers, and what is in flight stays within its bounds.

The cost model, not this machine, says how long a copy or an operator takes, so the figures are
exact and the same everywhere.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from helpers import EVERYTHING
from race_workloads import DEVICE, WrappedLane, lanes_opened, new_pool

import memswap
from simdev import NAME, virtual_time

SIDE = 96
NBYTES = SIDE * SIDE * 4  # of one storage; blocks of device memory have the same size
LAYERS = 16
device_module = getattr(torch, NAME)

#: Bandwidths in GB/s. An operator of a layer takes about as long as a copy of its activation on the
#: fast link, and there are several; the slow link cannot keep up.
COMPUTE = {"host_us": 0.05, "launch_us": 0.5, "hbm_gb_per_s": 3.0}
FAST = {"h2d_gb_per_s": 2.5, "d2h_gb_per_s": 2.5}
SLOW = {"h2d_gb_per_s": 0.2, "d2h_gb_per_s": 0.2}


class Chain:
    """Layers that save one storage each and share one weight, so activations make the peak."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        weight = torch.randn(SIDE, SIDE, generator=generator) / SIDE**0.5
        self.weight = weight.to(DEVICE).requires_grad_()
        self.x = torch.randn(SIDE, SIDE, generator=generator).to(DEVICE)

    def step(self, region: Any) -> None:
        self.weight.grad = None
        with region:
            x = self.x
            for _ in range(LAYERS):
                x = (x @ self.weight).tanh()
            loss = x.sum()
        del x
        loss.backward()


class Measured:
    """One steady step: its virtual time, the peak of device memory, and memswap's statistics."""

    def __init__(self, prefetch_bytes: int | str | None, link: dict[str, float]) -> None:
        chain = Chain()
        saved: Any = None
        region: Any = contextlib.nullcontext()
        if prefetch_bytes is not None:
            saved = region = memswap.saved_tensors(
                EVERYTHING, pool=new_pool(), prefetch_bytes=prefetch_bytes
            )
        for _ in range(3):
            chain.step(region)
        torch.accelerator.synchronize()
        with virtual_time(**COMPUTE, **link) as clock:
            device_module.reset_peak_memory_stats()
            if saved is not None:
                saved.reset_stats()
            chain.step(region)
            self.us = clock.elapsed_us()
            self.peak_bytes = device_module.max_memory_allocated()
        self.stats = saved.stats() if saved is not None else None


@pytest.mark.one_schedule
def test_prefetch_hides_the_transfers_of_a_link_that_can_keep_up() -> None:
    plain, ahead = Measured(None, FAST), Measured("auto", FAST)
    assert ahead.stats.moved_storages >= LAYERS // 2, "hardly anything moved"
    assert ahead.stats.returned_storages == ahead.stats.moved_storages
    assert ahead.us <= 1.05 * plain.us, (
        f"a managed step takes {ahead.us:.0f} us, a plain one {plain.us:.0f}: transfers are exposed"
    )


@pytest.mark.one_schedule
def test_without_a_window_every_return_is_exposed() -> None:
    ahead, demand = Measured("auto", FAST), Measured(0, FAST)
    one_return_us = NBYTES / (FAST["h2d_gb_per_s"] * 1e3)
    exposed_us = demand.us - ahead.us
    assert exposed_us > 0.5 * one_return_us * ahead.stats.returned_storages, (
        f"a step with a window takes {ahead.us:.0f} us, without one {demand.us:.0f}: either "
        "nothing is prefetched, or everything is"
    )
    assert demand.stats.stalls == demand.stats.returned_storages
    assert ahead.stats.stalls <= 1, f"{ahead.stats.stalls} returns were demanded too early"


@pytest.mark.one_schedule
def test_a_larger_window_never_costs_time() -> None:
    times = [Measured(n * NBYTES, FAST).us for n in (0, 1, 2, 4)]
    assert times == sorted(times, reverse=True), f"virtual us by window: {times}"


@pytest.mark.one_schedule
def test_a_slow_link_makes_a_step_as_long_as_its_transfers_and_not_longer() -> None:
    slow = Measured("auto", SLOW)
    one_way_us = NBYTES / (SLOW["d2h_gb_per_s"] * 1e3)
    transfers_us = one_way_us * (slow.stats.moved_storages + slow.stats.returned_storages)
    assert slow.us >= 0.9 * transfers_us, "the cost model charged less than the link allows"
    plain = Measured(None, SLOW)
    assert slow.us <= transfers_us + plain.us + 2 * one_way_us, (
        f"a step takes {slow.us:.0f} us; its transfers {transfers_us:.0f}, its work {plain.us:.0f}"
    )


def test_the_peak_is_below_the_plain_one_by_what_was_freed() -> None:
    plain, managed = Measured(None, FAST), Measured(0, FAST)
    freed = managed.stats.freed_bytes
    assert freed >= (LAYERS - 2) * NBYTES
    saving = plain.peak_bytes - managed.peak_bytes
    in_flight = 3 * NBYTES  # one leaves, one returns, one is used
    assert freed - in_flight <= saving <= freed, (
        f"{freed} bytes were freed, and the peak fell by {saving} from {plain.peak_bytes}"
    )


@pytest.mark.parametrize("windows", [0, 1, 2, 4])
@pytest.mark.parametrize("link", [FAST, SLOW], ids=["fast", "slow"])
def test_what_is_in_flight_stays_within_the_window(windows: int, link: dict[str, float]) -> None:
    """The peak of device memory grows with the window and with nothing else."""
    base = Measured(0, link)
    measured = Measured(windows * NBYTES, link)
    # The window stays at the end of the forward, and as much may be leaving at that moment.
    allowed = base.peak_bytes + 2 * windows * NBYTES
    assert measured.peak_bytes <= allowed, (
        f"{measured.peak_bytes} bytes at the peak with a window of {windows} storages, "
        f"{base.peak_bytes} without one"
    )
    resident = measured.stats.peak_resident_bytes
    assert resident <= (2 * windows + 4) * NBYTES, f"{resident} saved bytes were resident at once"


def test_sends_never_own_more_than_the_bound() -> None:
    most: list[tuple[int, int]] = []

    class Watched(WrappedLane):
        bound = 1 << 60

        def set_max_leaving_bytes(self, nbytes: int) -> None:
            self.bound = nbytes
            self.lane.set_max_leaving_bytes(nbytes)

        def send(self, storage: Any, block: Any) -> Any:
            ticket = self.lane.send(storage, block)
            most.append((self.lane.leaving_bytes(), self.bound))
            return ticket

    with lanes_opened(Watched):
        Measured(2 * NBYTES, SLOW)
    bounded = [(leaving, bound) for leaving, bound in most if bound < 1 << 60]
    assert bounded, "the bound was never set"
    assert {bound for _, bound in bounded} == {2 * NBYTES}
    assert all(leaving <= bound for leaving, bound in bounded), "more bytes leave than allowed"


@pytest.mark.one_schedule
def test_the_figures_are_the_programs_own_and_not_the_schedules() -> None:
    """Two runs of one program take the same virtual time, to the microsecond."""
    assert Measured("auto", FAST).us == Measured("auto", FAST).us
