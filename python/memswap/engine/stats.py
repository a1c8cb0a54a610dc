"""Accounting: what was offered, what was done with it and why."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from memswap.engine.units import format_bytes

if TYPE_CHECKING:
    from memswap._C import Ledger, Recipes


@dataclass(frozen=True, slots=True)
class Count:
    """A number of tensors and their bytes."""

    tensors: int = 0
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class Stats:
    """A snapshot of what memswap did since it was set up or since ``reset_stats``.

    Bytes are bytes of whole storages, except ``offered_bytes`` and ``deduplicated_bytes``, which
    count tensors as autograd offered them, and ``frame_bytes``. "Resident" means on the device:
    storages, and the frames of those that were encoded there. "Away" is what pools hold.
    """

    offered_tensors: int = 0
    offered_bytes: int = 0
    deduplicated_tensors: int = 0
    deduplicated_bytes: int = 0
    kept: Mapping[str, Count] = field(default_factory=lambda: MappingProxyType({}))
    """Reason -> tensors that stayed and the bytes of their storages. docs/choosing.md explains each
    reason ("What stays, and why")."""
    moved_storages: int = 0
    """Storages that left, in whatever form."""
    moved_bytes: int = 0
    encoded_storages: int = 0
    """Those of them that were encoded, as far as the sizes of their frames are known."""
    encoded_bytes: int = 0
    """Bytes of these storages as they were."""
    frame_bytes: int = 0
    """Bytes of these storages' frames."""
    recipe_storages: int = 0
    """Those of the moved storages that left as recipes: their operators are run again."""
    recipe_bytes: int = 0
    """Bytes of these storages as they were."""
    recipe_runs: int = 0
    """Times that a recipe was run. One run serves all results of an operator that are away."""
    returned_storages: int = 0
    returned_bytes: int = 0
    freed_bytes: int = 0
    """Bytes of moved storages that really went away, because nobody else held them."""
    stalls: int = 0
    """Returns that backward demanded before they had been prefetched."""
    exposed_wait_s: float = 0.0
    """Seconds for which the host was blocked until demanded bytes were there."""
    resident_bytes: int = 0
    """On the device now."""
    peak_resident_bytes: int = 0
    """Most at one time: what a budget bounds."""
    away_bytes: int = 0
    """In pools now."""
    peak_away_bytes: int = 0

    @property
    def ratio(self) -> float:
        """Bytes that were encoded beside those of their frames; 1 where nothing was."""
        return self.encoded_bytes / self.frame_bytes if self.frame_bytes else 1.0


@dataclass(frozen=True, slots=True)
class WindowStats:
    """What became of the work that waited for windows (csrc/engine/window_queue.h).

    Bytes are bytes of storages.
    """

    windows: int = 0
    """Windows that were opened."""
    window_s: float = 0.0
    """Seconds that they promised."""
    encoded_in_windows: int = 0
    encoded_bytes: int = 0
    started_at_bound: int = 0
    """Encodes started outside windows because too many bytes waited."""
    started_at_end: int = 0
    """Encodes started at the end of a forward."""
    kept_storages: int = 0
    """Storages whose encode had not been started when backward began, or that found no room."""
    kept_bytes: int = 0
    decoded_in_windows: int = 0
    decoded_ahead: int = 0
    """Decodes started outside windows because backward was close."""
    pending_bytes: int = 0
    """Bytes that wait now."""


def snapshot(ledger: Ledger, recipes: Recipes | None = None) -> Stats:
    """What an engine has counted by now (csrc/engine/ledger.h), and its recipes, if it has some."""
    kept = {reason: Count(*count) for reason, count in sorted(ledger.kept.items())}
    runs = 0 if recipes is None else recipes.runs
    return Stats(kept=MappingProxyType(kept), **vars(ledger.counters), recipe_runs=runs)


def added(snapshots: Iterable[Stats]) -> Stats:
    """Several statistics as one, peaks as well."""
    first, *others = snapshots
    if not others:
        return first
    several = (first, *others)
    kept: dict[str, Count] = {}
    for stats in several:
        for reason, count in stats.kept.items():
            so_far = kept.get(reason, Count())
            kept[reason] = Count(so_far.tensors + count.tensors, so_far.bytes + count.bytes)
    numbers: dict[str, Any] = {
        one.name: sum(getattr(stats, one.name) for stats in several)
        for one in fields(Stats)
        if one.name != "kept"
    }
    return Stats(kept=MappingProxyType(dict(sorted(kept.items()))), **numbers)


def describe(counted: Stats) -> str:
    """The same in one line."""
    moved, resident, away = counted.moved_bytes, counted.resident_bytes, counted.away_bytes
    return (
        f"{format_bytes(moved)} moved, {format_bytes(resident)} resident, {format_bytes(away)} away"
    )
