"""What the tests of memswap.checkpoint share: regions, an operator that counts, gradients."""

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


def checkpointing(pool: Any, decision: Any = None, **options: Any) -> memswap.Checkpointing:
    """Regions whose matrix products are saved as `decision` says; every size counts."""
    policy = None if decision is None else policy_of(decision)
    return memswap.Checkpointing(policy, pool=pool, min_bytes=1, **options)


def forward(model: Any, call: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """The stack's forward with each layer run by `call`."""
    x = model.enter(x)
    for layer in model.layers:
        x = call(layer, x)
    return x.square().mean()


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
