"""A Llama-style stack for the benchmarks: RMSNorm, rotary positions, grouped queries, SwiGLU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a stack; ``kv_heads`` divides ``heads``, which divides ``hidden``."""

    layers: int
    hidden: int
    feed_forward: int
    heads: int
    kv_heads: int
    vocabulary: int
    sequence: int


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.heads, config.kv_heads
        self.width = config.hidden // config.heads
        self.query = nn.Linear(config.hidden, config.heads * self.width, bias=False)
        self.key = nn.Linear(config.hidden, config.kv_heads * self.width, bias=False)
        self.value = nn.Linear(config.hidden, config.kv_heads * self.width, bias=False)
        self.output = nn.Linear(config.heads * self.width, config.hidden, bias=False)

    def forward(
        self, states: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor
    ) -> torch.Tensor:
        batch, sequence, _ = states.shape
        query = self.query(states).view(batch, sequence, self.heads, self.width).transpose(1, 2)
        key = self.key(states).view(batch, sequence, self.kv_heads, self.width).transpose(1, 2)
        value = self.value(states).view(batch, sequence, self.kv_heads, self.width).transpose(1, 2)
        mixed = functional.scaled_dot_product_attention(
            rotate(query, cosine, sine),
            rotate(key, cosine, sine),
            value,
            is_causal=True,
            enable_gqa=self.heads != self.kv_heads,
        )
        return self.output(mixed.transpose(1, 2).reshape(batch, sequence, -1))


def rotate(states: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Apply rotary position embedding to ``[batch, heads, sequence, width]``."""
    first, second = states.chunk(2, dim=-1)
    return states * cosine + torch.cat((-second, first), dim=-1) * sine


class Block(nn.Module):
    """Attention and a SwiGLU feed-forward, each behind an RMSNorm."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.RMSNorm(config.hidden)
        self.gate = nn.Linear(config.hidden, config.feed_forward, bias=False)
        self.up = nn.Linear(config.hidden, config.feed_forward, bias=False)
        self.down = nn.Linear(config.feed_forward, config.hidden, bias=False)

    def forward(
        self, states: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor
    ) -> torch.Tensor:
        states = states + self.attention(self.attention_norm(states), cosine, sine)
        normed = self.feed_forward_norm(states)
        return states + self.down(functional.silu(self.gate(normed)) * self.up(normed))


class Llama(nn.Module):
    """The stack between an embedding and a head.

    ``around_layers`` and ``recompute`` are how the modes of a benchmark treat what the layers
    save: a context entered around all of them, or checkpointing of each.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.around_layers: Callable[[], AbstractContextManager[Any]] = nullcontext
        self.recompute = False
        self.embedding = nn.Embedding(config.vocabulary, config.hidden)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden)
        self.head = nn.Linear(config.hidden, config.vocabulary, bias=False)
        width = config.hidden // config.heads
        frequencies = 10000.0 ** (-torch.arange(0, width, 2) / width)
        angles = torch.outer(torch.arange(config.sequence), frequencies)
        self.register_buffer("cosine", torch.cat((angles, angles), dim=-1).cos())
        self.register_buffer("sine", torch.cat((angles, angles), dim=-1).sin())

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean cross-entropy."""
        states = self.embedding(tokens)
        with self.around_layers():
            for layer in self.layers:
                if self.recompute:
                    states = checkpoint(layer, states, self.cosine, self.sine, use_reentrant=False)
                else:
                    states = layer(states, self.cosine, self.sine)
        logits = self.head(self.norm(states))
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
