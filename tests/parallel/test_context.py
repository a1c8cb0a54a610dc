"""ContextParallel: attention over a cut sequence is that of one process."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

import memswap
from cut_attention import (
    LATE,
    LATE_FIRST,
    SIZE,
    Attention,
    Core,
    assert_is_one_process,
    make,
    meshes,
    open_comms,
    random,
)
from memswap.parallel import ContextParallel, SequenceShards, causal_attention
from memswap.parallel.layouts import LAYOUTS
from ranks import Rank, distributed

HEADS = [(4, 4), (4, 2), (4, 1), (8, 2), (6, 3), (5, 5), (6, 2), (7, 1)]


#: What four ranks try in the fast suite: a layout is the same for any number of them.
ON_FOUR = ("bshd", "thd")


@distributed(2)
@LATE_FIRST
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_every_mode_and_number_of_heads_is_one_process(rank: Rank, late: bool, layout: str) -> None:
    assert_every_mode_is_one_process(rank, late, layout)


@distributed(4)
@LATE_FIRST
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(one, marks=() if one in ON_FOUR else pytest.mark.slow)
        for one in sorted(LAYOUTS)
    ],
)
def test_every_mode_and_number_of_heads_is_one_process_on_four_ranks(
    rank: Rank, late: bool, layout: str
) -> None:
    assert_every_mode_is_one_process(rank, late, layout)


def assert_every_mode_is_one_process(rank: Rank, late: bool, layout: str) -> None:
    for mode, (mesh, ulysses) in meshes(rank).items():
        for i, (heads, kv_heads) in enumerate(HEADS):
            for j, balance in enumerate(("contiguous", "headtail", "queries")):
                if late and (i // 2 + j) % 2:  # the other half is in the slow run
                    continue
                if balance == "queries" and (mode == "ulysses" or layout != "bshd" or i > 5):
                    continue
                tokens = (16, 13)[i % 2]
                style = ContextParallel(
                    ulysses=ulysses,
                    layout=layout,
                    balance=balance,  # type: ignore[arg-type]
                    sequence_length=tokens if tokens % 4 else None,
                    ranges="ranges",
                    comm=open_comms(rank, late),
                )
                model = make(heads=heads, kv_heads=kv_heads, layout=layout)
                style.apply(model.core, mesh)
                batch = 1 if layout == "thd" else 2
                try:
                    assert_is_one_process(style, model, random(batch, tokens, model.width))
                except AssertionError as error:
                    raise AssertionError(f"{mode} {heads}/{kv_heads} {balance}: {error}") from error
    rank.same_everywhere(rank.log.events, "launches and waits")


@distributed(2)
def test_ulysses_at_two_ranks_is_bit_identical(rank: Rank) -> None:
    """Heads are computed apart in one process as well, so nothing may differ."""
    mesh = init_device_mesh("cpu", (2,))
    core, reference = Core(), Core()
    style = ContextParallel(comm=open_comms(rank, True))
    style.apply(core, mesh)
    q, k, v = (random(2, 8, 4 * SIZE, seed).unflatten(-1, (4, SIZE)) for seed in range(3))
    whole = [t.clone().requires_grad_() for t in (q, k, v)]
    places = style.shard_batch({"q": q})["positions"]
    mine = [t[:, places].clone().requires_grad_() for t in (q, k, v)]
    expected, got = reference(*whole), core(*mine)
    assert torch.equal(got, expected[:, places])
    expected.square().sum().backward()
    got.square().sum().backward()
    for theirs, own in zip(whole, mine, strict=True):
        assert own.grad is not None and theirs.grad is not None
        assert torch.equal(own.grad, theirs.grad[:, places])


@distributed(2, 4)
@LATE
def test_cross_attention_with_another_length(rank: Rank, late: bool) -> None:
    for mesh, ulysses in meshes(rank).values():
        for lengths in ((16, 8), (13, 7)):
            style = ContextParallel(
                ulysses=ulysses,
                sequence_length=lengths[0],
                kv_sequence_length=lengths[1],
                comm=open_comms(rank, late),
            )
            model = make(causal=False)
            style.apply(model.core, mesh)
            x, source = random(2, lengths[0], model.width), random(2, lengths[1], model.width, 3)
            assert_is_one_process(style, model, x, source)


@distributed(2, 4)
def test_mask_is_offered_where_attention_takes_a_mask(rank: Rank) -> None:
    for mesh, ulysses in meshes(rank).values():
        style = ContextParallel(ulysses=ulysses, balance="headtail", mask="attn_mask")
        model = make()
        style.apply(model.core, mesh)
        assert_is_one_process(style, model, random(2, 16, model.width))


@distributed(2, 4)
def test_packed_sequences_keep_their_cu_seqlens(rank: Rank) -> None:
    class Packed(nn.Module):
        def forward(
            self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor
        ) -> torch.Tensor:
            cuts = list(zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True))
            parts = (tuple(t[a:b].transpose(0, 1) for t in (q, k, v)) for a, b in cuts)
            return torch.cat(
                [causal_attention(*p, [(0, p[0].size(1))]).transpose(0, 1) for p in parts]
            )

    cu_seqlens = torch.tensor([0, 3, 4, 11])
    style = ContextParallel(layout="thd", sequence_length=11)
    core = Packed()
    reference = Packed()
    style.apply(core, init_device_mesh("cpu", (rank.size,)))
    tensors = [random(11, 4, SIZE, seed) for seed in range(3)]
    named = {"q": tensors[0], "k": tensors[1], "v": tensors[2], "cu_seqlens": cu_seqlens}
    batch = style.shard_batch(named, seq_dim=0, whole=["cu_seqlens"])
    got = core(batch["q"], batch["k"], batch["v"], batch["cu_seqlens"])
    places = batch["positions"]
    assert torch.equal(got, reference(*tensors, cu_seqlens)[places])


@distributed(2, 4)
def test_headtail_gives_every_rank_the_same_causal_work(rank: Rank) -> None:
    shards = SequenceShards.cut(16 * rank.size, rank.size, "headtail")
    work = [int((shards.positions(r) + 1).sum()) for r in range(rank.size)]
    assert len(set(work)) == 1, work
    # torch's own head-tail balancer cuts alike.
    from torch.distributed.tensor.experimental import _attention

    balancer = getattr(_attention, "_HeadTailLoadBalancer", None)
    if balancer is not None:
        order = balancer(16 * rank.size, rank.size, "cpu")._generate_indices().flatten()
        ours = torch.cat([shards.positions(r) for r in range(rank.size)])
        assert torch.equal(order.to(torch.int64), ours)


def keeps_collectives(model: Attention, *inputs: torch.Tensor) -> torch.Tensor:
    y = memswap.checkpoint(model, *inputs, policy_fn=memswap.keep_collectives)
    assert isinstance(y, torch.Tensor)
    return y


CHECKPOINTS: dict[str, Any] = {
    "torch": lambda model, *inputs: checkpoint(model, *inputs, use_reentrant=False),
    "reentrant": lambda model, *inputs: checkpoint(model, *inputs, use_reentrant=True),
    "memswap": memswap.checkpoint,
    "keep-collectives": keeps_collectives,
}


@distributed(2, 4)
@LATE_FIRST
@pytest.mark.parametrize("run", sorted(CHECKPOINTS))
@pytest.mark.parametrize("early", [False, True], ids=["ordinary", "early"])
def test_checkpointed_attention_is_one_process(
    rank: Rank, late: bool, run: str, early: bool
) -> None:
    for mesh, ulysses in meshes(rank).values():
        style = ContextParallel(
            ulysses=ulysses, ranges="ranges", heads=4, comm=open_comms(rank, late)
        )
        model = make()
        hooked = {"q": model.q, "k": model.k, "v": model.v, "o": model.out} if early else {}
        applied = style.apply(model.core, mesh, **hooked)
        x = random(2, 16, model.width)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert_is_one_process(style, model, x, run=CHECKPOINTS[run])
        assert bool(applied.late) == (early and ulysses != 1)
    rank.same_everywhere(rank.log.events, "launches and waits")


@distributed(2)
@LATE
def test_checkpoint_of_the_core_alone_finds_its_inputs(rank: Rank, late: bool) -> None:
    """An empty slot in the recomputation: 'work, out = None' in another system."""
    style = ContextParallel(ranges="ranges", heads=4, comm=open_comms(rank, late))
    model = make()
    applied = style.apply(
        model.core, init_device_mesh("cpu", (2,)), q=model.q, k=model.k, v=model.v
    )

    def run(model: Attention, x: torch.Tensor) -> torch.Tensor:
        q, k, v = model.q(x), model.k(x), model.v(x)
        y = checkpoint(model.core, q, k, v, use_reentrant=False)
        assert isinstance(y, torch.Tensor)
        return model.out(y.flatten(2))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_is_one_process(style, model, random(2, 8, model.width), run=run)
    assert applied.early == 3


@distributed(2)
def test_parallelize_module_applies_it_by_name(rank: Rank) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(make() for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    style = ContextParallel(ranges="ranges")
    net, reference = Net(), Net()
    names = list(net.state_dict())
    parallelize_module(net, init_device_mesh("cpu", (2,)), {"layers.*.core": style})
    assert [one.module for one in style.applied] == [layer.core for layer in net.layers]
    x = random(2, 8, 16)
    batch = style.shard_batch({"x": x})
    torch.testing.assert_close(
        net(batch["x"]), reference(x)[:, batch["positions"]], rtol=0, atol=1e-12
    )
    style.check()
    assert list(net.state_dict()) == names
    for one in list(style.applied):
        one.remove()
    assert torch.equal(net(x), reference(x))
