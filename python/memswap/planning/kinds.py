"""Kinds of steps that were seen, and what is known of each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from memswap.engine.action import RECOMPUTE
from memswap.planning.followed import Followed
from memswap.planning.observed import left

if TYPE_CHECKING:
    import torch

    from memswap._C import Recorder, WorkspaceRecord
    from memswap.engine.transfers import Transfers
    from memswap.planning.device import DeviceTerms
    from memswap.planning.holding import Holding
    from memswap.planning.observed import Key
    from memswap.planning.plan import Plan
    from memswap.planning.rates import Rates
    from memswap.planning.recipe_record import RecipeRecord
    from memswap.planning.step import Step

#: A planned iteration is timed again after so many.
RETIME_AFTER = 128

#: The same for ranks that plan for their devices together: what has changed on one of them is said
#: there, and no rank learns again by itself.
RETIME_DEVICES_AFTER = 16

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


class Timing(NamedTuple):
    """An iteration that was taken down, for whoever reads what was."""

    first: Key
    """What the iteration saved first."""
    device: torch.device
    recorder: Recorder
    recipes: RecipeRecord


@dataclass(frozen=True, slots=True)
class InForce:
    """The plan that steps of a kind follow now, and what it was made of."""

    plan: Plan
    step: Step
    """The step that was planned, with the regions on that the plan recomputes."""
    rates: Rates
    """Of the machine."""
    keys: tuple[Key, ...]
    """Of the step's storages."""


@dataclass(frozen=True, slots=True)
class Trial:
    """Iterations in which some checkpoint regions are on, to be recorded or planned with."""

    units: tuple[str, ...]
    """The regions that are on."""
    number: int = 1
    """How many there have been, one after another."""
    margin_bytes: int = 0
    """That the last one took more than expected."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Of plans for ``"auto"`` that took longer than predicted, and were given up."""

    share: float = 1.0
    """Of what is allowed, how much a plan may take by prediction: less after each of them."""
    backoffs: int = 0
    """How many plans were given up."""
    words: str = ""
    """What the last of these plans took, in words for the user."""


@dataclass(frozen=True, slots=True)
class Known:
    """What planning goes by, and what it has come to. Made anew as a whole, off the hooks."""

    first: Key
    """What its iterations save first; of those that share a plan, the largest."""
    full: Step | None = None
    """What they do with all regions off."""
    in_force: InForce | None = None
    """None: they are still learnt from."""
    room_bytes: float = inf
    """What the pool is known to hold, for all forwards in flight."""
    trial: Trial | None = None
    """What the iterations to come recompute, to be recorded. None: learning without any."""
    costs: Costs = Costs()
    workspace: WorkspaceRecord | None = None
    """What was on the device beside saved activations, where plans are for all of it."""
    device: DeviceTerms | None = None
    """Of ranks that plan for their devices together, what they have agreed on."""

    @property
    def plan(self) -> Plan | None:
        """The plan in force."""
        return None if self.in_force is None else self.in_force.plan

    @property
    def recompute(self) -> tuple[str, ...]:
        """The regions that are on while this is learnt, or planned with."""
        return () if self.trial is None else self.trial.units


@dataclass(slots=True)
class Measured:
    """What the iterations under one plan have shown."""

    peak_bytes: int | None = None
    exposed_s: float | None = None
    over_budget_bytes: int = 0
    iterations: int = 0
    """Since the plan is in force."""
    changed: int = 0
    """Iterations in a row, the last one included, that did not look as planned."""
    alike: int = 0
    """Iterations in a row, the last one included, that looked as planned."""
    unfit: int = 0
    """Iterations in a row whose frames were longer than planned."""
    unproven: int = 0
    """Iterations in a row that lacked a recipe that was planned with."""
    held: bool = False
    """Whether `exposed_s` was compared with the plain step."""
    doubts: int = 0
    """Timed ones, one after another, that took other times than planned."""
    checks_again: bool = False
    """Whether the next iteration is to be timed, to be sure."""
    timing: Timing | None = None
    """Of an iteration that has ended, and that nobody has looked at."""

    def see(self, peak_bytes: int, over_budget_bytes: int = 0) -> None:
        """An iteration has taken so many bytes at a time; 0: nobody has looked."""
        if peak_bytes:
            self.peak_bytes = max(peak_bytes, self.peak_bytes or 0)
            self.over_budget_bytes = max(over_budget_bytes, self.over_budget_bytes)


@dataclass(slots=True)
class Learning:
    """How far a kind has come that has no plan."""

    iterations: int = 0
    """Since it began to learn."""
    unusable: int = 0
    """Of those that were timed, how many no plan could be made of."""
    full_at_bytes: int = 0
    """The most that was in the pool when it was full; 0: it never was."""

    @property
    def tries_codec(self) -> bool:
        """Whether this iteration shows how much everything shrinks."""
        return self.iterations == 2

    def times_next(self) -> bool:
        """Whether the next iteration is to be timed."""
        number = self.iterations + 1
        if self.unusable >= MOST_UNUSABLE:
            return number % MOST_UNUSABLE == 0
        return number >= 3

    def again(self) -> None:
        """The next iteration is timed. What is known of frames stays known."""
        self.iterations, self.full_at_bytes = 2, 0


@dataclass(slots=True)
class Flights:
    """How many forwards wait for their backward at a time: what has been seen, and is forgotten."""

    number: int = 1
    """To plan for."""
    seen: int = 1
    """The most forwards at a time since `number` was last compared with them."""
    iterations: int = 0
    """Iterations since then."""
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

    def count(self, number: int = 1) -> bool:
        """Iterations have begun. Whether fewer are in flight by now than planned for."""
        self.iterations += number
        if self.iterations < self.patience:
            return False
        seen, self.seen, self.iterations = self.seen, 1, self.iterations % self.patience
        if seen >= self.number:
            return False
        self.number, self.forgotten = seen, True
        return True


class StepKind:
    """Steps that begin alike: what is known, what was measured, and what is to be learnt.

    Args:
        first: what they save first.
    """

    def __init__(self, first: Key) -> None:
        self.known = Known(first)
        self.learning = Learning()
        self.measured = Measured()
        self.flights = Flights()
        self.patience = LEAST_PATIENCE  # how many that are not as planned make it learn again
        self.plans = 0  # that have been made
        self.holding: Holding | None = None  # while the plan is compared with the plain step
        self.device: torch.device | None = None  # of the last iteration
        self.free_bytes: float | None = None  # of ranks that plan together, on each one's device
        self.retries = 0  # how often that was made anew after everything stayed
        self.planning = False  # of ranks that plan together: whether one is timed or planned with
        self.wants_again = False  # of these: whether this rank's device is no longer as it was
        self.needs_operators = True  # whether the plan has recipes, or one is still to be made
        self._ready: list[Followed] = []  # the last two

    @property
    def plan(self) -> Plan | None:
        """The plan in force."""
        return self.known.plan

    def times_next(self) -> bool:
        """Whether the next iteration is to be timed."""
        return self.learning.times_next() if self.plan is None else self._until_timed() == 0

    def _until_timed(self) -> int:
        """Iterations under the plan until the one that is timed; 0: it is the next one."""
        number, after = self.measured.iterations + 1, RETIME_AFTER
        if self.measured.checks_again or (self.holding is not None and number >= 2):
            return 0
        if self.known.device is not None:
            after = min(RETIME_AFTER, RETIME_DEVICES_AFTER)
        return 2 - number if number <= 2 else -number % after

    def until_asked(self) -> int:
        """Iterations, from the next one on, that nobody has to look at if they go as planned."""
        if self.measured.timing is not None:
            return 1
        until, flights = self._until_timed(), self.flights
        if flights.number > 1:  # may be forgotten
            until = min(until, flights.patience - flights.iterations)
        return max(until, 1)

    def count(self, number: int = 1) -> None:
        """Iterations have begun."""
        if self.plan is None:
            self.learning.iterations += number
        else:
            self.measured.iterations += number
            self.measured.checks_again = False

    def went_as_planned(self, iterations: int, peak_bytes: int) -> None:
        """So many have ended, one after another, and there was nothing to learn from any."""
        measured = self.measured
        measured.see(peak_bytes)
        measured.unfit = measured.unproven = 0
        self.looked(as_planned=True, number=iterations)

    def regions_off(self) -> frozenset[str] | None:
        """Which regions are off in the next iteration; None: all of them."""
        known, learning = self.known, self.learning
        if self.plan is not None or known.trial is not None:
            if known.full is None or not known.full.regions:
                return frozenset()
            on = known.recompute if self.plan is None else self.plan.recompute
            return frozenset(one.unit for one in known.full.regions) - set(on)
        learns = learning.iterations >= 2 and learning.unusable < MOST_UNUSABLE
        return None if learns else frozenset()

    def looked(self, as_planned: bool, number: int = 1) -> bool:
        """How the last iterations looked. Whether another plan is wanted for that."""
        measured = self.measured
        if as_planned:
            measured.changed, measured.alike = 0, measured.alike + number
            if measured.alike >= RETIME_AFTER:
                self.patience = LEAST_PATIENCE
            return False
        measured.changed, measured.alike = measured.changed + 1, 0
        if measured.changed < self.patience:
            return False
        self.patience *= 2
        return True

    def ready(self, plan: Plan) -> Followed | None:
        """What `followed` has made for a plan, if it was one of the last."""
        for one in self._ready:
            if one.plan is plan:
                return one
        return None

    def followed(self, plan: Plan, transfers: Transfers, least_bytes: int) -> Followed:
        """A plan for the storages of the one in force, ready to be followed.

        Args:
            plan: the one in force, or the one under which everything stays that it is compared with
                (`holding`).
            transfers: of the device that it is for.
            least_bytes: storages of fewer stay.
        """
        if (ready := self.ready(plan)) is not None:
            return ready
        now = self.known.in_force
        assert now is not None
        keys = now.keys if plan is now.plan else left(now.keys, now.step.sources)
        made = Followed(plan, keys, transfers, least_bytes)
        self._ready = [*self._ready[-1:], made]
        return made

    def tries_again(self) -> bool:
        """Whether a plan that declined has been in force for long enough: a machine may have become
        faster, which nobody sees where nothing moves. Each time twice as long."""
        if self.measured.iterations < RETIME_AFTER << self.retries:
            return False
        self.retries += 1
        return True

    def follow(self, known: Known) -> None:
        """What was planned with is known from here on; if it has another plan, that is followed."""
        before, plan, self.known = self.plan, known.plan, known
        if plan is not before:
            self.plans += plan is not None
            self.measured, self.holding = Measured(), None
            self.needs_operators = plan is None or any(
                one.action is RECOMPUTE for one in plan.storages
            )

    def learn_again(self) -> None:
        """From the next iteration on, which is timed."""
        known = replace(self.known, in_force=None, trial=None, room_bytes=inf, costs=Costs())
        self.follow(known)
        self.wants_again = False
        self.learning.again()
