"""Layers whose tensors share memory in unusual ways, of which `programs.py` makes programs too."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune

WIDTH = 8
Function = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def views_of_views(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = (x @ w).view(-1)
    windows = y.unfold(0, WIDTH, WIDTH)  # the same elements by another way
    diagonal = windows.t().flip(1)[::2].diagonal()
    return windows.sin() * y.view(x.shape) + diagonal.exp().sum() * 0.01


def overlapping(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = (x @ w).flatten().contiguous()
    return y.as_strided((x.shape[0], WIDTH), (WIDTH // 2, 1)).sin() * x


def expanded(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    row = (x @ w).mean(0, keepdim=True)
    wide = row.expand(x.shape)
    return wide.sin() * x + wide.exp() * 0.1 * row


def scalars(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    norm = (x * w[0]).sum()
    return x * norm.sin() * 0.1 + norm.tanh() * norm.view(1)[0]


def empty_parts(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    nothing = (x[:0] @ w).sin()
    return torch.cat([nothing, x.cos(), nothing.exp()]) + nothing.sum()


def other_dtypes(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    half = (x @ w).to(torch.bfloat16)
    y = half.view(-1).view(x.shape).sin() * half
    index = y.detach().view(torch.int16).long().remainder(WIDTH)
    return y.float().gather(1, index) * half.detach().view(torch.uint8)[:, ::2].float() / 256


def other_graph_is_kept(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x.detach() * w[:1]
    other = y.sin()  # saves y, which is edited then: nobody runs its backward
    y.mul_(0.5)
    z = y.cos() * x
    if z.requires_grad:
        z.register_hook(lambda gradient: gradient if other.requires_grad else None)
    return z


def one_storage_two_counters(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = (x @ w).detach()
    alias = x.new_empty(0).set_(y)
    first = alias * w[0]
    return first * x + y * w[1] + alias.t().sin().t() * w[2]


def out_variants(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    buffer = x.new_empty(0)
    with torch.no_grad():
        torch.mm(x, w, out=buffer)
        torch.sin(buffer, out=buffer)
    y = buffer * w[0]
    larger = x.new_empty(1)
    with torch.no_grad():
        larger.resize_(x.shape).copy_(buffer)
        larger.untyped_storage()[:4].copy_(buffer.untyped_storage()[:4])
    return y * x + larger * w[1]


def residual_in_place(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    hidden = x.clone()
    hidden += F.relu(x @ w)
    y = F.relu_(hidden + 0)
    return y.add(F.silu(hidden)).addcmul_(y, w[:1], value=0.1)


def copied_into_slices(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    cache = x.new_zeros(2, *x.shape)
    cache[0].copy_(x @ w)
    cache[1, :, ::2] = x[:, ::2].sin()
    return (cache[0] * cache[1].exp()).sub_(x).relu_()


def channels_last(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    picture = x.reshape(-1, 2, 2, 2).contiguous(memory_format=torch.channels_last)
    kernel = w.flatten()[:16].view(2, 2, 2, 2).contiguous(memory_format=torch.channels_last)
    y = F.conv2d(F.pad(picture, (1, 0, 1, 0)), kernel)
    return (F.group_norm(y, 1) * picture).reshape(x.shape)


def spectrum(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    waves = torch.fft.rfft(x @ w)
    parts = waves.detach().view(torch.float32).view(*waves.shape, 2)
    return torch.fft.irfft(waves * waves.conj() * torch.view_as_complex(parts), n=WIDTH) * 0.01


def shifted(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x @ w
    labels = y.detach().argmax(-1)
    scores = F.pad(y, (0, 0, 1, 0))[:-1]
    return x - F.cross_entropy(scores, labels) - scores.logsumexp(-1, keepdim=True) * 0.1


def from_memory_of_its_own(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    table = torch.frombuffer(bytearray(4 * WIDTH), dtype=torch.float32).to(x.device)
    table.copy_(w.detach()[0])
    other = torch.tensor(table.tolist(), device=x.device)
    return x * table.sin() * w[0] + other * w[1] * x


ALIASES: dict[str, Function] = {
    "views of views": views_of_views,
    "overlapping": overlapping,
    "expanded": expanded,
    "scalars": scalars,
    "empty parts": empty_parts,
    "other dtypes": other_dtypes,
    "other graph is kept": other_graph_is_kept,
    "two counters": one_storage_two_counters,
    "out": out_variants,
    "residual in place": residual_in_place,
    "copied into slices": copied_into_slices,
    "channels last": channels_last,
    "spectrum": spectrum,
    "shifted": shifted,
    "memory of its own": from_memory_of_its_own,
}


class State(nn.Module):
    """Hands its detached state on to the next forward, as truncated recurrences do."""

    def __init__(self, aliases: bool) -> None:
        super().__init__()
        self.aliases = aliases
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.state: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = torch.zeros_like(x) if self.state is None else self.state
        y = (self.linear(x) + state.sin() * self.linear.weight[0]).tanh()
        self.state = y.detach() if self.aliases else y.detach().clone()
        return y * x


class Workspace(nn.Module):
    """Writes into the same memory in each forward: with two of them alive autograd refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.work = torch.empty(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.work.device != x.device:
            self.work = x.new_empty(0)
        with torch.no_grad():
            torch.mm(x, self.linear.weight, out=self.work)
        return self.work * self.linear(x)


class Cached(nn.Module):
    """A table that the first forward computes, and that no buffer is."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.table: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table is None or self.table.device != x.device:
            angles = torch.arange(WIDTH, dtype=x.dtype, device=x.device)
            self.table = torch.stack([angles.sin(), angles.cos()])
        sine, cosine = self.table
        return x * sine * self.scale + x.roll(1, -1) * cosine * self.scale[:1]


class Twice(nn.Module):
    """A module that it calls twice, on the second call with its own output."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        return self.inner(y) * y


class Teacher(nn.Module):
    """A copy of its own weights that follows them, and whose output is a target."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Linear(WIDTH, WIDTH)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                for ours, theirs in zip(
                    self.teacher.parameters(), self.student.parameters(), strict=True
                ):
                    ours.lerp_(theirs, 0.1)
        with torch.no_grad():
            target = self.teacher(x)
        y = self.student(x)
        return x + (y - target).square() + F.smooth_l1_loss(y, target)


def pruned() -> nn.Module:
    linear = nn.Linear(WIDTH, WIDTH)
    prune.l1_unstructured(linear, "weight", amount=0.3)
    return nn.Sequential(linear, nn.Tanh())


#: What a second run of the same forward finds changed.
STATEFUL = (
    "state", "state, an alias", "workspace", "teacher", "average", "average, copied", "batch norm",
    "spectral norm",
)  # fmt: skip

ALIASING_MODULES: dict[str, Callable[[], nn.Module]] = {
    "state": lambda: State(False),
    "state, an alias": lambda: State(True),
    "workspace": Workspace,
    "cached": Cached,
    "twice": Twice,
    "teacher": Teacher,
    "pruned": pruned,
    "prelu": nn.PReLU,
}
