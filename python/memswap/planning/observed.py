"""From a record of the engine's to a step of the planner's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memswap._native import native
from memswap.engine.action import Action
from memswap.planning.step import SavedStorage, Step

if TYPE_CHECKING:
    import torch

    from memswap.engine.expectations import Expectations
    from memswap.engine.record import Record


def step_of(
    record: Record,
    expectations: Expectations,
    device: torch.device,
    fixed: bool = False,
    on_disk: bool = False,
) -> Step:
    """What the planner needs of a passage.

    Args:
        record: a passage that was timed, and had its backward.
        expectations: of the frames.
        device: where the storages are.
        fixed: whether the policy says how storages move, so that only whether is left.
        on_disk: whether the user's pool is a file.
    """
    storages = []
    for saved in record.storages:
        sizes = expectations.sizes(saved.key)
        frame_nbytes, held_nbytes = sizes or (0, 0)
        storages.append(
            SavedStorage(
                unit=saved.key.unit,
                ordinal=saved.key.ordinal,
                nbytes=saved.key.nbytes,
                dtype=str(saved.key.dtype),
                actions=allowed(saved.action, device, fixed, on_disk),
                frame_nbytes=frame_nbytes,
                held_frame_nbytes=held_nbytes,
                held_until=saved.held_until,
                last_demand=saved.last_demand,
            )
        )
    return Step(
        storages=tuple(storages),
        order=record.order,
        gaps_s=tuple(map(quantised, record.gaps_s)),
        tail_s=quantised(record.tail_s),
    )


def allowed(action: Action, device: torch.device, fixed: bool, on_disk: bool) -> tuple[Action, ...]:
    """What the planner may do with a storage that the policy would treat like this."""
    if action is Action.KEEP:
        return ()
    if fixed:
        return (action,)
    swaps = device.type != "cpu" or on_disk
    encodes = native.codec_name(device) is not None
    return (
        *((Action.SWAP,) if swaps else ()),
        *((Action.ENCODE_SWAP,) if swaps and encodes else ()),
        *((Action.ENCODE,) if encodes else ()),
    )


def quantised(seconds: float) -> float:
    """To two digits: what is the same but for noise becomes the same."""
    return float(f"{seconds:.2g}")
