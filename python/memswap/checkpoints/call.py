"""What a checkpoint region calls instead of the user's function, in forward and in backward."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten
from torch.utils.checkpoint import _StopRecomputationError

from memswap._native import native
from memswap.engine.autograd import in_backward, is_parameter, next_node_number, top_hooks
from memswap.errors import RecomputeError

if TYPE_CHECKING:
    from memswap.engine.engine import Engine


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
        args: what it is called with.
        kwargs: the same by name.

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


# --- torch's own pack hook in the recomputation --------------------------------------------------


def may_be_filled_yet(tensor: torch.Tensor) -> bool:
    """Whether the operator that saves a tensor may write to it, without counting an edit."""
    return (
        tensor.is_floating_point()
        and tensor.is_leaf
        and not tensor.is_inference()
        and tensor._version == 0
        and not is_parameter(tensor)
    )


def stopping_behind_operators(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function of a region, for torch's checkpoint with ``early_stop``.

    Torch ends a recomputation when the last tensor that backward needs is saved. That is before the
    operator runs that saves it, and rrelu's noise is filled by that operator (see [Note: What an
    operator fills after it was saved]): backward would read memory that nobody has written.
    """

    def stopping(*args: Any, **kwargs: Any) -> Any:
        hooks = top_hooks(True) if in_backward() else None
        if hooks is None:
            return fn(*args, **kwargs)
        pack, unpack = hooks
        ended = False
        node: int | None = None  # the last one that saved what it may write

        # With the name of torch's hook: whoever asks whose turn it is to save shall find torch.
        @functools.wraps(pack)
        def stopping_pack(tensor: torch.Tensor) -> Any:
            nonlocal ended, node
            if ended:
                if node != next_node_number():
                    raise _StopRecomputationError
                return tensor.detach()
            if may_be_filled_yet(tensor):
                node = next_node_number()
            try:
                return pack(tensor)
            except _StopRecomputationError:
                if node != next_node_number():
                    raise
                ended = True
                return tensor.detach()

        with saved_tensors_hooks(stopping_pack, unpack):
            output = fn(*args, **kwargs)
        if ended:
            raise _StopRecomputationError
        return output

    return stopping


def counting(engine: Engine, fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function of a region, so that what it saves in backward counts as resident.

    Torch holds these storages; the engine looks through them at each mark
    (csrc/engine/in_use.h).

    Args:
        engine: whose ledger counts them.
        fn: what the region runs, in forward and again in backward.
    """

    def counted(*args: Any, **kwargs: Any) -> Any:
        hooks = top_hooks(True) if in_backward() else None
        if hooks is None:
            return fn(*args, **kwargs)
        pack, unpack = hooks

        # With the name of torch's hook: whoever asks whose turn it is to save shall find torch.
        @functools.wraps(pack)
        def counting_pack(tensor: torch.Tensor) -> Any:
            _count(engine, tensor)
            return pack(tensor)

        with saved_tensors_hooks(counting_pack, unpack):
            return fn(*args, **kwargs)

    return counted


def _count(engine: Engine, tensor: torch.Tensor) -> None:
    view = native.capture(tensor)
    if view is None or view.of_leaf or engine.is_persistent(view.key):
        return
    engine.lock.run(engine.planning.count_recomputed, native.StorageRef(tensor))
