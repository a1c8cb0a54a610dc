"""Making: from what is known of a kind of step to its plan. Data in, data out, off the hooks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING

from memswap._native import native
from memswap.planning.agreement import Basis
from memswap.planning.budgets import bytes_of
from memswap.planning.checking import measured_rates, recorded_step
from memswap.planning.device import (
    DeviceTerms,
    plan_for_device,
    smallest_of_device,
    too_small_for_device,
    workspace_of,
)
from memswap.planning.kinds import InForce, Trial
from memswap.planning.observed import calibrated, keys_of, left
from memswap.planning.planner import AUTO_SLOWDOWN, make_plan, regions_for, too_small
from memswap.planning.replay import MOVES
from memswap.planning.shapes import resized

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from memswap._C import Expectations, IterationRecord
    from memswap.planning.kinds import Known, Timing
    from memswap.planning.observed import Key
    from memswap.planning.plan import Plan
    from memswap.planning.rates import Rates
    from memswap.planning.step import Step

#: Sets of regions that are recorded before a budget counts as too small.
MOST_TRIALS = 3


@dataclass(frozen=True, slots=True)
class Terms:
    """The budget that a plan has to meet, and how many forwards in flight share it."""

    budget: int | str
    """Bytes, a share, or ``"auto"``."""
    flights: int
    """Forwards that wait for their backward at a time."""
    must_fit: bool
    """Whether a budget that cannot be met is an error, and no plan the next best thing."""
    device: DeviceTerms | None = None
    """Of a budget for the whole device."""


@dataclass(frozen=True, slots=True)
class PlanningResult:
    """A plan, or the checkpoint regions to record an iteration with before there is one."""

    known: Known
    """What is known of the step's kind from here on, with that plan or those regions."""
    needs_bytes: int | None = None
    """Bytes of the smallest budget that could be met, if the plan exceeds the one given."""
    allowed_bytes: int = 0
    """Bytes that the one given comes to, if the plan exceeds it."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine that plans are made for, as far as planning has to know it."""

    rates: Rates | None
    """None: they are measured when they are needed first."""
    calibrates: bool
    """Whether they were measured, so that the codec's may be corrected."""
    fixed: bool
    """Whether the policy says how storages move."""
    folder: Path | None
    """Of the file that storages go to; None: they go to memory."""


def from_record(
    record: IterationRecord | None,
    timing: Timing,
    known: Known,
    machine: Machine,
    expectations: Expectations,
    terms: Terms,
    own: Basis,
    agreed: Callable[[Basis], Basis],
) -> tuple[Rates | None, Basis, PlanningResult | None]:
    """Plan with an iteration that was recorded while learning, as all ranks do it.

    Args:
        record: of the iteration; None: it had no backward.
        timing: what was watched in it.
        known: of its kind.
        machine: that it was recorded on.
        expectations: of frames.
        terms: what the plan has to meet.
        own: what is known of this rank besides.
        agreed: what all ranks plan by, from what one has.

    Returns:
        The machine's rates, None: there was no memory to measure them in; what all ranks planned
        by; and what that came to, None: no plan can be made of it.

    Raises:
        BudgetError: no plan meets the budget, and `terms.must_fit`.
    """
    on_disk = machine.folder is not None
    rates = machine.rates or measured_rates(timing.device, machine.folder)
    step = workspace = None
    if record is not None and rates is not None:
        step = recorded_step(record, timing, rates, expectations, machine.fixed, on_disk)
        rates = calibrated(rates, record) if machine.calibrates else rates
    if terms.device is not None and step is not None:
        workspace = workspace_of(timing.recorder, len(step.gaps_s))
        step = step if workspace is not None else None
    gradients = () if workspace is None else tuple(workspace.gradient_nbytes)
    basis = agreed(
        own._replace(step=step, rates=rates, device=terms.device, gradient_nbytes=gradients)
    )
    if basis.step is None or basis.rates is None or record is None:
        return rates, basis, None
    step, keys = basis.step, keys_of(record)
    if step.regions or known.trial is not None:  # one that is on saves other storages
        step, keys = step.without(step.sources), left(keys, step.sources)
    if workspace is not None:  # what was there when the iteration began is each rank's own
        extra, gradients = basis.step.extra_nbytes, basis.gradient_nbytes
        workspace = native.WorkspaceRecord(extra, gradients, workspace.baseline_nbytes)
    known = replace(known, room_bytes=basis.room_bytes, workspace=workspace)
    if known.trial is None:
        known = replace(known, first=timing.first)
    else:
        known = sized_like(known, timing.first)
    if own.flights:
        known = replace(known, device=basis.device)
        terms = replace(terms, flights=basis.flights, device=basis.device)
    return rates, basis, from_step(known, step, basis.rates, keys, terms)


def from_step(
    known: Known, step: Step, rates: Rates, keys: tuple[Key, ...], terms: Terms
) -> PlanningResult:
    """Plan with a step that was recorded while learning, or choose the regions to record it with.

    Args:
        known: of the step's kind; `Known.first` is what the step saves first.
        step: with the regions of `known.trial` on, or all of them off if that is None.
        rates: of the machine.
        keys: of the step's storages.
        terms: what the plan has to meet.

    Raises:
        BudgetError: no plan meets the budget, and `terms.must_fit`.
    """
    if known.trial is None:
        known = replace(known, full=step)
        if step.regions and (trying := _with_trial(known, rates, terms)) is not None:
            return PlanningResult(trying)
        return planned(known, replace(step, regions=()), rates, keys, terms)
    step = replace(step, regions=())
    assert known.full is not None
    limit = limit_of(known, rates, terms)
    plan = make_plan(step, rates, limit, True, known.full, known.recompute, room_of(known, terms))
    if plan.peak_bytes > limit:
        margin_bytes = known.trial.margin_bytes + plan.peak_bytes - limit
        known = replace(known, trial=replace(known.trial, margin_bytes=margin_bytes))
        if (trying := _with_trial(known, rates, terms)) is not None:
            return PlanningResult(trying)
    return planned(known, step, rates, keys, terms)


def sized_like(known: Known, first: Key) -> Known:
    """The same for iterations that save another size first."""
    if first == known.first:
        return known
    full = known.full and resized(known.full, first.nbytes, known.first.nbytes)
    return replace(known, first=first, full=full)


def _with_trial(known: Known, rates: Rates, terms: Terms) -> Known | None:
    """To record an iteration with the regions on that a budget wants recomputed; None: none."""
    last = known.trial or Trial((), 0)
    if last.number >= MOST_TRIALS:
        return None
    assert known.full is not None
    limit = limit_of(known, rates, terms) - last.margin_bytes
    units, _ = regions_for(known.full, rates, limit, room_of(known, terms))
    if not units or units == last.units:
        return None
    return replace(known, trial=replace(last, units=units, number=last.number + 1))


def planned(
    known: Known, step: Step, rates: Rates, keys: tuple[Key, ...], terms: Terms
) -> PlanningResult:
    """Plan with a step whose regions are on as they shall be (`known.trial`).

    Args:
        known: of steps of this kind.
        step: to plan.
        rates: of the machine.
        keys: of the step's storages.
        terms: what the plan has to meet.

    Raises:
        BudgetError: no plan meets the budget, and `terms.must_fit`.
    """
    if terms.device is not None:
        return _planned_for_device(known, step, rates, keys, terms, terms.device)
    limit = None if terms.budget == "auto" else limit_of(known, rates, terms)
    asked = terms.budget if limit is None else limit
    room = room_of(known, terms)
    slowdown = AUTO_SLOWDOWN * known.costs.share
    plan = make_plan(step, rates, asked, True, known.full, known.recompute, room, slowdown)
    if known.costs.backoffs and not plan.moved_bytes:
        plan = replace(plan, declined=known.costs.words)
    needs_bytes, allowed = None, 0
    if limit is not None:
        allowed = terms.budget if isinstance(terms.budget, int) else limit * terms.flights
        if plan.peak_bytes > limit:
            needs_bytes = plan.peak_bytes * terms.flights
            if terms.must_fit:
                room = known.room_bytes if pooled(plan) else inf
                raise too_small(allowed, needs_bytes, room, terms.budget)
        plan = replace(plan, budget=terms.budget, budget_bytes=allowed, in_flight=terms.flights)
    elif terms.flights > 1:
        plan = replace(plan, in_flight=terms.flights)
    keys = left(keys, plan.left_out)
    in_force = InForce(plan, step.without(plan.left_out), rates, keys)
    return PlanningResult(replace(known, in_force=in_force, trial=None), needs_bytes, allowed)


def _planned_for_device(
    known: Known,
    step: Step,
    rates: Rates,
    keys: tuple[Key, ...],
    terms: Terms,
    device: DeviceTerms,
) -> PlanningResult:
    """Plan for everything on a device with a step whose regions are on as they shall be.

    Raises:
        BudgetError: no plan meets the budget, and `terms.must_fit`.
    """
    assert known.workspace is not None and isinstance(terms.budget, str)
    plan = plan_for_device(
        step,
        rates,
        terms.budget,
        device,
        known.workspace,
        terms.flights,
        known.full,
        known.recompute,
        room_of(known, terms),
    )
    needs_bytes, where = smallest_of_device(device, plan, terms.flights)
    found = replace(known, in_force=InForce(plan, step, rates, keys), trial=None)
    if needs_bytes <= device.nbytes:
        return PlanningResult(found)
    if terms.must_fit:
        raise too_small_for_device(device, needs_bytes, where)
    return PlanningResult(found, needs_bytes, device.nbytes)


def limit_of(known: Known, rates: Rates, terms: Terms) -> int:
    """Bytes that each iteration in flight may have, under a budget that is not ``"auto"``.

    Args:
        known: of steps of this kind.
        rates: of the machine.
        terms: what plans have to meet.
    """
    if terms.device is not None:  # with all of the optimizer's state away
        assert known.workspace is not None
        return terms.device.room(min(known.workspace.extra_nbytes), 0, terms.flights)
    if isinstance(terms.budget, int):
        return terms.budget // terms.flights
    assert known.full is not None
    return bytes_of(terms.budget, known.full, rates)


def room_of(known: Known, terms: Terms) -> float:
    """Bytes that each iteration in flight may have of the pool."""
    return known.room_bytes if known.room_bytes == inf else known.room_bytes // terms.flights


def pooled(plan: Plan) -> bool:
    """Whether some of a plan's storages could go to a pool."""
    return any(action in MOVES for one in plan.step.storages for action in one.actions)
