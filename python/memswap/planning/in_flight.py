"""InFlight: one iteration, from its first storage until its backward is over."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from memswap.engine.action import KEEP

if TYPE_CHECKING:
    from memswap._C import Iteration, Outcome, Workspace
    from memswap.engine.action import Action
    from memswap.planning.followed import Followed
    from memswap.planning.kinds import StepKind, Timing, Trial
    from memswap.planning.observed import Key
    from memswap.planning.plan import Plan


@dataclass(slots=True, eq=False)
class InFlight:
    """One iteration, of which kind it is, and how it goes under its plan."""

    iteration: Iteration
    kind: StepKind
    followed: Followed | None
    """The plan that it follows."""
    timing: Timing | None = None
    """Takes it down; None: nobody does."""
    plain: bool = False
    """Whether everything stays in it, to compare the plan in force with."""
    trial: Trial | None = field(init=False)
    off: frozenset[str] | None = field(init=False)
    """Regions that are off; None: each of them, which makes itself known."""
    excess_bytes: int = 0
    """Of what stays: more than the plan has room for, so far."""
    waited_for: int = 0
    """Storages that were waited for since there was no room."""
    outcome: Outcome = field(init=False)
    """How it went, as `look` has seen it last."""

    def __post_init__(self) -> None:
        self.trial, self.off = self.kind.known.trial, self.kind.regions_off()

    @property
    def plan(self) -> Plan | None:
        """That it follows, or began with."""
        return None if self.followed is None else self.followed.plan

    def begin(self, size: float = 1.0) -> None:
        """It has saved nothing yet: from here on it does as planned, and is taken down.

        Args:
            size: of its first storage, as a share of that which the kind is known by.
        """
        followed, iteration = self.followed, self.iteration
        if followed is None:  # or the plan says what is recomputed
            iteration.learn_recipes()
        else:
            plan = followed.plan
            peak_bytes = plan.limit_bytes * plan.in_flight
            saved_bytes = size * plan.step.saved_bytes
            iteration.course.follow(followed.native, saved_bytes, peak_bytes, plan.budget_bytes)
        if self.timing is not None:
            iteration.set_recorder(self.timing.recorder)

    # --- what happens to a storage ----------------------------------------------------------------

    def planned(self, key: Key, action: Action) -> Action | None:
        """The plan's action for the next storage, which may be another one than it knows.

        None: the plan has none.

        Args:
            key: of the storage.
            action: what the policy says of it.
        """
        followed, index = self.followed, self.iteration.size
        assert followed is not None
        plan = followed.plan
        planned = None
        if self.iteration.course.follows_plan and index < len(plan.storages):
            planned = plan.storages[index]
        if planned is None or (planned.unit, planned.ordinal, planned.dtype) != (
            key.unit,
            key.ordinal,
            str(key.dtype),
        ):
            self.iteration.course.leave_plan()
            # Within a budget only what leaves is safe.
            bounded = plan.budget_bytes is not None
            planned = None if bounded else followed.at_place(key)
        if planned is None:
            return None
        chosen = KEEP if action is KEEP else planned.action
        more_bytes = key.nbytes - planned.nbytes
        if chosen is KEEP and more_bytes and self.iteration.course.limit_bytes:
            if action is not KEEP and self.excess_bytes + more_bytes > 0:
                return None  # the plan knows no room for it
            self.excess_bytes += more_bytes
        return chosen

    @property
    def workspace(self) -> Workspace | None:
        """What takes down the device beside it; None: nobody does."""
        return None if self.timing is None else self.timing.recorder.workspace

    # --- how it goes ------------------------------------------------------------------------------

    def look(self) -> None:
        """How does it go? A higher peak is noticed, if it is the doing of the plan in force."""
        outcome = self.outcome = self.iteration.outcome
        if self.plan is not None and self.plan is self.kind.plan:
            self.kind.measured.see(outcome.peak_bytes, outcome.over_budget_bytes)

    def end(self) -> None:
        """It is over, or nobody wants to know any more: nothing more of it is taken down."""
        self.look()
        if self.timing is None:
            return
        for index, recipe in self.iteration.proven:
            self.timing.recipes.seen(index, recipe)
        self.iteration.set_recorder(None)
        self.timing.recorder.close()
