"""A small Llama whose weights are sharded, sequence cut, activations managed, layers recomputed.

Each of these may be combined with each other one, on any number of ranks: the losses are those of
one process without any of them. Without a cut sequence the ranks share the batch, so their number
has to divide it; with one they share the sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import memswap
from memswap.parallel import ContextParallel, ShardContext, shard


@dataclass(frozen=True)
class Config:
    """The model, the data, and what memswap does."""

    layers: int = 4
    width: int = 64
    heads: int = 4
    kv_heads: int = 2
    vocabulary: int = 256
    length: int = 64
    batch: int = 4
    steps: int = 4
    dtype: str = "float32"
    shard: bool = False
    """Shard weights over the ranks."""
    slots: int = 2
    """Layers whose weights may be gathered at once."""
    context: bool = False
    """Cut the sequence over the ranks."""
    ulysses: int = 0
    """Ranks that share the heads of attention, the others gather keys and values; 0: most."""
    manage: bool = False
    """Move saved activations, as suits the device."""
    checkpoint: int = 0
    """Layers, from the first, that are recomputed in backward."""


class Attention(nn.Module):
    """Causal attention with rotary positions and fewer heads of keys and values than of queries."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.size = config.width // config.heads
        self.wq = nn.Linear(config.width, config.heads * self.size, bias=False)
        self.wk = nn.Linear(config.width, config.kv_heads * self.size, bias=False)
        self.wv = nn.Linear(config.width, config.kv_heads * self.size, bias=False)
        self.wo = nn.Linear(config.heads * self.size, config.width, bias=False)
        self.core = Core()

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, self.size)) for f in (self.wq, self.wk, self.wv))
        return self.wo(self.core(rotate(q, angles), rotate(k, angles), v).flatten(2))


class Core(nn.Module):
    """Attention proper, [batch, tokens, heads, size]: what ContextParallel is applied to."""

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        ranges: tuple[tuple[int, int], ...] | None = None,
    ) -> torch.Tensor:
        """``ranges`` of the sequence that the queries are; None: all of it."""
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        ranges = ranges or ((0, q.size(2)),)
        return memswap.parallel.causal_attention(q, k, v, ranges).transpose(1, 2)


def rotate(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotary positions: pairs of channels, turned by ``angles`` [tokens, channels / 2]."""
    even, odd = x[..., ::2], x[..., 1::2]
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


class Block(nn.Module):
    """Attention and a gated MLP, each behind a norm."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.width)
        self.gate = nn.Linear(config.width, 3 * config.width, bias=False)
        self.up = nn.Linear(config.width, 3 * config.width, bias=False)
        self.down = nn.Linear(3 * config.width, config.width, bias=False)

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), angles)
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """Embedding, blocks, norm, head."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embed = nn.Embedding(config.vocabulary, config.width)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        size = config.width // config.heads
        frequencies = 10000.0 ** (-torch.arange(0, size, 2) / size)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        angles = positions[:, None] * self.frequencies
        for layer in self.layers:
            x = layer(x, angles)
        return self.head(self.norm(x))


def cut_sequence(model: Llama, config: Config, mesh: DeviceMesh) -> ContextParallel:
    """Let the model's attention see the whole sequence, of which each rank holds a part."""
    ranks = mesh.size()
    sharing = range(1, min(ranks, config.heads) + 1)
    ulysses = config.ulysses or max(n for n in sharing if ranks % n == 0)
    grid = init_device_mesh(mesh.device_type, (ranks // ulysses, ulysses))
    style = ContextParallel(balance="headtail", ranges="ranges", sequence_length=config.length)
    for layer in model.layers:
        style.apply(layer.attention.core, grid)
    return style


def batches(config: Config) -> Iterator[dict[str, torch.Tensor]]:
    """Tokens and labels [batch, length], the same on every rank."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(config.steps):
        # Counting upwards from anywhere: something that can be learnt.
        first = torch.randint(config.vocabulary, (config.batch, 1), generator=generator)
        text = (first + torch.arange(config.length + 1)) % config.vocabulary
        yield {"tokens": text[:, :-1], "labels": text[:, 1:]}


def train(config: Config, device: torch.device, mesh: DeviceMesh | None) -> list[float]:
    """The loss of each step, the same on every rank."""
    rank, ranks = (mesh.get_local_rank(), mesh.size()) if mesh is not None else (0, 1)
    torch.manual_seed(0)
    model = trained = Llama(config).to(device, getattr(torch, config.dtype))
    style = None
    if mesh is not None and config.context:
        style = cut_sequence(model, config, mesh)
    if mesh is not None and config.shard:
        context = ShardContext(slots=config.slots)
        for layer in model.layers:
            shard(layer, mesh, context=context)
        shard(model, mesh, context=context)
    if config.checkpoint:
        memswap.checkpoint_module(model.layers[: config.checkpoint])
    if mesh is not None and not config.shard:
        trained = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    with memswap.manage(model.layers) if config.manage else nullcontext():
        for batch in batches(config):
            if style is not None:
                batch = style.shard_batch(batch)
            else:
                batch = {name: part.chunk(ranks)[rank] for name, part in batch.items()}
                batch["positions"] = torch.arange(config.length)
            labels = batch.pop("labels").to(device).flatten()
            logits = trained(**{name: part.to(device) for name, part in batch.items()})
            total = F.cross_entropy(logits.flatten(0, 1), labels, reduction="sum")
            if style is not None:
                loss = style.mean_loss(total, labels.numel(), gradients="avg")
                mean = loss.detach()
            else:
                loss = total / labels.numel()
                mean = loss.detach() / ranks
                if ranks > 1:
                    dist.all_reduce(mean)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(mean.item())
    if rank == 0 and mesh is not None and config.shard:
        print(memswap.parallel.describe(model))
    return losses
