"""From a record of the engine's to a step of the planner's."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from memswap._native import native
from memswap.engine.action import Action
from memswap.engine.expectations import FrameSizes
from memswap.planning.sharing import taken_s
from memswap.planning.step import Recipe, Region, SavedStorage, Step

if TYPE_CHECKING:
    import torch

    from memswap.engine.expectations import Expectations, Key
    from memswap.engine.link_times import LinkTimes
    from memswap.engine.recipe_record import RecipeRecord
    from memswap.engine.record import Record
    from memswap.engine.region_record import RegionRecord
    from memswap.planning.rates import Rates


UNSEEN = FrameSizes(0, 0, 0)


def step_of(
    record: Record,
    expectations: Expectations,
    device: torch.device,
    fixed: bool = False,
    on_disk: bool = False,
    regions: RegionRecord | None = None,
    recipes: RecipeRecord | None = None,
) -> Step:
    """What the planner needs of an iteration.

    Args:
        record: an iteration that was timed, and had its backward.
        expectations: of the frames.
        device: where the storages are.
        fixed: whether the policy says how storages move, so that only whether is left.
        on_disk: whether the user's pool is a file.
        regions: what the iteration showed about regions,
        recipes: and about recipes.
    """
    storages = []
    for index, saved in enumerate(record.storages):
        frame = expectations.sizes(saved.key) or UNSEEN
        actions = allowed(saved.action, device, fixed, on_disk)
        seen = None if recipes is None or not actions else recipes.of(index)
        recipe = None
        if seen is not None:
            recipe = Recipe(seen.words, seen.sources, quantised(seen.seconds))
        storages.append(
            SavedStorage(
                unit=saved.key.unit,
                ordinal=saved.key.ordinal,
                nbytes=saved.key.nbytes,
                dtype=str(saved.key.dtype),
                actions=actions if recipe is None else (*actions, Action.RECOMPUTE),
                frame_nbytes=frame.used,
                held_frame_nbytes=frame.held,
                overflow_nbytes=frame.overflow,
                held_until=saved.held_until,
                last_demand=saved.last_demand,
                kept_until=saved.kept_until,
                recipe=recipe,
                users=() if regions is None else regions.users(index, saved.key.unit),
            )
        )
    marks = len(record.gaps_s)
    extra = {} if regions is None else regions.extra
    return Step(
        storages=tuple(storages),
        order=record.order,
        gaps_s=tuple(map(quantised, record.gaps_s)),
        tail_s=quantised(record.tail_s),
        regions=() if regions is None else tuple(Region(*one) for one in regions.regions()),
        extra_nbytes=tuple(extra.get(m, 0) for m in range(marks)) if any(extra.values()) else (),
        windows_s=tuple(map(quantised, record.windows_s)),
    )


def without_copies(step: Step, record: Record, rates: Rates) -> Step:
    """A step as if nothing had moved, where what moved took processors from compute."""
    copied = [
        saved.key.nbytes
        for saved in record.storages
        if saved.moved and saved.action is Action.SWAP and saved.last_demand is not None
    ]
    beside_s = taken_s(copied, rates, step.compute_s)
    if not beside_s:
        return step
    scale = 1 - beside_s / step.compute_s
    return step.with_gaps(
        [quantised(scale * gap_s) for gap_s in step.gaps_s], quantised(scale * step.tail_s)
    )


def reframed(step: Step, keys: tuple[Key, ...], expectations: Expectations) -> Step:
    """The same step with frames as they are expected by now."""
    sizes = [expectations.sizes(key) or UNSEEN for key in keys]
    pairs = zip(step.storages, sizes, strict=True)
    return replace(
        step,
        storages=tuple(
            replace(
                saved,
                frame_nbytes=frame.used,
                held_frame_nbytes=frame.held,
                overflow_nbytes=frame.overflow,
            )
            for saved, frame in pairs
        ),
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


#: Fewer bytes than these say nothing about a rate.
ENOUGH_BYTES = 1 << 20


def calibrated(rates: Rates, record: Record, read: Collection[int] = ()) -> Rates:
    """Rates of a codec that the calling thread runs, from what it took in training.

    It shares processors and caches with the training there, unlike where it was measured.

    Args:
        rates: as they are known.
        record: an iteration.
        read: storages that recipes read, which were decoded at other marks than their own.
    """
    if not rates.inline_codec:
        return rates
    saves = len(record.storages)
    demands = {index: saves + place for place, index in enumerate(record.order)}
    nbytes, encode_s, decode_s = 0, 0.0, 0.0
    for index, saved in enumerate(record.storages):
        if saved.action is Action.ENCODE and saved.moved and index in demands and index not in read:
            nbytes += saved.key.nbytes
            encode_s += record.costs_s[index]
            decode_s += record.costs_s[demands[index]]
    if nbytes < ENOUGH_BYTES or not encode_s or not decode_s:
        return rates
    return replace(
        rates,
        encode_bytes_per_s=quantised(nbytes / encode_s),
        decode_bytes_per_s=quantised(nbytes / decode_s),
        codec_latency_s=0.0,  # it is in the rates
    )


def linked(rates: Rates, links: LinkTimes, late: bool) -> Rates:
    """Rates of the link as an iteration saw them.

    An iteration shows what the link reaches at least, so it may be faster than was thought; it is
    slower only if compute has waited for it as well.

    Args:
        late: whether it has, for longer than was predicted.
    """
    values: dict[str, Any] = {}
    seen = links.rates(rates.copy_latency_s)
    for way, found in zip(("d2h", "h2d"), seen, strict=True):
        name, duplex = f"{way}_bytes_per_s", f"duplex_{way}_bytes_per_s"
        before = getattr(rates, name)
        if found > before or (late and found > 0):
            values[name] = quantised(found)
            values[duplex] = quantised(getattr(rates, duplex) * found / before) if before else found
    return replace(rates, **values)


def quantised(value: float) -> float:
    """To two digits: what is the same but for noise becomes the same."""
    return float(f"{value:.2g}")
