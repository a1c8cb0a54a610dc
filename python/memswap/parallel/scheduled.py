"""Scheduled: a unit in its context, and what is noted of the collectives that it takes part in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from memswap.parallel.unit import Unit


class Launch(NamedTuple):
    """One collective, and why it was launched when it was."""

    collective: str
    unit: str
    cause: str


#: Notes a collective: which, of which unit, and its cause.
Note = Callable[[str, Unit, str], None]


@dataclass(eq=False)
class Scheduled:
    """A unit in its context: how long its weights stay, and where it is in the step."""

    unit: Unit
    reshard_after_forward: bool
    residency: str
    unshard_in_backward: bool
    own_memory: bool
    """Not in a slot: its weights stay while other units come and go."""
    anchor: str | None
    anchored: bool = False
    """Whether this forward has passed the anchor."""
    exchanges: int = 0
    """Those that have arrived in this forward."""
    expected_exchanges: int = 0
    """Those of the last one. Without ``anchor``, the next unit is gathered behind the last."""
    depth: int = 0
    """Forward calls, also those of a recompute, that have begun and not ended."""
    left: set[int] = field(default_factory=set)
    """Modules of the unit that this forward has been through, by id."""
    sync: bool = True
    """Whether backward reduces gradients."""
    pinned: bool = False
    """Gathered by unshard(): stays until used or resharded."""
    in_backward: bool = False
    reached: bool = False
    """Whether this backward has computed a gradient of a parameter."""
    open_calls: int = 0
    """Calls of units with frozen parameters whose backward has begun and not ended."""
