"""What tests use: schedules, a laboratory that runs under one, counters, virtual time, faults.

    @pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
    def test_something(schedule):
        def body():
            x = torch.ones(8, device="sim")
            return (x + 1).cpu()

        assert torch.equal(run_in(schedule, body), torch.full((8,), 2.0))

Nothing here depends on pytest.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from . import _C

Result = TypeVar("Result")

DEFAULT_CAPACITY_BYTES = 2**30
#: For how long what is live still is looked at again, and how often, before it counts as a leak.
LET_GO_S = 0.5
LOOKS = 25

_CHECKS = {"off": _C.Check.off, "collect": _C.Check.collect, "throw": _C.Check.throw_}


# ---------------------------------------------------------------- schedules
@dataclasses.dataclass(frozen=True)
class Schedule:
    """How the machine runs what the program enqueues.

    Attributes:
        name: For test ids.
        policy: "eager" (program order), "lazy" (only what a host synchronisation needs),
            "side_first" (pool streams as early, default streams as late as possible),
            "main_first" (the reverse), "random" (seeded) or "free" (truly concurrent; the only one
            whose executions are not reproducible).
        seed: Of the "random" policy.
        check: The race detector: "off", "collect" (reported at the laboratory's end) or "throw"
            (raised at the offending call as well).
    """

    name: str
    policy: str
    seed: int = 0
    check: str = "collect"

    def __str__(self) -> str:
        return self.name

    def with_check(self, check: str) -> Schedule:
        return dataclasses.replace(self, check=check)


def schedules(n_random: int = 3) -> list[Schedule]:
    """The deterministic schedules, with `n_random` seeds of the random one."""
    return [
        Schedule("eager", "eager", check="throw"),
        Schedule("lazy", "lazy"),
        Schedule("side_first", "side_first"),
        Schedule("main_first", "main_first"),
        *(Schedule(f"random{seed}", "random", seed) for seed in range(n_random)),
    ]


SCHEDULES: list[Schedule] = schedules()
#: Truly concurrent: not reproducible, so beside the matrix and not in it.
FREE = Schedule("free", "free")


# ---------------------------------------------------------------- the laboratory
class LaboratoryError(AssertionError):
    """What a laboratory found at its end.

    Attributes:
        reports: Messages of the race detector.
        leaks: Descriptions of memory allocated inside and still live, and of frees that never
            completed.
        task_error: What an asynchronous task failed with, if nobody synchronised since.
    """

    def __init__(self, reports: list[str], leaks: list[str], task_error: str | None) -> None:
        self.reports, self.leaks, self.task_error = reports, leaks, task_error
        lines = [f"{len(reports)} race report(s):", *reports[:10]] if reports else []
        if len(reports) > 10:
            lines.append(f"... and {len(reports) - 10} more")
        lines += leaks
        if task_error is not None:
            lines.append(f"an asynchronous task failed: {task_error}")
        super().__init__("\n".join(lines))


class Laboratory:
    """The laboratory in force, as `with laboratory(...) as lab` yields it."""

    def __init__(self, schedule: Schedule, first_serial: int) -> None:
        self.schedule = schedule
        self._first_serial = first_serial
        self._reports: list[str] = []

    @property
    def reports(self) -> list[str]:
        """The race detector's reports so far, also after the laboratory's end."""
        self._reports += _C.take_reports() if _current is self else []
        return self._reports

    def forgive(self) -> list[str]:
        """Takes the reports out, so that the laboratory does not raise for them."""
        taken, self._reports = self.reports, []
        return taken

    def live_device_bytes(self) -> int:
        """Device bytes allocated since entry and still live, as requested."""
        return sum(b[0] for b in _C.live_blocks(self._first_serial) if not b[2])

    def live_pinned_bytes(self) -> int:
        """Pinned bytes allocated since entry and still live, as requested."""
        return sum(b[0] for b in _C.live_blocks(self._first_serial) if b[2])


_current: Laboratory | None = None


def _leaks(lab: Laboratory, allow_device_growth: bool, allow_pinned_growth: bool) -> list[str]:
    found = []
    blocks = _C.live_blocks(lab._first_serial)
    for pinned, allowed in ((False, allow_device_growth), (True, allow_pinned_growth)):
        kind = [b for b in blocks if b[2] == pinned]
        if allowed or not kind:
            continue
        largest = sorted(kind, reverse=True)[:8]
        shown = ", ".join(
            f"{size} bytes (allocation #{serial - lab._first_serial}"
            + ("" if pinned else f" on device {device}, stream {stream}")
            + ")"
            for size, serial, _, device, stream in largest
        )
        total = sum(b[0] for b in kind)
        memory = "pinned" if pinned else "device"
        found.append(f"{total} {memory} bytes in {len(kind)} block(s) are still live: {shown}")
    deferred = sum(_C.memory_stats(d)["deferred"] for d in range(_C.device_count))
    if deferred:
        found.append(f"{deferred} free(s) of device memory still wait for a recorded stream")
    deferred = _C.pinned_stats()["deferred"]
    if deferred:
        found.append(f"{deferred} free(s) of pinned memory still wait for a copy")
    return found


def _reset() -> None:
    _C.clear_mutations()
    _C.quiesce()
    _C.set_policy(_C.Policy.eager, 0)
    _C.set_check(_C.Check.off)
    _C.take_reports()
    _C.fail_pinned_requests(0, 0)
    _C.set_pinned_budget(None)
    _C.set_cost_model(3, 2, 1500, 25, 25, 0, True)
    for device in range(_C.device_count):
        _C.set_capacity(device, DEFAULT_CAPACITY_BYTES)
        _C.fail_device_requests(device, 0, 0)
        for stream in range(_C.pool_streams + 1):
            _C.set_stream_delay_us(device, stream, 0)


@contextlib.contextmanager
def laboratory(
    schedule: Schedule,
    capacity: int | None = None,
    *,
    allow_device_growth: bool = False,
    allow_pinned_growth: bool = False,
) -> Iterator[Laboratory]:
    """Runs the body under a schedule, and checks at the end that nothing is amiss.

    At entry the machine is made as new: caches empty, the stream pool rewound, counters and virtual
    time at zero. At exit every device is synchronised, and what is amiss is raised; policy,
    detector, mutations, capacity, faults and cost model are always reset, also after an exception,
    which passes through unchanged.

    Args:
        schedule: See `Schedule`.
        capacity: Device memory in bytes, per device; default 1 GiB.
        allow_device_growth: Device memory allocated in the body may still be live at its end. The
            locals of a `with` body are: prefer `run_in`, whose are not.
        allow_pinned_growth: The same for pinned memory (a pool may keep its slabs).

    Raises:
        LaboratoryError: An AssertionError that lists race reports, live memory, deferred frees and
            errors of tasks.
    """
    global _current  # noqa: PLW0603  there is one machine
    if _current is not None:
        raise RuntimeError("laboratories do not nest")
    _reset()
    for device in range(_C.device_count):
        _C.empty_cache(device)
        _C.reset_peak(device)
        if capacity is not None:
            _C.set_capacity(device, capacity)
    _C.pinned_empty_cache()
    _C.rewind_stream_pool()
    _C.reset_virtual_time()
    _C.set_policy(getattr(_C.Policy, schedule.policy), schedule.seed)
    _C.set_check(_CHECKS[schedule.check])
    _C.reset_counters()
    lab = _current = Laboratory(schedule, _C.last_serial())
    try:
        yield lab
        task_error = _C.quiesce()
        leaks = _leaks(lab, allow_device_growth, allow_pinned_growth)
        # Perhaps only a cycle, which may hold another one by way of autograd's nodes: the collector
        # does not see those. Collecting always would take longer than most tests. Or autograd's
        # thread is about to take the tasks of a graph that failed, for which it needs the GIL.
        for _ in range(LOOKS):
            if not leaks:
                break
            if not gc.collect():
                time.sleep(LET_GO_S / LOOKS)
            task_error = _C.quiesce() or task_error
            leaks = _leaks(lab, allow_device_growth, allow_pinned_growth)
        if lab.reports or leaks or task_error is not None:
            raise LaboratoryError(lab.reports, leaks, task_error)
    finally:
        lab.reports  # noqa: B018  fetches the last ones, for who looks at them after the end
        _current = None
        _reset()


def run_in(
    schedule: Schedule,
    body: Callable[..., Result],
    *args: Any,
    capacity: int | None = None,
    allow_device_growth: bool = False,
    allow_pinned_growth: bool = False,
    **kwargs: Any,
) -> Result:
    """Returns body(*args, **kwargs) as computed in a laboratory; its locals are gone at the end."""
    with laboratory(
        schedule,
        capacity,
        allow_device_growth=allow_device_growth,
        allow_pinned_growth=allow_pinned_growth,
    ):
        return body(*args, **kwargs)


def host_access(tensor: torch.Tensor, *, write: bool = False, name: str = "host") -> None:
    """Tells the race detector that the host reads (or writes) a pinned tensor's memory now.

    The detector cannot see the host's own loads and stores.
    """
    if tensor.numel() == 0:
        return
    last = sum((n - 1) * s for n, s in zip(tensor.size(), tensor.stride(), strict=True))
    nbytes = (last + 1) * tensor.element_size()
    _C.host_access(tensor.data_ptr(), nbytes, write, name)


@contextlib.contextmanager
def capturing(stream: torch.Stream) -> Iterator[None]:
    """The stream says that it captures a graph (of a torch that asks: 2.13).

    Nothing is captured: what is submitted runs as ever.
    """
    _C.set_capturing(stream.device_index, stream.stream_id, True)
    try:
        yield
    finally:
        _C.set_capturing(stream.device_index, stream.stream_id, False)


# ---------------------------------------------------------------- virtual time
class VirtualClock:
    """Virtual time since the `virtual_time` block began."""

    def reset(self) -> None:
        """Starts again from zero, after all work is done."""
        for device in range(_C.device_count):
            _C.synchronize_device(device)
        _C.reset_virtual_time()

    def host_us(self) -> float:
        """Microseconds at which the host has arrived; device work may go on beyond."""
        return _C.host_virtual_us()

    def elapsed_us(self) -> float:
        """Microseconds until all work enqueued so far is done; synchronises every device."""
        for device in range(_C.device_count):
            _C.synchronize_device(device)
        return _C.host_virtual_us()


@contextlib.contextmanager
def virtual_time(
    *,
    host_us: float = 3,
    launch_us: float = 2,
    hbm_gb_per_s: float = 1500,
    h2d_gb_per_s: float = 25,
    d2h_gb_per_s: float = 25,
    matrix_gb_per_s: float = 0,
    queries_wait: bool = True,
    duplex: float = 1.0,
) -> Iterator[VirtualClock]:
    """Sets the cost model and starts virtual time from zero.

    A task lasts launch_us + its bytes over the bandwidth of its engine (device memory, or either
    direction of the link) and starts when its stream, its engine and the host are there; each
    launch costs the host host_us. It depends on the program only, never on the schedule.
    Event.elapsed_time is virtual time as well, in milliseconds. GB = 10**9 bytes.

    Where `matrix_gb_per_s` is given, matrix products have an engine of their own: what moves memory
    runs beside them, and two of either kind still wait for each other.

    A query of work that has run takes the host to that work's virtual end. Without `queries_wait`
    it answers no until the host is there by itself: a host that runs ahead of the device.

    `duplex` (0.5 to 1): what both directions of the link reach together, as a share of twice one
    alone. The copy that was launched first goes at full speed; the other gets what it leaves.
    """
    if not 0.5 <= duplex <= 1:
        raise ValueError(f"virtual_time(duplex={duplex}): expected a share from 0.5 to 1")
    clock = VirtualClock()
    clock.reset()
    _C.set_cost_model(
        host_us,
        launch_us,
        hbm_gb_per_s,
        h2d_gb_per_s,
        d2h_gb_per_s,
        matrix_gb_per_s,
        queries_wait,
        *(() if duplex == 1 else (duplex,)),
    )
    try:
        yield clock
    finally:
        _C.set_cost_model(3, 2, 1500, 25, 25, 0, True)


# ---------------------------------------------------------------- counters
class counters:  # noqa: N801  a namespace
    """Counts since the laboratory's entry or the last reset()."""

    @staticmethod
    def reset() -> None:
        _C.reset_counters()

    @staticmethod
    def host_syncs() -> int:
        """Event, stream and device synchronisations, blocking copies, item(), blocking operators.

        Queries are not counted, for they do not block.
        """
        return _C.counters()["host_syncs"]

    @staticmethod
    def device_allocations() -> int:
        """Device allocations that the cache could not serve (a cudaMalloc each)."""
        return _C.counters()["device_allocations"]

    @staticmethod
    def pinned_allocations() -> int:
        """Pinned allocations that the cache could not serve (a cudaHostAlloc each)."""
        return _C.counters()["pinned_allocations"]

    @staticmethod
    def tasks() -> tuple[int, int]:
        """Tasks enqueued and executed in the life of the process."""
        counts = _C.counters()
        return counts["enqueued"], counts["executed"]

    @staticmethod
    def operators() -> tuple[int, int, dict[str, int]]:
        """Operators run asynchronously, run blocking, and the latter by name (process life)."""
        return _C.operator_counts()


# ---------------------------------------------------------------- faults
class faults:  # noqa: N801  a namespace
    """Injected failures of allocation.

    Of pinned memory: a c10::Error (torch.AcceleratorError in Python). Of the device's:
    torch.OutOfMemoryError.
    """

    @staticmethod
    @contextlib.contextmanager
    def fail_device(n: int = 1, after: int = 0, device: int = 0) -> Iterator[None]:
        """The next `n` requests for a device's memory fail, after `after` good ones."""
        _C.fail_device_requests(device, after, n)
        try:
            yield
        finally:
            _C.fail_device_requests(device, 0, 0)

    @staticmethod
    @contextlib.contextmanager
    def fail_pinned(n: int = 1, after: int = 0) -> Iterator[None]:
        """The next `n` requests for pinned memory fail, after `after` good ones."""
        _C.fail_pinned_requests(after, n)
        try:
            yield
        finally:
            _C.fail_pinned_requests(0, 0)

    @staticmethod
    @contextlib.contextmanager
    def pinned_budget(nbytes: int) -> Iterator[None]:
        """Requests fail that would bring live pinned memory above `nbytes` (4 KiB pages count)."""
        _C.set_pinned_budget(nbytes)
        try:
            yield
        finally:
            _C.set_pinned_budget(None)
