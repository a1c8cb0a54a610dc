"""Small models that the simulator's tests train."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn as nn
import torch.nn.functional as F


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            t.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for t in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class LanguageModel(nn.Module):
    def __init__(self, vocabulary: int = 50, width: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(*[Block(width, 4) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.norm(self.blocks(self.embedding(tokens))))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def train_language_model(
    device: str,
    steps: int = 2,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    forward_context: Callable[[], object] | None = None,
    dtype: torch.dtype = torch.float32,
) -> list[torch.Tensor]:
    """Losses and parameters after a few steps, on the CPU."""
    torch.manual_seed(0)
    model = LanguageModel().to(dtype).to(device)
    tokens, targets = (torch.randint(0, 50, (2, 8)).to(device) for _ in range(2))
    opt = optimizer(model.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        opt.zero_grad()
        if forward_context is None:
            loss = model(tokens, targets)
        else:
            with forward_context():
                loss = model(tokens, targets)
        loss.backward()
        opt.step()
        losses.append(loss.detach())
    return [t.detach().cpu() for t in [*losses, *model.parameters()]]


def assert_bitwise_equal(expected: list[torch.Tensor], actual: list[torch.Tensor]) -> None:
    assert len(expected) == len(actual)
    for i, (a, b) in enumerate(zip(expected, actual, strict=True)):
        difference = (a.double() - b.double()).abs().max().item()
        assert torch.equal(a, b), f"tensor {i} differs from the reference by up to {difference}"
