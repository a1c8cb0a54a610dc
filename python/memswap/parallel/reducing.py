"""Reducing: gradients on their way, a few units at once, in the order of their launches."""

from __future__ import annotations

from collections import deque

from memswap.parallel.scheduled import Note
from memswap.parallel.unit import Reduction, Unit


class Reducing:
    """The reductions of one backward.

    Args:
        at_most: so many units' gradients may be on their way at once.
        note: is told of each collective.
    """

    def __init__(self, at_most: int, note: Note) -> None:
        self._at_most = at_most
        self._note = note
        self._under_way: deque[Reduction] = deque()

    @property
    def under_way(self) -> tuple[Reduction, ...]:
        """Those that were launched and not waited for."""
        return tuple(self._under_way)

    def launch(self, unit: Unit) -> None:
        """Reduce the unit's gradients; waits for the oldest reduction if too many are under way."""
        self._replicate()
        while len(self._under_way) >= self._at_most:
            self._under_way.popleft().finish()
        self._under_way.append(unit.reduce())
        self._note("reduce-scatter", unit, "gradients complete")

    def finish(self) -> None:
        """Wait for all, and hand out their gradients."""
        self._replicate()
        while self._under_way:
            self._under_way.popleft().finish()

    def abandon(self) -> None:
        """Wait for all, and use none."""
        while self._under_way:
            self._under_way.popleft().ticket.wait()

    def _replicate(self) -> None:
        """Reduce-scatters have had a unit's backward to arrive: let the replicas' part follow."""
        for reduction in self._under_way:
            if reduction.replicate():
                self._note("all-reduce", reduction.unit, "reduce-scatter arrived")
