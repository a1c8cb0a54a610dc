"""The native form of a plan, which the engine follows without asking.

What is there is data: storage by storage what it is expected to be, what happens to it, what is
waited for after its save and after its demand, and what starts back at its first demand
(csrc/engine/plan.h). Where a storage is another one, and wherever an
encode has to be chosen a shape, the engine asks its director.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from memswap._native import native
from memswap.engine.action import ENCODE_SWAP, KEEP, SWAP
from memswap.planning.replay import CODED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memswap._C import Plan as NativePlan
    from memswap.engine.action import Action
    from memswap.engine.expectations import Key
    from memswap.engine.transfer import Route
    from memswap.planning.plan import Plan, PlannedStorage

WORDS = {SWAP: "swap", KEEP: "keep"}


def native_plan(plan: Plan, keys: Sequence[Key], route: Route, least_bytes: int) -> NativePlan:
    """What an engine does under a plan.

    Args:
        plan: with a storage for each of `keys`.
        keys: what the storages are known by; others than the plan's: it is asked about each.
        route: of the device that the plan is for.
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
                word(planned.action) if known and keys[index].nbytes == planned.nbytes else "ask",
                plan.releases.get(index, ()),
                plan.departures.get(index, ()),
                plan.fetches.get(index, ()),
                departs(planned),
                frame_nbytes(planned),
            )
        )
    refrains = torch.cuda.is_current_stream_capturing if route.captures else None
    return native.Plan(
        device=route.device,
        sender=route.swap,
        least_bytes=least_bytes,
        places=places,
        refrains=refrains,
    )


def departs(planned: PlannedStorage) -> bool:
    """Whether whoever has the storage comes after its frame's way to the pool, too."""
    return planned.action is ENCODE_SWAP


def frame_nbytes(planned: PlannedStorage) -> int | None:
    """Bytes that the storage's frame may take; None: no frame is planned."""
    return planned.away_nbytes if planned.action in CODED else None


def word(action: Action) -> str:
    """How the native plan says it; everything else is asked about."""
    return WORDS.get(action, "ask")
