"""WindowQueue: encodes and decodes that wait for an operator to run beside.

[Note: Windows]
An encode costs memory bandwidth. Launched the moment autograd saves a tensor, it runs beside the
next elementwise operator and slows it; beside a matrix product or a collective it is almost free.
So it waits, and whoever is about to launch such an operator opens a window of its duration.

The queue keeps one clock of estimates. Windows move it; work that is started ends at `busy_until`.
Of what fits the window that opens, that starts first which frees most for its time (masks, indices,
what repeats), then the oldest; what does not fit waits for a later one. What is longer than windows
are starts in one when it has waited for as long as it takes and the lane has nothing else to do.
Work whose estimated end has passed is joined: the current stream waits for it, which by then costs
nothing, and the storage is free in stream order. Between windows the clock stands still although
the lane works on, so the estimate errs towards joining late. A wrong one costs time, never an
error.

An encode that waits is only a promise: the entry is resident and holds its storage. Demanded, it
simply stays; dropped, nothing remains. Four rules keep it right and bounded:

1. It starts on the stream on which its tensor was saved, for the lane orders it after what that
   stream has been given so far. Streams are compared, never remembered to be waited for.
2. It does not start once its iteration's backward has begun: from there on memory only falls.
3. No more than `max_pending_bytes` wait; beyond that, encodes start at once.
4. A decode that is wanted waits as long as no more than half of the prefetch window does.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from memswap._C import EntryReference
    from memswap.engine.entry import Entry
    from memswap.engine.lane import Ticket

#: Bytes that may wait: a share of what one forward defers, and never less than this.
PENDING_SHARE, LEAST_PENDING_BYTES = 1 / 8, 64 << 20

#: Bytes that may wait before anything is known about the model.
FIRST_PENDING_BYTES = 256 << 20

#: Bytes per second of a codec that has not been measured yet.
FIRST_RATE = 100e9

#: Of the wanted decodes, those that may wait: a share of the prefetch window.
WANTED_SHARE = 1 / 2

#: Encodes that one window looks at in vain before it gives up.
MOST_LOOKS = 16


class Pending(Protocol):
    """An encode that has not been started."""

    @property
    def entry(self) -> EntryReference: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def gain(self) -> float:
        """What is expected to be freed, as a share of `nbytes`; so, per second of codec time."""

    @property
    def stream(self) -> Hashable:
        """What the stream on which the tensor was saved compares equal to."""


class _Waiting(NamedTuple):
    """An encode that waits, its rank, and since when."""

    loss: float
    number: int
    pending: Pending
    since: float


def _order(waiting: _Waiting) -> tuple[float, int]:
    return waiting.loss, waiting.number


class CodecWork(Protocol):
    """What a queue needs of the engine that it belongs to."""

    def start(self, pending: Pending) -> Ticket | None:
        """Start an encode now, on its own stream. None: there was no room, and the entry stays."""

    def fetch(self, entry: Entry) -> bool:
        """Start bringing an entry back, unless it is not away. Whether that was done."""

    def on_stream(self, stream: Hashable) -> bool:
        """Whether a stream is the calling thread's current one."""


class Started(NamedTuple):
    """Bytes of each encode and of each decode that was started, in order."""

    encoded: list[int]
    decoded: list[int]


@dataclass(frozen=True, slots=True)
class WindowStats:
    """What became of the work that waited for windows. Bytes are bytes of storages."""

    windows: int = 0
    """Windows that were opened."""
    window_s: float = 0.0
    """Seconds that they promised."""
    encoded_in_windows: int = 0
    encoded_bytes: int = 0
    started_at_bound: int = 0
    """Encodes started outside windows because too many bytes waited."""
    started_at_end: int = 0
    """Encodes started at the end of a forward."""
    kept_storages: int = 0
    """Storages whose encode had not been started when backward began, or that found no room."""
    kept_bytes: int = 0
    decoded_in_windows: int = 0
    decoded_ahead: int = 0
    """Decodes started outside windows because backward was close."""
    pending_bytes: int = 0
    """Bytes that wait now."""


class WindowQueue:
    """Encodes that wait, decodes that are wanted, and the clock. The engine's lock serialises
    calls.

    Args:
        max_pending_bytes: rule 3 of [Note: Windows]; None: from what forwards defer.
        leftovers_start: whether what waits at the end of a forward starts then. If not, it goes on
            waiting for windows of later microbatches, and stays if there are none.
    """

    def __init__(self, max_pending_bytes: int | None = None, leftovers_start: bool = True) -> None:
        self.encode_rate = self.decode_rate = FIRST_RATE  # bytes per second
        self.leftovers_start = leftovers_start
        self._max_pending_bytes = max_pending_bytes
        self._auto_pending_bytes = FIRST_PENDING_BYTES
        self._deferred_bytes = 0  # in this iteration
        self._pending: list[_Waiting] = []  # in the order in which they should start
        self._number = 0
        self._pending_bytes = 0
        self._wanted: deque[tuple[EntryReference, int, float]] = deque()
        self._wanted_bytes = 0
        self._started: deque[tuple[Ticket, float, Hashable]] = deque()  # not joined
        self._now = 0.0
        self._end = 0.0
        self._busy_until = 0.0
        self.reset_stats()

    # --- what waits -------------------------------------------------------------------------------

    def begin_iteration(self) -> None:
        """What is deferred from now on belongs to a new forward."""
        if self._deferred_bytes:
            share = int(self._deferred_bytes * PENDING_SHARE)
            self._auto_pending_bytes = max(LEAST_PENDING_BYTES, share)
            self._deferred_bytes = 0

    def defer(self, pending: Pending, work: CodecWork) -> None:
        """An encode is to be started in a window; if too much waits already, one starts now."""
        self._number += 1
        insort(self._pending, _Waiting(-pending.gain, self._number, pending, self._now), key=_order)
        self._pending_bytes += pending.nbytes
        self._deferred_bytes += pending.nbytes
        bound = self._max_pending_bytes
        bound = self._auto_pending_bytes if bound is None else bound
        if self._pending_bytes > bound:
            self._forget()
            self._started_at_bound += len(self._run(work, inf, most_left=bound))

    def want(self, entries: Iterable[Entry], window_bytes: int, work: CodecWork) -> None:
        """Entries will be demanded soon, in this order."""
        for entry in entries:
            self._wanted.append((entry.reference, entry.nbytes, self._now))
            self._wanted_bytes += entry.nbytes
        bound = window_bytes * WANTED_SHARE
        while self._wanted and self._wanted_bytes > bound:
            self._decoded_ahead += self._fetch_next(work) > 0

    def clear(self) -> None:
        """Promise nothing any more. What waits stays where it is."""
        self._pending.clear()
        self._wanted.clear()
        self._started.clear()
        self._pending_bytes = self._wanted_bytes = 0

    @property
    def pending(self) -> tuple[Pending, ...]:
        """Encodes that wait, in the order in which they should start; some entries may be gone."""
        return tuple(waiting.pending for waiting in self._pending)

    def start_now(self, entries: Iterable[EntryReference], work: CodecWork) -> None:
        """Start some of what waits, in no window."""
        wanted = set(entries)
        self._pending.sort(key=lambda one: (one.pending.entry not in wanted, *_order(one)))
        left = sum(one.pending.nbytes for one in self._pending if one.pending.entry not in wanted)
        self._run(work, inf, most_left=left)
        self._pending.sort(key=_order)

    # --- windows ----------------------------------------------------------------------------------

    def open(self, seconds: float, work: CodecWork) -> Started:
        """An operator of so many seconds is about to be launched on the current stream."""
        self.close(work)
        self._end = self._now + seconds
        self._windows += 1
        self._window_s += seconds
        decoded: list[int] = []
        while self._wanted:
            _, nbytes, since = self._wanted[0]
            if not self._fits(nbytes / self.decode_rate, since, self._end):
                break
            nbytes = self._fetch_next(work)
            if nbytes:
                decoded.append(nbytes)
        self._decoded_in_windows += len(decoded)
        encoded = self._run(work, self._end, looks=MOST_LOOKS)
        self._encoded_in_windows += len(encoded)
        return Started(encoded, decoded)

    def close(self, work: CodecWork) -> None:
        """The operator of the last window has been launched."""
        self._now = self._end = max(self._now, self._end)
        self._join(work, self._now)

    def end_forward(self, work: CodecWork) -> Started:
        """The managed part of a forward is over.

        Loss and logits follow, and with them the peak, so what still waits starts now.
        """
        self.close(work)
        encoded = self._run(work, inf) if self.leftovers_start else []
        self._started_at_end += len(encoded)
        return Started(encoded, [])

    def begin_backward(self, work: CodecWork) -> None:
        """The first storage of an iteration is demanded: the memory of what has left is needed."""
        self._now = self._end = max(self._now, self._end, self._busy_until)
        self._join(work, inf)
        self._forget()

    # --- the clock --------------------------------------------------------------------------------

    def _fits(self, cost: float, since: float, end: float) -> bool:
        begin = max(self._now, self._busy_until)
        if begin + cost <= end:
            return True
        # Longer than the window: once it has waited as long as it takes, where nothing else runs.
        return self._now - since >= cost and begin <= self._now < end

    def _run(
        self, work: CodecWork, end: float, looks: int | None = None, most_left: int = 0
    ) -> list[int]:
        """Start, in their order, those that belong on this stream and end by `end`; bytes of each.

        Stops after `looks` that could not start, and where no more than `most_left` bytes wait.
        """
        started: list[int] = []
        passed: list[_Waiting] = []
        candidates, self._pending = self._pending, []
        at = 0
        try:
            while at < len(candidates) and self._pending_bytes > most_left and len(passed) != looks:
                if max(self._now, self._busy_until) >= end:
                    break
                waiting = candidates[at]
                at += 1
                pending = waiting.pending
                if self._too_late(pending):
                    continue
                cost = pending.nbytes / self.encode_rate
                if not self._fits(cost, waiting.since, end) or not work.on_stream(pending.stream):
                    passed.append(waiting)
                    continue
                self._pending_bytes -= pending.nbytes
                ticket = work.start(pending)
                if ticket is None:
                    self._keep(pending)
                    continue
                self._busy_until = max(self._now, self._busy_until) + cost
                self._started.append((ticket, self._busy_until, pending.stream))
                self._encoded_bytes += pending.nbytes
                started.append(pending.nbytes)
        finally:
            self._pending = passed + candidates[at:]
        return started

    def _too_late(self, pending: Pending) -> bool:
        """Account for what must not start any more: a dead entry, or one of rule 2."""
        entry = pending.entry()
        if entry is not None and not (entry.iteration and entry.iteration.began_backward):
            return False
        self._pending_bytes -= pending.nbytes
        if entry is not None:
            self._keep(pending)
        return True

    def _forget(self) -> None:
        """Drop everything that must not start any more."""
        self._pending = [one for one in self._pending if not self._too_late(one.pending)]

    def _keep(self, pending: Pending) -> None:
        self._kept_storages += 1
        self._kept_bytes += pending.nbytes

    def _fetch_next(self, work: CodecWork) -> int:
        """Bring back the entry that is wanted first. Its bytes, or 0: it is not away any more."""
        reference, nbytes, _ = self._wanted.popleft()
        self._wanted_bytes -= nbytes
        entry = reference()
        if entry is None or (entry.iteration and entry.iteration.was_demanded(entry.index)):
            return 0  # nobody waits for it any more, and it may even be away again
        if not work.fetch(entry):
            return 0
        self._busy_until = max(self._now, self._busy_until) + nbytes / self.decode_rate
        return nbytes

    def _join(self, work: CodecWork, until: float) -> None:
        """Order this stream after encodes that should have ended by `until`."""
        started = self._started
        elsewhere: list[tuple[Ticket, float, Hashable]] = []
        while started and started[0][1] <= until:
            one = started.popleft()
            if work.on_stream(one[2]):
                one[0].wait()
            else:
                elsewhere.append(one)
        started.extendleft(reversed(elsewhere))

    # --- statistics -------------------------------------------------------------------------------

    def reset_stats(self) -> None:
        self._windows = 0
        self._window_s = 0.0
        self._encoded_in_windows = self._encoded_bytes = 0
        self._started_at_bound = self._started_at_end = 0
        self._kept_storages = self._kept_bytes = 0
        self._decoded_in_windows = self._decoded_ahead = 0

    def stats(self) -> WindowStats:
        return WindowStats(
            windows=self._windows,
            window_s=self._window_s,
            encoded_in_windows=self._encoded_in_windows,
            encoded_bytes=self._encoded_bytes,
            started_at_bound=self._started_at_bound,
            started_at_end=self._started_at_end,
            kept_storages=self._kept_storages,
            kept_bytes=self._kept_bytes,
            decoded_in_windows=self._decoded_in_windows,
            decoded_ahead=self._decoded_ahead,
            pending_bytes=self._pending_bytes,
        )
