"""Learner: makes plans of what was taken down, and makes them anew when they are not right.

[Note: Learning]
Iterations that begin alike are of one kind, and each kind learns for itself: its first iteration
runs as it would without a budget, so that allocators and caches warm up; in the second everything
is encoded on its way out, where there is a codec, which shows how much it shrinks; the third is
timed, by two events per mark. Checkpoint regions are off in the second and third, to see what they
save. If the budget wants some of them recomputed, an iteration with just these on is timed next.
Then there is a plan, for the first iteration that begins after it is made. Nothing waits for that,
and nothing is recorded any more but one iteration now and then. What does not look as planned is
treated as if there were no plan, which is safe; twice in a row, and the kind learns again; where
that does not help, after twice as many the next time. So a wrong forecast costs time or room, never
a bit. docs/planning.md has all of it in two tables.

[Note: In flight] Several iterations may wait for their backward at a time. Each has the same share
of a budget: what none exceeds, all of them do not exceed together. Their number is the highest that
was seen of late.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING, Any

import torch

from memswap._native import native
from memswap.engine.host_memory import host_share
from memswap.engine.pools import DiskPool
from memswap.engine.recipes import PROOFS
from memswap.engine.units import format_bytes
from memswap.errors import BudgetError
from memswap.planning.agreement import Basis, Ranks
from memswap.planning.background import Background
from memswap.planning.checking import (
    Checked,
    checked,
    differs,
    finished,
    measured_rates,
    plain,
    recorded_step,
    settled,
)
from memswap.planning.device import DevicePlan, workspace_of
from memswap.planning.holding import (
    CAUTION,
    MOST_BACKOFFS,
    MOST_BEGUN,
    Holding,
    Sample,
    kept_plan,
)
from memswap.planning.kinds import MOST_DOUBTS, MOST_UNUSABLE, REFRAME_AFTER, Costs, Trial
from memswap.planning.making import Made, Terms, from_step, planned, sized_like
from memswap.planning.observed import calibrated, keys_of, left, reframed
from memswap.planning.planner import AUTO_SLOWDOWN
from memswap.planning.shapes import resized

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from memswap._C import IterationRecord
    from memswap.engine.engine import Engine
    from memswap.engine.expectations import Expectations
    from memswap.planning.account import DeviceAccount
    from memswap.planning.background import Job
    from memswap.planning.in_flight import InFlight
    from memswap.planning.kinds import StepKind, Timing
    from memswap.planning.rates import Rates
    from memswap.planning.step import Step

logger = logging.getLogger("memswap")


@dataclass(frozen=True, slots=True)
class Learnt:
    """What a recorded iteration has led to."""

    rates: Rates | None
    """Of this machine; None: there was no memory to measure them in."""
    room_bytes: float
    made: Made | None
    """None: no plan can be made of it."""
    free_bytes: float | None = None
    """Of ranks that plan together, what each of their devices has for a plain step."""


@dataclass(slots=True)
class Forwards:
    """How many have begun."""

    number: int = 0


class Learner:
    """From iterations to plans. Plans are made in the background ([Note: Planning beside
    training]).

    Args:
        engine: whose iterations they are.
        budget: bytes, or ``"auto"``.
        rates: the machine's; None: measured when they are needed first.
        group: a process group whose ranks plan together.
        fixed: whether the policy says how storages move.
        pool: the user's, or None.
        device: what is on the device, where the budget is for all of it.
    """

    def __init__(
        self,
        engine: Engine,
        budget: int | str,
        rates: Rates | None,
        group: Any,
        fixed: bool,
        pool: object,
        device: DeviceAccount | None = None,
    ) -> None:
        self._device = device
        self.rates = rates
        self.background = Background()
        self.forwards = Forwards()
        self._engine = engine
        self._budget = budget
        self._calibrates = rates is None
        self._ranks = None if group is None else Ranks(group)
        self._fixed = fixed
        self._disk = pool if isinstance(pool, DiskPool) else None
        self._planned_before = False  # some step, of whatever shape

    @property
    def together(self) -> bool:
        """Whether ranks plan together: what one alone sees changes nothing until all know it."""
        return self._ranks is not None

    def begin(self) -> None:
        """A new forward.

        Raises:
            BudgetError: no plan meets the budget.
        """
        self.forwards.number += 1
        self.collect()

    def collect(self) -> None:
        """Follow the plans that have been made by now."""
        self.background.collect(self.forwards.number)

    def times(self, kind: StepKind) -> bool:
        """Whether the next iteration of a kind is timed.

        Ranks that plan together time one iteration after another, the same ones: each of them
        answers for it in its own time, and nobody times the next one before all follow what was
        found.
        """
        return not self._waits_for_ranks(kind) and kind.times_next()

    def keeps_next(self, kind: StepKind) -> bool:
        """Whether everything stays in the next iteration, which a plan is compared with."""
        if kind.holding is None or self._waits_for_ranks(kind):  # then it is not timed
            return False
        return kind.holding.next_is_plain

    def until_asked(self, kind: StepKind) -> int:
        """Forwards, from the one that begins, that nobody has to look at if they go as planned."""
        looks = self._device is not None or self.background.current is not None
        return 1 if looks or self._waits_for_ranks(kind) else kind.until_asked()

    def _waits_for_ranks(self, kind: StepKind) -> bool:
        """Whether the ranks that plan together do not follow yet what was found of a kind."""
        return self._ranks is not None and kind.planning

    def ended(self, one: InFlight) -> None:
        """An iteration is over."""
        kind, timing = one.kind, one.timing
        if one.plan is None and one.outcome.refused:
            full_at_bytes = max(kind.learning.full_at_bytes, one.iteration.pooled_bytes)
            kind.learning.full_at_bytes = full_at_bytes
        if kind.plan is None:
            alike = one.trial == kind.known.trial
            if timing is not None and (alike or self._ranks is not None):
                self._learn(kind, timing)
        elif self._ranks is not None:
            # What one rank alone saw changes nothing, and it answers whenever the others ask.
            if one.plan is kind.plan:
                self._tell_if_over(one)
            if timing is not None and one.plain:
                self._check_plain(kind, timing, not one.outcome.changed)
            elif timing is not None:
                self._check(kind, timing, one.plan is kind.plan and not one.outcome.changed)
        elif one.plain:
            if timing is not None and not one.outcome.changed:
                self._check_plain(kind, timing, as_planned=True)
        elif one.plan is kind.plan:
            self._followed(one, timing)

    def _followed(self, one: InFlight, timing: Timing | None) -> None:
        """An iteration followed the plan in force: is that still the right one?"""
        kind, outcome, as_planned = one.kind, one.outcome, not one.outcome.changed
        measured = kind.measured
        measured.timing = measured.timing or timing
        measured.unproven = measured.unproven + 1 if outcome.no_recipe else 0
        if measured.unproven > PROOFS:
            self._drop_recipes(kind, outcome.no_recipe)
            return
        over = self._tell_if_over(one)
        # An evaluation begins like a step and saves less; there is nothing to learn from it.
        if outcome.began_backward and kind.looked(as_planned):
            kind.learn_again()
            return
        measured.unfit = measured.unfit + 1 if outcome.unfit else 0
        if outcome.refused and one.iteration.pooled_bytes < kind.known.room_bytes:
            kind.follow(replace(kind.known, room_bytes=one.iteration.pooled_bytes))
            self.make_room(kind)
            return
        over = over or outgrown(one)
        lasting = measured.unfit >= 2 and measured.iterations >= REFRAME_AFTER
        if over or lasting:
            self._reframe(kind)
            return
        timing = measured.timing
        if timing is not None and as_planned and not self._plans(kind) and timing.recorder.ready():
            measured.timing = None
            self._check(kind, timing, as_planned)

    def _tell_if_over(self, one: InFlight) -> bool:
        """Whether more was on the device than the budget allows, of which somebody should know."""
        over = one.outcome.over_budget_bytes
        if not over:
            return False
        peak = one.outcome.peak_bytes
        why = (
            "more forwards are in flight than before, frames became longer than planned with "
            "nowhere else for the bytes to go, or saved tensors are held for longer than they were"
        )
        if one.outcome.refused:
            why = "the pool has no room for what was to leave (stats().kept)"
        elif one.outcome.changed:
            why = "the step saved other storages, or larger ones, than the plan is for"
        self._engine.ledger.tell_once(
            "over budget",
            f"{format_bytes(peak)} of saved activations were on the device at a time, "
            f"{format_bytes(over)} beyond the budget of {format_bytes(peak - over)}: {why}. No bit "
            "differs. Where another plan helps, it is made now; manager.plan.over_budget_bytes "
            "says how it goes.",
        )
        return not one.outcome.changed

    # --- plans in the making ----------------------------------------------------------------------

    def _plans(self, kind: StepKind) -> bool:
        """Whether a plan is in the making for a kind. One that Ctrl-C has lost no longer is."""
        return self.background.works_for(kind)

    def _submit(
        self,
        kind: StepKind,
        work: Callable[[Job], Any],
        then: Callable[[Any], None],
        together: bool = True,
    ) -> None:
        """Have something planned for a kind that nothing is planned for yet.

        What is found is dropped if other things are known of the kind by then.

        Args:
            together: whether ranks that plan together all do this, and take what is found with the
                same forward.
        """
        known, forwards = kind.known, self.forwards
        ranks = self._ranks if together else None
        kind.planning = True

        def settled(job: Job) -> tuple[Any, Exception | None]:
            found, error = None, None
            try:
                found = work(job)
            except Exception as one:  # raised in the forward that would have followed the plan
                error = one
            # A budget that cannot be met is the same for all ranks; nothing else is.
            alike = error is None or isinstance(error, BudgetError)
            if ranks is not None and alike:
                ranks.settle(job, lambda: forwards.number)
            return found, error

        def taken(found: tuple[Any, Exception | None]) -> None:
            kind.planning = False
            result, error = found
            if kind.known is known:
                if error is not None:
                    raise error
                then(result)

        self.background.submit(settled, taken, kind)

    def _terms(self, kind: StepKind) -> Terms:
        device = kind.known.device  # ranks have agreed on it
        if device is None and self._device is not None:
            device = self._device.terms()
        return Terms(self._budget, kind.flights.number, not self._planned_before, device)

    def _learn(self, kind: StepKind, timing: Timing) -> None:
        """Make a plan of an iteration that was timed, once the device has passed it."""
        if self._ranks is None and self._plans(kind):
            return

        def then(record: IterationRecord | None) -> None:
            self._plan_with(kind, timing, record)

        self._submit(kind, lambda job: finished(timing), then, together=False)

    def _plan_with(self, kind: StepKind, timing: Timing, record: IterationRecord | None) -> None:
        """Make a plan of a record, or choose the regions to record it with."""
        self._engine.stats()  # takes in what encoders have reported
        expectations = self._expectations(timing.device)
        known = replace(kind.known, device=None)
        terms = replace(
            self._terms(kind), device=None if self._device is None else self._device.terms()
        )
        rates = self.rates
        known = replace(known, room_bytes=min(known.room_bytes, self._room(kind, timing)))
        fixed, ranks, calibrates = self._fixed, self._ranks, self._calibrates
        folder = None if self._disk is None else self._disk.path
        on_disk, free = self._disk is not None, self._free_bytes(kind)

        def work(job: Job) -> Learnt:
            own = rates or measured_rates(timing.device, folder)
            step = None
            if record is not None and own is not None:
                step = recorded_step(record, timing, own, expectations, fixed, on_disk)
                own = calibrated(own, record) if calibrates else own
            workspace = None
            if terms.device is not None and step is not None:
                workspace = workspace_of(timing.recorder, len(step.gaps_s))
                step = step if workspace is not None else None
            gradients = () if workspace is None else tuple(workspace.gradient_nbytes)
            basis = Basis(step, own, known.room_bytes, terms.flights, terms.device, gradients)
            basis = basis._replace(free_bytes=free)
            if ranks is not None:
                basis = ranks.plan_by(job, basis)
            if basis.step is None or basis.rates is None or record is None:
                return Learnt(own, basis.room_bytes, None)
            step, keys = basis.step, keys_of(record)
            if step.regions or known.trial is not None:  # one that is on saves other storages
                step, keys = step.without(step.sources), left(keys, step.sources)
            about = replace(known, room_bytes=basis.room_bytes)
            about = (
                replace(about, first=timing.first)
                if about.trial is None
                else sized_like(about, timing.first)
            )
            if workspace is not None:  # what was there when the iteration began is each rank's own
                extra, gradients = basis.step.extra_nbytes, basis.gradient_nbytes
                workspace = native.WorkspaceRecord(extra, gradients, workspace.baseline_nbytes)
            agreed = None if ranks is None else basis.device
            about = replace(about, workspace=workspace, device=agreed)
            shared = replace(terms, flights=basis.flights, device=basis.device)
            made = from_step(about, step, basis.rates, keys, shared)
            return Learnt(own, basis.room_bytes, made, basis.free_bytes)

        def then(found: Learnt) -> None:
            self.rates = found.rates or self.rates
            if found.made is not None:
                kind.free_bytes = found.free_bytes
                self._follow(kind, found.made)
                return
            kind.follow(replace(kind.known, room_bytes=found.room_bytes))
            kind.learning.unusable += 1
            if kind.learning.unusable == MOST_UNUSABLE:
                self._engine.ledger.tell_once(
                    "no plan",
                    f"no plan was made for budget={self._budget!r}: {MOST_UNUSABLE} forwards had "
                    "no backward, or ranks that plan together took different steps. Everything "
                    "that the policy selects moves, as without a budget.",
                )

        self._submit(kind, work, then)

    def _replan(
        self,
        kind: StepKind,
        step: Step | None = None,
        *,
        rates: Rates | None = None,
        expectations: Expectations | None = None,
        flights: int | None = None,
        all_off: bool = False,
    ) -> None:
        """Plan again with what the plan in force was made of, but for what is given.

        Args:
            kind: with a plan in force.
            step: another one; None: the same.
            rates: others; None: the same.
            expectations: plan with frames as they are expected by now, and not if these are no
                others.
            flights: forwards at a time; None: as many as were seen.
            all_off: all regions are off in the step.
        """
        known, terms, now = kind.known, self._terms(kind), kind.known.in_force
        assert now is not None
        if flights is not None:
            terms = replace(terms, flights=flights)
        planning, by = step or now.step, rates or now.rates
        if all_off:
            known = replace(known, trial=None, full=planning)
        else:
            known = replace(known, trial=Trial(now.plan.recompute))

        def work(job: Job) -> Made | None:
            using = planning
            if expectations is not None:
                using = reframed(planning, now.keys, expectations)
                if using == planning:
                    return None
            return planned(known, using, by, now.keys, terms)

        def then(made: Made | None) -> None:
            if made is not None:
                self._follow(kind, made)

        self._submit(kind, work, then)

    def _follow(self, kind: StepKind, made: Made) -> None:
        """What was made is known from here on, and its plan is followed."""
        kind.follow(made.known)
        if made.known.plan is None:
            return
        self._planned_before = True
        logger.info("%s", made.known.plan.summary())
        kind.holding = self._new_holding(kind)
        if made.needs_bytes is not None:
            self._engine.ledger.tell_once(
                "budget",
                f"a step that is not like those before needs {format_bytes(made.needs_bytes)} "
                f"{'of saved activations' if self._device is None else 'of the device'} at least, "
                f"beyond the budget of {format_bytes(made.allowed_bytes)}. Training goes on with "
                "that.",
            )
        if made.known.plan.in_flight != kind.flights.number:
            self.make_room(kind)

    def lend(self, kind: StepKind, lender: StepKind, device: torch.device) -> None:
        """Have a kind that has seen nothing yet planned for with what is known of another one.

        Nothing where that would not do: then it learns for itself.
        """
        about, lent = lender.known, lender.known.in_force
        assert lent is not None and about.full is not None
        sizes = kind.known.first.nbytes, about.first.nbytes
        sources = lent.step.sources  # of recipes that have not proven themselves for this size
        step = resized(lent.step.without(sources), *sizes)
        if any(one.nbytes < self._engine.policy.min_bytes for one in step.storages):
            return  # some of them would not be considered at all
        pairs = zip(left(lent.keys, sources), step.storages, strict=True)
        keys = tuple(key._replace(nbytes=one.nbytes) for key, one in pairs)
        expectations = self._expectations(device)
        full = resized(about.full, *sizes)
        kind.flights.number, kind.patience = lender.flights.number, lender.patience
        known = replace(kind.known, full=full, room_bytes=about.room_bytes)
        # What a plan of another size has cost, this one would, too.
        known = replace(known, costs=about.costs, trial=Trial(lent.plan.recompute))
        kind.follow(replace(kind.known, room_bytes=about.room_bytes))
        terms = self._terms(kind)

        def work(job: Job) -> Made:
            return planned(known, reframed(step, keys, expectations), lent.rates, keys, terms)

        self._submit(kind, work, lambda made: self._follow(kind, made))

    def make_room(self, kind: StepKind) -> None:
        """Other numbers of iterations are in flight than planned for, or less fits into the pool.

        Ranks that plan together agree on that where they check their plan. Until then what no plan
        has room for leaves.
        """
        if kind.plan is None or self._ranks is not None or self._plans(kind):
            return  # `_follow` looks again, or `_judge`
        self._replan(kind)

    def _drop_recipes(self, kind: StepKind, storages: Collection[int]) -> None:
        """Storages have shown no recipe that is proven: plan without recomputing them.

        A shape that follows another one's plan has to prove the recipes in its first steps.
        """
        now = kind.known.in_force
        assert now is not None
        if not self._plans(kind):
            self._replan(kind, now.step.without_recipes(storages))

    def _reframe(self, kind: StepKind) -> None:
        """Frames are longer than planned: plan with those that are seen by now.

        Nothing is learnt anew, which would take an iteration without a budget.
        """
        kind.measured.unfit = 0
        if self._plans(kind):
            return
        self._engine.stats()  # takes in what encoders have reported
        assert kind.device is not None  # an iteration of it has ended
        self._replan(kind, expectations=self._expectations(kind.device))

    # --- plans that are checked -------------------------------------------------------------------

    def _check(self, kind: StepKind, timing: Timing, as_planned: bool) -> None:
        """A planned iteration was timed: is the plan still the right one?"""
        if self._ranks is None and self._plans(kind):
            return
        known, calibrates = kind.known, self._calibrates
        agree = self._agreeing(kind)

        def work(job: Job) -> Checked:
            found = agree(job, checked(timing, known, as_planned, calibrates))
            # Of ranks whose steps differ, the times say nothing.
            return found if found.step is not None else replace(found, sample=None)

        def then(found: Checked) -> None:
            kind.free_bytes = found.free_bytes
            self._judge(kind, found)

        self._submit(kind, work, then)

    def _check_plain(self, kind: StepKind, timing: Timing, as_planned: bool) -> None:
        """An iteration was timed in which everything stayed."""
        known, holding = kind.known, kind.holding
        agree = self._agreeing(kind)

        def then(found: Checked) -> None:
            kind.free_bytes = found.free_bytes
            if found.sample is not None and holding is not None and kind.holding is holding:
                holding.plain.append(found.sample)
                self._weigh(kind)

        self._submit(kind, lambda job: agree(job, plain(timing, known, as_planned)), then)

    def _agreeing(self, kind: StepKind) -> Callable[[Job, Checked], Checked]:
        """What all ranks make of what one has found, for a job; of one that plans alone, that."""
        ranks, flights, again = self._ranks, kind.flights.number, kind.wants_again
        free = self._free_bytes(kind)

        def agree(job: Job, found: Checked) -> Checked:
            if ranks is None:
                return replace(found, free_bytes=free)
            own = Basis(found.step, found.rates, flights=flights, again=again)
            basis = ranks.plan_by(job, own._replace(sample=found.sample, free_bytes=free))
            return replace(
                found,
                step=basis.step,
                rates=basis.rates or found.rates,
                sample=basis.sample,
                flights=basis.flights,
                again=basis.again,
                free_bytes=basis.free_bytes,
            )

        return agree

    def _judge(self, kind: StepKind, found: Checked) -> None:
        """Keep the plan, look again, or make another one."""
        measured, known, now = kind.measured, kind.known, kind.known.in_force
        assert now is not None
        if found.exposed_s is not None and not measured.held:
            measured.exposed_s = found.exposed_s
        if found.again:
            kind.learn_again()
            return
        compared = kind.holding is not None
        if found.sample is not None and self._costs_too_much(kind, found.sample, found.rates):
            return
        if now.plan.declined and kind.tries_again():
            kind.known = replace(known, costs=Costs())
            self._replan(kind)
            return
        if compared:
            return  # timed to be compared with plain steps: whether times differ is seen later
        if found.flights is not None and found.flights != now.plan.in_flight:
            self._replan(kind, flights=found.flights)
            return
        # The first timing follows the plan at once: it is there to be told, not to change it.
        if found.step is None or measured.iterations <= 2:
            return
        rates = settled(found.rates, now.rates)
        if not differs(found.step, now.step) and rates == now.rates:
            measured.doubts = 0
            return
        measured.doubts += 1
        if measured.doubts < MOST_DOUBTS:
            measured.checks_again = True  # one slow iteration is no reason
            return
        measured.doubts = 0
        self.rates = rates
        if known.full is not None and known.full.regions:
            kind.learn_again()
            return
        kind.known = replace(known, costs=Costs())  # what a plan cost was in other times
        self._replan(kind, found.step, rates=rates, flights=found.flights, all_off=True)

    # --- plans that are held to what they may cost ([Note: Never worse] in holding.py) ------------

    def _new_holding(self, kind: StepKind) -> Holding | None:
        """The comparison of a kind's plan with the plain step; None: nothing bounds its time."""
        plan = kind.plan
        if plan is None or self._budget != "auto" or not plan.moved_bytes:
            return None
        more_bytes = (plan.kept_peak_bytes - plan.peak_bytes) * plan.in_flight
        free = self._free_bytes(kind) if self._ranks is None else kind.free_bytes
        return Holding(kept_plan(plan) if free is not None and 2 * more_bytes <= free else None)

    def _free_bytes(self, kind: StepKind) -> float | None:
        """What a plain step has room in, where a plan is compared with one."""
        compares = self._budget == "auto" and kind.device is not None
        return free_bytes(kind.device) if compares else None

    def _costs_too_much(self, kind: StepKind, sample: Sample, rates: Rates) -> bool:
        """One more iteration under a plan was timed. Whether another plan is made for that."""
        if kind.holding is None:
            if not kind.measured.held or sample.cost_s <= allowed_s(kind):
                return False
            kind.holding = self._new_holding(kind)
        if kind.holding is None:
            return False
        kind.holding.planned.append(sample)
        kind.holding.rates = rates
        return self._weigh(kind)

    def _weigh(self, kind: StepKind) -> bool:
        """Compare a plan with the plain step once there is enough. Whether it is given up."""
        holding, known = kind.holding, kind.known
        if holding is not None and holding.begun > MOST_BEGUN:
            kind.holding = None  # steps that are seldom as planned cannot be compared
        if kind.holding is None or holding is None or not holding.complete:
            return False
        now = known.in_force
        assert now is not None
        cost_s, allowed = holding.cost_s(), allowed_s(kind)
        kind.holding = None
        kind.measured.exposed_s, kind.measured.held = max(cost_s, 0.0), True
        if cost_s <= allowed:
            return False
        kind.measured.held = False
        backoffs = known.costs.backoffs + 1
        rates = settled(holding.rates or now.rates, now.rates)
        if rates == now.rates:
            share = known.costs.share * min(CAUTION * allowed / cost_s, 0.5)
        else:  # that the machine is slower explains it
            share, self.rates = known.costs.share, rates
        longer = cost_s / now.step.compute_s
        words = (
            f"moving {format_bytes(now.plan.moved_bytes)} a step made it {longer:.1%} longer, "
            f"where {AUTO_SLOWDOWN:.0%} is allowed"
        )
        share = 0.0 if backoffs >= MOST_BACKOFFS else share
        kind.known = replace(known, costs=Costs(share, backoffs, words))
        self._replan(kind, rates=rates)
        return True

    # --- what the engine knows --------------------------------------------------------------------

    def _expectations(self, device: torch.device) -> Expectations:
        transfers = self._engine.transfers(device)
        assert transfers is not None  # or nothing would have been recorded
        return transfers.expectations

    def _room(self, kind: StepKind, timing: Timing) -> float:
        """What the pool may take at most, as far as anybody has seen."""
        transfers = self._engine.transfers(timing.device)
        assert transfers is not None  # something was recorded
        return min(transfers.pool.budget_bytes, kind.learning.full_at_bytes or inf)


def allowed_s(kind: StepKind) -> float:
    """Seconds by which a plan for ``"auto"`` may make a step longer."""
    assert kind.known.in_force is not None
    return AUTO_SLOWDOWN * kind.known.in_force.step.compute_s


def outgrown(one: InFlight) -> bool:
    """Whether frames became so long that a plan for the whole device is no longer exact."""
    plan = one.plan
    if not isinstance(plan, DevicePlan) or one.outcome.changed:
        return False
    return plan.outgrown_by(one.outcome.peak_bytes)


def free_bytes(device: torch.device) -> int | None:
    """Bytes that may still be allocated on a device; None: nobody can say."""
    if device.type == "cpu":
        return host_share().limits.free_bytes
    module = torch.get_device_module(device)
    if not hasattr(module, "mem_get_info"):
        return None
    free, _ = module.mem_get_info(device)
    unused = module.memory_reserved(device) - module.memory_allocated(device)
    return int(free) + int(unused)
