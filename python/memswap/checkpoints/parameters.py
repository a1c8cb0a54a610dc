"""Whether a checkpointed module is run again with the parameters that its forward had."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from memswap.errors import RecomputeError


def with_the_same_parameters(fn: Callable[..., Any], called: Callable[..., Any]) -> Any:
    """``called``, which runs ``fn`` once in forward and again for backward, and checks this.

    Where a parameter was computed from others (``torch.func.functional_call``) and is in its place
    no more, the module would be recomputed with another one, and what the first was computed from
    would get no gradient. An ``fn`` that is neither a module nor a method of one is not checked.
    """
    module = fn if isinstance(fn, nn.Module) else getattr(fn, "__self__", None)
    if not isinstance(module, nn.Module):
        return called
    computed: set[str] | None = None  # by the forward: the first call

    def checked(*args: Any) -> Any:
        nonlocal computed
        found = {name for name, one in module.named_parameters() if one.grad_fn is not None}
        if computed is None:
            computed = found
        elif lost := sorted(computed - found):
            raise RecomputeError(
                f"{type(module).__name__} is a checkpointed region whose parameter {lost[0]!r} was "
                "the result of a computation in its forward (functional_call?), and is another "
                "one now that it is run again for backward: the gradient would be lost. "
                "Checkpoint a function that makes the functional_call instead of the module"
            )
        return called(*args)

    return checked
