"""What tests of the engine on a real GPU share: a small transformer, trained plain and managed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS is first used

import torch
from helpers import EVERYTHING, assert_nothing_left, assert_same_gradients, gradients
from torch import nn
from torch.nn import functional as F

import memswap

WIDTH, DEPTH, LENGTH, BATCH = 256, 4, 128, 8
Region = Callable[[], contextlib.AbstractContextManager[Any]]


class Layer(nn.Module):
    """A pre-norm transformer layer with causal attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = (*x.shape[:2], 3, 4, WIDTH // 4)
        q, k, v = self.qkv(self.norm1(x)).view(shape).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(DEPTH)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean()


def new_model(device: torch.device, seed: int = 0) -> Transformer:
    torch.manual_seed(seed)
    return Transformer().to(device)


def new_input(device: torch.device, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(BATCH, LENGTH, WIDTH, generator=generator).to(device)


def new_pool(device: torch.device) -> memswap.HostPool:
    return memswap.HostPool(budget="1GiB", slab="16MiB", device=device)


def train(device: torch.device, region: Region, steps: int = 3) -> list[torch.Tensor | None]:
    """Gradients of several steps, and between them a graph that is dropped unused."""
    model = new_model(device)
    found: list[torch.Tensor | None] = []
    for step in range(steps):
        x = new_input(device, seed=step)
        with region():
            loss = model(x)
        loss.backward()
        del loss
        found += gradients(model)
        model.zero_grad(set_to_none=True)
        with region():
            dropped = model(x)
        del dropped
    return found


def check(
    device: torch.device, program: Callable[[torch.device, Region], Any], **options: Any
) -> memswap.types.Stats:
    """The program plain and managed."""
    expected = program(device, contextlib.nullcontext)
    saved = memswap.saved_tensors(EVERYTHING, pool=new_pool(device), **options)
    found = program(device, lambda: saved)
    torch.cuda.synchronize(device)
    assert_same_gradients(found, expected)
    stats = saved.stats()
    assert stats.moved_storages > 0 and stats.freed_bytes > 0, "nothing moved"
    assert_nothing_left(stats)
    return stats
