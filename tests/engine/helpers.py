"""What engine tests share: bitwise comparison, small models, and a training step."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

import memswap

#: Small enough for hundreds of runs, large enough to move: every storage counts.
EVERYTHING = memswap.Policy(min_bytes=1)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's elements as bytes on the CPU, NaN payloads and signed zeros included."""
    dense = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    if dense.is_complex():
        dense = torch.view_as_real(dense).contiguous()
    return dense.reshape(-1).view(torch.uint8) if dense.numel() else dense.reshape(-1)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(bits(a), bits(b))


def assert_same_gradients(
    found: Iterable[torch.Tensor | None], expected: Iterable[torch.Tensor | None]
) -> None:
    """Every gradient is bit for bit what it is without memswap."""
    for number, (ours, plain) in enumerate(zip(found, expected, strict=True)):
        if plain is None or ours is None:
            assert ours is plain, f"gradient {number}: only one of the two runs has one"
        else:
            assert same_bits(ours, plain), f"gradient {number} of shape {list(plain.shape)} differs"


class Block(nn.Module):
    """A pre-norm transformer block without frills."""

    def __init__(self, width: int, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        shape = (batch, length, 3, self.heads, width // self.heads)
        q, k, v = self.qkv(self.norm1(x)).view(shape).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(x.shape))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Stack(nn.Module):
    """Blocks between an input projection and a mean."""

    def __init__(self, depth: int = 3, width: int = 16) -> None:
        super().__init__()
        self.enter = nn.Linear(width, width)
        self.layers = nn.ModuleList([Block(width) for _ in range(depth)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def new_stack(device: torch.device, depth: int = 3, width: int = 16, seed: int = 0) -> Stack:
    torch.manual_seed(seed)
    return Stack(depth, width).to(device)


def new_input(device: torch.device, seed: int = 1, batch: int = 2, width: int = 16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 8, width, generator=generator).to(device)


def gradients(model: nn.Module) -> list[torch.Tensor | None]:
    return [p.grad.clone() if p.grad is not None else None for p in model.parameters()]


def train_step(
    model: nn.Module, loss: Callable[[], torch.Tensor], *, keep: bool = False
) -> list[torch.Tensor | None]:
    """Zero, forward, backward; the gradients."""
    if not keep:
        model.zero_grad(set_to_none=True)
    loss().backward()
    return gradients(model)


def assert_nothing_left(stats: memswap.Stats) -> None:
    """No graph is alive, so nothing is away and nothing is counted as resident."""
    assert stats.away_bytes == 0, f"{stats.away_bytes} bytes are still away without a graph"
    assert stats.resident_bytes == 0, f"{stats.resident_bytes} saved bytes are still counted"
