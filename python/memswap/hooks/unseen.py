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
        self._seen = False
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

    def seen(self, units: Iterable[nn.Module]) -> None:
        """A unit runs: watch no more, and say once where torch compiles it for its hooks alone."""
        if not self._seen:
            self.end()
            tell_compiled_for_its_hooks(units)

    def end(self) -> None:
        """Watch no more: a unit was seen, or is not managed any more."""
        self._seen = True
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
                "that torch.compile compiles as a whole hooks do nothing: compile the layers one "
                f"by one, before {self._caller}; or put a memswap.saved_tensors block around the "
                "call of a compiled function, whose tensors are away then between its forward and "
                "its backward. If nothing is compiled: are these the modules that the model calls, "
                "as module(x) and not as module.forward(x)?"
            )


def tell_compiled_for_its_hooks(modules: Iterable[nn.Module]) -> None:
    """Say, once, where torch compiles a module's forward only if the module has hooks."""
    for module in modules:
        if type(module).__module__.startswith("torch.nn.") and module._compiled_call_impl:
            warn(
                f"memswap: torch compiles nothing of a {type(module).__name__} after `.compile()` "
                "(it leaves classes of torch.nn out), unless it has hooks, as it has now. So this "
                "training is faster, and its last bits are those of compiled layers. Compile such "
                "layers with torch.compile(layer) before manage() for the same bits with and "
                "without"
            )
            return
