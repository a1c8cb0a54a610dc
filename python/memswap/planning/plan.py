"""Plan: what the planner decided for each storage, why, and what it should cost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from memswap.engine.action import Action
from memswap.engine.recipes import in_words
from memswap.engine.units import aligned, format_bytes
from memswap.planning.step import Step


@dataclass(frozen=True, slots=True)
class PlannedStorage:
    """What happens to one storage."""

    unit: str
    ordinal: int
    nbytes: int
    dtype: str
    action: Action
    why: str
    away_nbytes: int
    """Bytes that it takes while it is away: of the pool, or of the device for ENCODE."""
    exposed_s: float
    """Predicted seconds that compute waits for it, or gives to its codec or recipe, per step."""
    recipe: str = ""
    """What is run again in its place, where `action` is RECOMPUTE: ``"silu of gate"``."""


@dataclass(frozen=True, slots=True)
class PlannedUnit:
    """What happens to one unit's storages, added up."""

    name: str
    nbytes: int
    moved_nbytes: int
    away_nbytes: int
    """Bytes that what moves takes while it is away."""
    actions: Mapping[Action, int]
    """How many storages get which action."""
    recompute: bool
    """Whether the unit, a checkpoint region, is recomputed instead."""
    why: str
    exposed_s: float

    @property
    def ratio(self) -> float:
        """Bytes that move beside those they take while they are away."""
        return self.moved_nbytes / self.away_nbytes if self.away_nbytes else 1.0


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan for one step. Bytes are the ledger's resident ones; seconds are per step.

    ``str(plan)`` is a table with a line per unit.
    """

    budget: int | str
    """As it was asked for: bytes, a share such as ``"70%"``, or ``"auto"``; ``"none"``: it was not,
    and everything stays (`declined`)."""
    storages: tuple[PlannedStorage, ...]
    units: tuple[PlannedUnit, ...]
    recompute: tuple[str, ...]
    """Units that are recomputed: checkpoint regions that are on."""
    peak_bytes: int
    """Predicted: the most saved bytes on the device at any moment."""
    kept_peak_bytes: int
    """The same if nothing moved and nothing was recomputed."""
    exposed_s: float
    """Predicted: how much longer a step takes."""
    compute_s: float
    """What a step takes if nothing moves and nothing is recomputed."""
    exact: bool
    """Whether all choices were compared, or the most promising ones."""
    step: Step = field(repr=False)
    """What it is a plan for: `storages` are this step's."""
    releases: Mapping[int, tuple[int, ...]] = field(repr=False)
    """After the save of a storage, which sends compute waits for."""
    departures: Mapping[int, tuple[int, ...]] = field(repr=False)
    """After the save of a storage, which frames compute waits for on their way to a pool."""
    fetches: Mapping[int, tuple[int, ...]] = field(repr=False)
    """At the first demand of a storage, which ones start back."""
    budget_bytes: int | None = None
    """What the budget comes to, for all forwards in flight; None for ``"auto"``."""
    in_flight: int = 1
    """Forwards that wait for their backward at a time. Bytes are those of each of them; the budget
    is for all."""
    arena_bytes: int = 0
    """Of `peak_bytes`, what elements that do not fit their frames may take: always there."""
    limit_bytes: int = 0
    """Resident bytes that releases and fetches stay below; `peak_bytes` at least."""
    measured_peak_bytes: int | None = None
    """The highest since the plan is in force; None before its first step."""
    measured_exposed_s: float | None = None
    """Of the last step under this plan that was timed."""
    held: bool = False
    """Whether `measured_exposed_s` was compared with a plain step, over several of both, and is
    what ``"auto"`` allows."""
    declined: str = ""
    """Why everything stays although something could move: what moving it took, as measured."""
    left_out: frozenset[int] = field(default=frozenset(), repr=False)
    """Storages of the step that it was made with which only recipes read that it does not use:
    they are not saved, and no part of `step`."""
    over_budget_bytes: int = 0
    """Bytes by which the budget was exceeded since the plan is in force. Under a share, a step in
    flight beside longer ones has theirs."""

    @property
    def moved_bytes(self) -> int:
        """Bytes of the storages that do not stay as they are."""
        return sum(one.nbytes for one in self.storages if one.action is not Action.KEEP)

    @property
    def away_bytes(self) -> int:
        """Bytes of the pool that the plan takes."""
        swaps = (Action.SWAP, Action.ENCODE_SWAP)
        return sum(one.away_nbytes for one in self.storages if one.action in swaps)

    @property
    def slowdown(self) -> float:
        """Predicted exposed time as a share of the step."""
        return self.exposed_s / self.compute_s if self.compute_s else 0.0

    def __repr__(self) -> str:
        return (
            f"<memswap Plan of {len(self.units)} unit(s), {len(self.storages)} storage(s): peak "
            f"{format_bytes(self.peak_bytes)} instead of {format_bytes(self.kept_peak_bytes)}, "
            f"{self.exposed_s * 1e3:.2f} ms exposed>"
        )

    def __str__(self) -> str:
        header = ("unit", "saved", "moves", "ratio", "action", "exposed", "why")
        rows = [
            (
                unit.name or "(all)",
                format_bytes(unit.nbytes),
                format_bytes(unit.moved_nbytes),
                f"{unit.ratio:.2f}" if unit.away_nbytes else "-",
                describe(unit),
                f"{unit.exposed_s * 1e3:.2f} ms",
                unit.why,
            )
            for unit in self.units
        ]
        lines = aligned((header, *rows), left=(0, 4, 6))
        recomputed = self.recomputed()
        return "\n".join([*lines, "", *([recomputed] if recomputed else []), self.summary()])

    def recomputed(self) -> str:
        """Which operators are run again in place of what they made, in one line; empty: none."""
        sizes: dict[str, list[int]] = {}
        for one in self.storages:
            if one.action is Action.RECOMPUTE:
                sizes.setdefault(one.recipe, []).append(one.nbytes)
        nbytes = sum(map(sum, sizes.values()))
        return f"recomputed, {format_bytes(nbytes)} in all: {in_words(sizes)}" if sizes else ""

    def summary(self) -> str:
        """What is where at the peak, and what it costs, predicted and measured, in a few lines."""
        lines = self._predicted()
        if self.declined:
            lines.append(self.why_declined())
        if self.in_flight > 1:
            lines.append(f"for each of the {self.in_flight} forwards in flight")
        measured = self._measured()
        if self.measured_exposed_s is not None:
            held = " (held, over several steps)" if self.held else ""
            measured.append(f"cost {self.measured_exposed_s * 1e3:.2f} ms{held}")
        if measured:
            lines.append("measured: " + ", ".join(measured))
        return "\n".join(lines)

    def _predicted(self) -> list[str]:
        asked = self.budget if isinstance(self.budget, str) else format_bytes(self.budget)
        share = self.peak_bytes / self.kept_peak_bytes if self.kept_peak_bytes else 1.0
        return [
            f"budget {asked}: peak of saved activations {format_bytes(self.peak_bytes)}, "
            f"{share:.0%} of the {format_bytes(self.kept_peak_bytes)} without memswap",
            self._moves(),
        ]

    def _moves(self) -> str:
        return (
            f"{format_bytes(self.moved_bytes)} move per step, "
            f"{format_bytes(self.away_bytes)} into the pool; predicted cost "
            f"{self.exposed_s * 1e3:.2f} ms of {self.compute_s * 1e3:.2f} ms ({self.slowdown:.1%})"
        )

    def _measured(self) -> list[str]:
        if self.measured_peak_bytes is None:
            return []
        return [f"peak {format_bytes(self.measured_peak_bytes)}{beyond(self.over_budget_bytes)}"]

    def why_declined(self) -> str:
        """`declined` as a line for people; of a plan that has declined."""
        return f"declined, everything stays: {self.declined}"


def beyond(over_bytes: int) -> str:
    """By how much a budget was exceeded, behind what was measured; empty: it was not."""
    return f" ({format_bytes(over_bytes)} beyond the budget)" if over_bytes > 0 else ""


def describe(unit: PlannedUnit) -> str:
    """The actions of a unit: ``"swap 5, keep 2"``."""
    ordered = sorted(unit.actions.items(), key=lambda item: list(Action).index(item[0]))
    moved = [f"{action.value} {count}" for action, count in ordered if action is not Action.KEEP]
    kept = unit.actions.get(Action.KEEP, 0)
    first = ["recompute"] if unit.recompute else []
    return ", ".join([*first, *moved, *([f"keep {kept}"] if kept else [])])


def by_place(events: Iterable[tuple[int, int]]) -> Mapping[int, tuple[int, ...]]:
    """What happens where: pairs of a place and a storage, by the place."""
    storages: dict[int, list[int]] = {}
    for place, storage in events:
        storages.setdefault(place, []).append(storage)
    return MappingProxyType({place: tuple(found) for place, found in storages.items()})
