"""Replay: when everything in a step happens under a plan, and how many bytes are where.

The replay is native (csrc/engine/replay.h, [Note: The model]) and runs without the interpreter's
lock. Here stands how a `Step`, `Rates` and actions become the columns that it reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from math import floor, inf
from typing import TYPE_CHECKING

from memswap._native import native
from memswap.engine.action import NUMBERS, Action
from memswap.planning.rates import Rates

if TYPE_CHECKING:
    from memswap._C import MachineRates, Replay, StepRecord
    from memswap.planning.step import Step

MOVES = (Action.SWAP, Action.ENCODE_SWAP)
CODED = (Action.ENCODE, Action.ENCODE_SWAP)

#: The byte that stands for what is kept in a column of actions.
KEPT = NUMBERS[Action.KEEP]


def replay(
    step: Step, rates: Rates, actions: Mapping[int, Action], budget_bytes: float = inf
) -> Replay:
    """Replay a step under a plan.

    Args:
        step: one forward and backward.
        rates: of the machine.
        actions: what is done with a storage, by its index; the others are kept.
        budget_bytes: how many resident bytes to stay below, if waiting makes it possible.

    Raises:
        ValueError: the plan copies or encodes, and the machine's rate for that is 0; or it
            recomputes what has no recipe.
    """
    column = encoded(actions, len(step.storages))
    return native.replay(columns_of(step), machine(rates), column, whole(budget_bytes))


def encoded(actions: Mapping[int, Action], count: int) -> bytes:
    """Actions by index as a column of `count` bytes."""
    column = bytearray(count)
    for index, action in actions.items():
        column[index] = NUMBERS[action]
    return bytes(column)


def whole(budget_bytes: float) -> int | None:
    """A number of bytes to stay below; None: there is none."""
    return None if budget_bytes == inf else floor(budget_bytes)


def columns_of(step: Step) -> StepRecord:
    """A step as the native replay reads it."""
    storages = step.storages
    return native.StepRecord(
        nbytes=[one.nbytes for one in storages],
        held_frame_nbytes=[one.held_frame_nbytes for one in storages],
        overflow_nbytes=[one.overflow_nbytes for one in storages],
        held_until=[_mark(one.held_until) for one in storages],
        last_demand=[_mark(one.last_demand) for one in storages],
        gone_after=[_mark(one.gone_after) for one in storages],
        recipe_s=[
            native.NO_RECIPE if one.recipe is None else one.recipe.seconds for one in storages
        ],
        inner_nbytes=[one.inner_nbytes for one in storages],
        recipe_sources=[() if one.recipe is None else one.recipe.sources for one in storages],
        for_recipe=[one.for_recipe for one in storages],
        order=step.order,
        gaps_s=step.gaps_s,
        windows_s=step.windows_s,
        extra_nbytes=step.extra_nbytes,
    )


def _mark(mark: int | None) -> int:
    return native.NEVER if mark is None else mark


def machine(rates: Rates) -> MachineRates:
    """Rates as the native replay reads them."""
    return native.MachineRates(
        **{one.name: getattr(rates, one.name) for one in fields(rates) if one.name != "device"}
    )


@dataclass(frozen=True, slots=True)
class Span:
    """Something that a lane did, in seconds from the begin of the step."""

    lane: str
    name: str
    begin_s: float
    end_s: float


#: The lane of each kind of work, and what it is called of a unit's storage; in the order of
#: `WorkKind` (csrc/engine/replay.h).
LANES = (
    ("compute", "forward {unit}"),
    ("compute", "backward {unit}"),
    ("waits", "wait for room ({unit})"),
    ("waits", "write ({unit})"),
    ("waits", "wait for bytes ({unit})"),
    ("waits", "copying takes processors from {unit}"),
    ("codec", "encode {unit}"),
    ("codec", "decode {unit}"),
    ("recomputing", "{recipe} ({unit} #{index})"),
    ("copies away", "{unit} #{index}"),
    ("copies back", "{unit} #{index}"),
)


@dataclass(frozen=True, slots=True)
class Timetable:
    """What every lane does when, and the bytes that are there: for pictures and traces."""

    resident_bytes: tuple[int, ...]
    """At each mark, the most of it."""
    mark_s: tuple[float, ...]
    """When each mark was over."""
    spans: tuple[Span, ...]


def timetable(
    step: Step, rates: Rates, actions: Mapping[int, Action], budget_bytes: float = inf
) -> Timetable:
    """What `replay` goes through, with its arguments.

    Args:
        step: to go through.
        rates: of the machine.
        actions: of storages, by their places; the others stay.
        budget_bytes: that what starts back stays below.
    """
    column = encoded(actions, len(step.storages))
    found = native.replay(columns_of(step), machine(rates), column, whole(budget_bytes), spans=True)
    return Timetable(
        tuple(found.resident_bytes), tuple(found.mark_s), tuple(_spans(step, found.work))
    )


def _spans(step: Step, work: Iterable[tuple[int, int, float, float]]) -> Iterable[Span]:
    for what, index, begin_s, end_s in work:
        lane, name = LANES[what]
        saved = step.storages[index]
        recipe = "" if saved.recipe is None else saved.recipe.words
        yield Span(lane, name.format(unit=saved.unit, index=index, recipe=recipe), begin_s, end_s)
