"""Accounting: what was offered, what was done with it and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from memswap._native import native
from memswap._warn import warn
from memswap.engine.units import format_bytes


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


class Ledger(native.Ledger):
    """The counters behind :class:`Stats`. Its owner serialises the calls.

    The numbers are native (csrc/engine/residence.h): entries count by themselves.
    """

    def __init__(self) -> None:
        self._told: set[str] = set()

    def tell_once(self, reason: str, message: str) -> None:
        """Warn about something that costs memory but not correctness, once per reason."""
        if reason not in self._told:
            self._told.add(reason)
            warn(f"memswap: {message}")

    def __str__(self) -> str:
        moved, resident, away = self.moved_bytes, self.resident_bytes, self.away_bytes
        return (
            f"{format_bytes(moved)} moved, {format_bytes(resident)} resident, "
            f"{format_bytes(away)} away"
        )

    def snapshot(self) -> Stats:
        nbytes = self.kept_bytes
        kept = {
            reason: Count(tensors, nbytes[reason])
            for reason, tensors in sorted(self.kept_tensors.items())
        }
        return Stats(
            offered_tensors=self.offered_tensors,
            offered_bytes=self.offered_bytes,
            deduplicated_tensors=self.deduplicated_tensors,
            deduplicated_bytes=self.deduplicated_bytes,
            kept=MappingProxyType(kept),
            moved_storages=self.moved_storages,
            moved_bytes=self.moved_bytes,
            encoded_storages=self.encoded_storages,
            encoded_bytes=self.encoded_bytes,
            frame_bytes=self.frame_bytes,
            returned_storages=self.returned_storages,
            returned_bytes=self.returned_bytes,
            freed_bytes=self.freed_bytes,
            stalls=self.stalls,
            exposed_wait_s=self.exposed_wait_s,
            resident_bytes=self.resident_bytes,
            peak_resident_bytes=self.peak_resident_bytes,
            away_bytes=self.away_bytes,
            peak_away_bytes=self.peak_away_bytes,
        )
