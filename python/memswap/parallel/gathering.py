"""Gathering: how a unit's weights come, and go."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from memswap.parallel.scheduled import Note, Scheduled
from memswap.parallel.slots import SlotPool
from memswap.parallel.unit import State, Unit

#: Does something before a unit is gathered; what it returns, if anything, is waited before.
Prerequisite = Callable[[str], Any]


class Gathering:
    """Weights of scheduled units, in slots or in memory of their own.

    Args:
        pool: where gathered weights live.
        scheduled: all units that share it; whose it is adds to it.
        note: is told of each all-gather.
        warn: is told of a unit that found no slot, and the message.
    """

    def __init__(
        self,
        pool: SlotPool,
        scheduled: Mapping[Unit, Scheduled],
        note: Note,
        warn: Callable[[Unit, str], None],
    ) -> None:
        self._pool = pool
        self._scheduled = scheduled
        self._note = note
        self._warn = warn
        self._prerequisites: list[tuple[Prerequisite, nn.Module | None]] = []

    def after(self, prerequisite: Prerequisite, of: nn.Module | None) -> None:
        """Gather only after ``prerequisite(name)``; ``of`` a module: for that module's unit."""
        self._prerequisites.append((prerequisite, of))

    def fetch(self, one: Scheduled, ahead_of: Unit | None = None) -> bool:
        """Launch the unit's all-gather; ahead of its use only if a slot is free."""
        unit = one.unit
        if unit.state is not State.ABSENT:
            return True
        lease = None
        if not one.own_memory:
            lease = self._pool.take(unit.name, unit.nbytes, unit.device)
            if lease is None and ahead_of is not None:
                return False
            if lease is None and self._drop_unused():
                lease = self._pool.take(unit.name, unit.nbytes, unit.device)
            if lease is None:
                self._pool.stats.overflows += 1
                self._warn(
                    unit, "all slots are in use and unit %r needs one; it gets memory of its own"
                )
        if lease is None:
            lease = self._pool.allocate(unit.name, unit.nbytes, unit.device)
        self._run_prerequisites(unit)
        unit.fetch(lease)
        cause = "needed" if ahead_of is None else f"prefetched by {ahead_of.name}"
        self._note("all-gather", unit, cause)
        return True

    def use(self, one: Scheduled, *, refresh: bool) -> None:
        """Have the unit's weights ready; ``refresh``: those of its shards as they are now."""
        unit = one.unit
        if refresh and unit.state is not State.ABSENT and unit.stale:
            self._run_prerequisites(unit)
            unit.fetch_again()
            self._note("all-gather", unit, "shards were edited")
        self.fetch(one)
        unit.ready()

    def release(self, one: Scheduled) -> None:
        """Drop the unit's weights."""
        one.pinned = False
        one.unit.hide()
        lease = one.unit.drop()
        if lease is not None:
            self._pool.release(lease)

    def _drop_unused(self) -> bool:
        """Free the slot of a unit that was prefetched and not used: the guess was wrong."""
        for one in self._scheduled.values():
            unit = one.unit
            idle = unit.state is not State.ABSENT and one.depth == 0 and not one.pinned
            if idle and not one.own_memory and not one.in_backward:
                self.release(one)
                return True
        return False

    def _run_prerequisites(self, unit: Unit) -> None:
        for prerequisite, module in self._prerequisites:
            if module is not None and module not in unit.modules:
                continue
            awaited = prerequisite(unit.name)
            if awaited is None:
                continue
            if not hasattr(awaited, "wait"):
                raise TypeError(
                    f"before_fetch(): the callback returned {type(awaited).__name__} for unit "
                    f"{unit.name!r}; expected None or something with wait()"
                )
            awaited.wait()
