"""Durations: how long operators and the codec take, from events in a few iterations.

The first iteration is not representative (libraries load, kernels are tuned), the next two are
measured, and from then on one in a hundred. Events are read once they have happened: nothing here
ever waits for the device.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from memswap._C import Windows

#: Iterations that are measured: those between these two, and every so many.
FIRST_MEASURED, FIRST_UNMEASURED, MEASURED_EVERY = 1, 3, 100

#: Events that are looked at in one go, so that no operator pays for all.
MOST_READS = 4

ENCODE, DECODE = "encode", "decode"


class Span(NamedTuple):
    """Work between two events, or from one event on."""

    key: str
    amount: float
    begin: torch.Event
    end: torch.Event | None = None


class Durations:
    """Seconds by key, per unit of an amount (elements of an operator's input, bytes of a frame).

    Args:
        windows: of an engine, which learn the codec's rates.
    """

    def __init__(self, windows: Windows) -> None:
        self._windows = windows
        self._iterations = 0
        self._known: dict[str, float] = {}
        self._codec: dict[str, tuple[float, float]] = {}  # bytes and seconds of an iteration
        self._fresh: set[str] = set()  # keys that were measured in this iteration
        self._spans: deque[Span] = deque()  # ended, and not read yet
        self._submitted: dict[bool, torch.Event] = {}  # of the work submitted in one go

    @property
    def measuring(self) -> bool:
        """Whether this iteration is measured."""
        last = self._iterations - 1
        return FIRST_MEASURED <= last < FIRST_UNMEASURED or (
            last > 0 and last % MEASURED_EVERY == 0
        )

    def begin_iteration(self) -> None:
        """What follows belongs to a new forward."""
        self._read()
        self._iterations += 1
        self._fresh.clear()

    def seconds(self, key: str, amount: float) -> float | None:
        """What so much of this takes, if it has been measured."""
        if self._spans:
            self._read()
        known = self._known.get(key)
        return None if known is None else known * amount

    # --- operators --------------------------------------------------------------------------------

    def start(self, key: str, amount: float, device: torch.device) -> Span | None:
        """An operator is about to be launched on the current stream."""
        if not self.measuring or device.type == "cpu" or capturing(device):
            return None
        return Span(key, amount, recorded(torch.accelerator.current_stream(device)))

    def stop(self, span: Span) -> None:
        """It has been launched."""
        if capturing(span.begin.device):
            return
        end = recorded(torch.accelerator.current_stream(span.begin.device))
        self._spans.append(span._replace(end=end))

    # --- the codec (`CodecObserver` in csrc/engine/windows.h) -------------------------------------

    def begin(self) -> None:
        """What follows is submitted in one go."""
        self._submitted.clear()

    def submitted(self, stream: tuple[int, int, int], nbytes: int, encoded: bool) -> None:
        """An encode (or a decode) was put on a lane's stream.

        The first one of a go may have had to wait for compute; what comes right after it has not.
        """
        of_lane = stream_of(stream)
        if not self.measuring or capturing(of_lane.device):
            return
        now = recorded(of_lane)
        before = self._submitted.get(encoded)
        if before is not None:
            self._spans.append(Span(ENCODE if encoded else DECODE, nbytes, before, now))
        self._submitted[encoded] = now

    # --- reading ----------------------------------------------------------------------------------

    def _read(self) -> None:
        """Take in what has happened by now, in order."""
        spans = self._spans
        for _ in range(MOST_READS):
            if not spans or spans[0].end is None or not spans[0].end.query():
                return
            span = spans.popleft()
            assert span.end is not None
            if span.amount > 0:
                self._learn(span, span.begin.elapsed_time(span.end) / 1e3)

    def _learn(self, span: Span, seconds: float) -> None:
        if span.key in (ENCODE, DECODE):
            self._learn_rate(span.key, span.amount, seconds)
            return
        each = seconds / span.amount
        if span.key in self._fresh:  # the shortest: others have waited for the host
            each = min(each, self._known[span.key])
        self._fresh.add(span.key)
        self._known[span.key] = each

    def _learn_rate(self, key: str, nbytes: float, seconds: float) -> None:
        """The mean of an iteration, with whatever ran beside: that is what is to be expected."""
        if key not in self._fresh:
            self._fresh.add(key)
            self._codec[key] = (0.0, 0.0)
        before = self._codec[key]
        nbytes, seconds = self._codec[key] = (before[0] + nbytes, before[1] + seconds)
        if seconds <= 0:
            return
        if key == DECODE:
            self._windows.decode_rate = nbytes / seconds
        else:
            self._windows.encode_rate = nbytes / seconds
            if DECODE not in self._codec:
                self._windows.decode_rate = nbytes / seconds


def capturing(device: torch.device) -> bool:
    """Whether a graph is captured: an event that is recorded then belongs to the graph.

    It never happens, and asking about it is an error.
    """
    return device.type == "cuda" and bool(torch.cuda.is_current_stream_capturing())


def stream_of(packed: tuple[int, int, int]) -> torch.Stream:
    """A lane's stream: (stream id, device index, device type)."""
    stream_id, device_index, device_type = packed
    return torch.Stream(stream_id=stream_id, device_index=device_index, device_type=device_type)


def recorded(stream: torch.Stream) -> torch.Event:
    """An event on a stream that can be timed."""
    event = torch.Event(device=stream.device, enable_timing=True)
    event.record(stream)
    return event
