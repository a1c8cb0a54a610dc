"""A byte-level GPT in ordinary modules, as a user would write it: nothing here knows memswap.

The ignored types: mypy is told not to follow torch (pyproject.toml), so its Module is Any.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

VOCABULARY = 256  # one token per byte


class CausalSelfAttention(nn.Module):  # type: ignore[misc]
    """Multi-head attention; ``[batch, sequence, hidden]`` in and out."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query_key_value = nn.Linear(hidden, 3 * hidden)
        self.output = nn.Linear(hidden, hidden)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        batch, sequence, hidden = states.shape
        projected = self.query_key_value(states)
        projected = projected.view(batch, sequence, 3, self.heads, hidden // self.heads)
        query, key, value = projected.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.output(mixed.transpose(1, 2).reshape(batch, sequence, hidden))


class Block(nn.Module):  # type: ignore[misc]
    """One pre-LayerNorm transformer block."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(hidden)
        self.attention = CausalSelfAttention(hidden, heads)
        self.mlp_norm = nn.LayerNorm(hidden)
        self.mlp = nn.Sequential(
            nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden)
        )

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        states = states + self.attention(self.attention_norm(states))
        return states + self.mlp(self.mlp_norm(states))


class GPT(nn.Module):  # type: ignore[misc]
    """Embeddings, blocks, a final LayerNorm and a head that shares the embedding's weight.

    Args:
        layers: number of blocks.
        hidden: width; a multiple of ``heads``.
        heads: attention heads per block.
        sequence: longest sequence, in tokens.

    Raises:
        ValueError: ``hidden`` cannot be split into ``heads``, or a size is not positive.
    """

    def __init__(self, layers: int, hidden: int, heads: int, sequence: int) -> None:
        super().__init__()
        if min(layers, hidden, heads, sequence) < 1:
            raise ValueError(
                "Layers, hidden size, heads and sequence must be positive; got "
                f"{layers}, {hidden}, {heads} and {sequence}."
            )
        if hidden % heads:
            raise ValueError(
                f"A hidden size of {hidden} cannot be split into {heads} heads of equal width. "
                f"Choose a multiple of {heads}."
            )
        self.token_embedding = nn.Embedding(VOCABULARY, hidden)
        self.position_embedding = nn.Embedding(sequence, hidden)
        self.layers = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, VOCABULARY, bias=False)
        self.head.weight = self.token_embedding.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)  # GPT-2's

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean cross-entropy, in nats per byte, of ``targets`` after ``tokens``."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        states = self.token_embedding(tokens) + self.position_embedding(positions)
        if torch.is_autocast_enabled(states.device.type):
            # The residual stream in bfloat16, as large models train: autocast alone would leave it
            # in float32, since it does not touch sums.
            states = states.to(torch.get_autocast_dtype(states.device.type))
        for layer in self.layers:
            states = layer(states)
        logits = self.head(self.norm(states))
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
