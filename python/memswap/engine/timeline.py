"""Timeline: in which order storages were saved and demanded, and what that predicts.

A passage is one forward of the managed part and the backward that belongs to it. The last passage
that was demanded predicts the next one, storage by storage, for as long as the sizes agree. A wrong
guess costs a stall or a little memory, never an error.

[Note: The window]
Backward demands the storages that were saved last first, so whatever leaves last would have to be
back at once: at the moment of the peak it frees nothing. What is demanded first, up to a window of
bytes, therefore stays, and from then on the window slides: whatever lies within that many bytes
ahead of the latest demand is on its way back. The same window bounds both, so a peak holds the
window, not the window twice. Decoding takes a fraction of the time of a transfer, and what is
encoded on the device frees only a part of its bytes, so for those an automatic window is shorter.
"""

from __future__ import annotations

import weakref
from collections import deque
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

NEEDED_AT_ONCE = "needed at once"
NEVER_FREED = "never freed"
PLANNED = "planned"

#: An automatic window is this share of a passage's bytes, and never less than its largest storage.
AUTO_WINDOW_SHARE = 1 / 8

#: The same for bytes that are encoded where they are; and the largest storage comes with the small
#: ones around it (the weight beside the input of a matrix product).
DECODE_WINDOW_SHARE, DECODE_WINDOW_SLACK = 1 / 32, 1.25


class Placed(Protocol):
    """What has a place in a passage: an entry."""

    passage: Any
    index: int

    @property
    def reference(self) -> Any:
        """A weak reference to itself; a passage keeps nothing alive."""


PlacedT = TypeVar("PlacedT", bound=Placed)


class Forecast:
    """What a finished passage says about the next one."""

    def __init__(self, passage: Passage[Any]) -> None:
        self.sizes = tuple(passage.sizes)
        self.order = tuple(complete(passage.order, len(self.sizes)))
        self.held = frozenset(passage.held)
        self.window_bytes = passage.own_window_bytes
        at_once = set()
        room = self.window_bytes
        for index in self.order:
            room -= self.sizes[index]
            if room < 0:
                break
            at_once.add(index)
        #: Why a storage should stay, where it should.
        self.verdicts = dict.fromkeys(at_once, NEEDED_AT_ONCE) | dict.fromkeys(
            self.held, NEVER_FREED
        )


class Passage(Generic[PlacedT]):
    """One forward, as it happens. The saver's lock serialises the calls."""

    def __init__(self, forecast: Forecast | None, window_bytes: int | None) -> None:
        self.sizes: list[int] = []
        self.order: list[int] = []  # indices, in the order of their first demand
        self.held: set[int] = set()  # storages that stayed alive although they had left
        #: What a plan brings back at the first demand of which storage; None: the window decides.
        self.fetches: Mapping[int, Sequence[int]] | None = None
        #: What a director knows of it.
        self.course: Any = None
        self._raw_bytes = self._raw_most = 0  # of storages that come back as they are,
        self._decoded_bytes = self._decoded_most = 0  # and of those that are decoded: sum, largest
        self._decoded: set[int] = set()  # storages that would be encoded where they are
        self._forecast = forecast
        self._window_bytes = window_bytes
        self._entries: list[weakref.ref[PlacedT]] = []
        self._groups: list[int | None] = []
        self._demanded: set[int] = set()
        self._order: _ExpectedOrder | None = None

    def admit(self, nbytes: int, decoded: bool = False, group: int | None = None) -> str | None:
        """Register the next storage. Why it should stay, or None.

        `decoded`: its bytes would be encoded where they are, and come back by decoding.
        `group`: a checkpoint region replays its forward, so the storages of one region, which have
        the same number here, are expected back in the order in which they were saved.
        """
        sizes = self.sizes
        index = len(sizes)
        sizes.append(nbytes)
        self._groups.append(group)
        if decoded:
            self._decoded.add(index)
            self._decoded_bytes += nbytes
            if nbytes > self._decoded_most:
                self._decoded_most = nbytes
        else:
            self._raw_bytes += nbytes
            if nbytes > self._raw_most:
                self._raw_most = nbytes
        forecast = self._forecast
        if forecast is None:
            return None
        if index >= len(forecast.sizes) or forecast.sizes[index] != nbytes:
            self._forecast = None  # another order than last time: stop guessing
            return None
        verdict = forecast.verdicts.get(index)
        if verdict is NEVER_FREED:
            self.held.add(index)
        return verdict

    def place(self, entry: PlacedT) -> None:
        """The entry of the storage that :meth:`admit` registered last."""
        entry.passage, entry.index = self, len(self._entries)
        self._entries.append(entry.reference)

    @property
    def began_backward(self) -> bool:
        return bool(self.order)

    @property
    def over(self) -> bool:
        """Whether nothing that was saved is alive: no graph will demand it."""
        return all(reference() is None for reference in self._entries)

    def was_demanded(self, index: int) -> bool:
        return index in self._demanded

    @property
    def window_bytes(self) -> int:
        if self._forecast is not None:
            return self._forecast.window_bytes
        return self.own_window_bytes

    @property
    def own_window_bytes(self) -> int:
        """The window that the storages so far make."""
        if self._window_bytes is not None:
            return self._window_bytes
        shares = self._raw_bytes * AUTO_WINDOW_SHARE + self._decoded_bytes * DECODE_WINDOW_SHARE
        return int(max(self._raw_most, self._decoded_most * DECODE_WINDOW_SLACK, shares))

    @property
    def leaving_bytes(self) -> int:
        """Bytes that may leave at once: the window, and never less than one storage."""
        return max(self.window_bytes, max(self.sizes, default=0))

    def demand(self, index: int) -> list[PlacedT]:
        """A storage is demanded. Which ones come next and fit into the window."""
        demanded = self._demanded
        if index in demanded:
            return []
        demanded.add(index)
        self.order.append(index)
        if self.fetches is not None:
            wanted = self.fetches.get(index, ())
        else:
            order = self._order
            if order is None or order.length != len(self.sizes):
                order = self._order = self._expected_order()
            # A decoded one lies beside its frame, which is there until it has been used.
            beside = self.sizes[index] if index in self._decoded else 0
            wanted = order.advance(index, beside)
        return self._placed(wanted) if wanted else []

    def _expected_order(self) -> _ExpectedOrder:
        forecast = self._forecast
        known = forecast is not None and len(forecast.sizes) == len(self.sizes)
        order = forecast.order if forecast and known else first_guess(self._groups)
        return _ExpectedOrder(order, self.sizes, self.window_bytes)

    def entry(self, index: int) -> PlacedT | None:
        """What is at a place, if it is alive."""
        return self._entries[index]()

    def _placed(self, wanted: Sequence[int]) -> list[PlacedT]:
        entries = [self._entries[i]() for i in wanted if i not in self._demanded]
        return [entry for entry in entries if entry is not None]


class _ExpectedOrder:
    """A window that slides over the expected order of demands."""

    def __init__(self, order: Sequence[int], sizes: Sequence[int], window_bytes: int) -> None:
        self.order = order
        self.length = len(order)
        self.window_bytes = window_bytes
        self.rank = {index: position for position, index in enumerate(order)}
        self.bytes_before = [0, *accumulate(sizes[index] for index in order)]
        self.frontier = 0  # positions before it were demanded or asked for

    def advance(self, index: int, beside: int) -> Sequence[int]:
        """Indices that the window newly covers now that ``index`` is demanded.

        `beside`: bytes of the window that something else takes.
        """
        position = self.rank[index] + 1
        first = last = position if position > self.frontier else self.frontier
        bytes_before, length = self.bytes_before, self.length
        limit = bytes_before[position]
        if beside < self.window_bytes:
            limit += self.window_bytes - beside
        while last < length and bytes_before[last + 1] <= limit:
            last += 1
        self.frontier = last
        return self.order[first:last]


class Timeline(Generic[PlacedT]):
    """The passages of one saver."""

    def __init__(self, window_bytes: int | None) -> None:
        self.window_bytes = window_bytes  # None: automatic
        self._recent: deque[Passage[PlacedT]] = deque(maxlen=8)
        self._forecast: Forecast | None = None
        self._forecast_of: Passage[PlacedT] | None = None

    def begin(self) -> Passage[PlacedT]:
        """A new passage, with what the last demanded one predicts."""
        latest = next((p for p in reversed(self._recent) if p.began_backward), None)
        if latest is not None and latest is not self._forecast_of:
            self._forecast = Forecast(latest)
            self._forecast_of = latest
        passage: Passage[PlacedT] = Passage(self._forecast, self.window_bytes)
        self._recent.append(passage)
        return passage


def complete(order: Sequence[int], length: int) -> list[int]:
    """``order``, then what it leaves out, last saved first."""
    known = set(order)
    return [*order, *(index for index in reversed(range(length)) if index not in known)]


def first_guess(groups: Sequence[int | None]) -> list[int]:
    """The order in which nobody has seen storages demanded: last saved first, group by group."""
    runs: list[list[int]] = []
    for index, group in enumerate(groups):
        if runs and group is not None and group == groups[index - 1]:
            runs[-1].append(index)
        else:
            runs.append([index])
    return [index for run in reversed(runs) for index in run]
