"""Followed: a plan as an engine follows it, without asking.

Its native form is data: storage by storage what it is expected to be, what happens to it, what is
waited for after its save and after its demand, and what starts back at its first demand
(csrc/engine/plan.h). Where a storage is another one, the engine asks its director.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import torch

from memswap._native import native
from memswap.engine.action import ENCODE_SWAP
from memswap.planning.replay import CODED

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from memswap._C import Plan as NativePlan
    from memswap.engine.transfers import Transfers
    from memswap.planning.observed import Key
    from memswap.planning.plan import Plan, PlannedStorage


#: Unit, ordinal and dtype of a storage.
Place: TypeAlias = tuple[str, int, str]


class Followed:
    """A plan that is followed: as engines follow it, and by what its storages are called.

    Args:
        plan: what happens to each storage.
        keys: of its storages.
        transfers: of the device that it is for.
        least_bytes: storages of fewer stay.
    """

    def __init__(
        self, plan: Plan, keys: tuple[Key, ...], transfers: Transfers, least_bytes: int
    ) -> None:
        self.plan = plan
        self.transfers = transfers
        #: What it has for the storage that comes first, if anything.
        self.first = keys[0] if keys else None
        self.native: NativePlan = native_plan(plan, keys, transfers, least_bytes)
        self._at_place: Mapping[Place, PlannedStorage] = {
            (one.unit, one.ordinal, one.dtype): one for one in plan.storages
        }

    def at_place(self, key: Key) -> PlannedStorage | None:
        """What the plan has for the storage of this name, wherever it comes in an iteration."""
        return self._at_place.get((key.unit, key.ordinal, str(key.dtype)))


def native_plan(
    plan: Plan, keys: Sequence[Key], transfers: Transfers, least_bytes: int
) -> NativePlan:
    """What an engine does under a plan.

    Args:
        plan: with a storage for each of `keys`.
        keys: what the storages are known by; others than the plan's: it is asked about each.
        transfers: of the device that the plan is for.
        least_bytes: storages of fewer stay, and have no place in the plan.
    """
    known = len(keys) == len(plan.storages)
    places = []
    for index, planned in enumerate(plan.storages):
        dtype = keys[index].dtype if known else torch.uint8
        places.append(
            (
                planned.unit,
                planned.ordinal,
                planned.nbytes,
                dtype,
                planned.action if known and keys[index].nbytes == planned.nbytes else None,
                plan.releases.get(index, ()),
                plan.departures.get(index, ()),
                plan.fetches.get(index, ()),
                departs(planned),
                frame_nbytes(planned),
                plan.step.storages[index].for_recipe,
            )
        )
    return native.Plan(transfers.device, least_bytes, places)


def departs(planned: PlannedStorage) -> bool:
    """Whether whoever has the storage comes after its frame's way to the pool, too."""
    return planned.action is ENCODE_SWAP


def frame_nbytes(planned: PlannedStorage) -> int | None:
    """Bytes that the storage's frame may take; None: no frame is planned."""
    return planned.away_nbytes if planned.action in CODED else None
