"""What a checkpoint region does with each operator's output, and how policies say so."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch.utils.checkpoint import CheckpointPolicy as TorchPolicy
from torch.utils.checkpoint import SelectiveCheckpointContext


class CheckpointPolicy(enum.Enum):
    """What happens to an operator's output between forward and backward.

    The first four mean what they mean in :class:`torch.utils.checkpoint.CheckpointPolicy`, whose
    members may be used in their place (its ``CPU_OFFLOAD`` ones are read as ``MUST_SWAP``).
    """

    MUST_SAVE = 0
    """Stays on the device; the operator does not run again."""
    PREFER_SAVE = 1
    """The same, but under a budget the plan says how the output waits, and where it was edited in
    place later the operator does run again."""
    MUST_RECOMPUTE = 2
    """Is dropped; the operator runs again in backward."""
    PREFER_RECOMPUTE = 3
    """The same (torch.compile may decide otherwise)."""
    MUST_SWAP = 4
    """Goes to the pool and comes back; the operator does not run again."""
    MUST_ENCODE = 5
    """Waits on the device, losslessly encoded; the operator does not run again."""


#: ``policy_fn(ctx, op, *args, **kwargs)``, as in torch.
PolicyFunction: TypeAlias = Callable[..., object]
PolicyLike: TypeAlias = "PolicyFunction | Sequence[Any]"
#: A policy as regions use it: (operator, args, kwargs, output).
Decide: TypeAlias = Callable[[Any, tuple[Any, ...], dict[str, Any], object], CheckpointPolicy]

_MEANING: dict[object, CheckpointPolicy] = {
    True: CheckpointPolicy.MUST_SAVE,
    False: CheckpointPolicy.PREFER_RECOMPUTE,
    **{policy: policy for policy in CheckpointPolicy},
    **{policy: CheckpointPolicy.MUST_SWAP for policy in TorchPolicy if "OFFLOAD" in policy.name},
    **{TorchPolicy[policy.name]: policy for policy in list(CheckpointPolicy)[:4]},
}

_COLLECTIVES = frozenset(
    {"c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd", "_dtensor"}
)


def is_collective(op: object) -> bool:
    """Whether an operator communicates: c10d's, functional collectives, DTensor's."""
    return getattr(op, "namespace", "") in _COLLECTIVES


def keep_collectives(
    ctx: SelectiveCheckpointContext, op: object, *args: object, **kwargs: object
) -> CheckpointPolicy:
    """A policy that saves what collectives gave and recomputes the rest.

    Recomputing then issues no collective a second time. To be called from other policies, too.

    Args:
        ctx: of the call, as torch gives it; not looked at.
        op: the operator that has run, or is about to.
        *args: its arguments; not looked at.
        **kwargs: the same by name.

    Returns:
        ``MUST_SAVE`` for a collective, ``PREFER_RECOMPUTE`` for any other operator.
    """
    if is_collective(op):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def read_policy(policy_fn: PolicyLike) -> Decide:
    """A policy function, or a list of operators to save, as regions use it.

    Raises:
        TypeError: neither of them.
        ValueError: an element of the list is no :class:`torch._ops.OpOverload`.
    """
    if isinstance(policy_fn, (list, tuple, set, frozenset)):
        return _saving(frozenset(checked_ops(policy_fn)))
    if not callable(policy_fn):
        raise TypeError(
            f"policy_fn={policy_fn!r}: found {type(policy_fn).__name__}, expected a function "
            "policy_fn(ctx, op, *args, **kwargs) or a list of operators to save"
        )

    def decide(
        op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: object
    ) -> CheckpointPolicy:
        ctx = SelectiveCheckpointContext(is_recompute=False)
        ctx.op_output = output  # torch 2.13 has it, before that nobody else sets it
        return meaning(policy_fn(ctx, op, *args, **kwargs), op)

    return decide


def meaning(found: object, op: object) -> CheckpointPolicy:
    """What a policy function returned for an operator: ours, torch's, or a bool."""
    if isinstance(found, (CheckpointPolicy, TorchPolicy, bool)):
        return _MEANING[found]
    raise TypeError(
        f"policy_fn returned {found!r} for {op}: expected a memswap.CheckpointPolicy, a "
        "torch.utils.checkpoint.CheckpointPolicy or a bool (whether to save)"
    )


def torch_policy(
    policy_fn: PolicyFunction,
    ctx: SelectiveCheckpointContext,
    op: object,
    *args: Any,
    **kwargs: Any,
) -> TorchPolicy:
    """A policy in torch's words, for what torch.compile traces: what leaves is saved there.

    Args:
        policy_fn: a policy in memswap's words.
        ctx: of the call, as torch gives it.
        op: the operator that is traced.
        *args: its arguments.
        **kwargs: the same by name.
    """
    policy = meaning(policy_fn(ctx, op, *args, **kwargs), op)
    if policy in (CheckpointPolicy.MUST_SWAP, CheckpointPolicy.MUST_ENCODE):
        return TorchPolicy.MUST_SAVE
    return TorchPolicy[policy.name]


def checked_ops(ops: Sequence[Any] | set[Any] | frozenset[Any]) -> list[Any]:
    """The operators of a list, or an error."""
    for op in ops:
        if isinstance(op, torch._ops.OpOverload | torch._ops.HigherOrderOperator):
            continue
        hint = ""
        if isinstance(op, torch._ops.OpOverloadPacket):
            hint = f"; name one of its overloads, such as {op}.{op.overloads()[0]}"
        raise ValueError(
            f"policy_fn: found {op!r} ({type(op).__name__}) in the list of operators to save, "
            f"expected overloads such as torch.ops.aten.mm.default{hint}"
        )
    return list(ops)


def _saving(ops: frozenset[Any]) -> Decide:
    def decide(
        op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: object
    ) -> CheckpointPolicy:
        if op in ops:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return decide
