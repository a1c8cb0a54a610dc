"""What a checkpoint region calls instead of the user's function, in forward and in backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

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


def flattened(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], Sequence[Any]]:
    """The same call with every tensor as an argument of its own, each of them once.

    Tensors inside lists, dicts and keyword arguments torch would hold in a closure, where no hook
    sees them and nothing checks their versions. A tensor that is passed twice would come back as
    two, and attention asks whether its inputs are one.

    Args:
        fn: the user's function.
        args, kwargs: what it is called with.

    Returns:
        A function, and the arguments to call it with.
    """
    is_nested = bool(kwargs) or any(isinstance(arg, (list, tuple, dict)) for arg in args)
    flat, spec = tree_flatten((args, kwargs)) if is_nested else (args, None)
    distinct: list[Any] = []
    places: list[int] = []
    known: dict[int, int] = {}
    for value in flat:
        new = len(distinct)
        place = known.setdefault(id(value), new) if isinstance(value, torch.Tensor) else new
        if place == new:
            distinct.append(value)
        places.append(place)
    if spec is None and len(distinct) == len(args):
        return fn, args

    def called(*distinct: Any) -> Any:
        flat = [distinct[place] for place in places]
        if spec is None:
            return fn(*flat)
        args, kwargs = spec.unflatten(flat)
        return fn(*args, **kwargs)

    return called, distinct
