"""LinkTimes: how fast a link carries an iteration's copies, from events on the lane's streams."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

from memswap._native import native
from memswap.engine.durations import recorded, stream_of
from memswap.engine.entry import State

if TYPE_CHECKING:
    from collections.abc import Iterable

    from memswap.engine.entry import Entry

#: Copies that take less than so many latencies say nothing about a rate.
ENOUGH_LATENCIES = 3


class LinkTimes:
    """Copies of one iteration, away and back.

    A copy is timed from the end of the one before it on its stream. It may have waited for compute
    in between, so a rate found here is one that the link reaches at least, and is the link's own
    where copies queue up. Only raw copies of stream lanes are seen.
    """

    def __init__(self) -> None:
        self._events: tuple[list[tuple[Any, int]], list[tuple[Any, int]]] = ([], [])
        self._returning: set[int] = set()

    def sent(self, entry: Entry) -> None:
        """A storage was saved; it may be on its way."""
        lane = copying_lane(entry)
        if lane is not None and entry.state is State.LEAVING:
            self._note(0, lane.send_stream, entry.nbytes)

    def asked(self, entries: Iterable[Entry | None]) -> None:
        """Backward was served; these may be on their way back since."""
        nbytes, stream = 0, None
        for entry in entries:
            if (
                entry is None
                or entry.state is not State.RETURNING
                or entry.index in self._returning
            ):
                continue
            lane = copying_lane(entry)
            if lane is not None:
                self._returning.add(entry.index)
                nbytes += entry.nbytes
                stream = lane.fetch_stream
        if stream is not None:
            self._note(1, stream, nbytes)

    def rates(self, latency_s: float) -> tuple[float, float]:
        """Bytes per second away and back, the best of the iteration; 0: nothing was seen.

        The device has passed all events.
        """
        return self._best(0, latency_s), self._best(1, latency_s)

    def _note(self, direction: int, stream: tuple[int, int, int], nbytes: int) -> None:
        self._events[direction].append((recorded(stream_of(stream)), nbytes))

    def _best(self, direction: int, latency_s: float) -> float:
        best = 0.0
        for (before, _), (after, nbytes) in pairwise(self._events[direction]):
            seconds = before.elapsed_time(after) * 1e-3 - latency_s
            if seconds > ENOUGH_LATENCIES * latency_s:
                best = max(best, nbytes / seconds)
        return best


def copying_lane(entry: Entry) -> native.StreamLane | None:
    """The stream lane that copies an entry's raw bytes; None where its away form is another one."""
    lane = entry.away.lane if isinstance(entry.away, native.BlockForm) else None
    return lane if isinstance(lane, native.StreamLane) else None
