"""InFlight: one iteration, from its first storage until its backward is over."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memswap.engine.action import KEEP

if TYPE_CHECKING:
    from memswap._C import Iteration, Outcome, Workspace
    from memswap.engine.action import Action
    from memswap.engine.expectations import Key
    from memswap.planning.kinds import Followed, StepKind, Timing
    from memswap.planning.plan import Plan

#: An iteration counts as another one when the bytes that it saves have changed by this share.
SIZE_TOLERANCE = 0.25


class InFlight:
    """One iteration, of which kind it is, and how it goes under its plan.

    Args:
        iteration: that is in flight.
        kind: of steps that it is one of.
        followed: the plan that it follows, or None.
        size: of the first storage, as a share of that which the kind is known by.
        timing: takes it down; None: nobody does.
        plain: whether everything stays in it, to compare the plan in force with.
    """

    def __init__(
        self,
        iteration: Iteration,
        kind: StepKind,
        followed: Followed | None,
        size: float = 1.0,
        timing: Timing | None = None,
        plain: bool = False,
    ) -> None:
        self.iteration = iteration
        self.kind = kind
        self._followed = followed
        self._size = size
        self.timing = timing
        self.plain = plain
        self.plan: Plan | None = None
        if followed is None:  # or the plan says what is recomputed
            iteration.learns_recipes = True
        else:
            self.plan, iteration.plan = followed.plan, followed.native
        if timing is not None:
            iteration.recorder = timing.recorder
        self.trial = kind.known.trial
        #: Regions that are off; None: each of them, which makes itself known.
        self.off = kind.regions_off()
        #: Of what stays: more than the plan has room for, so far.
        self.excess_bytes = 0
        #: Storages that were waited for since there was no room.
        self.waited_for = 0
        #: How it went, as `look` has seen it last.
        self.outcome: Outcome
        # What that means under a plan.
        #: Whether it left its plan, or its forward saved clearly more or fewer bytes than planned.
        self.changed = False
        #: Whether it took more than was planned.
        self.unfit = False
        #: By how much its peak exceeds the budget of all in flight.
        self.over_budget_bytes = 0

    # --- what happens to a storage ----------------------------------------------------------------

    def planned(self, key: Key, action: Action) -> Action | None:
        """The plan's action for the next storage, which may be another one than it knows.

        None: the plan has none.

        Args:
            key: of the storage.
            action: what the policy says of it.
        """
        followed, index = self._followed, self.iteration.count
        assert followed is not None
        plan = followed.plan
        planned = None
        if self.iteration.plan is not None and index < len(plan.storages):
            planned = plan.storages[index]
        if planned is None or (planned.unit, planned.ordinal, planned.dtype) != (
            key.unit,
            key.ordinal,
            str(key.dtype),
        ):
            self.iteration.plan = None  # it goes another way
            # Within a budget only what leaves is safe.
            bounded = plan.budget_bytes is not None
            planned = None if bounded else followed.at_place(key)
        if planned is None:
            return None
        chosen = KEEP if action is KEEP else planned.action
        more_bytes = key.nbytes - planned.nbytes
        if chosen is KEEP and more_bytes and self.iteration.limit_bytes:
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
        followed, plan, measured = self._followed, self.plan, self.kind.measured
        if followed is None or plan is None:
            return
        self.changed, self.unfit = not outcome.follows, outcome.unfit
        if outcome.follows and outcome.began_backward:
            expected = self._size * followed.saved_bytes
            self.changed = abs(outcome.nbytes - expected) > SIZE_TOLERANCE * expected
        peak_bytes, limit_bytes = outcome.peak_bytes, outcome.limit_bytes
        self.over_budget_bytes = 0
        if plan.budget_bytes is not None and peak_bytes > plan.budget_bytes:
            self.over_budget_bytes = max(peak_bytes - max(plan.budget_bytes, limit_bytes), 0)
        if plan is not self.kind.plan or not peak_bytes:
            return
        measured.peak_bytes = max(peak_bytes, measured.peak_bytes or 0)
        if self.over_budget_bytes > measured.over_budget_bytes:
            measured.over_budget_bytes = self.over_budget_bytes
        if peak_bytes > (limit_bytes or plan.limit_bytes * plan.in_flight):
            self.unfit = self.unfit or not self.changed

    def end(self) -> None:
        """It is over, or nobody wants to know any more: nothing more of it is taken down."""
        self.look()
        if self.timing is None:
            return
        for index, recipe in self.iteration.proven:
            self.timing.recipes.seen(index, recipe)
        self.iteration.recorder = None
        self.timing.recorder.close()

    def take_back(self) -> None:
        """It has not begun, and is known by what it saves first."""
        self.iteration.plan, self.iteration.limit_bytes = None, 0
