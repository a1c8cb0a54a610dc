"""Order: which unit follows which, as learnt. A wrong guess costs time, never a result."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from memswap.parallel.unit import Unit


class Order:
    """Successors of units in one direction, from the last time that each was visited.

    Pairs, and not one list: chunks of a pipeline, branches and repeated layers each keep their own
    neighbours, and an order that changes is relearnt where it changed.
    """

    def __init__(self) -> None:
        self._after: WeakKeyDictionary[Unit, Unit] = WeakKeyDictionary()
        self._before: WeakKeyDictionary[Unit, Unit] = WeakKeyDictionary()
        self._last: Unit | None = None
        self._opener: Unit | None = None

    def visit(self, unit: Unit) -> None:
        """``unit`` is used now."""
        if unit is self._opener:  # a new pass begins: its first unit does not follow the last one
            self._last = None
        if self._last is None:
            self._opener = unit
        elif self._last is not unit:
            self._after[self._last] = unit
            self._before[unit] = self._last
        self._last = unit

    def pause(self) -> None:
        """A pass has ended: what comes next follows nobody."""
        self._last = self._opener = None

    def after(self, unit: Unit) -> Unit | None:
        return self._after.get(unit)

    def before(self, unit: Unit) -> Unit | None:
        return self._before.get(unit)
