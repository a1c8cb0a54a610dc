"""Unseen: modules that train although nobody sees them run.

[Note: Hooks that nobody calls] Code that torch.compile has compiled leaves out hooks that are added
later, also for other modules of the same class, and `module.forward(x)` calls none. Such a model
trains as if it were not managed, and nothing but its memory tells. What still happens is that its
parameters get gradients. A first one may belong to a forward from before; a second one may not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import ref

from torch import nn

from memswap._warn import warn

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch


class Unseen:
    """Warns, once, of the second gradient of a unit before any unit was seen; see the note.

    Args:
        units: modules whose hooks were added. One of their parameters is watched.
        caller: who added them, for the warning.
    """

    def __init__(self, units: Iterable[nn.Module], caller: str) -> None:
        self._caller = caller
        self._gradients = 0
        weak = ref(self)  # a parameter does not own what watches it

        def gradient(parameter: torch.Tensor) -> None:
            watching = weak()
            if watching is not None:
                watching._gradient()

        watched = next(
            (
                parameter
                for unit in units
                for parameter in unit.parameters()
                if type(parameter) is nn.Parameter and parameter.requires_grad
            ),
            None,
        )
        self._handle = None
        if watched is not None:
            self._handle = watched.register_post_accumulate_grad_hook(gradient)

    def end(self) -> None:
        """Watch no more: a unit was seen, or is not managed any more."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _gradient(self) -> None:
        self._gradients += 1
        if self._gradients == 2:
            self.end()
            warn(
                f"memswap: {self._caller}: the managed modules get gradients, but no hook has seen "
                "one of them run, so nothing is saved and no memory is freed. Inside of code "
                f"that torch.compile compiles as a whole hooks do nothing: give {self._caller} the "
                "compiled model itself, compile its layers one by one before, or put a "
                "memswap.saved_tensors block around the call of a compiled function. If nothing is "
                "compiled: are these the modules that the model calls, as module(x) and not as "
                "module.forward(x)?"
            )
