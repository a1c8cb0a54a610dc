"""Where a recomputation may end: behind the last operator that saves, not within it."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import _StopRecomputationError

from memswap.engine.autograd import in_backward, is_parameter, next_node_number, top_hooks

if TYPE_CHECKING:
    from collections.abc import Callable


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
