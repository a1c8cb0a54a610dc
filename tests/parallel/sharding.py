"""A small transformer, its replicated reference, and training steps that can be compared."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from comms import EventLog
from memswap.parallel import ShardContext, shard
from ranks import Rank


class Mark(torch.autograd.Function):
    """Writes into a log when forward and backward pass by."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, log: EventLog, forward: str, backward: str) -> Any:
        ctx.log, ctx.backward = log, backward
        log(forward)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.log(ctx.backward)
        return gradient, None, None, None


class Block(nn.Module):
    """Attention and an MLP; rows that no number of ranks divides, with and without bias."""

    def __init__(self, d: int, index: int) -> None:
        super().__init__()
        self.index = index
        self.norm = nn.LayerNorm(d)
        self.qkv = nn.Linear(d, 3 * d, bias=False)
        self.wo = nn.Linear(d, d)
        self.up = nn.Linear(d, 2 * d + 1)
        self.down = nn.Linear(2 * d + 1, d)
        self.log: EventLog | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.log is not None:
            x = Mark.apply(x, self.log, f"F{self.index}", f"B{self.index} ends")
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.wo(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        x = x + self.down(F.gelu(self.up(x)))
        if self.log is not None:
            x = Mark.apply(x, self.log, f"F{self.index} ends", f"B{self.index}")
        return x


class Net(nn.Module):
    """Embedding, blocks, head; optionally tied."""

    def __init__(self, layers: int = 3, d: int = 8, vocabulary: int = 11, tied: bool = False):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, d)
        self.layers = nn.ModuleList(Block(d, i) for i in range(layers))
        self.norm = nn.LayerNorm(d)
        self.head = nn.Linear(d, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.checkpointed: Sequence[int] = ()
        self.reentrant = False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for i, layer in enumerate(self.layers):
            if i in self.checkpointed:
                x = checkpoint(layer, x, use_reentrant=self.reentrant)
            else:
                x = layer(x)
        return self.head(self.norm(x))


def make_net(dtype: torch.dtype = torch.float64, **options: Any) -> Net:
    torch.manual_seed(7)
    return Net(**options).to(dtype)


def sharded(
    rank: Rank, net: Net, *, late: bool = False, context: dict[str, Any] | None = None, **how: Any
) -> tuple[Net, ShardContext]:
    """A copy of the net with each layer and the rest sharded."""
    net = copy.deepcopy(net)
    kept = ShardContext(
        open_comm=lambda group: rank.open_comm(group, late=late), debug=True, **(context or {})
    )
    for layer in net.layers:
        shard(layer, rank.mesh, context=kept, **how)
    shard(net, rank.mesh, context=kept, mp_policy=how.get("mp_policy"))
    return net, kept


def fully_sharded(rank: Rank, net: Net, **how: Any) -> Net:
    """The same with FSDP2."""
    net = copy.deepcopy(net)
    for layer in net.layers:
        fully_shard(layer, mesh=rank.mesh, **how)
    return fully_shard(net, mesh=rank.mesh, **how)


def tokens_of(step: int, size: int, n: int = 2, length: int = 5) -> torch.Tensor:
    """Tokens of all ranks, [size, n, length]."""
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randint(0, 11, (size, n, length), generator=generator)


def loss_of(net: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = net(tokens)
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def adamw(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.1)


def train(
    net: nn.Module, rank: Rank, steps: int = 3, make: Callable[..., Any] = adamw
) -> list[torch.Tensor]:
    """Each rank on its own tokens."""
    optimizer = make(net)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(net, tokens_of(step, rank.size)[rank.rank])
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def train_replicated(
    net: nn.Module, rank: Rank, steps: int = 3, make: Callable[..., Any] = adamw
) -> None:
    """The reference: replicas whose gradients are averaged by an all-reduce."""
    optimizer = make(net)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(net, tokens_of(step, rank.size)[rank.rank]).backward()
        for parameter in net.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= rank.size
        optimizer.step()


def whole(net: nn.Module) -> dict[str, torch.Tensor]:
    """All parameters, gathered."""
    return {
        name: parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter.detach()
        for name, parameter in net.named_parameters()
    }


def assert_same(net: nn.Module, reference: nn.Module, rank: Rank, bitwise: bool) -> None:
    """Parameters are equal: in every bit, or as far as adding up in another order lets them be."""
    mine, theirs = whole(net), whole(reference)
    assert mine.keys() == theirs.keys()
    for name, parameter in mine.items():
        if bitwise:
            assert torch.equal(parameter, theirs[name]), (
                f"{name} differs: {parameter - theirs[name]}"
            )
        else:
            torch.testing.assert_close(parameter, theirs[name], rtol=0, atol=1e-12, msg=name)


def moved(net: nn.Module, before: nn.Module) -> bool:
    """Whether training did anything at all."""
    old = dict(before.named_parameters())
    return all(not torch.equal(value, old[name]) for name, value in whole(net).items())
