"""RegionRecord: what one iteration shows about checkpoint regions that are off, or on."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from memswap._native import native

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from memswap._C import Iteration, WeakStorage
    from memswap.engine.entry import Entry


class CalledWith(NamedTuple):
    """What a region was called with."""

    unit: str
    inputs: tuple[int, ...]
    """Those of the iteration's storages,"""
    other_nbytes: int
    """and bytes of what nobody saved."""


class RegionRecord:
    """Which units save a storage again, what regions are called with, what recomputing takes."""

    def __init__(self) -> None:
        self.extra: dict[int, int] = {}
        """Mark -> the most bytes that recomputed units had saved again, until the next mark."""
        self._users: dict[int, list[str]] = {}
        #: (unit, input, storage's index once it is saved). A weak storage keeps its key from reuse.
        self._inputs: list[tuple[str, WeakStorage, int, int | None]] = []

    def region(
        self, unit: str, tensors: Iterable[torch.Tensor], iteration: Iteration, least: int
    ) -> None:
        """A region that is off is called with these. Fewer bytes than `least` are not counted."""
        entries = map(iteration.entry, range(iteration.count))
        known = {e.identity.key: e.index for e in entries if e is not None and not e.fetched}
        seen = set()
        for tensor in tensors:
            key = native.storage_key(tensor)
            if not key or key in seen:
                continue
            seen.add(key)
            storage = native.StorageRef(tensor)
            if storage.nbytes >= least:
                weak = native.WeakStorage(storage)
                self._inputs.append((unit, weak, storage.nbytes, known.get(key)))

    def saved(self, entry: Entry) -> None:
        """A storage is saved for the first time."""
        key = entry.identity.key
        for place, (unit, weak, nbytes, index) in enumerate(self._inputs):
            if index is None and weak.key == key:
                self._inputs[place] = (unit, weak, nbytes, entry.index)

    def again(self, entry: Entry, unit: str) -> None:
        """And by another unit."""
        users = self._users.setdefault(entry.index, [])
        if unit not in users:
            users.append(unit)

    def recomputed(self, mark: int, nbytes: int) -> None:
        """So many bytes are there of what recomputed units saved again."""
        self.extra[mark] = max(self.extra.get(mark, 0), nbytes)

    def users(self, index: int, first: str) -> tuple[str, ...]:
        """Units that saved a storage again, besides the first one."""
        return tuple(unit for unit in self._users.get(index, ()) if unit != first)

    def regions(self) -> tuple[CalledWith, ...]:
        """All regions that were off."""
        found = []
        for unit in dict.fromkeys(one[0] for one in self._inputs):
            mine = [one for one in self._inputs if one[0] == unit]
            inputs = tuple(index for _, _, _, index in mine if index is not None)
            others = sum(nbytes for _, _, nbytes, index in mine if index is None)
            found.append(CalledWith(unit, inputs, others))
        return tuple(found)
