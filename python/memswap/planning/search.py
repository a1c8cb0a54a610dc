"""Search: the cheapest choice of actions that stays within a number of bytes.

[Note: How a plan is found]
Whether a plan fits and what it costs is what its replay says (csrc/engine/replay.h); the search
only chooses among plans. Few choices are compared all (`_choices`). Many are narrowed down first:
what backward demands last has the most time to leave and to come back, and frees its bytes for
longest, so the candidates are the first k storages in that order under one action, for the smallest
k that meets the limit, or those that free most bytes per second of work; then two actions side by
side; then single changes, for as long as they help. A storage whose room nobody needed is kept: so
what is demanded first, and what does not live at the peak, stays.

The same step, rates and limit give the same choice on every machine: nothing depends on an address,
a hash or a clock, ties go to the earlier storage, and times are compared in whole nanoseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, product
from math import inf, prod
from typing import TYPE_CHECKING

from memswap._native import native
from memswap.engine.action import ACTIONS, Action
from memswap.planning.replay import KEPT, MOVES, columns_of, encoded, machine, whole

if TYPE_CHECKING:
    from memswap._C import Replay
    from memswap.planning.rates import Rates
    from memswap.planning.step import SavedStorage, Step

#: So many combinations of actions are compared one by one.
EXACT_CHOICES = 1024

#: Replays that single changes may take, in marks: of a plan, and of the smallest peak.
LOCAL_MARKS = 80_000

#: What shrinks by this factor is encoded before anything else moves.
MUCH = 4

Choice = Mapping[int, Action]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A choice, and what its replay says of it."""

    actions: bytes
    """For each storage the code of its action (replay.py)."""
    found: Replay
    limit_bytes: float
    unplaced_bytes: int = 0
    """Bytes for which the pool has no room."""

    @property
    def choice(self) -> Choice:
        """What does not stay: storage -> action."""
        return {i: ACTIONS[code] for i, code in enumerate(self.actions) if code}

    @property
    def over_bytes(self) -> int:
        """Bytes beyond the limit, and those without a place."""
        return max(int(self.found.peak_bytes - self.limit_bytes), 0) + self.unplaced_bytes

    @property
    def cost(self) -> tuple[int, int, int]:
        """Bytes too many, nanoseconds exposed, bytes moved: less is better, in this order."""
        return self.over_bytes, round(self.found.total_exposed_s * 1e9), self.found.moved_bytes


class Search:
    """One step on one machine.

    Args:
        step: to plan.
        rates: of the machine.
        exact_choices: as many combinations of actions are compared one by one.
        room_bytes: most bytes that may be in the pool at a time, which is at the end of the
            forward.
    """

    def __init__(
        self,
        step: Step,
        rates: Rates,
        exact_choices: int = EXACT_CHOICES,
        room_bytes: float = inf,
    ) -> None:
        self.step, self.rates, self.room_bytes = step, rates, room_bytes
        self._record, self._machine = columns_of(step), machine(rates)
        #: What this machine can do, what is tried first standing first.
        able = (
            (Action.SWAP, rates.copies),
            (Action.ENCODE_SWAP, rates.copies and rates.encodes),
            (Action.ENCODE, rates.encodes),
            (Action.RECOMPUTE, True),
        )
        self._able = tuple(action for action, can in able if can)
        self.menus = {index: self._menu(one) for index, one in enumerate(step.storages)}
        place = {index: rank for rank, index in enumerate(step.order)}
        self._first_demand = {i: len(step.storages) + rank for i, rank in place.items()}
        #: Storages that may move, what is demanded last first.
        self.movable = sorted(
            (index for index, menu in self.menus.items() if menu),
            key=lambda index: (-place.get(index, len(place)), index),
        )
        self._most_replays = max(LOCAL_MARKS // max(len(step.gaps_s), 1), 8)
        self.exact = prod(len(self.menus[i]) + 1 for i in self.movable) <= exact_choices

    def _menu(self, storage: SavedStorage) -> tuple[Action, ...]:
        """What may be done with a storage, on this machine."""
        if not storage.movable:
            return ()
        fits = {Action.SWAP: True, Action.RECOMPUTE: storage.recipe is not None}
        shrinks = 0 < storage.held_frame_nbytes < storage.nbytes
        possible = tuple(
            action
            for action in self._able
            if action in storage.actions and fits.get(action, shrinks)
        )
        if not possible and Action.ENCODE_SWAP in storage.actions and self.rates.copies:
            return (Action.SWAP,)  # what does not shrink goes as it is
        return possible

    # --- public -----------------------------------------------------------------------------------

    def best_within(self, limit_bytes: float, thorough: bool = True) -> Candidate:
        """The cheapest plan that stays within so many bytes, or the one that comes closest.

        `thorough`: whether to try single changes as well.
        """
        kept = self.candidate({}, limit_bytes)
        if not kept.over_bytes:
            return kept
        candidates = [kept, self.candidate(self._least.choice, limit_bytes)]
        if self.exact:
            candidates += (self.candidate(one, limit_bytes) for one in self._choices())
            return least(candidates)
        candidates += self._prefixes(limit_bytes)
        best = least(candidates)
        return self._changed(best) if thorough and not best.over_bytes else best

    def smallest_bytes(self) -> int:
        """The smallest limit for which there is a plan; of a step of many storages, for which one
        was found."""
        return self._least.found.peak_bytes

    def kept(self, limit_bytes: float = 0) -> Candidate:
        """Nothing moves."""
        return self.candidate({}, limit_bytes)

    def candidate(self, choice: Choice, limit_bytes: float) -> Candidate:
        """What a choice comes to. Storages that move although nobody needs their room are kept."""
        return self._tried(encoded(choice, len(self.step.storages)), limit_bytes)

    def _tried(self, actions: bytes, limit_bytes: float) -> Candidate:
        plan = native.replay_without_idle(self._record, self._machine, actions, whole(limit_bytes))
        return self._candidate(plan.actions, plan.found, limit_bytes)

    def _candidate(self, actions: bytes, found: Replay, limit_bytes: float) -> Candidate:
        unplaced = int(max(found.pooled_bytes - self.room_bytes, 0))
        return Candidate(actions, found, limit_bytes, unplaced)

    # --- the ways of searching --------------------------------------------------------------------

    def _choices(self) -> Iterator[Choice]:
        """All there are."""
        menus = [(Action.KEEP, *self.menus[index]) for index in self.movable]
        for actions in product(*menus):
            pairs = zip(self.movable, actions, strict=True)
            yield {index: action for index, action in pairs if action is not Action.KEEP}

    def _prefixes(self, limit: float) -> Iterator[Candidate]:
        """The first k storages under one action, or under two, for the smallest k that fits."""
        movable = self.movable
        offered = [a for a in Action if any(a in self.menus[index] for index in movable)]
        rows = [self._row(movable, action) for action in offered]
        if Action.ENCODE in offered:
            # Masks, indices and constants: bytes of memory for next to no codec time.
            shrinking = [i for i in self._by_yield(movable) if self._shrinks_much(i)]
            others = [index for index in movable if index not in shrinking]
            encoded = self._row(shrinking, Action.ENCODE)
            rows += [encoded + self._row(others, action) for action in offered if shrinking]
            rows.append(self._row(self._by_yield(movable), Action.ENCODE))
        if Action.RECOMPUTE in offered:
            rows += self._cheapest_rows(movable)
        found = [self._shortest(limit, row) for row in rows]
        yield from found
        if not found or min(one.cost[:2] for one in found) == (0, 0):
            return
        for first in offered:
            for then in offered:
                for eighths in (2, 4, 6) if first is not then else ():
                    border = len(movable) * eighths // 8
                    row = self._row(movable[:border], first) + self._row(movable[border:], then)
                    yield self._shortest(limit, row)

    def _row(self, indices: Sequence[int], action: Action) -> list[tuple[int, Action]]:
        """Storages with an action each: this one, where it may be and the pool has room."""
        if self.room_bytes == inf:
            return [
                (index, action if action in menu else menu[0])
                for index in indices
                if (menu := self.menus[index])
            ]
        row, room = [], self.room_bytes
        for index in indices:
            menu = self.menus[index]
            for one in (action, *menu):
                if one not in menu:
                    continue
                away = self.step.storages[index].away_nbytes(one) if one in MOVES else 0
                if away <= room:
                    room -= away
                    row.append((index, one))
                    break
        return row

    def _by_yield(self, movable: Sequence[int]) -> list[int]:
        """What frees most of the device per second of codec time first."""
        encodable = [index for index in movable if Action.ENCODE in self.menus[index]]
        return sorted(encodable, key=lambda index: -self._freed_per_s(index, Action.ENCODE))

    def _cheapest_rows(self, movable: Sequence[int]) -> Iterator[list[tuple[int, Action]]]:
        """Storages by what they free per second of their cheapest action; and recipes before all.

        Recipes free all bytes of a storage, take no link and no codec.
        """
        chosen: list[tuple[float, int, Action]] = []
        for index in movable:
            rated = [
                (-self._freed_per_s(index, action), rank, action)
                for rank, action in enumerate(self.menus[index])
                if action in (Action.ENCODE, Action.RECOMPUTE)
            ]
            if rated:
                rate, _, best = min(rated)
                chosen.append((rate, index, best))
        cheapest = [(index, action) for _, index, action in sorted(chosen, key=lambda one: one[:2])]
        yield cheapest
        recipes: list[tuple[int, Action]] = [
            (index, Action.RECOMPUTE)
            for index, _ in cheapest
            if Action.RECOMPUTE in self.menus[index]
        ]
        known = {index for index, _ in recipes}
        others = [index for index in movable if index not in known]
        for action in (Action.SWAP, Action.ENCODE_SWAP, Action.ENCODE):
            if any(action in self.menus[index] for index in others):
                yield recipes + self._row(others, action)

    def _freed_per_s(self, index: int, action: Action) -> float:
        """Bytes of the device that an action frees for each second that it takes."""
        saved = self.step.storages[index]
        if action is Action.RECOMPUTE:
            assert saved.recipe is not None  # or it would not be on the menu
            sources = (self.step.storages[source] for source in saved.recipe.sources)
            kept = sum(one.nbytes for one in sources if one.for_recipe)
            return (saved.nbytes - kept) / max(saved.recipe.seconds, 1e-9)
        seconds = self.rates.encode_s(saved.nbytes) + self.rates.decode_s(saved.nbytes)
        return (saved.nbytes - saved.held_frame_nbytes) / seconds

    def _shrinks_much(self, index: int) -> bool:
        saved = self.step.storages[index]
        return MUCH * saved.held_frame_nbytes <= saved.nbytes

    def _shortest(self, limit: float, row: Sequence[tuple[int, Action]]) -> Candidate:
        """The fewest of a row's first storages that stay within the limit."""
        everything = encoded(dict(row), len(self.step.storages))
        best = self._tried(everything, limit)
        low, high = 0, len(row)
        while low < high:
            middle = (low + high) // 2
            actions = bytearray(everything)
            for index, _ in row[middle:]:
                actions[index] = KEPT
            tried = self._tried(bytes(actions), limit)
            if tried.over_bytes:
                low = middle + 1
            else:
                high, best = middle, tried
        return best

    def _changed(self, best: Candidate) -> Candidate:
        """Single changes, and exchanges of one storage for the next, for as long as they help."""
        replays = self._most_replays
        improved = True
        while improved and replays > 0:
            improved = False
            for changed in self._neighbours(best):
                replays -= 1
                tried = self.candidate(changed, best.limit_bytes)
                if tried.cost < best.cost:
                    best, improved = tried, True
                    break
                if replays <= 0:
                    break
        return best

    def _neighbours(self, best: Candidate) -> Iterator[Choice]:
        exposed, choice = best.found.exposed_s, best.choice
        moved = sorted(choice, key=lambda index: (-exposed[index], index))
        kept = [index for index in self.movable if index not in choice]
        for index in moved:
            yield from self._changed_at((index,), choice)
            without = {i: action for i, action in choice.items() if i != index}
            for other in kept[:2]:
                for action in self.menus[other]:
                    yield {**without, other: action}
        yield from self._changed_at(kept, choice)

    @cached_property
    def _least(self) -> Candidate:
        """The smallest peak that was found: all goes as soon as it can, and returns when asked."""
        if self.exact:
            return min(map(self._forced, self._choices()), key=size_of)
        offered = [a for a in Action if any(a in self.menus[index] for index in self.movable)]
        rows = [dict(self._row(self.movable, action)) for action in offered]
        found, replays = [], self._most_replays
        for start in sorted(map(self._forced, ({}, *rows)), key=size_of):
            best, replays = self._narrowed(start, replays)
            found.append(best)
        return min(found, key=size_of)

    def _narrowed(self, best: Candidate, replays: int) -> tuple[Candidate, int]:
        """Single changes for as long as they make the peak smaller, or rarer.

        Args:
            replays: so many at most.

        Returns:
            The best candidate, and how many replays are left.
        """
        improved = True
        while improved:
            improved = False
            peaks = best.found.resident_bytes
            mark = peaks.index(max(peaks))
            there = [index for index in self.movable if self._is_there(index, mark)]
            # A frame beside its storage may be what makes the peak, and so may what a recipe reads,
            # or what was to be read later.
            for indices in (there, [index for index in self.movable if index not in there]):
                changed = list(islice(self._changed_at(indices, best.choice), replays))
                replays -= len(changed)
                tried = min(map(self._forced, changed), key=size_of, default=best)
                if size_of(tried) < size_of(best):
                    best, improved = tried, True
                    break
        return best, replays

    def _changed_at(self, indices: Iterable[int], choice: Choice) -> Iterator[Choice]:
        """The same with another action for one of these storages."""
        for index in indices:
            without = {i: action for i, action in choice.items() if i != index}
            if index in choice:
                yield without
            for action in self.menus[index]:
                if action is not choice.get(index):
                    yield {**without, index: action}

    def _is_there(self, index: int, mark: int) -> bool:
        """Whether backward or the save itself has a storage's bytes at a mark."""
        last = self.step.storages[index].last_demand
        if mark == index or last is None:
            return mark == index
        return self._first_demand[index] <= mark <= last

    def _forced(self, choice: Choice) -> Candidate:
        actions = encoded(choice, len(self.step.storages))
        return self._candidate(actions, native.replay(self._record, self._machine, actions, 0), 0)


def size_of(candidate: Candidate) -> tuple[int, int, int]:
    """Bytes without a place, the peak, and at how many marks it is: less is smaller."""
    peaks = candidate.found.resident_bytes
    peak = candidate.found.peak_bytes
    return candidate.unplaced_bytes, peak, peaks.count(peak)


def least(candidates: Iterable[Candidate]) -> Candidate:
    """The cheapest; of equal ones the one with the earlier storages."""
    return min(candidates, key=lambda one: one.cost)
