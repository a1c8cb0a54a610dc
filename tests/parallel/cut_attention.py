"""An attention layer that can be cut over ranks, and its comparison with one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel

from comms import LateComm, Recording
from memswap.parallel import ContextParallel, causal_attention
from memswap.parallel.comm import Comm, ProcessGroupComm
from ranks import Rank

LATE = pytest.mark.parametrize("late", [False, True], ids=["async", "late"])
#: For the big ones: over the worst network always, over gloo's own in the slow run.
LATE_FIRST = pytest.mark.parametrize(
    "late", [pytest.param(False, marks=pytest.mark.slow, id="async"), pytest.param(True, id="late")]
)
FP64 = torch.float64
SIZE = 4  # of a head


def to_layout(x: torch.Tensor, layout: str) -> torch.Tensor:
    """From [batch, tokens, heads, size]."""
    if layout == "thd":
        return x.squeeze(0)
    return {"bshd": x, "bnsd": x.transpose(1, 2), "sbhd": x.transpose(0, 1)}[layout]


def from_layout(x: torch.Tensor, layout: str) -> torch.Tensor:
    """To [batch, tokens, heads, size]."""
    return x.unsqueeze(0) if layout == "thd" else to_layout(x, layout)


class Core(nn.Module):
    """Attention proper. It knows the layout, and where its queries are if it is told."""

    def __init__(self, layout: str = "bshd", causal: bool = True) -> None:
        super().__init__()
        self.layout, self.causal = layout, causal

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        ranges: Any = None,
        attn_mask: torch.Tensor | None = None,
        is_causal: bool = False,
    ) -> torch.Tensor:
        q, k, v = (from_layout(x, self.layout).transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel(SDPBackend.MATH):
            if self.causal and attn_mask is None:
                y = causal_attention(q, k, v, ranges or ((0, q.size(2)),))
            else:
                gqa = q.size(1) != k.size(1)
                y = F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, enable_gqa=gqa)
        return to_layout(y.transpose(1, 2), self.layout)


class Heads(nn.Module):
    """A projection whose output attention takes as it is."""

    def __init__(self, width: int, heads: int, layout: str) -> None:
        super().__init__()
        self.linear = nn.Linear(width, heads * SIZE, bias=False, dtype=FP64)
        self.layout, self.heads = layout, heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return to_layout(self.linear(x).unflatten(-1, (self.heads, SIZE)), self.layout)


class Attention(nn.Module):
    """x, and for cross-attention what keys come from -> the same shape as x."""

    def __init__(
        self, heads: int = 4, kv_heads: int = 2, layout: str = "bshd", causal: bool = True
    ) -> None:
        super().__init__()
        self.width = heads * SIZE
        self.q = Heads(self.width, heads, layout)
        self.k = Heads(self.width, kv_heads, layout)
        self.v = Heads(self.width, kv_heads, layout)
        self.core = Core(layout, causal)
        self.out = nn.Linear(self.width, self.width, dtype=FP64)
        self.between: Any = lambda q: q

    def forward(self, x: torch.Tensor, source: torch.Tensor | None = None) -> torch.Tensor:
        source = x if source is None else source
        q, k, v = self.q(x), self.k(source), self.v(source)
        y = self.core(self.between(q), k, v=v)
        return self.out(from_layout(y, self.core.layout).flatten(2))


def open_comms(rank: Rank, late: bool) -> Any:
    """Opens groups that record in the rank's log; ``late``: nothing moves until it is awaited."""

    def comm(group: torch.distributed.ProcessGroup) -> Comm:
        comm: Comm = ProcessGroupComm(group)
        return Recording(LateComm(comm) if late else comm, rank.log)

    return comm


def make(**options: Any) -> Attention:
    torch.manual_seed(7)
    return Attention(**options)


def meshes(rank: Rank) -> dict[str, tuple[DeviceMesh, int | None]]:
    """Mode to mesh and ``ulysses``."""
    line = init_device_mesh("cpu", (rank.size,))
    modes: dict[str, tuple[DeviceMesh, int | None]] = {"ulysses": (line, None), "gather": (line, 1)}
    if rank.size == 4:
        modes["hybrid"] = (init_device_mesh("cpu", (2, 2), mesh_dim_names=("co", "ul")), 2)
    return modes


def random(batch: int, tokens: int, width: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, tokens, width, dtype=FP64, generator=generator)


def assert_is_one_process(
    style: ContextParallel,
    model: Attention,
    x: torch.Tensor,
    source: torch.Tensor | None = None,
    run: Any = lambda model, *inputs: model(*inputs),
    reference: Attention | None = None,
) -> None:
    """Output, gradients of the inputs and of the weights."""
    if reference is None:
        reference = make(
            heads=model.q.heads,
            kv_heads=model.k.heads,
            layout=model.core.layout,
            causal=model.core.causal,
        )
    reference.between = model.between
    go = random(x.size(0), x.size(1), x.size(2), seed=2)
    inputs = [x.clone().requires_grad_()]
    local = style.shard_batch({"x": x, "go": go})
    places = [local["positions"]]
    mine = [local["x"].requires_grad_()]
    if source is not None:
        inputs.append(source.clone().requires_grad_())
        keys = style.shard_batch({"x": source}, keys=True)
        mine.append(keys["x"].requires_grad_())
        places.append(keys["positions"])
    expected = reference(*inputs)
    expected.backward(go)
    y = run(model, *mine)
    y.backward(local["go"])
    close = {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(y, expected[:, places[0]], **close)
    for whole, part, where in zip(inputs, mine, places, strict=True):
        assert whole.grad is not None
        torch.testing.assert_close(part.grad, whole.grad[:, where], **close)
    for (name, weight), (_, theirs) in zip(
        model.named_parameters(), reference.named_parameters(), strict=True
    ):
        assert weight.grad is not None, name
        torch.distributed.all_reduce(weight.grad)
        torch.testing.assert_close(weight.grad, theirs.grad, **close)
