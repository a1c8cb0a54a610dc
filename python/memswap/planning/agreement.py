"""Agreement: ranks that measured different times make the same plan."""

from __future__ import annotations

from dataclasses import fields, replace
from math import inf
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from memswap.planning.rates import Rates
    from memswap.planning.step import Step


#: Of a machine's rates, those of which more is worse.
COSTS = ("copy_latency_s", "codec_latency_s", "copy_share")


def agree(
    step: Step | None, rates: Rates, group: Any, room_bytes: float = inf
) -> tuple[Step | None, Rates, float]:
    """What all ranks of a group plan by: the slowest of them.

    Every rank of the group calls this at the same passage. Without a group the arguments come back.

    Returns:
        The step with the longest times that any rank measured, for each mark, the lowest rates and
        the least room in a pool; and no step if any rank has none, or if their steps differ in more
        than times.
    """
    if group is None:
        return step, rates, room_bytes
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, (step, rates, room_bytes), group=group)
    steps = [one for one, *_ in gathered]
    first = steps[0]
    if first is None or any(one is None or not alike(one, first) for one in steps):
        return None, rates, room_bytes
    gaps = [max(gaps) for gaps in zip(*(one.gaps_s for one in steps), strict=True)]
    frames = zip(*(one.storages for one in steps), strict=True)
    storages = tuple(
        replace(
            saved[0],
            frame_nbytes=agreed_frame([one.frame_nbytes for one in saved]),
            held_frame_nbytes=agreed_frame([one.held_frame_nbytes for one in saved]),
            overflow_nbytes=max(one.overflow_nbytes for one in saved),
        )
        for saved in frames
    )
    windows = [one.windows_s for one in steps]
    agreed = replace(
        first,
        storages=storages,
        gaps_s=tuple(gaps),
        windows_s=tuple(map(min, zip(*windows, strict=True))) if all(windows) else (),
    )
    return (
        replace(agreed, tail_s=max(one.tail_s for one in steps)),
        slowest([one for _, one, _ in gathered]),
        min(room for *_, room in gathered),
    )


def alike(one: Step, other: Step) -> bool:
    """Whether two steps differ in times and frames alone."""

    def essence(step: Step) -> tuple[Any, ...]:
        storages = [
            replace(s, frame_nbytes=0, held_frame_nbytes=0, overflow_nbytes=0)
            for s in step.storages
        ]
        return storages, step.order, step.regions, step.extra_nbytes

    return essence(one) == essence(other)


def agreed_frame(nbytes: list[int]) -> int:
    """The longest frame that any rank saw; 0 if one of them saw none."""
    return max(nbytes) if all(nbytes) else 0


def slowest(rates: list[Rates]) -> Rates:
    """The lowest of each rate, and the highest of what copies take besides."""
    values: dict[str, Any] = {}
    for field in fields(rates[0]):
        found = [getattr(one, field.name) for one in rates]
        if field.type == "float":
            values[field.name] = (max if field.name in COSTS else min)(found)
    return replace(rates[0], **values)
