"""Record: what one iteration was like, measured while it ran.

[Note: Marks]
An iteration is a row of marks: first the saves, in their order, then the first demands, in theirs.
Between two marks the device computes. Each mark has a moment at which memswap began there and one
at which it was done: between those two lies what the mark itself cost (a wait for room, for bytes
that were not back yet, an encode by the calling thread), so that the time between the marks is the
model's own. On an accelerator both moments are events on the compute stream: nobody waits for them,
and they are read when the device has passed the last one. On a CPU they are read from the clock.

Also recorded: for how long the forward itself still holds a storage that is leaving, since until
then leaving frees nothing, and the last demand, after which autograd lets it go.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from memswap.engine.durations import capturing, recorded
from memswap.engine.entry import State
from memswap.engine.expectations import Key

if TYPE_CHECKING:
    from memswap._C import Iteration
    from memswap.engine.action import Action
    from memswap.engine.entry import Entry


#: Storages that one operator asks for in a row.
MOST_ASKED = 8


@dataclass(frozen=True, slots=True)
class RecordedStorage:
    """One saved storage of an iteration."""

    key: Key
    action: Action
    """What was to be done with it; what stayed is recorded all the same."""
    moved: bool
    """Whether that was done."""
    held_until: int | None
    """Number of the first mark at which the forward held it no longer. None: it still did when
    backward asked for it, so that leaving frees nothing."""
    last_demand: int | None
    """Number of the last mark in whose course somebody used it. None: it was never demanded. What a
    graph that is retained lets go of, and asks for again, counts no more: it comes alone then."""
    kept_until: int | None
    """Number of the last mark at which its graph still had it."""


@dataclass(frozen=True, slots=True)
class Record:
    """One iteration. Seconds of the device, or of the host's clock on a CPU."""

    storages: tuple[RecordedStorage, ...]
    order: tuple[int, ...]
    """Indices of storages in the order of their first demands."""
    gaps_s: tuple[float, ...]
    """Seconds of work before each mark."""
    costs_s: tuple[float, ...]
    """Seconds that each mark itself took."""
    tail_s: float
    """From the last mark to the begin of the next iteration."""
    peak_bytes: int
    """Most bytes of the ledger's resident ones at a mark."""
    windows_s: tuple[float, ...] = ()
    """Seconds of the windows that were opened in each gap; empty: there were none."""

    @property
    def signature(self) -> tuple[Key, ...]:
        """What makes two iterations alike."""
        return tuple(storage.key for storage in self.storages)

    @property
    def exposed_s(self) -> float:
        """Seconds that marks took."""
        return sum(self.costs_s)


class Clock:
    """Moments of one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.on_host = device.type == "cpu"

    def now(self) -> Any:
        """This moment: seconds on a CPU, or an event on the device's current stream.

        None while a graph is captured: there is no such moment.
        """
        if self.on_host:
            return perf_counter()
        if capturing(self.device):
            return None
        return recorded(torch.accelerator.current_stream(self.device))

    def reached(self, moment: Any) -> bool:
        """Whether the device has come to a moment. Never waits."""
        return True if self.on_host else bool(moment.query())

    def wait(self, moment: Any) -> None:
        """Block the host until it has."""
        if not self.on_host:
            moment.synchronize()

    def seconds(self, begin: Any, end: Any) -> float:
        """From one moment to another. Both have been reached."""
        if self.on_host:
            return float(end - begin)
        return float(begin.elapsed_time(end)) * 1e-3


@dataclass(slots=True)
class _Saved:
    """What is seen of a storage after it was saved."""

    index: int  # in the iteration: also the number of its mark
    key: Key
    action: Action
    moved: bool
    entry: Callable[[], Entry | None]  # a weak reference
    held_until: int | None = None
    let_go: int | None = None  # the mark, if that was seen while its send was under way
    last_demand: int | None = None
    kept_until: int | None = None
    marks_since: int = 0  # somebody demanded it
    used_up: bool = False  # it came back, and nobody holds it any more

    def look_at_use(self, entry: Entry) -> None:
        """Whether those who demanded it are done with it."""
        self.used_up = self.used_up or (entry.storage is None and entry.identity.expired())


class Recorder:
    """Takes down one iteration as it happens."""

    def __init__(
        self, clock: Clock, iteration: Iteration, leaving_bytes: Callable[[], int]
    ) -> None:
        self.iteration = iteration
        self._clock = clock
        self._leaving_bytes = leaving_bytes  # what the lane's sends hold now
        self._chosen: tuple[Key, Action] | None = None  # for the storage that is being saved
        self._saved: list[_Saved] = []
        self._held: list[_Saved] = []  # those that the forward may still hold
        self._sent: list[_Saved] = []  # and those whose sends may be under way
        self._demanded: dict[int, _Saved] = {}  # by index, in the order of their first demands
        self._served: dict[int, _Saved] = {}  # those of them that are still the graph's
        self._moments: list[tuple[Any, Any]] = []
        self._broken = False
        self._closed = False
        self._opening = self._now()
        self._began: Any = self._opening
        self._end: Any = None
        self._peak_bytes = 0
        self._windows_s: dict[int, float] = {}  # mark -> in the gap before it

    @property
    def marks(self) -> int:
        return len(self._moments)

    def choose(self, key: Key, action: Action) -> None:
        """A storage is about to be saved."""
        self._look()
        self._chosen = key, action
        self._began = self._now()

    def saved(self, entry: Entry) -> None:
        """It is on its way, or stayed."""
        index = entry.index
        chosen, self._chosen = self._chosen, None
        if chosen is None or not index == len(self._saved) == len(self._moments):
            self._broken = True
        if chosen is None or self._broken:
            return
        self._moments.append((self._began, self._now()))
        saved = _Saved(index, *chosen, entry.away is not None, entry.reference)
        self._saved.append(saved)
        self._held.append(saved)
        self._sent.append(saved)
        self._note_bytes(entry)

    def demanding(self, entry: Entry) -> None:
        """Backward asks for a storage."""
        again = self._demanded.get(entry.index)
        if again is not None:
            again.look_at_use(entry)
            return
        if not self._demanded:
            self._look()
        self._began = self._now()
        self._look_at_served()

    def demanded(self, entry: Entry) -> None:
        """Backward has it."""
        index = entry.index
        if self._broken or index >= len(self._saved):
            self._broken = True
            return
        saved = self._saved[index]
        if index not in self._demanded:
            self._demanded[index] = saved
            self._moments.append((self._began, self._now()))
        saved.kept_until = len(self._moments) - 1
        if not saved.used_up:
            saved.last_demand = saved.kept_until
        saved.marks_since = 0
        self._served[index] = saved
        self._note_bytes(entry)

    def window(self, seconds: float) -> None:
        """An operator of so many seconds is about to be launched, and codec work may run beside."""
        mark = len(self._moments)
        self._windows_s[mark] = self._windows_s.get(mark, 0.0) + seconds

    def close(self) -> None:
        """The next iteration begins."""
        if not self._closed:
            self._closed, self._end = True, self._now()
            self._leaving_bytes = nothing  # whoever reads the record holds no lane

    def ready(self) -> bool:
        """Whether the device has passed the last moment."""
        return self._closed and (self._end is None or self._clock.reached(self._end))

    def wait(self) -> None:
        """Block the host until it has. For who has to plan now; no steady step does."""
        self.close()
        if self._end is not None:
            self._clock.wait(self._end)

    def take(self) -> Record | None:
        """The record of an iteration that is over; None where a save or a demand broke off.

        Memory may have been short, and the model have tried again; somebody pressed Ctrl-C, or
        captured a graph.
        """
        if self._broken or len(self._saved) + len(self._demanded) != len(self._moments):
            return None
        seconds = self._clock.seconds
        ends = [self._opening, *(end for _, end in self._moments)]
        begins = [*(begin for begin, _ in self._moments), self._end]
        gaps = [max(seconds(end, begin), 0.0) for end, begin in zip(ends, begins, strict=True)]
        # A mark that was begun may not have come to be.
        final = len(self._moments) - 1
        return Record(
            storages=tuple(_recorded(saved, final) for saved in self._saved),
            order=tuple(self._demanded),
            gaps_s=tuple(gaps[:-1]),
            costs_s=tuple(max(seconds(begin, end), 0.0) for begin, end in self._moments),
            tail_s=gaps[-1],
            peak_bytes=self._peak_bytes,
            windows_s=tuple(self._windows_s.get(mark, 0.0) for mark in range(final + 1))
            if self._windows_s
            else (),
        )

    def _now(self) -> Any:
        moment = self._clock.now()
        self._broken = self._broken or moment is None
        return moment

    def _note_bytes(self, entry: Entry) -> None:
        self._peak_bytes = max(self._peak_bytes, entry.engine.ledger.resident_bytes)

    def _look_at_served(self) -> None:
        """What the graph has let go of since the last mark.

        An operator that saved several storages asks for one after another and uses them together.
        A graph that is retained, or the frame of a checkpoint region, has them for longer.
        """
        mark = len(self._moments)
        for index, saved in list(self._served.items()):
            entry = saved.entry()
            if entry is None:
                del self._served[index]
                continue
            saved.kept_until = mark
            saved.look_at_use(entry)
            if not saved.used_up and saved.marks_since < MOST_ASKED:
                saved.last_demand = mark
            saved.marks_since += 1

    def _look(self) -> None:
        """Which storages the forward has let go of since the last mark."""
        mark = len(self._moments)
        owned = self._owned_by_sends()
        still = []
        for saved in self._held:
            entry = saved.entry()
            storage = None if entry is None else entry.identity.lock()
            if entry is None or storage is None:
                saved.held_until = mark if saved.let_go is None else saved.let_go
                continue
            # What was just taken, and an encode that waits for a window.
            sends = saved.index in owned
            ours = 1 + entry.keeps + sends + (entry.storage is not None)
            held = storage.use_count > ours
            if held:
                saved.let_go = None
            elif saved.let_go is None:
                # A worker may have let go of it since we asked, and somebody else hold it: what is
                # seen now counts if it is still so when the send has ended.
                saved.let_go = mark
            if held or sends:
                still.append(saved)
            else:
                saved.held_until = saved.let_go
        self._held = still

    def _owned_by_sends(self) -> set[int]:
        """Indices of the storages that sends under way hold.

        A lane lets go of its sends in their order, whether the host knows that they ended or not.
        """
        room = self._leaving_bytes()
        owned = set()
        still = []
        for saved in reversed(self._sent):
            entry = saved.entry()
            if entry is None or entry.state is not State.LEAVING:
                continue
            departure = entry.departure
            if departure is None or departure.done():
                continue
            still.append(saved)
            room -= entry.nbytes
            if room >= 0:
                owned.add(saved.index)
        self._sent = still[::-1]
        return owned


def nothing() -> int:
    """Bytes that sends hold which nobody looks at any more."""
    return 0


def _recorded(saved: _Saved, final: int) -> RecordedStorage:
    """What an iteration that is over says of a storage; `final` is the number of its last mark."""
    last_demand, kept_until = (
        None if mark is None else min(mark, final) for mark in (saved.last_demand, saved.kept_until)
    )
    held_until = saved.held_until if saved.let_go is None else saved.let_go
    return RecordedStorage(
        saved.key, saved.action, saved.moved, held_until, last_demand, kept_until
    )
