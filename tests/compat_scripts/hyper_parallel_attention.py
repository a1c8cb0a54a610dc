"""Models as HyperParallel's users have them, the same in plain torch, and their comparison.

The reference is the same training in plain torch on the same processes: blocking collectives of
torch.distributed with autograd, and attention called on what they give. Where keys are gathered it
is cut in the same way (a rank's queries against the keys up to its last one), so that bits are
comparable; that cut is compared with attention on the whole sequence in one process, in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from cut_attention import open_comms
from ranks import Rank

HEADS, SIZE = 4, 8
WIDTH = HEADS * SIZE
BATCH, TOKENS = 2, 16
STEPS = 2

# --- the user's model -----------------------------------------------------------------------------


class CoreAttention(nn.Module):
    """Attention proper, causal by itself. BSHD."""

    seq_dim, head_dim = 1, 2

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Any:
        query, key, value = (self.to_bnsd(x) for x in (query, key, value))
        return self.from_bnsd(
            F.scaled_dot_product_attention(
                query, key, value, is_causal=True, enable_gqa=query.size(1) != key.size(1)
            )
        )

    def to_bnsd(self, x: torch.Tensor) -> torch.Tensor:
        return x.transpose(1, 2)

    def from_bnsd(self, x: torch.Tensor) -> torch.Tensor:
        return x.transpose(1, 2)


class CoreBNSD(CoreAttention):
    seq_dim, head_dim = 2, 1

    def to_bnsd(self, x: torch.Tensor) -> torch.Tensor:
        return x

    from_bnsd = to_bnsd


class CoreSBHD(CoreAttention):
    seq_dim, head_dim = 0, 2

    def to_bnsd(self, x: torch.Tensor) -> torch.Tensor:
        return x.permute(1, 2, 0, 3)

    def from_bnsd(self, x: torch.Tensor) -> torch.Tensor:
        return x.permute(2, 0, 1, 3)


class CoreTHD(CoreAttention):
    seq_dim, head_dim = 0, 1

    def to_bnsd(self, x: torch.Tensor) -> torch.Tensor:
        return x.transpose(0, 1).unsqueeze(0)

    def from_bnsd(self, x: torch.Tensor) -> torch.Tensor:
        return x.squeeze(0).transpose(0, 1)


class CoreBSH(CoreAttention):
    """Heads and their size in one dimension."""

    def to_bnsd(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, SIZE)).transpose(1, 2)

    def from_bnsd(self, x: torch.Tensor) -> torch.Tensor:
        return x.transpose(1, 2).flatten(2)


class CoreTriu(CoreAttention):
    """With a mask of its own making."""

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Any:
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        hidden = torch.ones(query.size(2), key.size(2), dtype=torch.bool).triu(1)
        y = F.scaled_dot_product_attention(query, key, value, attn_mask=~hidden)
        return y.transpose(1, 2)


class CoreTuple(CoreAttention):
    """Returns the output, something beside it, and a second tensor of the same kind."""

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Any:
        y = super().forward(query, key, value)
        return y, None, y.abs()


class CoreOtherPlaces(CoreAttention):
    """Queries are the second argument."""

    def forward(self, scale: Any, query: Any, key: Any, value: Any) -> Any:  # type: ignore[override]
        return super().forward(query, key, value)


class Projection(nn.Module):
    """A linear layer whose output attention takes as it is."""

    def __init__(self, to_layout: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.to_layout = to_layout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.linear(x).unflatten(-1, (HEADS, SIZE)).transpose(1, 2)
        return self.to_layout(heads).contiguous()


class Block(nn.Module):
    def __init__(self, core: nn.Module, like: CoreAttention) -> None:
        super().__init__()
        self.like = like.__class__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q_proj = Projection(like.from_bnsd)
        self.k_proj = Projection(like.from_bnsd)
        self.v_proj = Projection(like.from_bnsd)
        self.q_norm = nn.RMSNorm(SIZE) if isinstance(like, CoreNormed) else nn.Identity()
        self.k_norm = nn.RMSNorm(SIZE) if isinstance(like, CoreNormed) else nn.Identity()
        self.attention = core
        self.o_proj = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        q, k, v = self.q_norm(self.q_proj(h)), self.k_norm(self.k_proj(h)), self.v_proj(h)
        y = self.call(q, k, v)
        return x + self.o_proj(self.like.to_bnsd(y).transpose(1, 2).flatten(2))

    def call(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        y = self.attention(q, k, v)
        if isinstance(y, tuple):
            assert y[1] is None
            return y[0] + y[2]
        return y


class CoreNormed(CoreAttention):
    """Its queries and keys are normalized."""


def make(like: type[CoreAttention], cores: Iterable[nn.Module], block: type = Block) -> nn.Module:
    torch.manual_seed(11)
    return nn.Sequential(*(block(core, like()) for core in cores))


# --- the same in plain torch ----------------------------------------------------------------------


class Plain(nn.Module):
    """Attention over a cut sequence: ``heads`` exchange, ``keys`` gather, all of it blocking.

    Takes and gives the layout of ``like``, computes in BSHD.
    """

    def __init__(
        self,
        like: CoreAttention,
        heads: dist.ProcessGroup | None,
        keys: dist.ProcessGroup | None,
        balance: bool = False,
    ) -> None:
        super().__init__()
        self.like, self.heads, self.keys, self.balance = like, heads, keys, balance

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        # Sums over a gradient that lies otherwise in memory have other bits; one that is exchanged
        # arrives in the natural order.
        for x in (q, k, v) if self.heads is not None or self.balance else (k, v):
            x.register_hook(torch.Tensor.contiguous)
        q, k, v = (self.like.to_bnsd(x).transpose(1, 2) for x in (q, k, v))
        if self.heads is not None:
            q, k, v = (swap(x, self.heads, 2, 1) for x in (q, k, v))
        if self.keys is None:
            y = self.attend(q, k, v, 0)
        elif not self.balance:
            k, v = gather(k, self.keys), gather(v, self.keys)
            y = self.attend(q, k, v, self.keys.rank() * q.size(1))
        else:
            y = self.balanced(q, k, v)
        if self.heads is not None:
            y = swap(y, self.heads, 1, 2)
        y = self.like.from_bnsd(y.transpose(1, 2))
        return (y, None, y.abs()) if isinstance(self.like, CoreTuple) else y

    def balanced(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """An early and a late part of the queries at each rank."""
        assert self.keys is not None
        rank, size = self.keys.rank(), self.keys.size()
        q, k, v = (gather(x, self.keys) for x in (q, k, v))
        length = q.size(1) // (2 * size)
        early, late = (i * length for i in (rank, 2 * size - 1 - rank))
        if early + length == late:
            y = self.attend(q[:, early : late + length], k, v, early)
        else:
            y = torch.cat([self.attend(q[:, i : i + length], k, v, i) for i in (early, late)], 1)
        y = gather(y, self.keys)
        order = [i for r in range(size) for i in (r, 2 * size - 1 - r)]
        chunks = y.chunk(2 * size, 1)
        whole = torch.cat([chunks[order.index(i)] for i in range(2 * size)], 1)
        return whole.chunk(size, 1)[rank]

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int) -> torch.Tensor:
        """Queries from ``start`` on against the keys up to their end; with a mask, against all."""
        stop = start + q.size(1)
        masked = isinstance(self.like, CoreTriu)
        keys = k.size(1) if masked else stop
        seen = torch.arange(start, stop)[:, None] >= torch.arange(keys)
        q, k, v = (x.transpose(1, 2) for x in (q, k[:, :keys], v[:, :keys]))
        plain = not masked and not start
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=None if plain else seen, is_causal=plain
        )
        return y.transpose(1, 2)


class AllToAll(torch.autograd.Function):
    """Part ``j`` of the first dimension goes to rank ``j``, there and back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        y = torch.empty_like(x)
        dist.all_to_all_single(y, x, group=group)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return AllToAll.apply(gradient.contiguous(), ctx.group), None


class AllGather(torch.autograd.Function):
    """The parts of all ranks along the first dimension; in backward the sum of their gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        y = x.new_empty((group.size() * len(x), *x.shape[1:]))
        dist.all_gather_into_tensor(y, x, group=group)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        own = gradient.new_empty((len(gradient) // ctx.group.size(), *gradient.shape[1:]))
        dist.reduce_scatter_tensor(own, gradient.contiguous(), group=ctx.group)
        return own, None


def swap(x: torch.Tensor, group: dist.ProcessGroup, cut: int, join: int) -> torch.Tensor:
    """Cut one dimension among the ranks and join another one. BSHD."""
    y = AllToAll.apply(torch.stack(x.chunk(group.size(), cut)), group)
    return torch.cat(y.unbind(), join)


def gather(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The tokens of all ranks. BSHD."""
    return AllGather.apply(x.transpose(0, 1).contiguous(), group).transpose(0, 1).contiguous()


# --- comparing ------------------------------------------------------------------------------------


def batches(dtype: torch.dtype, batch: int = BATCH) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [
        torch.randn(batch, TOKENS, WIDTH, dtype=dtype, generator=generator) for _ in range(STEPS)
    ]


def train(
    model: nn.Module, x: Iterable[torch.Tensor], reduce: dist.ProcessGroup | None = None
) -> list[torch.Tensor]:
    """The outputs of each step, then the weights."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    results = []
    for batch in x:
        y = model(batch)
        y.square().sum().backward()
        gradients = [weight.grad for weight in model.parameters()]
        assert all(gradient is not None for gradient in gradients)
        sums = torch.cat([gradient.flatten() for gradient in gradients])  # one collective, not ten
        dist.all_reduce(sums, group=reduce)
        for gradient, part in zip(
            gradients, sums.split([g.numel() for g in gradients]), strict=True
        ):
            gradient.copy_(part.view_as(gradient))
        optimizer.step()
        optimizer.zero_grad()
        results.append(y.detach())
    return [*results, *(weight.detach() for weight in model.parameters())]


def assert_same_bits(found: list[torch.Tensor], expected: list[torch.Tensor], what: str) -> None:
    for i, (one, other) in enumerate(zip(found, expected, strict=True)):
        as_bits = torch.int64 if one.dtype == torch.float64 else torch.int32
        same = torch.equal(one.contiguous().view(as_bits), other.contiguous().view(as_bits))
        worst = float((one - other).abs().max())
        assert same, f"{what}: tensor {i} of {len(found)} differs by {worst}"


def groups_of(mesh: DeviceMesh, degree: int | None) -> tuple[Any, Any]:
    """For the reference: who shares heads, who gathers keys, of all ranks of a mesh."""
    ranks = mesh.mesh.flatten().tolist()
    grid = mesh.mesh.reshape(-1, degree or len(ranks))
    row, column = (grid == dist.get_rank()).nonzero()[0].tolist()
    lines = grid[row].tolist(), grid[:, column].tolist()
    heads, keys = (
        dist.new_group(line, use_local_synchronization=True) if len(line) > 1 else None
        for line in lines
    )
    return heads, keys


def assert_trains_the_bits(
    rank: Rank,
    style: Any,
    mesh: DeviceMesh,
    like: type[CoreAttention],
    script: Callable[[nn.Module, Any, DeviceMesh], None],
    *,
    core: type[nn.Module] | None = None,
    block: type = Block,
    name: str = "",
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float64),
) -> nn.Module:
    """A user's script, which applies the style to the model, against plain torch."""
    size, place = mesh.size(), mesh.mesh.flatten().tolist().index(rank.rank)
    heads, keys = groups_of(mesh, style.ulysses_degree)
    balance = style.style.balance == "queries"
    batch = 1 if like is CoreTHD else BATCH
    everyone = dist.new_group(mesh.mesh.flatten().tolist(), use_local_synchronization=True)
    for i, dtype in enumerate(dtypes):
        mine = [x.chunk(size, 1)[place] for x in batches(dtype, batch)]
        plain = make(like, [Plain(like(), heads, keys, balance) for _ in range(2)])
        expected = train(plain.to(dtype), mine, everyone)
        model = make(like, [(core or like)() for _ in range(2)], block).to(dtype)
        if dtype == torch.float64:  # the cut itself, against one process
            whole = batches(dtype, batch)[0]
            one = make(like, [like() for _ in range(2)]).to(dtype)(whole).chunk(size, 1)[place]
            torch.testing.assert_close(expected[0], one, rtol=1e-12, atol=1e-12)
        used = style.again() if i else style
        script(model, used, mesh)
        assert_same_bits(train(model, mine, everyone), expected, f"{name} {dtype}")
    return model


class Recorded:
    """A style as the user makes it, again for another model, with what it sends recorded."""

    def __new__(cls, kind: type, rank: Rank, late: bool, *args: Any, **options: Any) -> Any:
        made = kind(*args, comm=open_comms(rank, late), **options)
        made.again = partial(cls, kind, rank, late, *args, **options)
        return made


def degrees(rank: Rank) -> list[int | None]:
    return [None, 1, 2] if rank.size == 4 else [None, 1]
