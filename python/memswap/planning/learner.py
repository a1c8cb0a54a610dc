"""Learner: makes plans of what was taken down, and makes them anew when they are not right.

[Note: Learning]
Iterations that begin alike are of one kind, and each kind learns for itself. docs/planning.md has
two tables: what is learnt in which iteration, and what makes a kind plan or learn again. Nothing
waits for a plan, and what does not look as planned is treated as if there were none, which is
safe. So a wrong forecast costs time or room, never a bit.

[Note: In flight] Several iterations may wait for their backward at a time. Each has the same share
of a budget: what none exceeds, all of them do not exceed together. Their number is the highest that
was seen of late.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING, Any

import torch

from memswap._native import native
from memswap.engine.host_memory import host_share
from memswap.engine.pools import DiskPool
from memswap.engine.units import format_bytes
from memswap.errors import BudgetError
from memswap.planning.agreement import Basis, Ranks
from memswap.planning.background import Background
from memswap.planning.checking import checked, finished, plain
from memswap.planning.kinds import MOST_UNUSABLE, InForce, Trial
from memswap.planning.making import Machine, PlanningResult, Terms, from_record, planned
from memswap.planning.observed import left, reframed
from memswap.planning.shapes import resized
from memswap.planning.verdicts import Anew, comparison, followed, judged, weighed

if TYPE_CHECKING:
    from collections.abc import Callable

    from memswap._C import Expectations, IterationRecord
    from memswap.engine.engine import Engine
    from memswap.planning.account import DeviceAccount
    from memswap.planning.background import Job
    from memswap.planning.in_flight import InFlight
    from memswap.planning.kinds import Known, StepKind, Timing
    from memswap.planning.rates import Rates

    Agreed = Callable[[Basis], Basis]

logger = logging.getLogger("memswap")


class Learner:
    """From iterations to plans. Plans are made in the background ([Note: Planning beside
    training]).

    Args:
        engine: whose iterations are planned for.
        budget: bytes, a share, or ``"auto"``.
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
        folder = pool.path if isinstance(pool, DiskPool) else None
        self.machine = Machine(rates, rates is None, fixed, folder)
        self.background = Background()
        self._engine = engine
        self._budget = budget
        self._ranks = None if group is None else Ranks(group)
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
        self.count(1)
        self.collect()

    def count(self, forwards: int) -> None:
        """So many have begun."""
        if self._ranks is not None:
            self._ranks.forwards += forwards

    def collect(self) -> None:
        """Follow the plans that have been made by now."""
        self.background.collect(0 if self._ranks is None else self._ranks.forwards)

    # --- the next iteration -----------------------------------------------------------------------

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

    # --- the last iteration -----------------------------------------------------------------------

    def ended(self, one: InFlight) -> None:
        """An iteration is over."""
        kind, timing, outcome = one.kind, one.timing, one.outcome
        if one.plan is None and outcome.refused:
            full_at_bytes = max(kind.learning.full_at_bytes, outcome.pooled_bytes)
            kind.learning.full_at_bytes = full_at_bytes
        if kind.plan is None:
            alike = self.together or one.trial == kind.known.trial
            if timing is not None and alike and (self.together or not self._plans(kind)):
                self._learn(kind, timing)
            return
        follows, as_planned = one.plan is kind.plan, not outcome.changed
        if follows and outcome.over_budget_bytes:
            self._tell_that_over(one)
        if one.plain or self.together:
            # What one rank alone saw changes nothing, and it answers whenever the others ask.
            if timing is not None and (as_planned or self.together):
                self._check(kind, timing, as_planned and (follows or one.plain), one.plain)
        elif follows:
            self._followed(one)

    def _followed(self, one: InFlight) -> None:
        """An iteration followed the plan in force: is that still the right one?"""
        kind, measured = one.kind, one.kind.measured
        measured.timing = measured.timing or one.timing
        anew, plans = followed(one), self._plans(kind)
        if anew is not None:
            if anew.learns or not plans:
                self._make_anew(kind, anew)
            return
        timing = measured.timing
        if timing is not None and not one.outcome.changed and not plans and timing.recorder.ready():
            measured.timing = None
            self._check(kind, timing, as_planned=True)

    def _tell_that_over(self, one: InFlight) -> None:
        """More was on the device than the budget allows: somebody should know."""
        peak, over = one.outcome.peak_bytes, one.outcome.over_budget_bytes
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

    # --- work beside training ---------------------------------------------------------------------

    def _plans(self, kind: StepKind) -> bool:
        """Whether a plan is in the making for a kind. One that Ctrl-C has lost no longer is."""
        return self.background.works_for(kind)

    def _submit(
        self,
        kind: StepKind,
        work: Callable[[Agreed], Any],
        then: Callable[[Any], None],
        together: bool = True,
    ) -> None:
        """Have something planned for a kind that nothing is planned for yet.

        What is found is dropped if other things are known of the kind by then.

        Args:
            kind: that it is for.
            work: to be done beside training. It is given what says what all ranks make of what
                one has found; of one that plans alone, that.
            then: is called with what was found.
            together: whether ranks that plan together all do this, and take what is found with the
                same forward.
        """
        known, ranks = kind.known, self._ranks if together else None
        kind.planning = True

        def settled(job: Job) -> tuple[Any, Exception | None]:
            found, error = None, None
            try:
                found = work(lambda own: own if ranks is None else ranks.plan_by(job, own))
            except Exception as one:  # raised in the forward that would have followed the plan
                error = one
            # A budget that cannot be met is the same for all ranks; nothing else is.
            alike = error is None or isinstance(error, BudgetError)
            if ranks is not None and alike:
                ranks.settle(job)
            return found, error

        def taken(found: tuple[Any, Exception | None]) -> None:
            kind.planning = False
            result, error = found
            if kind.known is known:
                if error is not None:
                    raise error
                then(result)

        self.background.submit(settled, taken, kind)

    def _own(self, kind: StepKind) -> Basis:
        """What this rank has to say besides what an iteration shows."""
        flights = kind.flights.number if self.together else 0
        again, free = kind.wants_again, self._free_bytes(kind)
        return Basis(None, None, flights=flights, again=again, free_bytes=free)

    def _terms(self, kind: StepKind, known: Known) -> Terms:
        device = known.device  # ranks have agreed on it
        if device is None and self._device is not None:
            device = self._device.terms()
        return Terms(self._budget, kind.flights.number, not self._planned_before, device)

    # --- a kind that learns -----------------------------------------------------------------------

    def _learn(self, kind: StepKind, timing: Timing) -> None:
        """Make a plan of an iteration that was timed, once the device has passed it."""

        def then(record: IterationRecord | None) -> None:
            self._plan_with(kind, timing, record)

        self._submit(kind, lambda agreed: finished(timing), then, together=False)

    def _plan_with(self, kind: StepKind, timing: Timing, record: IterationRecord | None) -> None:
        """Make a plan of a record, or choose the regions to record it with."""
        self._engine.take_reports()
        transfers = self._engine.transfers(timing.device)
        assert transfers is not None  # something was recorded
        # What the pool may take at most, as far as anybody has seen.
        room = min(transfers.pool.budget_bytes, kind.learning.full_at_bytes or inf)
        known = replace(kind.known, device=None, room_bytes=min(kind.known.room_bytes, room))
        about = known, self.machine, transfers.expectations, self._terms(kind, known)
        own = self._own(kind)._replace(room_bytes=known.room_bytes)

        def work(agreed: Agreed) -> tuple[Rates | None, Basis, PlanningResult | None]:
            return from_record(record, timing, *about, own, agreed)

        def then(found: tuple[Rates | None, Basis, PlanningResult | None]) -> None:
            rates, basis, made = found
            self._measured(rates)
            if made is not None:
                kind.free_bytes = basis.free_bytes
                self._follow(kind, made)
                return
            kind.follow(replace(kind.known, room_bytes=basis.room_bytes))
            kind.learning.unusable += 1
            if kind.learning.unusable == MOST_UNUSABLE:
                self._engine.ledger.tell_once(
                    "no plan",
                    f"no plan was made for budget={self._budget!r}: {MOST_UNUSABLE} forwards had "
                    "no backward, or ranks that plan together took different steps. Everything "
                    "that the policy selects moves, as without a budget.",
                )

        self._submit(kind, work, then)

    def _measured(self, rates: Rates | None) -> None:
        if rates is not None:
            self.machine = replace(self.machine, rates=rates)

    def _follow(self, kind: StepKind, made: PlanningResult) -> None:
        """What was made is known from here on, and its plan is followed."""
        kind.follow(made.known)
        if made.known.plan is None:
            return
        self._planned_before = True
        logger.info("%s", made.known.plan.summary())
        if not self.together:
            kind.free_bytes = self._free_bytes(kind)
        kind.holding = comparison(kind)
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

        Args:
            kind: that has seen nothing yet.
            lender: another one, with a plan in force.
            device: whose storages they are.
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
        kind.flights.number, kind.patience = lender.flights.number, lender.patience
        kind.follow(replace(kind.known, room_bytes=about.room_bytes))
        # What a plan of another size has cost, this one would, too.
        full, trial = resized(about.full, *sizes), Trial(lent.plan.recompute)
        known = replace(kind.known, full=full, costs=about.costs, trial=trial)
        using = replace(lent, step=step, keys=keys)
        self._plan(kind, known, using, self._terms(kind, known), self._expectations(device))

    # --- a kind that has a plan -------------------------------------------------------------------

    def make_room(self, kind: StepKind) -> None:
        """Other numbers of iterations are in flight than planned for, or less fits into the pool.

        Ranks that plan together agree on that where they check their plan. Until then what no plan
        has room for leaves.
        """
        if kind.plan is None or self.together or self._plans(kind):
            return  # `_follow` looks again, or `judged`
        self._make_anew(kind, Anew())

    def _make_anew(self, kind: StepKind, anew: Anew) -> None:
        """Have another plan made than the one in force."""
        self._measured(anew.rates)
        if anew.learns:
            kind.learn_again()
            return
        if anew.costs is not None:
            kind.known = replace(kind.known, costs=anew.costs)
        known, now = kind.known, kind.known.in_force
        assert now is not None
        using = replace(now, step=anew.step or now.step, rates=anew.rates or now.rates)
        if anew.all_off:
            made_for = replace(known, trial=None, full=using.step)
        else:
            made_for = replace(known, trial=Trial(now.plan.recompute))
        terms = self._terms(kind, known)
        terms = replace(terms, flights=anew.flights or terms.flights)
        expectations = None
        if anew.reframes:
            self._engine.take_reports()
            assert kind.device is not None  # an iteration of it has ended
            expectations = self._expectations(kind.device)
        self._plan(kind, made_for, using, terms, expectations, only_if_others=True)

    def _plan(
        self,
        kind: StepKind,
        known: Known,
        using: InForce,
        terms: Terms,
        expectations: Expectations | None,
        only_if_others: bool = False,
    ) -> None:
        """Have a plan made with what another one was made of.

        Args:
            kind: that it is for.
            known: what is known of it.
            using: the step, its keys, and rates.
            terms: what the plan has to meet.
            expectations: of the step's frames; None: they are as they were.
            only_if_others: whether expected frames that are as they were are no reason to plan.
        """

        def work(agreed: Agreed) -> PlanningResult | None:
            step = using.step
            if expectations is not None:
                step = reframed(step, using.keys, expectations)
                if only_if_others and step == using.step:
                    return None
            return planned(known, step, using.rates, using.keys, terms)

        def then(made: PlanningResult | None) -> None:
            if made is not None:
                self._follow(kind, made)

        self._submit(kind, work, then)

    def _check(self, kind: StepKind, timing: Timing, as_planned: bool, kept: bool = False) -> None:
        """An iteration was timed under the plan, or with everything kept: what does that say?"""
        known, own, holding = kind.known, self._own(kind), kind.holding
        calibrates = self.machine.calibrates

        def work(agreed: Agreed) -> tuple[Basis, float | None]:
            if kept:
                found, exposed_s = plain(timing, known, as_planned, own)
            else:
                found, exposed_s = checked(timing, known, as_planned, calibrates, own)
            return agreed(found), exposed_s

        def then(seen: tuple[Basis, float | None]) -> None:
            found, exposed_s = seen
            kind.free_bytes = found.free_bytes
            if not kept:
                anew = judged(kind, found, exposed_s)
            elif found.sample is not None and holding is not None and kind.holding is holding:
                holding.plain.append(found.sample)
                anew = weighed(kind)
            else:
                anew = None
            if anew is not None:
                self._make_anew(kind, anew)

        self._submit(kind, work, then)

    # --- what the engine knows --------------------------------------------------------------------

    def _expectations(self, device: torch.device) -> Expectations:
        transfers = self._engine.transfers(device)
        assert transfers is not None  # or nothing would have been recorded
        return transfers.expectations

    def _free_bytes(self, kind: StepKind) -> float | None:
        """What a plain step has room in, where a plan is compared with one."""
        compares = self._budget == "auto" and kind.device is not None
        return free_bytes(kind.device) if compares else None


def free_bytes(device: torch.device) -> int | None:
    """Bytes that were free on a device where the most was there; None: nobody can say.

    A forward begins where the least is there: what is free then a step's own peak may need. The
    most is that since the process began, or since somebody had it counted anew
    (`torch.cuda.reset_peak_memory_stats`).
    """
    if device.type == "cpu":
        free = host_share().limits.free_bytes
    else:
        module = torch.get_device_module(device)
        if not hasattr(module, "mem_get_info"):
            return None
        free = int(module.mem_get_info(device)[0])
        free += int(module.memory_reserved(device) - module.memory_allocated(device))
    try:
        gauge = native.MemoryGauge(device)
    except RuntimeError:  # there is no such count
        return None
    return max(free - (gauge.peak - gauge.now), 0)
