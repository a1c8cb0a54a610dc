"""InFlight: one iteration, from its first storage until its backward is over."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memswap.engine.action import KEEP
from memswap.engine.recipe_record import RecipeRecord

if TYPE_CHECKING:
    import torch

    from memswap._C import Iteration, Recorder
    from memswap.engine.action import Action
    from memswap.engine.expectations import Key
    from memswap.planning.kinds import Followed, StepKind
    from memswap.planning.plan import Plan

#: An iteration counts as another one when the bytes that it saves have changed by this share.
SIZE_TOLERANCE = 0.25


class InFlight:
    """One iteration, of which kind it is, and how it goes under its plan.

    Args:
        iteration: that is in flight.
        kind: of steps that it is one of.
        followed: the plan that it follows, or None.
        first: what it saves first.
        device: where that is.
        recorder: takes it down; None: nobody does.
        plain: whether everything stays in it, to compare the plan in force with.
    """

    def __init__(
        self,
        iteration: Iteration,
        kind: StepKind,
        followed: Followed | None,
        first: Key,
        device: torch.device,
        recorder: Recorder | None,
        plain: bool = False,
    ) -> None:
        self.iteration = iteration
        self.kind = kind
        self.plan: Plan | None = None
        if followed is not None:
            self.plan, iteration.plan = followed.plan, followed.native
        self._followed = followed
        self.first = first
        self.device = device
        self.recorder = recorder
        if recorder is not None:
            iteration.recorder = recorder
        self.plain = plain
        self.recipes = RecipeRecord()
        iteration.learns_recipes = followed is None  # or the plan says what is recomputed
        self.trial = kind.known.trial
        #: Regions that are off; None: each of them, which makes itself known.
        self.off = kind.regions_off()
        #: Of what stays: more than the plan has room for, so far.
        self.excess_bytes = 0
        #: Storages that were waited for since there was no room.
        self.waited_for = 0
        self._size = first.nbytes / kind.known.first.nbytes  # of what the plan is for

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
        if not self.lost and index < len(plan.storages):
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

    # --- how it goes ------------------------------------------------------------------------------

    @property
    def waits(self) -> bool:
        """Whether most of what it saved is still there, for a backward that may come."""
        return 2 * self.iteration.alive_bytes > self.iteration.nbytes

    @property
    def lost(self) -> bool:
        """Whether it went another way than planned."""
        return self.plan is not None and self.iteration.plan is None

    @property
    def changed(self) -> bool:
        """Whether it is `lost`, or its forward saved clearly more or fewer bytes than planned."""
        if self._followed is None or not self.iteration.began_backward:
            return self.lost
        expected = self._size * self._followed.saved_bytes
        other = abs(self.iteration.nbytes - expected) > SIZE_TOLERANCE * expected
        return self.lost or other

    @property
    def over_budget_bytes(self) -> int:
        """By how much the most that was resident exceeds the budget of all that is in flight."""
        if self.plan is None or self.plan.budget_bytes is None:
            return 0
        peak_bytes = self.iteration.peak_bytes
        if peak_bytes <= self.plan.budget_bytes:
            return 0
        return max(peak_bytes - max(self.plan.budget_bytes, self.iteration.limit_bytes), 0)

    @property
    def no_recipe(self) -> set[int]:
        """Storages that were to be recomputed, and were not."""
        return self.iteration.no_recipe

    def take_recipes(self) -> None:
        """Take down which storages could have been recomputed."""
        for index, recipe in self.iteration.proven:
            self.recipes.seen(index, recipe)

    def take_peak(self) -> None:
        """Notice the most that was resident so far, if it is the doing of the plan in force."""
        plan, iteration, measured = self.plan, self.iteration, self.kind.measured
        peak_bytes = iteration.peak_bytes
        if plan is None or plan is not self.kind.plan or not peak_bytes:
            return
        measured.peak_bytes = max(peak_bytes, measured.peak_bytes or 0)
        measured.over_budget_bytes = max(self.over_budget_bytes, measured.over_budget_bytes)
        limit_bytes = iteration.limit_bytes or plan.limit_bytes * plan.in_flight
        if peak_bytes > limit_bytes and not self.changed:
            iteration.unfit = True
