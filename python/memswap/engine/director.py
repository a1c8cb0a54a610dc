"""Director: who says what happens to each storage under a memory budget."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from torch import nn

    from memswap._C import Iteration
    from memswap.engine.action import Action


class Director(Protocol):
    """What an engine asks whoever directs it. The engine's lock serialises the calls.

    Storages that the policy keeps reach a director as well, unlike an engine without one. What
    happens at each mark of an iteration is taken down by its `Recorder`, and recipes of its
    storages in `Iteration.proven` and `Iteration.outcome`. Under a plan (`Course.follow`)
    nobody is asked about a storage that is as expected, unless the policy asks about each.
    """

    def begin(self, iteration: Iteration) -> int:
        """A new forward, unless it only extends a streak ([Note: Asked when something changed] in
        csrc/engine/streak.h). Bytes that may leave at once; 0: as the timeline says."""

    def choose(
        self,
        tensor: torch.Tensor,
        unit: str,
        ordinal: int,
        nbytes: int,
        action: Action,
        insists: bool,
    ) -> Action | None:
        """What to do with a storage that is about to be saved; None: `action`.

        Args:
            tensor: that is saved.
            unit: that saves it.
            ordinal: among the storages that the unit saves.
            nbytes: of the storage.
            action: the policy's, or who saves.
            insists: whether who saves has an action of its own; then nothing changes it.
        """

    def recomputes(self, module: nn.Module, args: tuple[Any, ...]) -> bool:
        """Whether a module that is a checkpoint region is one in the forward that begins now."""
