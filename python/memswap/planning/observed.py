"""From a record of the engine's to a step of the planner's."""

from __future__ import annotations

from dataclasses import replace
from itertools import starmap
from typing import TYPE_CHECKING, Any, NamedTuple

from memswap._native import native
from memswap.engine.action import Action
from memswap.planning.sharing import taken_s
from memswap.planning.step import Region, SavedStorage, Step

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    import torch

    from memswap._C import Expectations, IterationRecord
    from memswap.planning.rates import Rates
    from memswap.planning.recipe_record import RecipeRecord


#: Bytes of a frame that nobody has seen: used, held and of its overflow.
UNSEEN = (0, 0, 0)


class Key(NamedTuple):
    """Which storage it is, step after step. The same program makes the same keys."""

    unit: str
    ordinal: int
    """Place among the storages that one scope of the unit considered."""
    nbytes: int
    dtype: torch.dtype


def keys_of(record: IterationRecord) -> tuple[Key, ...]:
    """What each storage is known by; what makes two iterations alike."""
    columns = (record.units, record.ordinals, record.nbytes, record.dtypes)
    return tuple(starmap(Key, zip(*columns, strict=True)))


def left(keys: tuple[Key, ...], left_out: Collection[int]) -> tuple[Key, ...]:
    """Those of storages that are saved."""
    return tuple(key for index, key in enumerate(keys) if index not in left_out)


def step_of(
    record: IterationRecord,
    expectations: Expectations,
    device: torch.device,
    fixed: bool = False,
    on_disk: bool = False,
    recipes: RecipeRecord | None = None,
) -> Step:
    """What the planner needs of an iteration.

    Args:
        record: an iteration that was timed, and had its backward.
        expectations: of the frames.
        device: where the storages are.
        fixed: whether the policy says how storages move, so that only whether is left.
        on_disk: whether the user's pool is a file.
        recipes: what the iteration showed about recipes.
    """
    storages: list[SavedStorage] = []
    columns = (
        keys_of(record),
        record.actions,
        record.held_until,
        record.last_demand,
        record.kept_until,
        record.others,
        record.for_recipe,
    )
    for key, action, held_until, last_demand, kept_until, others, for_recipe in zip(
        *columns, strict=True
    ):
        used, held, overflow = expectations.sizes(key) or UNSEEN
        actions = allowed(action, device, fixed, on_disk)
        recipe = None if recipes is None or not actions else recipes.of(len(storages))
        if recipe is not None:
            recipe = replace(recipe, seconds=quantised(recipe.seconds))
            actions = (*actions, Action.RECOMPUTE)
        storages.append(
            SavedStorage(
                unit=key.unit,
                ordinal=key.ordinal,
                nbytes=key.nbytes,
                dtype=str(key.dtype),
                actions=actions,
                frame_nbytes=used,
                held_frame_nbytes=held,
                overflow_nbytes=overflow,
                held_until=held_until,
                last_demand=last_demand,
                kept_until=kept_until,
                users=tuple(others),
                recipe=recipe,
                for_recipe=for_recipe and last_demand is None,  # or autograd has it, too
            )
        )
    return Step(
        storages=tuple(storages),
        order=tuple(record.order),
        gaps_s=tuple(map(quantised, record.gaps_s)),
        tail_s=quantised(record.tail_s),
        regions=tuple(
            Region(unit, tuple(inputs), other_nbytes)
            for unit, inputs, other_nbytes in record.regions
        ),
        extra_nbytes=tuple(record.extra_nbytes),
        windows_s=tuple(map(quantised, record.windows_s)),
    )


def without_copies(step: Step, record: IterationRecord, rates: Rates) -> Step:
    """A step as if nothing had moved, where what moved took processors from compute.

    Args:
        step: as it was recorded.
        record: of that iteration.
        rates: of the machine, which say what share copies take of compute.
    """
    columns = (record.nbytes, record.actions, record.moved, record.last_demand)
    copied = [
        nbytes
        for nbytes, action, moved, last_demand in zip(*columns, strict=True)
        if moved and action is Action.SWAP and last_demand is not None
    ]
    beside_s = taken_s(copied, rates, step.compute_s)
    if not beside_s:
        return step
    scale = 1 - beside_s / step.compute_s
    return step.with_gaps(
        [quantised(scale * gap_s) for gap_s in step.gaps_s], quantised(scale * step.tail_s)
    )


def reframed(step: Step, keys: tuple[Key, ...], expectations: Expectations) -> Step:
    """The same step with frames as they are expected by now.

    Args:
        step: as it was recorded.
        keys: of its storages, in their order.
        expectations: of frames' lengths.
    """
    sizes = [expectations.sizes(key) or UNSEEN for key in keys]
    pairs = zip(step.storages, sizes, strict=True)
    return replace(
        step,
        storages=tuple(
            replace(saved, frame_nbytes=used, held_frame_nbytes=held, overflow_nbytes=overflow)
            for saved, (used, held, overflow) in pairs
        ),
    )


def allowed(action: Action, device: torch.device, fixed: bool, on_disk: bool) -> tuple[Action, ...]:
    """What the planner may do with a storage that the policy would treat like this.

    Args:
        action: of the policy.
        device: where the storage is.
        fixed: whether the policy names the action, and the plan only whether.
        on_disk: whether swapped bytes go to files.
    """
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


def calibrated(rates: Rates, record: IterationRecord, read: Collection[int] = ()) -> Rates:
    """Rates of a codec that the calling thread runs, from what it took in training.

    It shares processors and caches with the training there, unlike where it was measured.

    Args:
        rates: as they are known.
        record: an iteration.
        read: storages that recipes read, which were decoded at other marks than their own.
    """
    if not rates.inline_codec:
        return rates
    sizes, costs_s = record.nbytes, record.costs_s
    demands = {index: len(sizes) + place for place, index in enumerate(record.order)}
    nbytes, encode_s, decode_s = 0, 0.0, 0.0
    for index, (action, moved) in enumerate(zip(record.actions, record.moved, strict=True)):
        encoded = action is Action.ENCODE and moved
        if encoded and index in demands and index not in read:
            nbytes += sizes[index]
            encode_s += costs_s[index]
            decode_s += costs_s[demands[index]]
    if nbytes < ENOUGH_BYTES or not encode_s or not decode_s:
        return rates
    return replace(
        rates,
        encode_bytes_per_s=quantised(nbytes / encode_s),
        decode_bytes_per_s=quantised(nbytes / decode_s),
        codec_latency_s=0.0,  # it is in the rates
    )


#: Copies that take less than so many latencies say nothing about a rate.
ENOUGH_LATENCIES = 3


def linked(rates: Rates, record: IterationRecord, late: bool) -> Rates:
    """Rates of the link as an iteration saw them.

    An iteration shows what the link reaches at least, so it may be faster than was thought; it is
    slower only if compute has waited for it as well.

    Args:
        rates: those that the iteration was planned with.
        record: of the iteration.
        late: whether compute has waited, for longer than was predicted.
    """
    values: dict[str, Any] = {}
    for way, copies in (("d2h", record.sends), ("h2d", record.fetches)):
        found = best_rate(copies, rates.copy_latency_s)
        name, duplex = f"{way}_bytes_per_s", f"duplex_{way}_bytes_per_s"
        before = getattr(rates, name)
        if found > before or (late and found > 0):
            values[name] = quantised(found)
            values[duplex] = quantised(getattr(rates, duplex) * found / before) if before else found
    return replace(rates, **values)


def best_rate(copies: Iterable[tuple[float, int]], latency_s: float) -> float:
    """Bytes per second of the fastest copy; 0: none was long enough to tell.

    Args:
        copies: seconds and bytes of each.
        latency_s: seconds of a copy of nothing.
    """
    return max(
        (
            nbytes / (seconds - latency_s)
            for seconds, nbytes in copies
            if seconds - latency_s > ENOUGH_LATENCIES * latency_s
        ),
        default=0.0,
    )


def quantised(value: float) -> float:
    """To two digits: what is the same but for noise becomes the same."""
    return float(f"{value:.2g}")
