"""ContextParallel with keys and values, or all three, in one tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from cut_attention import LATE, LATE_FIRST, SIZE, from_layout, meshes, open_comms, random, to_layout
from memswap.parallel import ContextParallel, causal_attention
from memswap.parallel.layouts import LAYOUTS, Layout
from ranks import Rank, distributed

LAYOUTS_OF_PACKED = pytest.mark.parametrize("layout", ["bshd", "sbhd", "thd"])


class PackedCore(nn.Module):
    """Attention of [q, kv] or [qkv], with a dimension before that of the heads."""

    def __init__(self, layout: str, packing: str) -> None:
        super().__init__()
        self.layout, self.packing = layout, packing

    def forward(self, *packed: Any, ranges: Any = None, **apart: torch.Tensor) -> torch.Tensor:
        where: Layout = LAYOUTS[self.layout]
        if apart:  # there are more keys than queries
            assert packed == (None,)
            packed = tuple(apart.values())
        q, k, v = packed if len(packed) == 3 else (*packed[:-1], *packed[-1].unbind(where.head_dim))
        q, k, v = (from_layout(t, self.layout).transpose(1, 2) for t in (q, k, v))
        y = causal_attention(q, k, v, ranges or ((0, q.size(2)),))
        return to_layout(y.transpose(1, 2), self.layout)


def inputs(layout: str, packing: str, tokens: int, heads: int, kv_heads: int) -> list[torch.Tensor]:
    q, k, v = (
        to_layout(random(1, tokens, h * SIZE, i).unflatten(-1, (h, SIZE)), layout)
        for i, h in enumerate((heads, kv_heads, kv_heads))
    )
    dim = LAYOUTS[layout].head_dim
    if packing == "qkv":
        return [torch.stack([q, k, v], dim)]
    return [q.contiguous(), torch.stack([k, v], dim)]


@distributed(2, 4)
@LATE_FIRST
@LAYOUTS_OF_PACKED
@pytest.mark.parametrize("packing", ["kv", "qkv"])
def test_packed_tensors_travel_in_one_exchange(
    rank: Rank, late: bool, layout: str, packing: Any
) -> None:
    for mode, (mesh, ulysses) in meshes(rank).items():
        apart = None
        for heads, kv_heads in [(5, 5), (4, 4)] if packing == "qkv" else [(4, 1), (6, 3), (4, 4)]:
            if packing == "qkv":
                apart = ("q", "kv") if heads == 5 else ("q", "k", "v")
            style = ContextParallel(
                ulysses=ulysses,
                layout=layout,
                packing=packing,
                unpacked=apart,
                balance="headtail",
                sequence_length=13,
                ranges="ranges",
                comm=open_comms(rank, late),
            )
            core, reference = PackedCore(layout, packing), PackedCore(layout, packing)
            style.apply(core, mesh)
            whole = [t.requires_grad_() for t in inputs(layout, packing, 13, heads, kv_heads)]
            dim = LAYOUTS[layout].seq_dim
            named = {str(i): t.detach() for i, t in enumerate(whole)}
            batch = style.shard_batch(named, seq_dim=dim)
            mine = [batch[name].requires_grad_() for name in named]
            rank.log.events.clear()
            expected, got = reference(*whole), core(*mine)
            assert rank.log.count("all_to_all") == (0 if mode == "gather" else len(mine) + 1)
            assert rank.log.count("all_gather kv") == (0 if mode == "ulysses" else 1)
            places = batch["positions"]
            torch.testing.assert_close(
                got, expected.index_select(dim, places), rtol=1e-12, atol=1e-12
            )
            expected.square().sum().backward()
            got.square().sum().backward()
            for own, theirs in zip(mine, whole, strict=True):
                assert theirs.grad is not None
                torch.testing.assert_close(
                    own.grad, theirs.grad.index_select(dim, places), rtol=1e-12, atol=1e-12
                )


@distributed(2, 4)
@LATE
def test_a_packed_projection_launches_early(rank: Rank, late: bool) -> None:
    """Three separate projections are not needed."""
    for mesh, ulysses in meshes(rank).values():
        torch.manual_seed(3)
        project = nn.Sequential(nn.Linear(8, 48, dtype=torch.float64), nn.Unflatten(-1, (3, 4, 4)))
        core, reference = PackedCore("bshd", "qkv"), PackedCore("bshd", "qkv")
        style = ContextParallel(
            ulysses=ulysses,
            packing="qkv",
            unpacked=("q", "kv"),
            heads=4,
            ranges="ranges",
            comm=open_comms(rank, late),
        )
        applied = style.apply(core, mesh, qkv=project)
        x = random(1, 8, 8)
        expected = reference(project(x))
        batch = style.shard_batch({"x": x})
        got = core(project(batch["x"]))
        assert applied.early == 1
        torch.testing.assert_close(got, expected[:, batch["positions"]], rtol=0, atol=1e-12)


@distributed(2)
def test_what_packing_cannot_do_is_told(rank: Rank) -> None:
    mesh = init_device_mesh("cpu", (2,))
    with pytest.raises(NotImplementedError, match="one packed tensor has one length"):
        ContextParallel(packing="qkv", ulysses=1).apply(PackedCore("bshd", "qkv"), mesh)
    with pytest.raises(ValueError, match="no packed form"):
        ContextParallel(packing="kv", layout="bnsd")
    with pytest.raises(ValueError, match="expected 2 for packing='kv'"):
        ContextParallel(packing="kv", qkv=(0,))
    with pytest.raises(ValueError, match="expected two names"):
        ContextParallel(packing="kv", unpacked=("q", "kv"))
    with pytest.raises(TypeError, match=r"found projections \['k'\]"):
        ContextParallel(packing="kv", heads=4).apply(
            PackedCore("bshd", "kv"), mesh, k=nn.Linear(2, 2)
        )


@distributed(2)
def test_an_early_launch_without_a_graph_is_not_used_for_one_with_it(rank: Rank) -> None:
    """Or else the gradient of a tensor that asks for one after its projection would be lost."""
    project = nn.Unflatten(-1, (3, 2, 4))
    core = PackedCore("bshd", "qkv")
    style = ContextParallel(packing="qkv", heads=2)
    applied = style.apply(core, init_device_mesh("cpu", (2,)), qkv=project)
    packed = project(random(1, 4, 24))
    packed.requires_grad_()
    with pytest.warns(UserWarning):
        core(packed).sum().backward()
    assert applied.early == 0
    assert packed.grad is not None and bool(packed.grad.abs().sum() > 0)
    with torch.inference_mode():  # no version to compare: the ordinary path, without a word
        once = core(project(random(1, 4, 24)))
    with torch.no_grad():
        again = core(project(random(1, 4, 24)))
    assert applied.early == 1
    assert torch.equal(once, again)
