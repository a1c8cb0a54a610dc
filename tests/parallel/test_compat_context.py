"""Other systems' context parallelism by their names: the bits of memswap's own."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

from cut_attention import Attention, Core, make, meshes, open_comms, random
from memswap.compat import hyper_parallel, internevo
from memswap.parallel import ContextParallel, causal_attention
from ranks import Rank, distributed

MODES = {"ulysses": None, "gather": 1, "hybrid": 2}


def train(model: nn.Module, batch: torch.Tensor, steps: int = 2) -> list[torch.Tensor]:
    """The losses, then the weights; gradients are added over the ranks."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        loss = model(batch).square().sum()
        loss.backward()
        for weight in model.parameters():
            assert weight.grad is not None
            dist.all_reduce(weight.grad)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *(weight.detach() for weight in model.parameters())]


@distributed(2, 4)
@pytest.mark.parametrize("late", [True], ids=["late"])
def test_hyper_parallel_trains_the_bits_of_memswap(rank: Rank, late: bool) -> None:
    line = init_device_mesh("cpu", (rank.size,))
    whole = random(2, 16, 16)
    for mode, (mesh, ulysses) in meshes(rank).items():
        balances = ("contiguous", "queries") if mode == "gather" else ("contiguous",)
        for balance in balances:
            options: dict[str, Any] = {"ranges": "ranges", "comm": open_comms(rank, late)}
            theirs: dict[str, Any] = {
                "ulysses_degree": MODES[mode],
                "load_balance": balance == "queries",
                **options,
            }
            ours = ContextParallel(ulysses=ulysses, balance=balance, **options)  # type: ignore[arg-type]
            model = make()
            ours.apply(model.core, mesh)
            x = ours.shard_batch({"x": whole})["x"]
            assert torch.equal(x, whole.chunk(rank.size, 1)[rank.rank]), "parts are contiguous"
            expected = train(model, x)

            model = make()  # a 1-D mesh becomes (co, ds) by itself
            sync = hyper_parallel.ContextParallel(**theirs)
            assert sync.apply(model.core, line) is model.core
            assert all(map(torch.equal, train(model, x), expected)), mode

            model = make()
            sync = hyper_parallel.ContextParallel(qkv_kwarg_names=("q", "k", "v"), **theirs)
            parallelize_module(model, line, {"core": sync})
            assert all(map(torch.equal, train(model, x), expected)), mode

            for named in ({}, {"o_proj": "out"}):
                model = make()
                style = hyper_parallel.AsyncContextParallel(**theirs)
                projections = {f"{name}_proj": getattr(model, name) for name in "qkv"}
                late_output = {name: getattr(model, where) for name, where in named.items()}
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    style.apply(model.core, line, **projections, **late_output)
                    assert all(map(torch.equal, train(model, x), expected)), mode
                (applied,) = style.style.applied
                assert applied.early == 2 * (3 if mode != "gather" or balance == "queries" else 2)
                exchanges_output = mode != "gather" or balance == "queries"
                assert applied.late == (2 if named and exchanges_output else 0)
    rank.same_everywhere(rank.log.events, "launches and waits")


@distributed(2)
def test_hyper_parallel_says_what_it_cannot_do(rank: Rank) -> None:
    style = hyper_parallel.ContextParallel
    with pytest.raises(ValueError, match="head_dim=3: expected one of"):
        style(head_dim=3)
    with pytest.raises(ValueError, match="expected ulysses_degree=1"):
        style(load_balance=True)
    for degree in (0, -2):
        with pytest.raises(ValueError, match=r"expected None .* or a number from 1 on"):
            style(ulysses_degree=degree)
    with pytest.raises(ValueError, match="expected 3 different places or names"):
        style(qkv_indices=(0, 0, 1))
    with pytest.raises(ValueError, match="3 on a mesh of 2 ranks: expected a divisor"):
        style(ulysses_degree=3).apply(Core(), init_device_mesh("cpu", (2,)))
    mesh = init_device_mesh("cpu", (2,))
    core = Core(causal=False)
    style(use_local_output=False).apply(core, mesh)
    q = distribute_tensor(random(2, 8, 16).unflatten(-1, (4, 4)), mesh, [Shard(1)])
    got = core(q, q, q)
    assert isinstance(got, DTensor) and got.placements == (Shard(1),)


class Packed(nn.Module):
    """Attention by one of InternEvo's three calls."""

    def forward(
        self,
        *args: torch.Tensor,
        qkv: Any = None,
        kv: Any = None,
        q: Any = None,
        k: Any = None,
        v: Any = None,
        cu_seqlens: torch.Tensor | None = None,
    ) -> torch.Tensor:
        args = tuple(one for one in (*args, qkv, q, kv, k, v) if one is not None)
        q, k, v = args if len(args) == 3 else (*args[:-1], *args[-1].unbind(2))
        tokens = q.size(1)
        cuts = [0, tokens] if cu_seqlens is None else cu_seqlens.tolist()
        parts = [
            causal_attention(
                *(t[:, a:b].transpose(1, 2) for t in (q, k, v)), [(0, b - a)]
            ).transpose(1, 2)
            for a, b in itertools.pairwise(cuts)
        ]
        return torch.cat(parts, dim=1)


class InternEvoAttention(Attention):
    """The same weights, calling attention as InternEvo does."""

    call = "q, k, v"
    cu_seqlens: torch.Tensor | None = None

    def forward(self, x: torch.Tensor, source: torch.Tensor | None = None) -> torch.Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        extra = {} if self.cu_seqlens is None else {"cu_seqlens": self.cu_seqlens}
        if self.call == "q, k, v":
            y = self.core(q, k, v, **extra)
        elif self.call == "q, kv":
            y = self.core(q, torch.stack([k, v], 2), **extra)
        elif self.call == "kv by name":
            y = self.core(q=q, kv=torch.stack([k, v], 2), **extra)
        else:
            y = self.core(torch.stack([q, k, v], 2), **extra)
        return self.out(y.flatten(2))


@distributed(2, 4)
def test_internevo_trains_the_bits_of_memswap(rank: Rank) -> None:
    mesh = init_device_mesh("cpu", (rank.size,))
    whole = random(1, 16, 16)
    x = whole.chunk(rank.size, 1)[rank.rank]
    for cu_seqlens in (None, torch.tensor([0, 3, 11, 16])):
        for kv_heads, calls in {
            4: ("qkv", "q, k, v"),
            1: ("q, kv", "kv by name", "q, k, v"),
        }.items():
            results = []
            for call in ("memswap", *calls):
                model = make(kv_heads=kv_heads)
                model.__class__ = InternEvoAttention
                model.core = Packed()
                model.cu_seqlens = cu_seqlens
                if call == "memswap":
                    ContextParallel(comm=open_comms(rank, True)).apply(model.core, mesh)
                else:
                    model.call = call
                    model.core = internevo.DistributedAttention(
                        model.core, mesh.get_group(), comm=open_comms(rank, True)
                    )
                names = list(model.state_dict())
                results.append(train(model, x))
                assert list(model.state_dict()) == names
            for call, result in zip(calls, results[1:], strict=True):
                assert all(map(torch.equal, result, results[0])), (call, kv_heads)


@distributed(2)
def test_internevo_attention_is_wrapped_where_there_is_a_group(rank: Rank) -> None:
    group = init_device_mesh("cpu", (2,)).get_group()
    alone = dist.new_group([0]), dist.new_group([1])
    wrap = internevo.auto_wrap_distributed_attention
    for given in (None, lambda: None, alone[rank.rank]):
        assert isinstance(wrap(Packed, group=given)(), Packed)
    for given in (group, lambda: group):
        assert isinstance(wrap(Packed, group=given)().local_attn, Packed)
    function = internevo.auto_wrap_func_distributed_attention(Packed(), group=group)
    q = random(1, 8, 16).unflatten(-1, (4, 4))
    mine = q.chunk(2, 1)[rank.rank]
    expected = Packed()(q, q, q).chunk(2, 1)[rank.rank]
    for _ in range(2):
        torch.testing.assert_close(function(mine, mine, mine), expected, rtol=0, atol=1e-12)
    with pytest.raises(TypeError, match=r"expected \(qkv\), \(q, kv\) or \(q, k, v\)"):
        internevo.DistributedAttention(Packed(), group)(mine)
