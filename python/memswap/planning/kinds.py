"""Kinds of iterations, and what is known of each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING, TypeAlias

from memswap.engine.link_times import LinkTimes
from memswap.engine.record import Recorder
from memswap.engine.region_record import RegionRecord
from memswap.engine.workspace import Workspace, WorkspaceRecord

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from memswap._C import Iteration
    from memswap._C import Plan as NativePlan
    from memswap.engine.expectations import Key
    from memswap.planning.plan import Plan, PlannedStorage
    from memswap.planning.rates import Rates
    from memswap.planning.step import Step

#: Unit, ordinal and dtype of a storage.
Place: TypeAlias = tuple[str, int, str]

#: A planned iteration is timed again after so many.
RETIME_AFTER = 128

#: Iterations under a plan before frames that are longer than planned lead to another one.
REFRAME_AFTER = 16

#: Iterations, one after another, that were not as planned, before a kind learns again; each time
#: that did not help, twice as many.
LEAST_PATIENCE = 2

#: Iterations that no plan can be made of, after which somebody should know, and one in so many is
#: timed: the host waits for each of these, and so do ranks that plan together.
MOST_UNUSABLE = 8

#: Iterations, one after another, with fewer forwards in flight than planned for, after which a plan
#: is made for that; each time that more came back, twice as many.
FLIGHTS_PATIENCE = 16

#: Iterations that are timed after a first one that was not as planned, before a plan is made anew.
MOST_DOUBTS = 2


@dataclass(frozen=True, slots=True)
class Timing:
    """How one iteration is taken down."""

    first: Key
    """What the iteration saves first."""
    device: torch.device
    recorder: Recorder
    regions: RegionRecord
    links: LinkTimes
    workspace: WorkspaceRecord | None = None
    """What else is on the device, where plans are for all of it."""


@dataclass(frozen=True, slots=True)
class Known:
    """What planning goes by, and what it has come to. Made anew as a whole, off the hooks."""

    first: Key
    """What its iterations save first; of those that share a plan, the largest."""
    step: Step | None = None
    """That the plan was made of."""
    full: Step | None = None
    """The same with all regions off."""
    rates: Rates | None = None
    """That the plan was made with."""
    keys: tuple[Key, ...] = ()
    """Of the step's storages."""
    plan: Plan | None = None
    room_bytes: float = inf
    """What the pool is known to hold, for all forwards in flight."""
    trial: tuple[str, ...] | None = None
    """Regions that the iterations to come recompute, to be recorded. None: learning without any."""
    trials: int = 0
    margin_bytes: int = 0
    """That the last trial took more than expected."""
    workspace: Workspace | None = None
    """What was on the device beside saved activations, where plans are for all of it."""

    def without_trial(self) -> Known:
        """What is known once regions are chosen, or are to be chosen anew."""
        return replace(self, trial=None, trials=0, margin_bytes=0)


@dataclass(slots=True)
class Measured:
    """What the iterations under one plan have shown."""

    peak_bytes: int | None = None
    exposed_s: float | None = None
    over_budget_bytes: int = 0
    iterations: int = 0
    """Since the plan is in force."""
    changed: int = 0
    """Of the last ones, how many in a row did not look as planned,"""
    alike: int = 0
    """how many did,"""
    unfit: int = 0
    """and how many had frames that were longer than planned."""
    doubts: int = 0
    """Timed ones, one after another, that took other times than planned."""


@dataclass(slots=True)
class Flights:
    """How many forwards wait for their backward at a time: what has been seen, and is forgotten."""

    number: int = 1
    """To plan for."""
    seen: int = 1
    """The most since it was last looked at,"""
    iterations: int = 0
    """in so many iterations."""
    patience: int = FLIGHTS_PATIENCE
    """Iterations until a number that was not seen again is forgotten."""
    forgotten: bool = False

    def see(self, number: int) -> bool:
        """Others are in flight beside one of this kind. Whether there are more than planned for."""
        self.seen = max(self.seen, number)
        if number <= self.number:
            return False
        if self.forgotten:
            self.forgotten, self.patience = False, 2 * self.patience
        self.number = number
        return True

    def count(self) -> bool:
        """An iteration has begun. Whether fewer are in flight by now than planned for."""
        self.iterations += 1
        if self.iterations < self.patience:
            return False
        seen, self.seen, self.iterations = self.seen, 1, 0
        if seen >= self.number:
            return False
        self.number, self.forgotten = seen, True
        return True


class Kind:
    """Iterations that begin alike: what is known, what was measured, and what is to be learnt."""

    def __init__(self, first: Key) -> None:
        self.known = Known(first)
        self.measured = Measured()
        self.flights = Flights()
        self.planning = False  # of ranks that plan together: whether one is timed or planned with
        self.learnt = 0  # iterations since it began to learn
        self.patience = LEAST_PATIENCE  # how many that are not as planned make it learn again
        self.checks_again = False  # whether the next iteration is to be timed, to be sure
        self.unusable = 0
        self.replans = 0
        self.timing: Timing | None = None  # of an iteration that has ended
        self.full_at_bytes = 0  # while learning, the most that was in the pool when it was full
        self.native_plan: tuple[Plan, NativePlan] | None = None  # and the plan that it was made of
        self.places: tuple[Plan, Mapping[Place, PlannedStorage]] | None = None  # the same

    @property
    def plan(self) -> Plan | None:
        """The plan in force."""
        return self.known.plan

    def times_next(self) -> bool:
        """Count an iteration. Whether it is to be timed."""
        if self.plan is None:
            self.learnt += 1
            if self.unusable >= MOST_UNUSABLE:
                return self.learnt % MOST_UNUSABLE == 0
            return self.learnt >= 3
        measured = self.measured
        measured.iterations += 1
        again, self.checks_again = self.checks_again, False
        return measured.iterations == 2 or measured.iterations % RETIME_AFTER == 0 or again

    def looked(self, as_planned: bool) -> bool:
        """How the last iteration looked. Whether another plan is wanted for that."""
        measured = self.measured
        if as_planned:
            measured.changed, measured.alike = 0, measured.alike + 1
            if measured.alike >= RETIME_AFTER:
                self.patience = LEAST_PATIENCE
            return False
        measured.changed, measured.alike = measured.changed + 1, 0
        if measured.changed < self.patience:
            return False
        self.patience *= 2
        return True

    def at_place(self, key: Key) -> PlannedStorage | None:
        """What the plan has for the storage of this name, wherever it comes in an iteration."""
        assert self.plan is not None
        if self.places is None or self.places[0] is not self.plan:
            planned = {(one.unit, one.ordinal, one.dtype): one for one in self.plan.storages}
            self.places = (self.plan, planned)
        return self.places[1].get((key.unit, key.ordinal, str(key.dtype)))

    def follow(self, known: Known) -> None:
        """What was planned with is known from here on; if it has another plan, that is followed."""
        if known.plan is not self.plan:
            self.replans += self.known.step is not None and known.plan is not None
            self.measured, self.timing = Measured(), None
        self.known = known

    def learn_again(self) -> None:
        """From the next iteration on, which is timed. What is known of frames stays known."""
        self.follow(replace(self.known, plan=None, room_bytes=inf).without_trial())
        self.learnt, self.full_at_bytes = 2, 0


class Course:
    """One iteration of a kind."""

    def __init__(
        self,
        iteration: Iteration,
        kind: Kind,
        timing: Timing | None,
        first_nbytes: int,
        device: torch.device,
    ) -> None:
        self.iteration = iteration
        self.first_nbytes = first_nbytes  # of what it saves first
        self.device = device  # where that is
        self.kind = kind
        self.plan = kind.plan
        self.timing = timing
        self.trial = kind.known.trial
        #: Regions that are off; None: each of them, which makes itself known.
        self.off: frozenset[str] | None = frozenset()
        self.lost = False  # whether it went another way than planned
        self.changed = False
        self.excess_bytes = 0  # of what stays: more than the plan has room for, so far
        self.waited_for = 0  # storages that were waited for since there was no room
        self.unfit = False  # whether frames were longer than planned
        self.refused = False  # whether the pool had no room for something
        self.pooled_bytes = 0  # the most that was in it then, or when backward began

    def take_peak(self) -> None:
        """The most that was resident so far, if it is the plan's doing."""
        plan, peak = self.plan, self.iteration.peak_bytes
        if plan is None or plan is not self.kind.plan or not peak:
            return
        measured = self.kind.measured
        measured.peak_bytes = max(peak, measured.peak_bytes or 0)
        measured.over_budget_bytes = max(self.over_budget_bytes, measured.over_budget_bytes)
        limit_bytes = self.iteration.limit_bytes or plan.limit_bytes * plan.in_flight
        if not self.changed and peak > limit_bytes:
            self.unfit = True

    @property
    def over_budget_bytes(self) -> int:
        """By how much the most that was resident exceeds the budget of all that is in flight."""
        if self.plan is None or self.plan.budget_bytes is None:
            return 0
        allowed = max(self.plan.budget_bytes, self.iteration.limit_bytes)
        return max(self.iteration.peak_bytes - allowed, 0)

    @property
    def waits(self) -> bool:
        """Whether most of what it saved is still there, for a backward that may come."""
        return 2 * self.iteration.alive_bytes > self.iteration.nbytes
