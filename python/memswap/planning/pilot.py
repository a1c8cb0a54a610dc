"""Pilot: has an engine follow plans, and takes down what they are made of ([Note: Learning]).

Steps may follow a plan that was made for other sizes ([Note: Other sizes]).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from memswap._native import native
from memswap.engine.action import ENCODE_SWAP, KEEP, SWAP
from memswap.engine.entry import Entry
from memswap.engine.expectations import Key
from memswap.engine.link_times import LinkTimes
from memswap.engine.recomputed import Recomputed
from memswap.engine.record import Clock, Recorder
from memswap.engine.region_record import RegionRecord
from memswap.planning.device import DevicePlan
from memswap.planning.kinds import Course, Kind, Timing
from memswap.planning.learner import Learner, regions_off
from memswap.planning.native_plan import native_plan
from memswap.planning.replay import CODED
from memswap.planning.shapes import Kinds

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import nn

    from memswap._C import Iteration
    from memswap._C import Plan as NativePlan
    from memswap.engine.action import Action
    from memswap.engine.engine import Engine
    from memswap.planning.account import DeviceAccount
    from memswap.planning.plan import Plan
    from memswap.planning.policy import Policy
    from memswap.planning.rates import Rates
    from memswap.planning.step import Step

#: An iteration counts as another one when the bytes that it saves have changed by this share.
SIZE_TOLERANCE = 0.25


class Pilot:
    """A director under a budget.

    Where a plan is in force, the engine does what follows a save, and follows the plan alone for
    as long as what is saved and demanded is what was planned: then `choose`, `saved`,
    `demanding` and `demanded` are not called (csrc/engine/follow_plan.cpp).

    Args:
        engine: whose iterations it directs.
        policy: where it names actions, only whether a storage moves is left to the planner.
        pool: the user's, or None.
        budget: bytes, or ``"auto"``.
        rates: the machine's; None: measured when they are needed first.
        group: a process group whose ranks plan together.
        units: what is managed, by name; those that are checkpoint regions are switched on and off.
        device: what is on the device, where the budget is for all of it.
    """

    def __init__(
        self,
        engine: Engine,
        policy: Policy,
        pool: object,
        budget: int | str,
        rates: Rates | None = None,
        group: Any = None,
        units: Mapping[str, nn.Module] | None = None,
        device: DeviceAccount | None = None,
    ) -> None:
        self._engine = engine
        self._fixed = policy.action is not None or policy.fn is not None
        self._bounded = budget != "auto"
        self._learner = Learner(engine, budget, rates, group, self._fixed, pool, device)
        self._device = device
        self._baseline_bytes = 0  # on the device when the latest forward began
        self._names = {id(module): name for name, module in (units or {}).items()}
        # Ranks that plan together count together, whatever each of them sees.
        self._kinds = Kinds(separate=group is None)
        self._latest: Kind | None = None
        self._open: list[Course] = []  # that have not ended, in their order
        self._clock: Clock | None = None
        self._recomputed = Recomputed(engine, self._note_recomputed)

    # --- what users see ---------------------------------------------------------------------------

    @property
    def plan(self) -> Plan | None:
        """The plan in force, with what was measured under it."""
        kind = self._latest
        if kind is None or kind.plan is None:
            return None
        for course in self._open:
            course.take_peak()
        return replace(
            kind.plan,
            measured_peak_bytes=kind.measured.peak_bytes,
            measured_exposed_s=kind.measured.exposed_s,
            over_budget_bytes=kind.measured.over_budget_bytes,
        )

    @property
    def step(self) -> Step | None:
        """What was learnt of the step, all regions off."""
        return None if self._latest is None else self._latest.known.full

    @property
    def rates(self) -> Rates | None:
        """The machine's rates, once a plan has needed them."""
        return self._learner.rates

    def look(self) -> None:
        """Notice what is gone, without a mark."""
        with self._engine.lock:
            self._recomputed.sweep()

    def wait(self) -> None:
        """Have what the steps so far show planned with, and wait for that.

        Raises:
            BudgetError: no plan meets the budget.
        """
        lock, background = self._engine.lock, self._learner.background
        with lock:
            self._end_courses()
        while (job := background.current) is not None:
            job.wait()
            with lock:
                self._learner.collect()
            if job is background.current:
                return  # ranks follow what it found from a forward on that has not begun

    def end(self) -> None:
        """Nothing follows a plan any more, and nothing is learnt.

        What is in flight is the policy's from here on: the engine no longer knows its director.
        """
        engine = self._engine
        with engine.lock:
            engine.director = None
            for course in self._open:
                course.take_peak()
            self._open.clear()
            for route in engine.open_routes():
                engine.set_overflow_room(route, None)
            given_up = self._learner.background.give_up()
        for job in given_up:
            job.wait()

    # --- the director -----------------------------------------------------------------------------

    def begin(self, iteration: Iteration) -> int | None:
        """A new forward: end the books of those that are over, and follow plans that were made."""
        self._end_courses()
        self._learner.begin()
        if self._device is not None:
            self._look_at_device(self._device)
        plans = [kind.plan for kind in self._kinds if kind.plan is not None]
        return max((plan.limit_bytes for plan in plans), default=None)

    def _end_courses(self) -> None:
        """End the books of forwards whose backward is over; what they show is learnt from."""
        self._recomputed.sweep()
        ended = [course for course in self._open if not course.waits]
        self._open = [course for course in self._open if course not in ended]
        if not self._open:
            self._recomputed.clear()
        for course in ended:
            if course.timing is not None:
                course.timing.recorder.close()
                if self._device is not None and course.timing.workspace is not None:
                    self._device.end(course.timing.workspace)
        for course in ended:
            course.take_peak()
            self._learner.ended(course)

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
        iteration = self._engine.iteration
        self._recomputed.sweep()
        index = iteration.count
        course = self._course_of(iteration)
        if iteration.plan is not None:
            native.Engine.look_at_released(iteration)
        key = Key(unit, ordinal, nbytes, tensor.dtype)
        course = course or self._begin_course(iteration, key, tensor.device)
        self._arrive(course)
        chosen = None
        if course.plan is not None:
            chosen = self._planned(course, course.plan, index, key, action)
            if iteration.limit_bytes:
                self._make_room(course, nbytes)
        elif self._tries_codec(course.kind, action, tensor.device):
            chosen = ENCODE_SWAP
        recorded = chosen or action
        if insists:
            # Nothing to plan: it counts as kept, which is the most that it can take.
            chosen, recorded = None, KEEP
        elif chosen is None and self._times_copies(course, action):
            chosen = SWAP
        if course.timing is not None:
            course.timing.recorder.choose(key, recorded)
        return chosen

    def frame_nbytes(self, entry: Entry) -> int | None:
        """What the plan has for a storage's frame."""
        course = self._course_of(self._engine.iteration)
        if course is None or course.plan is None or course.lost:
            return None
        storages, index = course.plan.storages, entry.index
        if not index < len(storages):
            return None
        planned = storages[index]
        return planned.away_nbytes if planned.action in CODED else None

    def unfit(self) -> None:
        """A storage did not become the frame that was planned."""
        course = self._course_of(self._engine.iteration)
        if course is not None:
            course.unfit = True

    def no_room(self) -> None:
        """The pool is full."""
        course = self._course_of(self._engine.iteration)
        if course is not None:
            course.refused = True
            self._note_pooled(course)

    def _note_pooled(self, course: Course) -> None:
        course.pooled_bytes = max(course.pooled_bytes, self._engine.ledger.away_bytes)

    def saved(self, entry: Entry) -> None:
        """It was saved: release what has to go before the next one comes."""
        iteration = self._engine.iteration
        course = self._course_of(iteration)
        assert course is not None  # choose() has begun it
        if iteration.plan is not None:
            self._engine.saved(entry)
        if course.timing is not None:
            course.timing.recorder.saved(entry)
            course.timing.regions.saved(entry)
            course.timing.links.sent(entry)
            self._note_extra(course)
        self._depart(course)

    def window(self, seconds: float) -> None:
        """Codec work may run beside what comes next."""
        iteration = self._engine.iteration
        backward = self._engine.backward
        if backward is not None and backward.began_backward and iteration.count == 0:
            iteration = backward  # no forward has begun since
        course = self._course_of(iteration)
        if course is not None and course.timing is not None:
            course.timing.recorder.window(seconds)

    def again(self, entry: Entry, unit: str) -> None:
        """A unit saves what was saved before."""
        course = self._course_of(entry.iteration)
        if course is not None and course.timing is not None:
            course.timing.regions.again(entry, unit)

    def demanding(self, entry: Entry) -> None:
        """Backward asks. What comes back when, its plan says if all it knows was saved."""
        iteration = self._engine.backward = entry.iteration
        course = self._course_of(iteration)
        if iteration is None or course is None:
            return
        self._arrive(course)
        self._recomputed.sweep()
        if not iteration.began_backward:
            if course.refused:
                self._note_pooled(course)
            if course.plan is not None:
                self._compare(course, course.plan)
        if course.timing is not None:
            course.timing.recorder.demanding(entry)

    def demanded(self, entry: Entry) -> None:
        """Backward has it."""
        iteration = entry.iteration
        course = self._course_of(iteration)
        if iteration is not None and course is not None and course.timing is not None:
            course.timing.recorder.demanded(entry)
            if course.plan is not None and iteration.returns_as_planned:
                asked = course.plan.fetches.get(entry.index, ())
                course.timing.links.asked(map(iteration.entry, asked))
            self._note_extra(course)
        if course is not None:
            self._depart(course)

    # --- the whole device -------------------------------------------------------------------------

    def _look_at_device(self, device: DeviceAccount) -> None:
        """A forward begins: what else is there by now?"""
        plans = [kind.plan for kind in self._kinds if isinstance(kind.plan, DevicePlan)]
        learns = len(plans) < len(self._kinds) or not plans
        if learns or device.follows_others(plans):
            for route in self._engine.open_routes():
                route.trim_arena()
        self._baseline_bytes = device.begin(plans, learns, self._present_bytes)
        for kind in self._kinds:
            workspace = kind.known.workspace
            if kind.plan is None or workspace is None:
                continue
            if device.step_is_new or device.relearns(workspace, self._baseline_bytes):
                kind.learn_again()

    def _present_bytes(self, granularity: int) -> int:
        """What saved storages take of the device now, each rounded up, and frames' arenas."""
        self._engine.departing.notice_gone()
        found = sum(course.iteration.present_bytes(granularity) for course in self._open)
        return found + sum(route.arena_bytes() for route in self._engine.open_routes())

    def _hold_present(self) -> object:
        return [course.iteration.present() for course in self._open]

    def _arrive(self, course: Course) -> None:
        """Memswap's work at a mark begins."""
        timing = course.timing
        if self._device is not None and timing is not None and timing.workspace is not None:
            self._device.arrive(timing.workspace)

    def _depart(self, course: Course) -> None:
        """And has ended."""
        timing = course.timing
        if self._device is not None and timing is not None and timing.workspace is not None:
            self._device.depart(timing.workspace, timing.recorder.marks - 1)

    # --- regions ----------------------------------------------------------------------------------

    def recomputes(self, module: nn.Module, args: tuple[Any, ...]) -> bool:
        """Whether a checkpoint region is one in the forward that begins now."""
        name = self._names.get(id(module))
        tensors = [one for one in args if isinstance(one, torch.Tensor)]
        engine = self._engine
        if name is None or not tensors or not self._bounded or not engine.policy.covers(name):
            return True
        if engine.route(tensors[0].device) is None:
            return True
        with engine.lock:
            iteration = engine.iteration
            course = self._course_of(iteration)
            if course is None:
                nbytes = sum(one.nbytes for one in tensors)
                key = Key(name, -1, nbytes, tensors[0].dtype)
                course = self._begin_course(iteration, key, tensors[0].device)
            on = course.off is not None and name not in course.off
            if not on and course.timing is not None:
                plain = (one for one in tensors if not (one.is_leaf and one.requires_grad))
                inputs = [one for one in plain if not engine.is_persistent(native.storage_key(one))]
                course.timing.regions.region(name, inputs, iteration, engine.policy.min_bytes)
            return on

    def counting(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """A region's function; what it saves in backward is counted."""
        return self._recomputed.counting(fn)

    def _note_recomputed(self) -> None:
        iteration = self._engine.backward
        course = self._course_of(iteration)
        if iteration is not None and course is not None:
            self._engine.note_peak(iteration)
            self._note_extra(course)

    def _note_extra(self, course: Course) -> None:
        timing = course.timing
        if timing is not None and timing.recorder.marks:
            mark = timing.recorder.marks - 1
            timing.regions.recomputed(mark, self._recomputed.nbytes)

    def _course_of(self, iteration: Iteration | None) -> Course | None:
        """What is known of an iteration that has not ended."""
        return next((one for one in self._open if one.iteration is iteration), None)

    # --- one iteration
    # ------------------------------------------------------------------------------

    def _begin_course(self, iteration: Iteration, key: Key, device: torch.device) -> Course:
        """What comes first says what kind of iteration it is."""
        if not key.nbytes:
            key = key._replace(nbytes=1)  # it is divided by
        kind, lender = self._kinds.of(key)
        if lender is not None and self._device is None:  # what else is there does not grow alike
            self._learner.lend(kind, lender, device)
            self._learner.collect()
        self._latest = kind
        if self._clock is None:
            self._clock = Clock(device)
        in_flight = 1 + len(self._open)
        # All of them share the budget, those as well that so far began when nothing was in flight.
        for one in dict.fromkeys((kind, *(course.kind for course in self._open))):
            if one.flights.see(in_flight):
                self._learner.make_room(one)
        if kind.flights.count():
            self._learner.make_room(kind)
        self._learner.collect()
        timing = None
        if self._learner.times(kind):
            route = self._engine.route(device)
            assert route is not None  # or the engine would not have asked
            recorder = Recorder(self._clock, iteration, route.leaving_bytes)
            workspace = None
            if self._device is not None and kind.plan is None:
                workspace = self._device.record(
                    self._present_bytes, self._hold_present, self._baseline_bytes
                )
            timing = Timing(key, device, recorder, RegionRecord(), LinkTimes(), workspace)
        course = Course(iteration, kind, timing, key.nbytes, device)
        course.off = regions_off(kind)
        if self._bounded and course.plan is not None and course.plan.in_flight < in_flight:
            course.plan = None  # it leaves the others no room; what leaves is safe
        self._open.append(course)
        self._set_overflow_room(device)
        if course.plan is not None:
            iteration.plan = self._native_plan(kind, course.plan, device)
            iteration.follows_alone = timing is None and self._engine.policy.fn is None
        if self._bounded:
            self._set_limit()
        return course

    def _set_limit(self) -> None:
        """What iterations in flight stay below although they save other sizes.

        A share of a short step's bytes is no bound for a long one that is in flight as well.
        """
        planned = [(one.iteration, one.plan) for one in self._open if one.plan is not None]
        limit_bytes = max((plan.limit_bytes * plan.in_flight for _, plan in planned), default=0)
        for iteration, _ in planned:
            iteration.limit_bytes = max(iteration.limit_bytes, limit_bytes)

    def _native_plan(self, kind: Kind, plan: Plan, device: torch.device) -> NativePlan:
        if kind.native_plan is None or kind.native_plan[0] is not plan:
            route = self._engine.route(device)
            assert route is not None  # or the engine would not have asked
            least_bytes = self._engine.policy.min_bytes
            made = native_plan(plan, kind.known.keys, route, least_bytes)
            kind.native_plan = (plan, made)
        return kind.native_plan[1]

    def _lose(self, course: Course) -> None:
        """An iteration goes another way than planned."""
        course.lost = course.changed = True
        course.iteration.plan = None

    def _compare(self, course: Course, plan: Plan) -> None:
        """Its forward is over: did it save what was planned, within a tolerance?"""
        iteration = course.iteration
        if iteration.count != len(plan.storages):
            self._lose(course)
        expected = course.first_nbytes / course.kind.known.first.nbytes * plan.step.saved_bytes
        if abs(iteration.nbytes - expected) > SIZE_TOLERANCE * expected:
            course.changed = True

    def _set_overflow_room(self, device: torch.device) -> None:
        """As much as the plans of the iterations in flight ask for; without one, none is set."""
        plans = [course.plan for course in self._open if course.plan is not None]
        room = max((plan.arena_bytes * plan.in_flight for plan in plans), default=None)
        route = self._engine.route(device)
        if route is not None:
            self._engine.set_overflow_room(route, room)

    def _planned(
        self,
        course: Course,
        plan: Plan,
        index: int,
        key: Key,
        action: Action,
    ) -> Action | None:
        """The plan's action, for a storage that may be another one than it knows."""
        planned = None
        if not course.lost and index < len(plan.storages):
            planned = plan.storages[index]
        if planned is None or (planned.unit, planned.ordinal, planned.dtype) != (
            key.unit,
            key.ordinal,
            str(key.dtype),
        ):
            self._lose(course)
            # Within a budget only what leaves is safe.
            planned = None if self._bounded else course.kind.at_place(key)
        if planned is None:
            return None
        chosen = KEEP if action is KEEP else planned.action
        more_bytes = key.nbytes - planned.nbytes
        if chosen is KEEP and more_bytes and course.iteration.limit_bytes:
            if action is not KEEP and course.excess_bytes + more_bytes > 0:
                return None  # the plan knows no room for it
            course.excess_bytes += more_bytes
        return chosen

    def _make_room(self, course: Course, nbytes: int) -> None:
        """Wait for what leaves, oldest first, until so many bytes more are within the budget."""
        iteration, ledger = course.iteration, self._engine.ledger
        while (
            ledger.resident_bytes + nbytes > iteration.limit_bytes
            and course.waited_for < iteration.count
        ):
            self._engine.release(iteration, course.waited_for)
            course.waited_for += 1

    def _tries_codec(self, kind: Kind, action: Action, device: torch.device) -> bool:
        """Whether this iteration shows how much everything shrinks."""
        return (
            kind.learnt == 2
            and action is SWAP
            and not self._fixed
            and native.codec_name(device) is not None
        )

    def _times_copies(self, course: Course, action: Action) -> bool:
        """Whether what is to be encoded is swapped, in an iteration that shows the model's times.

        Encodes beside compute would make the gaps between marks longer than they are.
        """
        clock = self._clock
        learns = course.timing is not None and course.plan is None
        return learns and action in CODED and clock is not None and not clock.on_host
