"""What the tests of memswap.checkpoint share: policies, an operator that counts, gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

import memswap

aten = torch.ops.aten
CheckpointPolicy = memswap.CheckpointPolicy

#: What a policy of one action saves with.
LEAVE = {"swap": CheckpointPolicy.MUST_SWAP, "encode": CheckpointPolicy.MUST_ENCODE}

MATMULS = (aten.mm.default, aten.addmm.default, aten.bmm.default)


def policy_of(
    decision: Any, ops: Iterable[Any] = MATMULS, otherwise: Any = CheckpointPolicy.PREFER_RECOMPUTE
) -> Callable[..., Any]:
    """`decision` for these operators, `otherwise` for the rest."""
    chosen = frozenset(ops)

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        return decision if op in chosen else otherwise

    return policy


runs: list[int] = []
"""One element for each run of `double`."""


@torch.library.custom_op("memswap_tests::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    """Twice `x`; remembers each run, on whatever thread and whoever asked for it."""
    runs.append(x.numel())
    return x * 2


@double.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


double.register_autograd(lambda ctx, gradient: gradient * 2)
DOUBLE = torch.ops.memswap_tests.double.default


def gradients_of(
    fn: Callable[..., torch.Tensor], *tensors: torch.Tensor, **options: Any
) -> list[torch.Tensor | None]:
    """The gradients of the sum of `fn` of these tensors; with options, checkpointed with them."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    out = memswap.checkpoint(fn, *leaves, **options) if options else fn(*leaves)
    out.sum().backward()
    return [leaf.grad for leaf in leaves]
