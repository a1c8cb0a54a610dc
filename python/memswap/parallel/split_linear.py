"""split_linear: a linear layer whose backward gives its input's gradient first.

[Note: The input's gradient first] The backward of F.linear gives the gradients of input and weight
at once, so an exchange of the first waits for the second to be computed. Here they are two nodes.
WeightSide is made before the input, InputSide after it. Autograd runs later nodes first: backward
comes to InputSide, then to what made the input, which launches the exchange, and then to
WeightSide, which computes beside it. The formulas are those of F.linear's own backward, and so are
the bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable


def can_split(input: torch.Tensor, weight: Any, bias: Any) -> bool:
    """Whether a linear layer has two gradients to compute, of plain tensors, without casts.

    Args:
        input: ``[..., in features]``.
        weight: ``[out features, in features]``, or whatever ``F.linear`` was called with.
        bias: ``[out features]``, None, or whatever ``F.linear`` was called with.
    """
    return bool(
        torch.is_grad_enabled()
        and input.requires_grad
        and _is_plain(weight)
        and weight.ndim == 2
        and weight.requires_grad
        and (bias is None or (_is_plain(bias) and bias.ndim == 1))
        and not torch.is_autocast_enabled(input.device.type)
        and not torch.compiler.is_compiling()
    )


def split_linear(
    input: Callable[[], torch.Tensor], weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """``F.linear(input(), weight, bias)``: see [Note: The input's gradient first].

    Args:
        input: returns ``[..., in features]``; called once WeightSide has its place in the graph.
        weight: ``[out features, in features]``.
        bias: ``[out features]``, or None.

    Returns:
        ``[..., out features]``.
    """
    held = _Held()
    token = _WeightSide.apply(weight, bias, held)
    output: torch.Tensor = _InputSide.apply(input(), token, (weight, bias), held)
    return output


def _is_plain(tensor: Any) -> bool:
    return type(tensor) in (torch.Tensor, torch.nn.Parameter)


class _Held:
    """What InputSide hands to WeightSide in backward: the input ``[rows, in features]`` and the
    output's gradient ``[rows, out features]``."""

    matrices: tuple[torch.Tensor, torch.Tensor] | None = None


class _WeightSide(torch.autograd.Function):  # type: ignore[misc]
    """In backward, the gradients of weight and bias."""

    @staticmethod
    def forward(
        ctx: Any, weight: torch.Tensor, bias: torch.Tensor | None, held: _Held
    ) -> torch.Tensor:
        ctx.held = held
        return weight.new_empty(0)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, token: torch.Tensor) -> Any:
        matrices, ctx.held.matrices = ctx.held.matrices, None
        assert matrices is not None
        input, gradient = matrices
        weights, biases, _ = ctx.needs_input_grad
        return (
            gradient.t().mm(input) if weights else None,
            gradient.sum(0) if biases else None,
            None,
        )


class _InputSide(torch.autograd.Function):  # type: ignore[misc]
    """The linear layer; in backward, the gradient of its input."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        token: torch.Tensor,
        weights: tuple[torch.Tensor, torch.Tensor | None],
        held: _Held,
    ) -> torch.Tensor:
        # In a tuple: no edges, and the kernel is chosen as for a weight that requires grad.
        weight, bias = weights
        ctx.save_for_backward(input, weight)
        ctx.held = held
        return F.linear(input, weight, bias)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        input, weight = ctx.saved_tensors
        rows = gradient.reshape(-1, gradient.size(-1))
        ctx.held.matrices = input.reshape(-1, input.size(-1)), rows
        return rows.mm(weight).view(input.shape), gradient.new_empty(0), None, None
