"""After warm-up a step asks nothing of the driver and leaves nothing behind."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import EVERYTHING, assert_nothing_left, frames_expected, new_input, new_stack
from race_workloads import DEVICE, new_pool

import memswap
from memswap._native import native
from simdev import Schedule, counters, run_in

WARM_UP, STEPS, FEWER_STEPS = 5, 50, 15
Step = Callable[[], None]


class Training:
    """A model under memswap, its optimizer, and nothing that the host has to read."""

    def __init__(
        self,
        how: str,
        prefetch_bytes: Any = "auto",
        policy: memswap.Policy = EVERYTHING,
    ) -> None:
        self.pool = new_pool()
        self.model = new_stack(DEVICE, depth=2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.x = new_input(DEVICE)
        self.swap: Any = None
        if how == "saved_tensors":
            self.swap = memswap.saved_tensors(policy, pool=self.pool, prefetch_bytes=prefetch_bytes)
        elif how == "manage":
            self.swap = memswap.manage(
                self.model.layers, policy, pool=self.pool, prefetch_bytes=prefetch_bytes
            )
        self.how = how

    def step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        if self.how == "saved_tensors":
            with self.swap:
                loss = self.model(self.x)
        else:
            loss = self.model(self.x)
        loss.backward()
        self.optimizer.step()

    def steps(self, number: int) -> None:
        for _ in range(number):
            self.step()


# Made inside the test: pytest would keep what a fixture returns beyond the laboratory's end.
def warm_training(
    how: str, prefetch_bytes: Any = "auto", policy: memswap.Policy = EVERYTHING
) -> Training:
    warm = Training(how, prefetch_bytes, policy)
    warm.steps(WARM_UP)
    torch.accelerator.synchronize()
    return warm


def steps_under(schedule: Schedule) -> int:
    """Most where no copy runs before something has to wait for it: there most waits at a time."""
    return STEPS if schedule.policy == "lazy" else FEWER_STEPS


def assert_steady(training: Training, steps: int) -> None:
    """Further steps synchronise nothing, and neither a driver nor a pool gives them memory."""
    before = training.pool.native.statistics()
    counters.reset()
    training.steps(steps)
    assert counters.host_syncs() == 0, "the host waited for the device in a steady step"
    assert counters.device_allocations() == 0, "device memory came from the driver"
    assert counters.pinned_allocations() == 0, "pinned memory came from the driver"
    after = training.pool.native.statistics()
    for name in ("slabs", "slabs_acquired", "reserved_bytes", "refusals", "blocks"):
        assert after[name] == before[name], f"{name} of the pool grew in a steady state"


each_way = pytest.mark.parametrize("how", ["saved_tensors", "manage"])


@each_way
@pytest.mark.parametrize("prefetch_bytes", ["auto", 0, 4096], ids=["auto", "demand", "4KiB"])
def test_a_step_synchronises_nothing_and_allocates_nothing_from_the_driver(
    how: str, prefetch_bytes: Any, schedule: Schedule
) -> None:
    training = warm_training(how, prefetch_bytes)
    assert_steady(training, steps_under(schedule))
    assert training.swap.stats().moved_storages > 0
    torch.accelerator.synchronize()
    assert_nothing_left(training.swap.stats())


@pytest.mark.few_schedules
@each_way
@pytest.mark.parametrize("action", ["encode", "encode_swap"])
def test_a_step_that_encodes_synchronises_nothing_and_gives_everything_back(
    how: str, action: str, schedule: Schedule
) -> None:
    policy = memswap.Policy(action=memswap.Action(action), min_bytes=1)
    # These tensors do not shrink. Another layout, tried now and then, is a frame of another size:
    # no steady step.
    with frames_expected(worth=float("inf"), trial_share=0, retry_after=1_000_000):
        training = warm_training(how, policy=policy)
    training.swap.reset_stats()
    assert_steady(training, steps_under(schedule))
    torch.accelerator.synchronize()
    stats = training.swap.stats()
    assert stats.moved_storages > 0 and "codec room" not in stats.kept
    assert_nothing_left(stats)
    (sent_by,) = training.swap._engine._transfers.all()
    arena = sent_by.codec_lane.arena_statistics()
    assert arena["live_shares"] == 0, "a frame's share of the arena was not given back"
    assert sent_by.awaited_reports <= 1000, "reports are waited for without end"


@pytest.mark.one_schedule
@each_way
def test_nobody_is_handed_a_block_behind_a_ticket_when_transfers_keep_up(how: str) -> None:
    training = warm_training(how)
    before = training.pool.native.statistics()["waits"]
    training.steps(STEPS)
    assert training.pool.native.statistics()["waits"] == before


@each_way
def test_ranges_that_wait_for_tickets_do_not_add_up(how: str) -> None:
    training = warm_training(how)
    per_step = max(1, training.swap.stats().moved_storages // WARM_UP)
    pending = []
    for number in range(STEPS):
        training.step()
        if number % 5 == 4:  # a machine that never runs a copy by itself has to be made to
            torch.accelerator.synchronize()
        statistics = training.pool.native.statistics()
        pending.append(statistics["pending"])
        assert statistics["blocks"] == 0, "a block outlived its graph"
    assert max(pending) <= 7 * per_step, f"ranges wait for tickets without end: {pending}"


@pytest.mark.few_schedules
@each_way
def test_no_object_of_the_engine_outlives_its_step(how: str) -> None:
    def alive(kind: type) -> int:
        return sum(type(one) is kind for one in gc.get_objects())

    gc.collect()
    training = warm_training(how)
    for _ in range(3):
        training.step()
        left = alive(native.Handle)
        assert left == 0, f"{left} handles outlive a step, without a cycle collection"
        assert training.swap._engine.iteration.over, "entries outlive a step"
    training.steps(STEPS)


# ---------------------------------------------------------------- native objects
class MallInfo(ctypes.Structure):
    """struct mallinfo2 of malloc.h (glibc 2.33 and later)."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def allocated_bytes() -> int:
    """Bytes that malloc has handed out, native and Python objects alike."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        pytest.skip("needs mallinfo2 (glibc 2.33)")
    libc.mallinfo2.restype = MallInfo
    info = libc.mallinfo2()
    return info.uordblks + info.hblkhd


def growth(run: Step, settle: Step = lambda: None, *, enough: int) -> int:
    """Bytes that `run` leaves allocated, once nothing is in flight: the least of several times.

    What leaks does so every time; an allocator that keeps a chunk back, or a table that grows
    once, does not. The first time that leaves at most `enough` ends the search. `settle` makes a
    pool ask the tickets that it still holds.
    """

    def quiet() -> int:
        for _ in range(2):
            torch.accelerator.synchronize()
            settle()
        torch.accelerator.synchronize()
        gc.collect()
        return allocated_bytes()

    least = 1 << 60
    for _ in range(8):
        before = quiet()
        run()
        least = min(least, quiet() - before)
        if least <= enough:
            break
    return least


#: Less than one event (and far less than one ticket) per step.
NOISE_BYTES = STEPS * 128


@each_way
@pytest.mark.own_laboratory
def test_tickets_and_events_do_not_add_up(how: str, schedule: Schedule) -> None:
    if schedule.policy not in ("eager", "lazy"):
        pytest.skip("the other schedules end transfers between these two extremes")

    def body() -> int:
        training = Training(how)
        training.steps(2 * WARM_UP)
        return growth(lambda: training.steps(STEPS), lambda: training.steps(4), enough=NOISE_BYTES)

    found = run_in(schedule, body)
    assert found <= NOISE_BYTES, (
        f"{STEPS} steps left {found} bytes behind, of {NOISE_BYTES} at most, each time"
    )


@pytest.mark.one_schedule
def test_the_measure_of_growth_would_see_one_ticket_per_step() -> None:
    lane = native.StreamLane(DEVICE, max_leaving_bytes=0, chunk_bytes=1 << 20)
    pool = new_pool()
    x = torch.ones(1000, device=DEVICE)
    block = pool.native.allocate(4000)
    kept: list[Any] = []

    def leak() -> None:
        for _ in range(STEPS):
            kept.append(lane.send(native.StorageRef(x), block))
            kept[-1].synchronize()

    assert growth(leak, enough=NOISE_BYTES) > NOISE_BYTES
    kept.clear()
