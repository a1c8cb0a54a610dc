"""Checking: what a timed iteration says: a step to plan with, or whether its plan still holds."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING

import torch

from memswap.engine.action import Action
from memswap.planning.device import with_workspace, workspace_of
from memswap.planning.holding import sample_of
from memswap.planning.observed import calibrated, linked, quantised, step_of, without_copies
from memswap.planning.profile import profile
from memswap.planning.replay import CODED
from memswap.planning.sharing import taken_s

if TYPE_CHECKING:
    from pathlib import Path

    from memswap._C import Expectations, IterationRecord
    from memswap.planning.agreement import Basis
    from memswap.planning.kinds import Known, Timing
    from memswap.planning.plan import Plan
    from memswap.planning.rates import Rates
    from memswap.planning.step import Step

#: A plan is made anew when the step's own time, or a rate of the machine, has changed by this
#: share.
TOLERANCE = 0.25

#: Waits that were not predicted show a slower link if they take this share of a step.
LATE_SHARE = 0.02


def measured_rates(device: torch.device, folder: Path | None) -> Rates | None:
    """What `profile` returns; None where there is not even memory for the smallest measurement."""
    try:
        return profile(device, folder=folder)
    except torch.OutOfMemoryError:
        return None  # counted as unusable: tried again with a later iteration


def finished(timing: Timing) -> IterationRecord | None:
    """The record of an iteration that had its backward, or None. Waits for the device."""
    timing.recorder.wait()
    record = timing.recorder.take()
    return record if record is not None and record.order else None


def recorded_step(
    record: IterationRecord,
    timing: Timing,
    rates: Rates,
    expectations: Expectations,
    fixed: bool,
    on_disk: bool,
) -> Step | None:
    """What a record says; None where it is no step, which is no reason to stop training.

    Args:
        record: of an iteration that had its backward.
        timing: what was watched in that iteration.
        rates: of the machine.
        expectations: of frames' lengths.
        fixed: whether the policy names the action, and the plan only whether.
        on_disk: whether swapped bytes go to files.
    """
    try:
        step = step_of(record, expectations, timing.device, fixed, on_disk, timing.recipes)
    except ValueError:
        return None  # counted as unusable, and told if it goes on
    workspace = workspace_of(timing.recorder, len(step.gaps_s))
    if workspace is not None:
        step = with_workspace(step, workspace)
    return without_copies(step, record, rates)


def checked(
    timing: Timing, about: Known, as_planned: bool, calibrates: bool, own: Basis
) -> tuple[Basis, float | None]:
    """What an iteration that followed a plan says about the times that the plan was made with.

    Args:
        timing: of the iteration.
        about: the plan, and what it was made with.
        as_planned: whether the iteration saved what was planned.
        calibrates: whether the rates were measured, so that the codec's may be corrected.
        own: what is known of this rank besides.

    Returns:
        That with the plan's step as it is by the iteration's times (without one, these say nothing
        about it), the rates, and what the iteration took; and seconds by which it was longer for
        the plan, or None.
    """
    assert about.in_force is not None
    known, before, plan = about.in_force.step, about.in_force.rates, about.in_force.plan
    if not timing.recorder.ready():
        timing.recorder.wait()
    record = timing.recorder.take()
    # Another number of saves, or another order, says nothing about the times of this step.
    if (
        not as_planned
        or record is None
        or len(record.gaps_s) != len(known.gaps_s)
        or tuple(record.order) != known.order
    ):
        return own._replace(rates=before), None
    size = about.first.nbytes / timing.first.nbytes  # of what the plan is for
    gaps = [quantised(size * gap_s) for gap_s in record.gaps_s]
    step = known.with_gaps(gaps, quantised(size * record.tail_s))
    shared_s = 0.0
    if before.copy_share:  # nobody waits for copies, and compute takes longer
        shared_s = max(step.compute_s - known.compute_s, 0.0)
    beside_s = codec_s(plan, before) + taken_s(swapped(plan), before, step.compute_s)
    if beside_s:
        # Encodes, decodes and copies ran in these gaps: how they were shared is not known.
        scale = max(step.compute_s - beside_s, 0.0) / known.compute_s
        gaps = [quantised(scale * gap_s) for gap_s in known.gaps_s]
        step = known.with_gaps(gaps, quantised(scale * known.tail_s))
    again_s = step.compute_s - plan.compute_s if plan.recompute else 0.0
    waited_s = sum(record.costs_s)
    exposed_s = waited_s + max(again_s, 0.0) + shared_s
    late_s = waited_s - (plan.exposed_s - (known.compute_s - plan.compute_s))
    rates = linked(before, record, late_s > LATE_SHARE * known.compute_s)
    read = read_by_recipes(plan)
    sample = sample_of(record, [one.action is Action.KEEP for one in plan.storages])
    sample = replace(sample, cost_s=sample.cost_s + max(again_s, 0.0) + shared_s)
    rates = calibrated(rates, record, read) if calibrates else rates
    return own._replace(step=step, rates=rates, sample=sample), exposed_s


def plain(timing: Timing, about: Known, as_planned: bool, own: Basis) -> tuple[Basis, None]:
    """The same of an iteration in which everything stayed: what it took, to compare a plan with.

    Args:
        timing: what was watched in the iteration.
        about: what is known of steps of this kind, with a plan in force.
        as_planned: whether it saved what the plan expects.
        own: what this rank knew before.
    """
    assert about.in_force is not None
    record = finished(timing) if as_planned else None
    sample = None if record is None else sample_of(record, [True] * len(record.nbytes))
    return own._replace(rates=about.in_force.rates, sample=sample), None


def read_by_recipes(plan: Plan) -> frozenset[int]:
    """Storages that come back for what a plan recomputes."""
    recomputed = (
        saved.recipe
        for saved, planned in zip(plan.step.storages, plan.storages, strict=True)
        if planned.action is Action.RECOMPUTE
    )
    return frozenset(source for one in recomputed if one is not None for source in one.sources)


def swapped(plan: Plan) -> list[int]:
    """Bytes of each storage that goes to a pool as it is."""
    return [one.nbytes for one in plan.storages if one.action is Action.SWAP]


def codec_s(plan: Plan, rates: Rates) -> float:
    """Seconds of compute that the encodes and decodes of a plan take, where they run beside it."""
    if rates.inline_codec or not rates.encodes:
        return 0.0
    coded = [one.nbytes for one in plan.storages if one.action in CODED]
    seconds = sum(rates.encode_s(nbytes) + rates.decode_s(nbytes) for nbytes in coded)
    return max(seconds - sum(plan.step.windows_s), 0.0)


def differs(step: Step, known: Step) -> bool:
    """Whether a step takes another time than it did."""
    return abs(step.compute_s - known.compute_s) > TOLERANCE * known.compute_s


def settled(rates: Rates, before: Rates) -> Rates:
    """Rates, as they were where they have changed by little."""
    values = {}
    for field in fields(rates):
        new, old = getattr(rates, field.name), getattr(before, field.name)
        if isinstance(new, float) and abs(new - old) <= TOLERANCE * old:
            values[field.name] = old
    return replace(rates, **values)
