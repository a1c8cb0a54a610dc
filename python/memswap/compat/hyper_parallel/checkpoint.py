"""HyperParallel's checkpointing by its own names: they are memswap's, module by module.

A wrapped module is the module itself: no parameter is renamed, and a ``state_dict`` fits before and
after.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from memswap.activations import manage
from memswap.checkpointing import CheckpointPolicy, checkpoint, checkpoint_module
from memswap.engine.action import Action, TensorInfo
from memswap.planning.policy import Policy

if TYPE_CHECKING:
    from memswap.engine.transfer import Pool

__all__ = [
    "ActivationPolicy",
    "CheckpointPolicy",
    "checkpoint",
    "checkpoint_wrapper",
    "swap_wrapper",
]

ModuleT = TypeVar("ModuleT", bound=nn.Module)


class ActivationPolicy(enum.Enum):
    """What a policy of :func:`swap_wrapper` says about a saved tensor."""

    SAVE = 0
    SWAP = 1


def checkpoint_wrapper(
    module: ModuleT,
    policy_fn: Any = None,
    *,
    swap_inputs: bool = False,
    **options: Any,
) -> ModuleT:
    """Make each forward of a module a checkpointed region; returns the module itself.

    Args:
        policy_fn: ``policy_fn(ctx, op, *args, **kwargs) -> CheckpointPolicy``.
        swap_inputs: whether the region's inputs are swapped until backward.
        **options: see :class:`memswap.Checkpointing`.
    """
    checkpoint_module(module, policy_fn, swap_inputs=swap_inputs, **options)
    return module


def swap_wrapper(
    module: ModuleT,
    policy_fn: Callable[[torch.Tensor], ActivationPolicy] | None = None,
    *,
    pool: Pool | None = None,
) -> ModuleT:
    """Swap what a module saves, or what a policy chooses of it; returns the module itself.

    Raises:
        TypeError: in the forward, if the policy returns something else.
    """

    def chosen(tensor: torch.Tensor, info: TensorInfo) -> Action:
        assert policy_fn is not None
        says = policy_fn(tensor)
        if not isinstance(says, ActivationPolicy):
            raise TypeError(
                f"swap_wrapper(policy_fn=...): found {says!r}, expected ActivationPolicy"
            )
        return Action.SWAP if says is ActivationPolicy.SWAP else Action.KEEP

    fn = None if policy_fn is None else chosen
    manage({type(module).__name__: module}, Policy(Action.SWAP, min_bytes=1, fn=fn), pool=pool)
    return module
