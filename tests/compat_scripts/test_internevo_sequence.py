"""InternEvo's ends and attention as its users write them, with its process-wide context loaded."""

from __future__ import annotations

import enum
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from memswap.compat.internevo import (
    DistributedAttention,
    EmbeddingWeightParallelCommunicator,
    auto_wrap_distributed_attention,
    auto_wrap_func_distributed_attention,
)
from memswap.compat.internevo.all_to_all import _SeqAllToAll
from ranks import Rank, distributed

WORDS, WIDTH, HEADS, BATCH = 24, 8, 4, 2


@contextmanager
def context_of_internevo(mode: str = "isp", **groups: Any) -> Iterator[Any]:
    """Its context module, as far as it is asked: which ranks share what."""
    package = types.ModuleType("internlm.core.context")

    class ParallelMode(enum.Enum):
        TENSOR = "tensor"
        WEIGHT = "weight"
        HEAD = "head"

    ParallelMode.__module__ = "internlm.core.context.process_group_initializer"
    parallel = {"tensor": {"mode": mode}, "sequence_2D": {"enable": "head" in groups}}
    package.ParallelMode = ParallelMode
    package.global_context = types.SimpleNamespace(
        get_group=lambda one: groups[one.value],
        config=types.SimpleNamespace(parallel=parallel),
    )
    sys.modules["internlm.core.context"] = package
    try:
        yield ParallelMode
    finally:
        del sys.modules["internlm.core.context"]


class Embedding1D(nn.Module):
    """An embedding with a part of its weight, along the vocabulary or along the width."""

    def __init__(self, whole: torch.Tensor, rank: Rank, vocab_parallel: bool) -> None:
        super().__init__()
        self.num_embeddings, self.embed_dim = whole.shape
        self.vocab_parallel = vocab_parallel
        part = whole.chunk(rank.size, 0 if vocab_parallel else 1)[rank.rank]
        self.weight = nn.Parameter(part.clone())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.embedding(tokens, self.weight)


def whole_weight() -> torch.Tensor:
    made = torch.Generator().manual_seed(3)
    return torch.randn(WORDS, WIDTH, generator=made, dtype=torch.float64)


@distributed(2, 4)
@pytest.mark.parametrize("vocab_parallel", [True, False], ids=["vocabulary", "width"])
def test_an_embedding_with_a_part_of_its_weight(rank: Rank, vocab_parallel: bool) -> None:
    with context_of_internevo(weight=dist.group.WORLD) as modes:
        embed = Embedding1D(whole_weight(), rank, vocab_parallel)
        EmbeddingWeightParallelCommunicator(modes.WEIGHT).register_module_hook(embed)
    assert list(dict(embed.named_parameters())) == ["weight"]
    shape = embed.weight.shape
    optimizer = torch.optim.AdamW(embed.parameters(), lr=0.1)
    plain = nn.Parameter(whole_weight())
    reference = torch.optim.AdamW([plain], lr=0.1)
    dim = 0 if vocab_parallel else 1
    for step in range(2):
        optimizer.zero_grad()
        reference.zero_grad()
        for microbatch in range(2):
            made = torch.Generator().manual_seed(100 * step + 10 * microbatch + rank.rank)
            tokens = torch.randint(WORDS, (BATCH, 6), generator=made)
            output = embed(tokens)
            assert torch.equal(output, F.embedding(tokens, plain))
            assert embed.weight.shape == shape, "a part again, behind forward"
            output.square().sum().backward()
            before, plain.grad = plain.grad, None
            F.embedding(tokens, plain).square().sum().backward()
            sent = plain.grad.movedim(dim, 0).contiguous()
            rows = sent.new_empty(sent.shape[0] // rank.size, sent.shape[1])
            dist.reduce_scatter_tensor(rows, sent, op=dist.ReduceOp.AVG)
            whole = torch.empty_like(sent)
            dist.all_gather_into_tensor(whole, rows)
            whole = whole.movedim(0, dim).contiguous()
            plain.grad = whole if before is None else before + whole
        mine = plain.grad.chunk(rank.size, dim)[rank.rank]
        assert torch.equal(embed.weight.grad, mine)
        optimizer.step()
        reference.step()
        assert torch.equal(embed.weight, plain.chunk(rank.size, dim)[rank.rank])


@distributed(2)
def test_an_embedding_of_neither_shape_and_an_unknown_mode_are_refused(rank: Rank) -> None:
    embed = Embedding1D(whole_weight(), rank, True)
    embed.num_embeddings += 1
    with pytest.raises(ValueError, match=r"weight of shape \[12, 8\].*embedding_dim \[25, 8\]"):
        EmbeddingWeightParallelCommunicator().register_module_hook(embed)

    class Mode(enum.Enum):
        WEIGHT = "weight"

    with pytest.raises(TypeError, match=r"found <Mode.WEIGHT: 'weight'>, expected a process group"):
        EmbeddingWeightParallelCommunicator(Mode.WEIGHT)


# --- attention ------------------------------------------------------------------------------------


def by_lists(group: Any, scatter: int, gather: int, tensor: torch.Tensor) -> torch.Tensor:
    """What the exchange does, in the plainest way."""
    parts = [one.contiguous() for one in tensor.chunk(dist.get_world_size(group), scatter)]
    outputs = [torch.empty_like(parts[0]) for _ in parts]
    dist.all_to_all(outputs, parts, group=group)
    return torch.cat(outputs, gather)


@distributed(2, 4)
def test_seq_all_to_all_of_one_tensor_and_of_several(rank: Rank) -> None:
    group = dist.group.WORLD
    made = torch.Generator().manual_seed(rank.rank)
    q = torch.randn(BATCH, 3, HEADS, 2, generator=made, dtype=torch.float64)
    kv = torch.randn(BATCH, 3, 2, HEADS, 2, generator=made, dtype=torch.float64)
    whole = _SeqAllToAll.apply(group, 3, 1, kv)
    assert torch.equal(whole, by_lists(group, 3, 1, kv))
    q.requires_grad_()
    kv.requires_grad_()
    one, two = _SeqAllToAll.apply(group, [2, 3], [1, 1], q, kv)
    assert torch.equal(one, by_lists(group, 2, 1, q.detach())) and torch.equal(two, whole)
    torch.autograd.backward([one, two], [torch.sin(one).detach(), torch.cos(two).detach()])
    assert torch.equal(q.grad, torch.sin(q).detach())
    assert torch.equal(kv.grad, torch.cos(kv).detach())
    with pytest.raises(ValueError, match=r"shape \[2, 3, 4, 2\] to scatter along dimension 1"):
        _SeqAllToAll.apply(group, 1, 2, q)
    with pytest.raises(ValueError, match=r"dimensions \[2\] for 2 tensors"):
        _SeqAllToAll.apply(group, 2, 1, q, kv)


class SelfAttention(nn.Module):
    def __init__(self, causal: bool = False) -> None:
        super().__init__()
        self.causal = causal

    def forward(self, qkv: torch.Tensor) -> torch.Tensor:
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2)


@distributed(2, 4)
@pytest.mark.parametrize("two_dimensional", [False, True], ids=["tensor", "head"])
def test_attention_is_wrapped_by_what_the_context_says(rank: Rank, two_dimensional: bool) -> None:
    made = torch.Generator().manual_seed(8)
    qkv = torch.randn(BATCH, 3 * rank.size, 3, HEADS, 2, generator=made, dtype=torch.float64)
    whole = SelfAttention(causal=True)(qkv).chunk(rank.size, 1)[rank.rank]
    mine = qkv.chunk(rank.size, 1)[rank.rank].contiguous()
    group = {"head" if two_dimensional else "tensor": dist.group.WORLD}
    with context_of_internevo(**group):
        attention = auto_wrap_distributed_attention(SelfAttention)(causal=True)
        assert isinstance(attention, DistributedAttention)
        assert attention.spg is dist.group.WORLD and attention.sp_size == rank.size
        assert torch.equal(attention(mine), whole)
        function = auto_wrap_func_distributed_attention(SelfAttention(causal=True).forward)
        assert torch.equal(function(mine), whole)
    with context_of_internevo("mtp"):
        assert type(auto_wrap_distributed_attention(SelfAttention)(causal=True)) is SelfAttention
    with pytest.raises(TypeError, match="neither group= nor InternEvo's context"):
        auto_wrap_distributed_attention(SelfAttention)(causal=True)
