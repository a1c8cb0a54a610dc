"""Director: who watches an engine's iterations, and says what happens to each storage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import nn

    from memswap._C import Iteration, ProvenRecipe
    from memswap.engine.action import Action
    from memswap.engine.entry import Entry


class Director(Protocol):
    """Called by an engine at each mark of an iteration: each save, and each demand of what was
    saved.

    The engine's lock serialises the calls, `demanded` excepted, which follows a wait that holds no
    lock. Storages that the policy keeps reach a director as well, unlike an engine without one.

    A director that gives an iteration a plan (`Iteration.plan`, `Iteration.follows_alone`) is not
    called at the marks at which that says enough: a save that is as expected, a demand once
    backward has begun. `Engine.watched` has it called all the same.
    """

    def begin(self, iteration: Iteration) -> int | None:
        """A new forward. Bytes that may leave at once, or None: as the timeline says."""

    def choose(
        self,
        tensor: torch.Tensor,
        unit: str,
        ordinal: int,
        nbytes: int,
        action: Action,
        insists: bool,
    ) -> Action | None:
        """A storage is about to be saved, as `action` if nobody objects (None).

        `insists`: nobody may object.
        """

    def frame_nbytes(self, entry: Entry) -> int | None:
        """Bytes that a frame of a storage may take, or None: as many as it needs.

        Under a bound, a storage that does not become a frame is swapped as it is.
        """

    def learns_recipes(self) -> bool:
        """Whether recipes are tried, and told by `recipe`, of what is saved now."""

    def recipe(self, entry: Entry, recipe: ProvenRecipe) -> None:
        """A storage that leaves in another form could be recomputed."""

    def no_recipe(self, entry: Entry) -> None:
        """A storage was to be recomputed, and has no proven recipe. It leaves in another form."""

    def unfit(self) -> None:
        """A storage did not become a frame of so many bytes."""

    def no_room(self) -> None:
        """A storage was to leave, and its pool is full."""

    def saved(self, entry: Entry) -> None:
        """It is on its way, or stayed."""

    def window(self, seconds: float) -> None:
        """An operator of so many seconds is about to be launched; codec work may run beside it."""

    def again(self, entry: Entry, unit: str) -> None:
        """A unit saves a storage that was saved before."""

    def recomputes(self, module: nn.Module, args: tuple[Any, ...]) -> bool:
        """Whether a module that is a checkpoint region is one in the forward that begins now."""

    def counting(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """The function of a region, so that what it saves in backward is noticed."""

    def demanding(self, entry: Entry) -> None:
        """Backward asks for a storage. What it waits for, it waits for after this."""

    def demanded(self, entry: Entry) -> None:
        """Backward has it, in stream order."""
