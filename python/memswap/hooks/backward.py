"""BackwardPass: whether an outermost backward runs, when it ends, and that one has raised."""

from __future__ import annotations

from collections.abc import Callable
from weakref import ref

import torch

from memswap.engine.autograd import graph_task


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
        inside = graph_task() != -1
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
