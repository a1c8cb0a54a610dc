"""ContextParallel beside other systems' Ulysses attention: the same numbers, where installed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from cut_attention import open_comms, random
from memswap.parallel import ContextParallel
from other_systems import import_deepspeed, rank_pool
from ranks import Rank, distributed

__all__ = ["rank_pool"]


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """[batch, tokens, heads, size], causal."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    gqa = q.size(1) != k.size(1)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa)
    return y.transpose(1, 2)


class Dense(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return dense(q, k, v)


def with_gradients(attention: Any, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    leaves = [x.clone().requires_grad_() for x in inputs]
    y = attention(*leaves)
    y.square().sum().backward()
    return [y.detach(), *(x.grad for x in leaves if x.grad is not None)]


def ours(rank: Rank) -> nn.Module:
    attention = Dense()
    ContextParallel(comm=open_comms(rank, True)).apply(
        attention, init_device_mesh("cpu", (rank.size,))
    )
    return attention


def parts(rank: Rank, heads: int, kv_heads: int) -> list[torch.Tensor]:
    return [
        random(2, 8, n * 4, seed).unflatten(-1, (n, 4)).chunk(rank.size, 1)[rank.rank].contiguous()
        for seed, n in enumerate((heads, kv_heads, kv_heads))
    ]


@pytest.mark.slow
@distributed(2)
def test_attention_equals_ulysses_of_yunchang(rank: Rank) -> None:
    """And goes on where that stops: one key head for two ranks, heads that do not divide."""
    yunchang = pytest.importorskip("yunchang")
    theirs = yunchang.UlyssesAttention(
        torch.distributed.group.WORLD, attn_type=yunchang.kernels.AttnType.TORCH_MATH
    )
    theirs.attn_fn = dense  # its own kernels want a GPU
    for heads, kv_heads in ((4, 4), (4, 2)):
        inputs = parts(rank, heads, kv_heads)
        expected = with_gradients(theirs, inputs)
        assert all(map(torch.equal, with_gradients(ours(rank), inputs), expected))
    for heads, kv_heads in ((4, 1), (3, 3)):
        with_gradients(ours(rank), parts(rank, heads, kv_heads))


@pytest.mark.slow
@distributed(2)
def test_attention_equals_distributed_attention_of_deepspeed(rank: Rank) -> None:
    deepspeed = import_deepspeed(rank)
    layer = pytest.importorskip("deepspeed.sequence.layer")
    deepspeed.init_distributed(dist_backend="gloo")
    theirs = layer.DistributedAttention(dense, torch.distributed.group.WORLD, 2, 1)
    for heads, kv_heads in ((4, 4), (4, 2)):
        inputs = parts(rank, heads, kv_heads)
        expected = with_gradients(lambda *x: theirs(*x, 0), inputs)
        assert all(map(torch.equal, with_gradients(ours(rank), inputs), expected))
