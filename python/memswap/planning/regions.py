"""Regions: what a step would be like if some of its checkpoint regions were recomputed.

[Note: Regions] A step is recorded with regions off, where every unit saves what it needs. If a unit
is recomputed instead, it keeps what it was called with; what others save as well stays theirs. Its
backward begins with the demand of its inputs and with its forward once more, after which everything
that it saves is there, and goes as backward uses it. `under` makes that step of the recorded one.
It is close enough to choose by: the plan itself is made of a step that was recorded with just these
regions on, so a difference cannot make it wrong.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, combinations, pairwise
from math import inf
from typing import NamedTuple

from memswap.engine.action import Action
from memswap.planning.rates import Rates
from memswap.planning.search import Candidate, Search
from memswap.planning.step import Region, SavedStorage, Step, with_recipe

#: So many regions are compared in all combinations.
EXACT_REGIONS = 4

#: Of more, sets of so many sizes.
SIZES = 8


class Choice(NamedTuple):
    """Regions to recompute, and what the best plan beside them comes to."""

    units: tuple[str, ...]
    found: Candidate
    cost: tuple[int, int, int, int]
    """Bytes too many, nanoseconds of waiting and recomputing, bytes moved, regions."""


def chosen(step: Step, rates: Rates, limit_bytes: float, room_bytes: float = inf) -> Choice:
    """Which regions to recompute to stay within so many bytes, or to come closest.

    Sets that take less time to recompute are looked at first: once a set meets the limit, those
    whose recomputation alone takes longer than all that it costs are out.

    Args:
        step: with what each region saves.
        rates: of the machine.
        limit_bytes: most bytes at the peak.
        room_bytes: most bytes that the pool may hold.
    """
    sets = [(units, under(step, units)) for units in candidates(step)]
    best: Choice | None = None
    for units, derived in sorted(sets, key=lambda one: one[1].compute_s):
        again_ns = round((derived.compute_s - step.compute_s) * 1e9)
        if best is not None and best.cost[0] == 0 and again_ns > best.cost[1]:
            continue
        search = Search(derived, rates, room_bytes=room_bytes)
        found = search.best_within(limit_bytes, thorough=False)
        over, exposed_ns, moved = found.cost
        one = Choice(units, found, (over, exposed_ns + again_ns, moved, len(units)))
        if best is None or one.cost < best.cost:
            best = one
    assert best is not None  # the empty set is always there
    return best


def smallest(step: Step, rates: Rates, room_bytes: float = inf) -> tuple[tuple[str, ...], int]:
    """The regions whose recomputation leaves the smallest peak, and that peak.

    Args:
        step: with what each region saves.
        rates: of the machine.
        room_bytes: most bytes that the pool may hold.
    """
    found = (
        (units, Search(under(step, units), rates, room_bytes=room_bytes))
        for units in candidates(step)
    )
    peaks = [(search.smallest_bytes(), len(units), units) for units, search in found]
    least_bytes, _, units = min(peaks, key=lambda one: one[:2])
    return units, least_bytes


def candidates(step: Step) -> Iterator[tuple[str, ...]]:
    """Sets of regions: all where they are few; else rows of the first ones, and of the last.

    What is saved first has the most time to leave and to come back, so there swapping is cheapest.
    What is saved last is needed at once. Recomputing costs the same anywhere: the rows end before
    the last region as well as begin with the first.
    """
    names = [region.unit for region in step.regions]
    if len(names) <= EXACT_REGIONS:
        for count in range(len(names) + 1):
            yield from combinations(names, count)
        return
    yield ()
    counts = sorted({max(len(names) * size // SIZES, 1) for size in range(1, SIZES + 1)})
    for count in counts:
        yield tuple(names[:count])
        if count < len(names):
            yield tuple(names[-count - 1 : -1])


def under(step: Step, units: Sequence[str]) -> Step:
    """The step if these regions were recomputed."""
    if not units:
        return replace(step, regions=())
    return _Under(step, units).step()


class _Under:
    """One step under one set of recomputed units."""

    def __init__(self, step: Step, units: Sequence[str]) -> None:
        self.full = step
        self.units = set(units)
        self.regions = {one.unit: one for one in step.regions if one.unit in self.units}
        self.saves = len(step.storages)
        self.times = list(accumulate(step.gaps_s))
        first_demand = {i: self.saves + place for place, i in enumerate(step.order)}
        self.begins: dict[str, int] = {}  # unit -> mark of its first save
        self.saved_by: dict[str, list[int]] = {}  # unit -> storages that it saves
        self.callers: dict[int, list[str]] = {}  # storage -> regions that are called with it
        self.backwards: dict[str, tuple[float, float]] = {}  # unit -> its backward
        for region in self.regions.values():
            for index in region.inputs:
                self.callers.setdefault(index, []).append(region.unit)
        for index, storage in enumerate(step.storages):
            for unit in dict.fromkeys((storage.unit, *storage.users)):
                self.begins.setdefault(unit, index)
                self.saved_by.setdefault(unit, []).append(index)
            mark, last = first_demand.get(index), storage.last_demand
            if mark is not None and last is not None and storage.unit in self.units:
                begin, end = self.backwards.get(storage.unit, (self.times[mark], 0.0))
                self.backwards[storage.unit] = (
                    min(begin, self.times[mark]),
                    max(end, self.times[last]),
                )
        self.first_demand = first_demand
        forward_s = step.forward_s()
        again = sorted((begin, forward_s[unit]) for unit, (begin, _) in self.backwards.items())
        self.again_begins = [begin for begin, _ in again]
        #: What the first so many of them take.
        self.again_s = [0.0, *accumulate(seconds for _, seconds in again)]

    def step(self) -> Step:
        """Marks get the times that they had, and then the recomputations between them."""
        full = self.full
        saves: list[tuple[float, int, SavedStorage, int | None]] = []
        for index, storage in enumerate(full.storages):
            mark = self._place(index, storage)
            if mark is not None:
                saves.append((self.times[mark], mark, storage, index))
        for region in self.regions.values():
            if region.other_nbytes:
                begin = self.begins.get(region.unit, 0)
                saves.append((self.times[begin], begin, self._other(region), None))
        saves.sort(key=lambda one: one[:2])
        demands = []
        for place, (_, _, storage, origin) in enumerate(saves):
            moment = self._demand_s(origin, storage)
            if moment is not None:
                rank = -place if origin is None else self.first_demand.get(origin, 0)
                demands.append((moment, rank, place))
        demands.sort()
        marks = {place: len(saves) + n for n, (_, _, place) in enumerate(demands)}
        places = {origin: place for place, (*_, origin) in enumerate(saves) if origin is not None}
        moments = [*(one[0] for one in saves), *(one[0] for one in demands)]
        return replace(
            full,
            storages=tuple(
                with_recipe(
                    self._storage(storage, place, index, moments, len(saves), marks.get(place)),
                    places,
                )
                for place, (_, _, storage, index) in enumerate(saves)
            ),
            order=tuple(place for _, _, place in demands),
            gaps_s=self._gaps(moments),
            tail_s=full.compute_s + self.again_s[-1] - self._shifted(moments[-1]) if moments else 0,
            regions=(),
            extra_nbytes=self._extra(moments, len(saves)),
            windows_s=self._windows(moments),
        )

    def _windows(self, moments: list[float]) -> tuple[float, ...]:
        """Windows lie where they did: in the gap before the first mark that is no earlier."""
        if not self.full.windows_s:
            return ()
        seconds = [0.0] * len(moments)
        for moment, window_s in zip(self.times, self.full.windows_s, strict=True):
            gap = bisect_left(moments, moment)
            if gap < len(seconds):
                seconds[gap] += window_s
        return tuple(seconds)

    def _place(self, index: int, storage: SavedStorage) -> int | None:
        """At which mark of the full step a storage is saved now; None: not any more."""
        inputs = self.callers.get(index, [])
        savers = [u for u in (storage.unit, *storage.users) if u not in self.units or u in inputs]
        savers += [unit for unit in inputs if unit not in savers]
        if not savers:
            return None
        if storage.unit in savers:
            return index
        return max(index, min(self.begins.get(unit, index) for unit in savers))

    def _other(self, region: Region) -> SavedStorage:
        """Inputs that nobody saves otherwise. Nothing is known of their frames."""
        storages = self.full.storages
        mine = [i for i in self.saved_by.get(region.unit, ()) if storages[i].unit == region.unit]
        swaps = any(Action.SWAP in one.actions for one in storages)
        return SavedStorage(
            region.unit,
            0,
            region.other_nbytes,
            "torch.uint8",
            actions=(Action.SWAP,) if swaps else (),
            held_until=mine[-1] + 1 if mine else None,  # the caller has them while the unit runs
        )

    def _demand_s(self, index: int | None, storage: SavedStorage) -> float | None:
        """When a storage is demanded first."""
        if index is None:
            return self.backwards.get(storage.unit, (None, None))[0]
        mark = self.first_demand.get(index)
        starts = [
            self.backwards[unit][0]
            for unit in self.callers.get(index, ())
            if unit in self.backwards
        ]
        if mark is not None and ({storage.unit, *storage.users} - self.units or not starts):
            starts.append(self.times[mark])
        return min(starts, default=None)

    def _storage(
        self,
        storage: SavedStorage,
        place: int,
        index: int | None,
        moments: list[float],
        saves: int,
        mark: int | None,
    ) -> SavedStorage:
        """With the marks of the new step, of which `mark` is its first demand."""
        last = mark
        if mark is not None:
            ends = [self.backwards[storage.unit][1]] if storage.unit in self.backwards else []
            if storage.last_demand is not None:
                ends.append(self.times[storage.last_demand])
            last = max(mark, bisect_right(moments, max(ends), saves) - 1) if ends else mark
        kept = None
        if mark is not None and index in self.callers:
            kept = len(moments) - 1  # torch's frame of a region has its inputs to the end
        elif mark is not None and storage.kept_until is not None:
            kept = max(mark, bisect_right(moments, self.times[storage.kept_until], saves) - 1)
        held = storage.held_until
        if held is not None and held < len(self.times):
            held = max(bisect_left(moments, self.times[held]), place + 1)
        elif held is not None:
            held = saves
        if held is not None:
            held = min(held, len(moments))
        return replace(storage, last_demand=last, kept_until=kept, held_until=held)

    def _shifted(self, moment: float) -> float:
        """A moment of the full step, later by what was recomputed before it."""
        return moment + self.again_s[bisect_left(self.again_begins, moment)]

    def _gaps(self, moments: list[float]) -> tuple[float, ...]:
        shifted = [0.0, *map(self._shifted, moments)]
        return tuple(max(after - before, 0.0) for before, after in pairwise(shifted))

    def _extra(self, moments: list[float], saves: int) -> tuple[int, ...]:
        """From each mark to the next: what is there of what units saved again."""
        changes = [0] * (len(moments) + 1)
        for unit, (begin, _) in self.backwards.items():
            first = max(bisect_right(moments, begin, saves) - 1, 0)
            for index in self.saved_by[unit]:
                storage = self.full.storages[index]
                last = storage.last_demand
                kept = index in self.regions[unit].inputs or self._place(index, storage) is not None
                if kept or last is None:
                    continue
                after = bisect_right(moments, self.times[last], saves)
                changes[first] += storage.nbytes
                changes[max(after, first + 1)] -= storage.nbytes
        again = tuple(accumulate(changes[:-1]))
        if not self.full.extra_nbytes:
            return again
        # What else was there, at the last mark of the full step that is no later.
        places = (max(bisect_right(self.times, moment) - 1, 0) for moment in moments)
        beside = (self.full.extra_nbytes[place] for place in places)
        return tuple(map(sum, zip(again, beside, strict=True)))
