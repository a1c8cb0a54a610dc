"""Pilot: learns what a step is like, makes a plan, and has the saver follow it.

[Note: Learning]
Passages with the same first storage are of one kind, and each kind learns for itself: its first
passage runs as it would without a budget, so that allocators and caches warm up; in the second
everything is encoded on its way out, where there is a codec, which shows how much it shrinks; the
third is timed, by two events per mark; the fourth begins with a plan. Planning may wait for the
device once. After that nothing waits, and nothing is recorded but one passage now and then. What
does not look as planned is treated as if there were no plan, which is safe; twice in a row, and the
kind learns again. So a wrong forecast costs time or room, never a bit.
"""

from __future__ import annotations

from collections import OrderedDict
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from memswap._native import native
from memswap.engine.action import Action
from memswap.engine.entry import Entry, State
from memswap.engine.expectations import Key
from memswap.engine.pools import DiskPool
from memswap.engine.record import Clock, Record, Recorder
from memswap.planning.agreement import agree
from memswap.planning.observed import calibrated, quantised, step_of
from memswap.planning.planner import make_plan
from memswap.planning.profile import profile

if TYPE_CHECKING:
    from collections.abc import Sequence
    from weakref import ref

    from memswap.engine.saver import Saver
    from memswap.engine.timeline import Passage
    from memswap.planning.plan import Plan, PlannedStorage
    from memswap.planning.policy import Policy
    from memswap.planning.rates import Rates
    from memswap.planning.step import Step

#: Kinds of passages that are remembered, the latest.
MOST_KINDS = 16

#: A planned passage is timed again after so many.
RETIME_AFTER = 128

#: A plan is made anew when the step's own time has changed by this share,
TIME_TOLERANCE = 0.25

#: and a storage counts as another one when its size has.
SIZE_TOLERANCE = 0.25

#: Passages without a backward of their own, after which somebody should know.
MOST_UNUSABLE = 8


class Kind:
    """Passages that begin with the same storage."""

    def __init__(self) -> None:
        self.learnt = 0  # passages since it began to learn
        self.planned = 0  # passages since the plan
        self.changed = 0  # of these, the last ones that did not look as planned
        self.unusable = 0
        self.replans = 0
        self.recorder: Recorder | None = None
        self.step: Step | None = None
        self.keys: tuple[Key, ...] = ()  # of the step's storages
        self.plan: Plan | None = None
        self.measured_peak_bytes: int | None = None
        self.measured_exposed_s: float | None = None


class Course:
    """One passage of a kind."""

    def __init__(self, kind: Kind, plan: Plan | None, recorder: Recorder | None) -> None:
        self.kind = kind
        self.plan = plan
        self.recorder = recorder
        self.lost = False  # whether it went another way than planned
        self.changed = False
        self.closed = False
        self.lingering: list[ref[Entry]] = []  # released, and still held by the forward


class Pilot:
    """A director under a budget.

    Args:
        saver: whose passages it directs.
        policy: where it names actions, only whether a storage moves is left to the planner.
        pool: the user's, or None.
        budget: bytes, or ``"auto"``.
        rates: the machine's; None: measured when they are needed first.
        group: a process group whose ranks plan together.
    """

    def __init__(
        self,
        saver: Saver,
        policy: Policy,
        pool: object,
        budget: int | str,
        rates: Rates | None = None,
        group: Any = None,
    ) -> None:
        self._saver = saver
        self._budget = budget
        self._rates = rates
        self._calibrates = rates is None
        self._group = group
        self._fixed = policy.action is not None or policy.fn is not None
        self._on_disk = isinstance(pool, DiskPool)
        self._kinds: OrderedDict[Key | None, Kind] = OrderedDict()
        self._latest: Kind | None = None
        self._passage: Passage[Entry] = saver.passage
        self._clock: Clock | None = None

    # --- what users see ---------------------------------------------------------------------------

    @property
    def plan(self) -> Plan | None:
        """The plan in force, with what was measured under it."""
        kind = self._latest
        if kind is None or kind.plan is None:
            return None
        return replace(
            kind.plan,
            measured_peak_bytes=kind.measured_peak_bytes,
            measured_exposed_s=kind.measured_exposed_s,
        )

    @property
    def step(self) -> Step | None:
        """What was learnt of the step."""
        return None if self._latest is None else self._latest.step

    @property
    def rates(self) -> Rates | None:
        """The machine's rates, once a plan has needed them."""
        return self._rates

    # --- the director -----------------------------------------------------------------------------

    def begin(self, passage: Passage[Entry]) -> int | None:
        """A new forward: end the books of the last one, and plan if enough is known."""
        ended = self._passage.course
        self._passage = passage
        if isinstance(ended, Course) and not ended.closed:
            ended.closed = True
            self._end(ended)
        plans = [kind.plan for kind in self._kinds.values() if kind.plan is not None]
        return max((plan.limit_bytes for plan in plans), default=None)

    def choose(
        self,
        tensor: torch.Tensor,
        unit: str,
        ordinal: int,
        nbytes: int,
        action: Action,
        insists: bool,
    ) -> Action | None:
        """The plan's action, or what learning needs, or None."""
        key = Key(unit, ordinal, nbytes, tensor.dtype)
        passage = self._saver.passage
        index = len(passage.sizes)
        course = passage.course
        if course is None:
            course = passage.course = self._open(passage, key, tensor.device)
        if course.lingering:
            course.lingering = [one for one in course.lingering if lingers(one())]
        chosen = None
        if course.plan is not None:
            chosen = self._planned(course, course.plan.storages, index, key, action)
        elif self._tries_codec(course.kind, action, tensor.device):
            chosen = Action.ENCODE_SWAP
        if insists:
            # Nothing to plan: it counts as kept, which is the most that it can take.
            chosen, action = None, Action.KEEP
        if course.recorder is not None:
            course.recorder.choose(key, chosen or action)
        return chosen

    def saved(self, entry: Entry) -> None:
        """It was saved: release what has to go before the next one comes."""
        passage = self._saver.passage
        course: Course = passage.course
        if course.plan is not None and not course.lost:
            for index in course.plan.releases.get(entry.index, ()):
                self._release(passage, course, index)
            self._note_peak(course, 0)
        if course.recorder is not None:
            course.recorder.saved(entry)

    def demanding(self, entry: Entry) -> None:
        """Backward asks: from its first demand on, the plan says what comes back when."""
        passage = entry.passage
        course = None if passage is None else passage.course
        if passage is None or course is None:
            return
        plan = course.plan
        if plan is not None and passage.fetches is None and not course.lost:
            if len(passage.sizes) == len(plan.storages):
                passage.fetches = plan.fetches
            else:
                course.lost = course.changed = True
        if course.recorder is not None and not course.closed:
            course.recorder.demanding(entry)

    def demanded(self, entry: Entry) -> None:
        """Backward has it."""
        passage = entry.passage
        course = None if passage is None else passage.course
        if course is None:
            return
        # What every save has seen is off the books, while its last consumer still holds it.
        self._note_peak(course, entry.nbytes if entry.state is State.AWAY else 0)
        if course.recorder is not None and not course.closed:
            course.recorder.demanded(entry)

    # --- one passage ------------------------------------------------------------------------------

    def _open(self, passage: Passage[Entry], key: Key, device: torch.device) -> Course:
        """The first storage says what kind of passage it is."""
        # Ranks that plan together count together, whatever each of them sees.
        name = key if self._group is None else None
        kind = self._kinds.get(name)
        if kind is None:
            kind = self._kinds[name] = Kind()
            if len(self._kinds) > MOST_KINDS:
                self._kinds.popitem(last=False)
        self._kinds.move_to_end(name)
        self._latest = kind
        if self._clock is None:
            self._clock = Clock(device)
        recorder = None
        if kind.plan is None:
            kind.learnt += 1
            timed = kind.learnt >= 3
        else:
            kind.planned += 1
            timed = kind.planned == 2 or kind.planned % RETIME_AFTER == 0
        if timed:
            route = self._saver.route(device)
            assert route is not None  # or the saver would not have asked
            recorder = Recorder(self._clock, passage, route.leaving_bytes)
        return Course(kind, kind.plan, recorder)

    def _planned(
        self,
        course: Course,
        storages: Sequence[PlannedStorage],
        index: int,
        key: Key,
        action: Action,
    ) -> Action | None:
        planned = storages[index] if index < len(storages) else None
        keys = course.kind.keys
        if planned is not None and not course.lost and index < len(keys) and key == keys[index]:
            return Action.KEEP if action is Action.KEEP else planned.action
        if (
            course.lost
            or planned is None
            or (planned.unit, planned.ordinal, planned.dtype)
            != (key.unit, key.ordinal, str(key.dtype))
        ):
            course.lost = course.changed = True
            return None
        if abs(key.nbytes - planned.nbytes) > SIZE_TOLERANCE * planned.nbytes:
            course.changed = True
            if key.nbytes > planned.nbytes:
                return None  # the plan knows no room for it
        return Action.KEEP if action is Action.KEEP else planned.action

    def _tries_codec(self, kind: Kind, action: Action, device: torch.device) -> bool:
        """Whether this passage shows how much everything shrinks."""
        return (
            kind.learnt == 2
            and action is Action.SWAP
            and not self._fixed
            and native.codec_name(device) is not None
        )

    def _release(self, passage: Passage[Entry], course: Course, index: int) -> None:
        """Order what comes after the end of a send, and let the storage go."""
        entry = passage.entry(index)
        if entry is None or entry.state is not State.LEAVING:
            return
        departure = entry.departure
        assert departure is not None  # it is leaving
        with suppress(native.TransferError):  # the entry notices, and has the bytes
            departure.wait()
        if lingers(entry):
            course.lingering.append(entry.reference)

    def _note_peak(self, course: Course, more: int) -> None:
        kind = course.kind
        if course.plan is not None and not course.changed:
            peak = self._saver.ledger.resident_bytes + more
            kind.measured_peak_bytes = max(kind.measured_peak_bytes or 0, peak)

    # --- from passages to plans -------------------------------------------------------------------

    def _end(self, course: Course) -> None:
        """A passage is over."""
        kind, recorder = course.kind, course.recorder
        if recorder is not None:
            recorder.close()
            kind.recorder = recorder
        if course.plan is None:
            if kind.recorder is not None:
                self._make(kind)
            return
        kind.changed = kind.changed + 1 if course.changed else 0
        if kind.changed >= 2 and self._group is None:
            kind.plan, kind.learnt, kind.planned, kind.changed = None, 2, 0, 0
            kind.recorder = None
            return
        if kind.recorder is not None and not course.changed:
            if self._group is not None:
                kind.recorder.wait()
            if kind.recorder.ready():
                self._look_again(kind)

    def _make(self, kind: Kind) -> None:
        """Make a plan of a kind's record."""
        assert kind.recorder is not None
        kind.recorder.wait()
        record: Record | None = kind.recorder.take()
        kind.recorder = None
        if record is not None and not record.order:
            record = None
        step = None if record is None else self._step(record)
        rates = self._measured_rates()
        if record is not None and self._calibrates:
            rates = self._rates = calibrated(rates, record)
        step, rates = agree(step, rates, self._group)
        if step is None:
            kind.unusable += 1
            if kind.unusable == MOST_UNUSABLE:
                self._saver.ledger.tell_once(
                    "no plan",
                    f"no plan was made for budget={self._budget!r}: {MOST_UNUSABLE} forwards began "
                    "before the backward of the one before. Everything that the policy selects "
                    "moves, as without a budget.",
                )
            return
        kind.keys = () if record is None else record.signature
        self._adopt(kind, step, rates)

    def _adopt(self, kind: Kind, step: Step, rates: Rates) -> None:
        again = kind.step is not None
        plan = make_plan(step, rates, self._budget, at_least=again)
        kind.step, kind.plan, kind.planned = step, plan, 0
        kind.measured_peak_bytes = kind.measured_exposed_s = None
        if again:
            kind.replans += 1
            if isinstance(plan.budget, int) and plan.peak_bytes > plan.budget:
                self._saver.ledger.tell_once(
                    "budget",
                    f"the step has changed, and needs {plan.peak_bytes} bytes of saved activations "
                    f"at least, beyond the budget of {plan.budget}. Training goes on with that.",
                )

    def _look_again(self, kind: Kind) -> None:
        """A planned passage was timed: is the plan still the right one?"""
        assert kind.recorder is not None and kind.plan is not None and kind.step is not None
        record = kind.recorder.take()
        kind.recorder = None
        known = kind.step
        alike = len(record.gaps_s) == len(known.gaps_s) and record.order == known.order
        gaps = [quantised(gap_s) for gap_s in record.gaps_s]
        step = known.with_gaps(gaps, quantised(record.tail_s))
        if alike:
            kind.measured_exposed_s = record.exposed_s
        step_or_none, rates = agree(step if alike else None, self._measured_rates(), self._group)
        if step_or_none is None:
            return
        # The first timing follows the plan at once: it is there to be told, not to change it.
        changed = abs(step_or_none.compute_s - known.compute_s) > TIME_TOLERANCE * known.compute_s
        if changed and kind.planned > 2:
            self._adopt(kind, step_or_none, rates)

    def _step(self, record: Record) -> Step:
        self._saver.stats()  # takes in what encoders have reported
        clock = self._clock
        assert clock is not None  # something was recorded
        route = self._saver.route(clock.device)
        assert route is not None
        return step_of(record, route.expectations, clock.device, self._fixed, self._on_disk)

    def _measured_rates(self) -> Rates:
        if self._rates is None:
            assert self._clock is not None
            self._rates = profile(self._clock.device)
        return self._rates


def lingers(entry: Entry | None) -> bool:
    """Whether a storage that has been sent is still held by somebody."""
    return entry is not None and entry.state is State.LEAVING and not entry.gone()
