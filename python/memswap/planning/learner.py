"""Learner: makes plans of what was taken down, and makes them anew when they are not right.

[Note: Learning]
Passages that begin alike are of one kind, and each kind learns for itself: its first passage runs
as it would without a budget, so that allocators and caches warm up; in the second everything is
encoded on its way out, where there is a codec, which shows how much it shrinks; the third is timed,
by two events per mark. Checkpoint regions are off in the second and third, to see what they save.
If the budget wants some of them recomputed, a passage with just these on is timed next. Then there
is a plan, for the fourth or fifth passage on. Planning may wait for the device once or twice. After
that nothing waits, and nothing is recorded but one passage now and then. What does not look as
planned is treated as if there were no plan, which is safe; twice in a row, and the kind learns
again; where that does not help, after twice as many the next time. So a wrong forecast costs time
or room, never a bit.

[Note: In flight] Several passages may wait for their backward at a time. Each has the same share of
a budget: what none exceeds, all of them do not exceed together. Their number is the highest that
was seen.
"""

from __future__ import annotations

from dataclasses import fields, replace
from math import inf
from typing import TYPE_CHECKING, Any

from memswap.engine.action import Action
from memswap.engine.pools import DiskPool
from memswap.planning.agreement import agree
from memswap.planning.budgets import bytes_of
from memswap.planning.kinds import MOST_DOUBTS, MOST_UNUSABLE, REFRAME_AFTER
from memswap.planning.observed import (
    calibrated,
    linked,
    quantised,
    reframed,
    step_of,
    without_copies,
)
from memswap.planning.planner import make_plan, regions_for, too_small
from memswap.planning.profile import profile
from memswap.planning.replay import CODED, MOVES
from memswap.planning.shapes import resized
from memswap.planning.sharing import taken_s

if TYPE_CHECKING:
    import torch

    from memswap.engine.expectations import Key
    from memswap.engine.record import Record
    from memswap.engine.saver import Saver
    from memswap.planning.kinds import Course, Kind, Timing
    from memswap.planning.plan import Plan
    from memswap.planning.rates import Rates
    from memswap.planning.step import Step

#: A plan is made anew when the step's own time, or a rate of the machine, has changed by this
#: share.
TOLERANCE = 0.25

#: Waits that were not predicted show a slower link if they take this share of a step.
LATE_SHARE = 0.02

#: Sets of regions that are recorded before a budget counts as too small.
MOST_TRIALS = 3


class Learner:
    """From passages to plans.

    Args:
        saver: whose passages they are.
        budget: bytes, or ``"auto"``.
        rates: the machine's; None: measured when they are needed first.
        group: a process group whose ranks plan together.
        fixed: whether the policy says how storages move.
        pool: the user's, or None.
    """

    def __init__(
        self,
        saver: Saver,
        budget: int | str,
        rates: Rates | None,
        group: Any,
        fixed: bool,
        pool: object,
    ) -> None:
        self.rates = rates
        self._saver = saver
        self._budget = budget
        self._calibrates = rates is None
        self._group = group
        self._fixed = fixed
        self._disk = pool if isinstance(pool, DiskPool) else None
        self._planned_before = False  # some step, of whatever shape

    def ended(self, course: Course) -> None:
        """A passage is over."""
        kind = course.kind
        if course.plan is None:
            if course.refused:
                kind.full_at_bytes = max(kind.full_at_bytes, course.pooled_bytes)
            if course.timing is not None and kind.plan is None and course.trial == kind.trial:
                self._make(kind, course.timing)
            return
        if course.plan is not kind.plan:
            return
        if course.timing is not None and kind.timing is None:
            kind.timing = course.timing
        over = self._tell_if_over(course)
        if self._group is not None:
            # What one rank alone saw changes nothing, and it comes to where the others wait for it.
            if kind.timing is not None:
                kind.timing.recorder.wait()
                self._look_again(kind, not course.changed)
            return
        # An evaluation begins like a step and saves less; there is nothing to learn from it.
        if course.passage.began_backward and kind.looked(not course.changed):
            kind.learn_again()
            return
        fits_less = course.refused and course.pooled_bytes < kind.room_bytes
        if fits_less:
            kind.room_bytes = course.pooled_bytes
        kind.unfit = kind.unfit + 1 if course.unfit else 0
        if fits_less:
            self.make_room(kind)
            return
        lasting = kind.unfit >= 2 and kind.planned >= REFRAME_AFTER
        if over or lasting:
            self._reframe(kind, course.device)
            return
        if kind.timing is not None and not course.changed and kind.timing.recorder.ready():
            self._look_again(kind)

    def _tell_if_over(self, course: Course) -> bool:
        """Whether more was on the device than the budget allows, of which somebody should know."""
        peak, over = course.passage.peak_bytes, course.over_budget_bytes
        if not over:
            return False
        why = (
            "more forwards are in flight than before, frames became longer than planned with "
            "nowhere else for the bytes to go, or saved tensors are held for longer than they were"
        )
        if course.refused:
            why = "the pool has no room for what was to leave (stats().kept)"
        elif course.changed:
            why = "the step saved other storages, or larger ones, than the plan is for"
        self._saver.ledger.tell_once(
            "over budget",
            f"{peak} bytes of saved activations were on the device at a time, {over} beyond the "
            f"budget of {peak - over}: {why}. No bit differs. Where another plan helps, it is made "
            "now; manager.plan.over_budget_bytes says how it goes.",
        )
        return not course.changed

    def _make(self, kind: Kind, timing: Timing) -> None:
        """Make a plan of a record, or choose the regions to record it with."""
        timing.recorder.wait()
        record = timing.recorder.take()
        if record is not None and not record.order:
            record = None
        rates = self._measured_rates(timing)
        step = None if record is None else self._step(record, timing, rates)
        if record is not None and self._calibrates:
            rates = self.rates = calibrated(rates, record)
        room = min(self._pool_bytes(timing), kind.full_at_bytes or inf)
        kind.room_bytes = min(kind.room_bytes, room)
        step, rates, kind.room_bytes = agree(step, rates, self._group, kind.room_bytes)
        if step is None:
            kind.unusable += 1
            if kind.unusable == MOST_UNUSABLE:
                self._saver.ledger.tell_once(
                    "no plan",
                    f"no plan was made for budget={self._budget!r}: {MOST_UNUSABLE} forwards had "
                    "no backward, or ranks that plan together took different steps. Everything "
                    "that the policy selects moves, as without a budget.",
                )
            return
        keys = () if record is None else record.signature
        if kind.trial is not None:
            assert kind.full is not None
            if timing.first != kind.first:  # not recorded in one size
                kind.full = resized(kind.full, timing.first.nbytes, kind.first.nbytes)
                kind.first = timing.first
            self._judge(kind, replace(step, regions=()), rates, keys)
            return
        kind.full, kind.first = step, timing.first
        if step.regions and self._try_regions(kind, rates):
            return
        self._adopt(kind, replace(step, regions=()), rates, keys)

    def _try_regions(self, kind: Kind, rates: Rates) -> bool:
        """Have the next passage recorded with the regions on that a budget wants recomputed."""
        assert kind.full is not None
        if kind.trials >= MOST_TRIALS:
            return False
        limit = self._limit(kind, rates) - kind.margin_bytes
        units, _ = regions_for(kind.full, rates, limit, self._room(kind))
        if not units or units == kind.trial:
            return False
        kind.trial, kind.trials = units, kind.trials + 1
        return True

    def _judge(self, kind: Kind, step: Step, rates: Rates, keys: tuple[Key, ...]) -> None:
        """A step with regions on was recorded: take it if it meets the budget."""
        limit = self._limit(kind, rates)
        room = self._room(kind)
        plan = make_plan(step, rates, limit, True, kind.full, kind.trial or (), room)
        if plan.peak_bytes > limit:
            kind.margin_bytes += plan.peak_bytes - limit
            if self._try_regions(kind, rates):
                return
        self._adopt(kind, step, rates, keys)

    def _adopt(self, kind: Kind, step: Step, rates: Rates, keys: tuple[Key, ...]) -> None:
        again = kind.step is not None
        recompute = kind.trial or ()
        kind.end_trial()
        flights, room = kind.in_flight, self._room(kind)
        limit = None if self._budget == "auto" else self._limit(kind, rates)
        asked = self._budget if limit is None else limit
        plan = make_plan(step, rates, asked, True, kind.full, recompute, room)
        if limit is not None:
            allowed = self._budget if isinstance(self._budget, int) else limit * flights
            if plan.peak_bytes > limit:
                needs = plan.peak_bytes * flights
                if not self._planned_before:
                    raise too_small(allowed, needs, kind.room_bytes if pooled(plan) else inf)
                self._saver.ledger.tell_once(
                    "budget",
                    f"a step that is not like those before needs {needs} bytes of saved "
                    f"activations at least, beyond the budget of {allowed}. Training goes on with "
                    "that.",
                )
            plan = replace(plan, budget=self._budget, budget_bytes=allowed, in_flight=flights)
        elif flights > 1:
            plan = replace(plan, in_flight=flights)
        self._planned_before = True
        kind.step, kind.plan, kind.rates, kind.keys, kind.planned = step, plan, rates, keys, 0
        kind.measured_peak_bytes, kind.measured_exposed_s, kind.over_budget_bytes = None, None, 0
        kind.replans += again

    def lend(self, kind: Kind, lender: Kind, device: torch.device) -> None:
        """Have a kind that has seen nothing yet begin with what is known of another one.

        Nothing where that would not do: then it learns for itself.
        """
        plan, known, full, rates = lender.plan, lender.step, lender.full, lender.rates
        assert plan is not None and known is not None and full is not None and rates is not None
        sizes = kind.first.nbytes, lender.first.nbytes
        step = resized(known, *sizes)
        if any(one.nbytes < self._saver.policy.min_bytes for one in step.storages):
            return  # some of them would not be considered at all
        pairs = zip(lender.keys, step.storages, strict=True)
        keys = tuple(key._replace(nbytes=one.nbytes) for key, one in pairs)
        route = self._saver.route(device)
        assert route is not None  # or the saver would not have asked
        step = reframed(step, keys, route.expectations)
        kind.full, kind.in_flight, kind.room_bytes = (
            resized(full, *sizes),
            lender.in_flight,
            lender.room_bytes,
        )
        kind.trial, kind.patience = plan.recompute or None, lender.patience
        self._adopt(kind, step, rates, keys)

    def _limit(self, kind: Kind, rates: Rates) -> int:
        """Bytes that each passage in flight may have."""
        if isinstance(self._budget, int):
            return self._budget // kind.in_flight
        assert kind.full is not None
        return bytes_of(self._budget, kind.full, rates)

    def _room(self, kind: Kind) -> float:
        """Bytes that each passage in flight may have of the pool."""
        return kind.room_bytes if kind.room_bytes == inf else kind.room_bytes // kind.in_flight

    def _pool_bytes(self, timing: Timing) -> float:
        """What the pool may take at most."""
        route = self._saver.route(timing.device)
        assert route is not None  # something was recorded
        return route.swap.pool.budget_bytes

    def make_room(self, kind: Kind) -> None:
        """More passages are in flight than planned for, or less fits into the pool."""
        assert kind.plan is not None and kind.step is not None and kind.rates is not None
        kind.trial = kind.plan.recompute or None
        self._adopt(kind, kind.step, kind.rates, kind.keys)

    def _reframe(self, kind: Kind, device: torch.device) -> None:
        """Frames are longer than planned: plan with those that are seen by now.

        Nothing is learnt anew, which would take a passage without a budget.
        """
        assert kind.plan is not None and kind.step is not None and kind.rates is not None
        kind.unfit = 0
        self._saver.stats()  # takes in what encoders have reported
        route = self._saver.route(device)
        assert route is not None  # or nothing would have been planned
        step = reframed(kind.step, kind.keys, route.expectations)
        if step != kind.step:
            kind.trial = kind.plan.recompute or None
            self._adopt(kind, step, kind.rates, kind.keys)

    def _look_again(self, kind: Kind, as_planned: bool = True) -> None:
        """A planned passage was timed: is the plan still the right one?"""
        timing, plan, known, before = kind.timing, kind.plan, kind.step, kind.rates
        assert timing is not None and plan is not None and known is not None and before is not None
        kind.timing, rates = None, before
        record = timing.recorder.take()
        step, shared_s = None, 0.0
        # Another number of saves, or another order, says nothing about the times of this step.
        if (
            as_planned
            and record is not None
            and len(record.gaps_s) == len(known.gaps_s)
            and record.order == known.order
        ):
            size = kind.first.nbytes / timing.first.nbytes  # of what the plan is for
            gaps = [quantised(size * gap_s) for gap_s in record.gaps_s]
            step = known.with_gaps(gaps, quantised(size * record.tail_s))
            if before.copy_share:  # nobody waits for copies, and compute takes longer
                shared_s = max(step.compute_s - known.compute_s, 0.0)
            beside_s = codec_s(plan, before) + taken_s(swapped(plan), before, step.compute_s)
            if beside_s:
                # Encodes, decodes and copies ran in these gaps: how they were shared is not known.
                scale = max(step.compute_s - beside_s, 0.0) / known.compute_s
                gaps = [quantised(scale * gap_s) for gap_s in known.gaps_s]
                step = known.with_gaps(gaps, quantised(scale * known.tail_s))
            again_s = step.compute_s - plan.compute_s if plan.recompute else 0.0
            kind.measured_exposed_s = record.exposed_s + max(again_s, 0.0) + shared_s
            late_s = record.exposed_s - (plan.exposed_s - (known.compute_s - plan.compute_s))
            rates = linked(rates, timing.links, late_s > LATE_SHARE * known.compute_s)
            if self._calibrates:
                rates = calibrated(rates, record)
        step_or_none, rates, _ = agree(step, rates, self._group)
        # The first timing follows the plan at once: it is there to be told, not to change it.
        if step_or_none is None or kind.planned <= 2:
            return
        rates = settled(rates, before)
        if not differs(step_or_none, known) and rates == before:
            kind.doubts = 0
            return
        kind.doubts += 1
        if kind.doubts < MOST_DOUBTS:
            kind.checks_again = True  # one slow passage is no reason
            return
        kind.doubts = 0
        self.rates = rates
        if kind.full is not None and kind.full.regions:
            kind.learn_again()
            return
        kind.full = step_or_none
        self._adopt(kind, step_or_none, rates, kind.keys)

    def _measured_rates(self, timing: Timing) -> Rates:
        if self.rates is None:
            self.rates = profile(
                timing.device, folder=None if self._disk is None else self._disk.path
            )
        return self.rates

    def _step(self, record: Record, timing: Timing, rates: Rates) -> Step | None:
        """What a record says; None where it is no step, which is no reason to stop training."""
        self._saver.stats()  # takes in what encoders have reported
        route = self._saver.route(timing.device)
        assert route is not None  # something was recorded
        try:
            step = step_of(
                record,
                route.expectations,
                timing.device,
                self._fixed,
                self._disk is not None,
                timing.regions,
            )
        except ValueError:
            return None  # counted as unusable, and told if it goes on
        return without_copies(step, record, rates)


def pooled(plan: Plan) -> bool:
    """Whether some of a plan's storages could go to a pool."""
    return any(action in MOVES for one in plan.step.storages for action in one.actions)


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


def regions_off(kind: Kind) -> frozenset[str] | None:
    """Which regions are off in the next passage of a kind; None: all of them."""
    if kind.plan is not None or kind.trial is not None:
        on = kind.plan.recompute if kind.plan is not None else kind.trial or ()
        known = kind.full.regions if kind.full is not None else ()
        return frozenset(one.unit for one in known) - set(on)
    learning = kind.learnt >= 2 and kind.unusable < MOST_UNUSABLE
    return None if learning else frozenset()


def settled(rates: Rates, before: Rates) -> Rates:
    """Rates, as they were where they have changed by little."""
    values = {}
    for field in fields(rates):
        new, old = getattr(rates, field.name), getattr(before, field.name)
        if isinstance(new, float) and abs(new - old) <= TOLERANCE * old:
            values[field.name] = old
    return replace(rates, **values)
