"""Layers of many kinds, of which `programs.py` makes training programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

WIDTH = 8


class Layer(nn.Module):
    """A function of rows of WIDTH and of a weight."""

    def __init__(self, function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x, self.weight)


class SavesAll(torch.autograd.Function):
    """Saves inputs, an output, one tensor twice and slices of memory of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> Any:
        own = x.new_empty(3, *x.shape)
        own[0] = x.sin()
        own[1] = x.cos()
        y = own[0] @ w
        ctx.save_for_backward(x, w, y, own[0], own[1], own[1].t())
        ctx.set_materialize_grads(False)
        return y, own[1].sum(0).long()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        x, w, y, sine, cosine, turned = ctx.saved_tensors
        gradient = gradients[0]
        if gradient is None:
            return None, None
        return (gradient @ w.t()) * (cosine + 0 * turned.t()) + 0 * x + 0 * y, sine.t() @ gradient


class Dirty(torch.autograd.Function):
    """Edits its input, and saves it then."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x.mul_(0.5)
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient * (0.5 + 0 * x)


class Staircase(torch.autograd.Function):
    """Returns its input, and an estimate for its gradient from what it saved."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x.abs() < 1)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (inside,) = ctx.saved_tensors
        return gradient * inside


def parts_edited_in_turn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    first, second = (x @ w).unsafe_chunk(2, 1)
    first = first.sigmoid_()
    third = first * second.tanh_()
    return torch.cat([third, first], 1)


def one_part_edited(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    first, second = (x @ w).unsafe_split(WIDTH // 2, 1)
    third = first.sin()
    return torch.cat([third, second.mul_(0.5).exp().clamp(max=2)], 1)


def filled_in_parts(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    rows = x.new_zeros(2, *x.shape)
    rows[0] = x @ w
    rows[1] = x.sin()
    torch._foreach_mul_([rows[0], rows[1]], 0.5)
    return (rows[0] * rows[1]).add_(1).tanh_()


def saved_then_edited(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x @ w
    z = y.sin()
    y.add_(1)  # autograd refuses
    return z + y


def edited_where_nobody_looks(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = F.linear(x, w)
    z = y + x  # saves nothing
    y.mul_(0.5).relu_()
    z[:, ::2] *= 0.5
    return z.index_add_(0, torch.zeros(1, dtype=torch.long, device=x.device), y[:1]).masked_fill_(
        z.detach() > 3, 3.0
    )


def complex_views(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = torch.view_as_complex((x @ w).view(-1, WIDTH // 2, 2).contiguous())
    z = y.conj() * y[:1]
    return torch.cat([z.real, (z.conj().imag * y.real)], 1) * 0.1


def attention(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    q, k, v = (
        t.unflatten(-1, (2, -1)).transpose(0, 1)[None]
        for t in F.linear(x, w.repeat(3, 1)).chunk(3, -1)
    )
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)[0].transpose(0, 1).flatten(1)


def through_hooks(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        y = (x @ w).sin()
    with torch.autograd.graph.save_on_cpu():
        return y * x.cos()


def energy_and_force(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    if not torch.is_grad_enabled():
        return x
    here = x if x.requires_grad else x.detach().requires_grad_()
    energy = (here @ w).tanh().square().sum()
    return x - 0.1 * torch.autograd.grad(energy, here, create_graph=True)[0]


def auxiliary_backward(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = (x @ w).sin()
    if y.requires_grad:
        (gradient,) = torch.autograd.grad(y.square().sum(), w, retain_graph=True)
        y = y * gradient.mean()
    return y


def half_precision(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with torch.autocast(x.device.type, torch.bfloat16):
        y = F.linear(F.linear(x, w), w)  # the second one finds the weight in autocast's cache
    return y.to(x.dtype).tanh()


def bits_of(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x @ w
    sign = (y.detach().view(torch.int32) >> 31).to(y.dtype)
    return y * (sign + 0.5)


FUNCTIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "linear": F.linear,
    "residual": lambda x, w: x + F.gelu(x @ w),
    "same storage": lambda x, w: x * x.detach() + x.t().contiguous().t() * x[:1].expand_as(x),
    "views": lambda x, w: x.view(-1, 2, WIDTH // 2).transpose(1, 2).flip(0).reshape(x.shape) * x,
    "slices": lambda x, w: torch.cat([x[1:].exp() * 0.1, x[:1].cos()]),
    "as_strided": lambda x, w: x.contiguous().as_strided(x.shape, (WIDTH, 1)).sigmoid(),
    "softmax": lambda x, w: torch.softmax(x @ w, -1) * x,
    "layer norm": lambda x, w: F.layer_norm(x, (WIDTH,), w[0], w[1]),
    "group norm": lambda x, w: F.group_norm(x, 2, w[0], w[1]),
    "convolution": lambda x, w: F.conv1d(
        x[None],
        w[0].view(1, 1, -1)[..., :3].expand(x.shape[0], 1, 3).contiguous(),
        padding=1,
        groups=x.shape[0],
    )[0],
    "dropout": lambda x, w: F.dropout(x @ w, 0.3),
    "dropout in place": lambda x, w: F.dropout(x @ w, 0.3, inplace=True).tanh(),
    "in place": lambda x, w: F.leaky_relu_((x @ w).add_(1).mul_(0.5), 0.1),
    "sort": lambda x, w: (x @ w).sort(-1).values * x.cumsum(0).tanh(),
    "max": lambda x, w: x + (x @ w).max(-1, keepdim=True).values,
    "logsumexp": lambda x, w: x - torch.logsumexp(x @ w, -1, keepdim=True),
    "where": lambda x, w: torch.where(x > 0, x @ w, x * 0.1),
    "scatter": lambda x, w: torch.zeros_like(x).scatter_add(0, (x > 0).long(), x @ w) + x,
    "matrix": lambda x, w: (
        x @ torch.linalg.solve(w @ w.t() + 4 * torch.eye(WIDTH, device=w.device), w)
    ),
    "vmap": lambda x, w: torch.vmap(lambda row: (row @ w).sin() * row)(x),
    "chain of checkpoints": lambda x, w: checkpoint(
        lambda y: checkpoint(lambda z: (z @ w).sin() * z, y.cos(), use_reentrant=False),
        x,
        use_reentrant=False,
    ),
    "reentrant": lambda x, w: checkpoint(lambda y: (y @ w).sin() * y, x, use_reentrant=True),
    "saves all": lambda x, w: SavesAll.apply(x, w)[0],
    "dirty": lambda x, w: Dirty.apply(x @ w) * x,
    "staircase": lambda x, w: Staircase.apply(x @ w).round() + x,
    "filled in parts": filled_in_parts,
    "edited where nobody looks": edited_where_nobody_looks,
    "complex": complex_views,
    "attention": attention,
    "hooks": through_hooks,
    "energy and force": energy_and_force,
    "auxiliary backward": auxiliary_backward,
    "half precision": half_precision,
    "bits": bits_of,
}
#: The parts of one storage are edited while it may be on its way, or an operator is the CPU's own.
FUNCTIONS_ON_A_CPU = {
    "parts edited in turn": parts_edited_in_turn,
    "one part edited": one_part_edited,
    "sparse": lambda x, w: torch.sparse.mm(w.relu().to_sparse(), x.t()).t() + x,
    "mkldnn": lambda x, w: (x.to_mkldnn().relu().to_dense()) @ w,
    "double": lambda x, w: (x.double() @ w.double()).float(),
}
REFUSED = {"saved, then edited": saved_then_edited}


#: What has no second derivative, or none with the same bits every time.
ONCE_DIFFERENTIABLE = (
    "saves all", "dirty", "staircase", "reentrant", "attention", "multihead", "encoder",
    "mkldnn", "lstm", "gru", "lstm cell", "gru cell", "hooks",
)  # fmt: skip


class Cell(nn.Module):
    """A recurrent layer over the rows; a cell over two steps."""

    def __init__(self, kind: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.cell = kind(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(self.cell, nn.RNNBase):
            return self.cell(x[:, None])[0][:, 0]
        if isinstance(self.cell, nn.LSTMCell):
            return self.cell(x, self.cell(x))[0]
        return self.cell(x, self.cell(x))


class Average(nn.Module):
    """A moving average in a buffer, which the graph uses."""

    def __init__(self, copies: bool) -> None:
        super().__init__()
        self.copies = copies
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("average", torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        if self.training:
            self.average.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        # Without a copy, a second forward edits what the first one saved, and autograd refuses.
        return y * (self.average.clone() if self.copies else self.average)


class LowRank(nn.Module):
    """A frozen weight with a trained difference."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.a, self.b = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(x) + self.b(F.dropout(self.a(x), 0.1, self.training))


class Rows(nn.Module):
    """A module that wants a batch of sequences."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = (
            self.module(x[None])
            if not isinstance(self.module, nn.MultiheadAttention)
            else self.module(x[None], x[None], x[None], need_weights=False)[0]
        )
        return y[0]


MODULES: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(True)
    ),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "low rank": LowRank,
    "average, copied": lambda: Average(True),
    "frozen": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).requires_grad_(False),
    "hardswish": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Hardswish(True), nn.SELU(True)),
}
MODULES_ON_A_CPU: dict[str, Callable[[], nn.Module]] = {
    "average": lambda: Average(False),
    "lstm": lambda: Cell(nn.LSTM),
    "gru": lambda: Cell(nn.GRU),
    "lstm cell": lambda: Cell(nn.LSTMCell),
    "gru cell": lambda: Cell(nn.GRUCell),
    "multihead": lambda: Rows(nn.MultiheadAttention(WIDTH, 2, batch_first=True)),
    "encoder": lambda: Rows(nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.1, batch_first=True)),
}
