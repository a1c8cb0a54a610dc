"""What of a training is noticed beside its modules: backward passes, and optimizers' steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakMethod, finalize, ref

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from memswap.engine.autograd import in_backward


class BackwardPass:
    """The backward pass that its owner has seen begin, until it ends.

    Args:
        ended: is called at the end of a backward pass that was seen.
        raised: is called where a backward pass that was seen has raised, so that nothing told its
            end: at the next event, whether that is in another backward or in a forward.

    Attributes:
        runs: whether a pass was seen, and neither its end nor that it raised.
    """

    def __init__(self, ended: Callable[[], object], raised: Callable[[], object]) -> None:
        self.runs = False
        self._ended = ended
        self._raised = raised
        self._ending: Callable[[], object] = lambda: None  # what torch calls at the end

    def look(self) -> bool:
        """Something happens, in forward or in backward. Returns whether it is in backward."""
        inside = in_backward()
        if self.runs and not (inside and self._ending()):
            self.runs = False
            self._raised()
        if inside and not self.runs:
            # The first event of a backward is always in the outermost graph task: a reentrant
            # checkpoint runs its recompute there before it starts a backward of its own.
            self.runs = True
            end = self._end  # torch alone owns it, as long as this backward lasts
            self._ending = ref(end)
            torch.autograd.Variable._execution_engine.queue_callback(end)
        return inside

    def _end(self) -> None:
        self._ended()
        self.runs = False  # not where that has raised: the next event finds it out


def before_optimizer_steps(method: Callable[[Optimizer], None]) -> finalize[[], Any]:
    """Call a bound method before the steps of all optimizers, for as long as its object lives."""
    weak = WeakMethod(method)  # torch keeps the hook; it keeps nothing

    def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        alive = weak()
        if alive is not None:
            alive(optimizer)

    handle = register_optimizer_step_pre_hook(before_step)
    owner: Any = method.__self__  # type: ignore[attr-defined]
    ends = finalize(owner, handle.remove)
    ends.atexit = False
    return ends
