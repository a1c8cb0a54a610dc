"""Kinds of passages, and what is known of each."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, TypeAlias

from memswap.engine.link_times import LinkTimes
from memswap.engine.record import Recorder
from memswap.engine.region_record import RegionRecord

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from memswap._C import Script
    from memswap.engine.expectations import Key
    from memswap.engine.timeline import Passage
    from memswap.planning.plan import Plan, PlannedStorage
    from memswap.planning.rates import Rates
    from memswap.planning.step import Step

#: Unit, ordinal and dtype of a storage.
Place: TypeAlias = tuple[str, int, str]

#: A planned passage is timed again after so many.
RETIME_AFTER = 128

#: Passages under a plan before frames that are longer than planned lead to another one.
REFRAME_AFTER = 16

#: Passages, one after another, that were not as planned, before a kind learns again; each time that
#: did not help, twice as many.
LEAST_PATIENCE = 2

#: Passages that no plan can be made of, after which somebody should know, and one in so many is
#: timed: the host waits for each of these, and so do ranks that plan together.
MOST_UNUSABLE = 8

#: Passages that are timed after a first one that was not as planned, before a plan is made anew.
MOST_DOUBTS = 2


@dataclass(frozen=True, slots=True)
class Timing:
    """How one passage is taken down."""

    first: Key
    """What the passage saves first."""
    device: torch.device
    recorder: Recorder
    regions: RegionRecord
    links: LinkTimes


class Kind:
    """Passages that begin alike."""

    def __init__(self, first: Key) -> None:
        #: What its passages save first; of those that share a plan, the largest.
        self.first = first
        self.learnt = 0  # passages since it began to learn
        self.planned = 0  # passages since the plan
        self.changed = 0  # of these, the last ones that did not look as planned
        self.patience = LEAST_PATIENCE  # how many of them make it learn again
        self.alike = 0  # of these, the last ones that did look as planned
        self.unfit = 0  # and of the last ones, those whose frames were longer than planned
        self.doubts = 0  # timed ones, one after another, that took other times than planned
        self.checks_again = False  # whether the next one is to be timed, for that reason
        self.unusable = 0
        self.replans = 0
        self.in_flight = 1  # forwards at a time, the most there were
        self.timing: Timing | None = None  # of a passage that has ended
        self.step: Step | None = None  # that the plan was made of
        self.full: Step | None = None  # the same with all regions off
        self.rates: Rates | None = None  # that the plan was made with
        self.keys: tuple[Key, ...] = ()  # of the step's storages
        #: Regions that the passages to come recompute, to be recorded. None: learning without any.
        self.trial: tuple[str, ...] | None = None
        self.trials = 0
        self.margin_bytes = 0  # that the last trial took more than expected
        self.full_at_bytes = 0  # while learning, the most that was in the pool when it was full
        self.room_bytes = inf  # what the pool is known to hold, for all forwards in flight
        self.plan: Plan | None = None
        self.script: tuple[Plan, Script] | None = None  # and the plan that it was made of
        self.places: tuple[Plan, Mapping[Place, PlannedStorage]] | None = None  # the same
        self.measured_peak_bytes: int | None = None
        self.measured_exposed_s: float | None = None
        self.over_budget_bytes = 0

    def times_next(self) -> bool:
        """Count a passage. Whether it is to be timed."""
        if self.plan is None:
            self.learnt += 1
            if self.unusable >= MOST_UNUSABLE:
                return self.learnt % MOST_UNUSABLE == 0
            return self.learnt >= 3
        self.planned += 1
        again, self.checks_again = self.checks_again, False
        return self.planned == 2 or self.planned % RETIME_AFTER == 0 or again

    def looked(self, as_planned: bool) -> bool:
        """How the last passage looked. Whether another plan is wanted for that."""
        if as_planned:
            self.changed, self.alike = 0, self.alike + 1
            if self.alike >= RETIME_AFTER:
                self.patience = LEAST_PATIENCE
            return False
        self.changed, self.alike = self.changed + 1, 0
        if self.changed < self.patience:
            return False
        self.patience *= 2
        return True

    def at_place(self, key: Key) -> PlannedStorage | None:
        """What the plan has for the storage of this name, wherever it comes in a passage."""
        assert self.plan is not None
        if self.places is None or self.places[0] is not self.plan:
            planned = {(one.unit, one.ordinal, one.dtype): one for one in self.plan.storages}
            self.places = (self.plan, planned)
        return self.places[1].get((key.unit, key.ordinal, str(key.dtype)))

    def learn_again(self) -> None:
        """From the next passage on, which is timed. What is known of frames stays known."""
        self.plan, self.learnt, self.planned, self.changed, self.doubts = None, 2, 0, 0, 0
        self.timing = None
        self.full_at_bytes, self.room_bytes = 0, inf
        self.end_trial()

    def end_trial(self) -> None:
        self.trial, self.trials, self.margin_bytes = None, 0, 0


class Course:
    """One passage of a kind."""

    def __init__(
        self,
        passage: Passage,
        kind: Kind,
        timing: Timing | None,
        first_nbytes: int,
        device: torch.device,
    ) -> None:
        self.passage = passage
        self.first_nbytes = first_nbytes  # of what it saves first
        self.device = device  # where that is
        self.kind = kind
        self.plan = kind.plan
        self.timing = timing
        self.trial = kind.trial
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
        kind, plan, peak = self.kind, self.plan, self.passage.peak_bytes
        if plan is None or plan is not kind.plan or not peak:
            return
        kind.measured_peak_bytes = max(peak, kind.measured_peak_bytes or 0)
        kind.over_budget_bytes = max(self.over_budget_bytes, kind.over_budget_bytes)
        limit_bytes = self.passage.limit_bytes or plan.limit_bytes * plan.in_flight
        if not self.changed and peak > limit_bytes:
            self.unfit = True

    @property
    def over_budget_bytes(self) -> int:
        """By how much the most that was resident exceeds the budget of all that is in flight."""
        if self.plan is None or self.plan.budget_bytes is None:
            return 0
        allowed = max(self.plan.budget_bytes, self.passage.limit_bytes)
        return max(self.passage.peak_bytes - allowed, 0)

    @property
    def waits(self) -> bool:
        """Whether most of what it saved is still there, for a backward that may come."""
        return 2 * self.passage.alive_bytes > self.passage.nbytes
