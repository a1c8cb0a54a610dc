"""Layers that come with hooks, derivatives and graphs of their own, for `programs.py`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import memswap

WIDTH = 8
Function = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Keeps(torch.autograd.Function):
    """Saves its output, a view of it and what is neither input nor output; hides one tensor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float, w: torch.Tensor) -> torch.Tensor:
        hidden = (x @ w).exp().clamp_(max=3)
        y = hidden * scale
        # A view of the output that is not detached would be a cycle in any program.
        ctx.save_for_backward(y, y.detach().t(), hidden[1:], None, x, w)
        ctx.scale, ctx.hidden = scale, hidden
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        y, turned, tail, nothing, x, w = ctx.saved_tensors
        assert nothing is None
        assert torch.equal(turned.t(), y)
        assert torch.equal(tail, ctx.hidden[1:])
        inner = gradient * ctx.scale * ctx.hidden * (ctx.hidden < 3)
        return inner @ w.t(), None, x.t() @ inner


class NewStyle(torch.autograd.Function):
    """With a context that is set up apart, a rule for vmap and a forward derivative."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.sin(), x.cos()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(inputs[0], output[1])
        ctx.save_for_forward(inputs[0], output[1])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _: Any) -> torch.Tensor:
        x, cosine = ctx.saved_tensors
        return gradient * cosine + 0 * x

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor) -> Any:
        _, cosine = ctx.saved_tensors
        return tangent * cosine, None


class EditsWhatItSaved(torch.autograd.Function):
    """Its backward writes the gradient over the probabilities that it saved."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        p = x.softmax(-1)
        ctx.save_for_backward(p)
        return p.square().sum(-1, keepdim=True)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (p,) = ctx.saved_tensors
        p = p.clone() if not p.is_contiguous() else p * 1
        inner = 2 * p * gradient
        return p.mul_(inner - (inner * p).sum(-1, keepdim=True))


class Reversible(torch.autograd.Function):
    """Saves its output alone; its backward finds the input again and runs the module there."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, module: nn.Module, *weights: torch.Tensor) -> Any:
        ctx.module, ctx.weights = module, weights
        first, second = x.chunk(2, -1)
        with torch.no_grad():
            y = torch.cat([first, second + module(first)], -1)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (y,) = ctx.saved_tensors
        first, _ = y.detach().chunk(2, -1)
        g_first, g_second = gradient.chunk(2, -1)
        with torch.enable_grad():
            first = first.clone().requires_grad_()
            inner = ctx.module(first)
        trained = [w for w in ctx.weights if w.requires_grad]
        found = iter(torch.autograd.grad(inner, [first, *trained], g_second))
        g_inner = next(found)
        weights = [next(found) if w.requires_grad else None for w in ctx.weights]
        return torch.cat([g_first + g_inner, g_second], -1), None, *weights


class ReversibleBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Linear(WIDTH // 2, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH // 2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = Reversible.apply(x, self.inner, *self.inner.parameters())
        return y


class ModuleHooks(nn.Module):
    """Hooks on modules, forward and backward, which return other tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.first.register_forward_hook(_doubled)
        self.first.register_full_backward_hook(_halved)
        self.second.register_forward_pre_hook(_sines)
        self.second.register_full_backward_pre_hook(_bounded)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).tanh()) * x


def _doubled(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 2 * output.detach().cos()


def _halved(module: nn.Module, inputs: Any, outputs: Any) -> Any:
    return tuple(None if g is None else g * 0.5 for g in inputs)


def _sines(module: nn.Module, args: Any) -> Any:
    return (args[0].sin() * args[0],)


def _bounded(module: nn.Module, outputs: Any) -> Any:
    return tuple(None if g is None else g.clamp(-1, 1) for g in outputs)


def hooks_on_tensors(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = (x @ w).sin()
    if y.requires_grad:
        held = y.detach()
        y.register_hook(lambda g: g * held.abs())
        assert y.grad_fn is not None
        y.grad_fn.register_prehook(lambda gs: tuple(g * 1.5 for g in gs))
        y.retain_grad()
    return y * y


def reads_saved_tensors(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = (x @ w).exp()
    if y.requires_grad:
        assert y.grad_fn is not None
        assert torch.equal(y.grad_fn._saved_result, y)
    return y.clamp(max=2) * x


def pack_to_numbers(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Somebody's hooks which pack to what is no tensor, and within them hooks again."""
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> int:
        kept[len(kept)] = tensor.detach()
        return len(kept) - 1

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda number: kept[number].clone()):
        y = (x @ w).sin()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            y = y * y.cos()
    return y * x


def forward_derivative(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, x.detach().cos())
        y = (dual @ w).sin()
        primal, tangent = forward_ad.unpack_dual(y)
    return primal * x if tangent is None else primal * x + tangent * 0.1


def selective(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    def contexts() -> Any:
        return create_selective_checkpoint_contexts([torch.ops.aten.mm.default])

    return checkpoint(lambda y: (y @ w).sin() * y, x, use_reentrant=False, context_fn=contexts)


def swapped_region(decision: memswap.CheckpointPolicy) -> Function:
    def run(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        def decide(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> memswap.CheckpointPolicy:
            return (
                decision
                if op is torch.ops.aten.mm.default
                else memswap.CheckpointPolicy.PREFER_RECOMPUTE
            )

        return memswap.checkpoint(
            lambda y: ((y @ w).sin() @ w) * y,
            x,
            policy_fn=decide,
            swap_inputs=True,
            min_bytes=1,
        )

    return run


def plain_region(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return memswap.checkpoint(lambda y: F.dropout((y @ w).sin(), 0.2) * y, x, min_bytes=1)


def without_gradient(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        scale = (x @ w).sigmoid()
        with torch.enable_grad():
            y = x * w[0]
        y2 = y * 2  # has no graph
    return y * scale + y2.detach() * w[1]


def switched_off(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    guard = torch.inference_mode() if not torch.is_grad_enabled() else contextlib.nullcontext()
    with guard:
        y = (x @ w).sin()
    with torch.inference_mode():
        number = float(x.detach().sum())
    return y.clone() * number * 0.1 + x


def gradient_of_a_part(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Two graphs of one tensor; one is gone before the other's backward, one was retained."""
    y = (x @ w).tanh()
    if not y.requires_grad:
        return y
    side = (y.exp() * y).sum()
    (first,) = torch.autograd.grad(side, y, retain_graph=True)
    (second,) = torch.autograd.grad(side, y)
    return y * first + second.detach()


def noisy(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x @ w
    return (
        y * torch.bernoulli(y.detach().sigmoid().nan_to_num(0.5))
        + F.rrelu(y, training=True)
        + F.alpha_dropout(y, 0.2, True)
    )


FLOWS: dict[str, Function] = {
    "keeps": lambda x, w: Keeps.apply(x, 0.5, w) * x,
    "new style": lambda x, w: NewStyle.apply(x @ w)[0] * NewStyle.apply(x)[1],
    "new style, mapped": lambda x, w: torch.vmap(lambda row: NewStyle.apply(row @ w)[0])(x),
    "edits what it saved": lambda x, w: EditsWhatItSaved.apply(x @ w) * x,
    "hooks on tensors": hooks_on_tensors,
    "reads saved tensors": reads_saved_tensors,
    "pack to numbers": pack_to_numbers,
    "forward derivative": forward_derivative,
    "selective": selective,
    "region": plain_region,
    "region that swaps": swapped_region(memswap.CheckpointPolicy.MUST_SWAP),
    "region that encodes": swapped_region(memswap.CheckpointPolicy.MUST_ENCODE),
    "without gradient": without_gradient,
    "switched off": switched_off,
    "gradient of a part": gradient_of_a_part,
    "noisy": noisy,
}
FLOW_MODULES: dict[str, Callable[[], nn.Module]] = {
    "reversible": ReversibleBlock,
    "module hooks": ModuleHooks,
}
#: Of these: what has no second derivative, or none with the same bits every time.
FLOWS_ONCE_DIFFERENTIABLE = (
    "keeps", "edits what it saved", "reversible", "pack to numbers", "hooks on tensors", "new style",
    "new style, mapped", "gradient of a part", "module hooks", "forward derivative",
)  # fmt: skip
