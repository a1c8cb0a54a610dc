"""What goes wrong for users of other systems' context parallelism, and does not here.

Further ones, beside what they are about: test_context_edges.py, test_context.py, test_exchange.py.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from cut_attention import Attention, Core, assert_is_one_process, make, meshes, open_comms, random
from memswap.errors import RankMismatchError
from memswap.parallel import ContextParallel
from ranks import Rank, distributed


@distributed(2)
def test_checkpointing_the_projections_alone_mixes_up_no_slots(rank: Rank) -> None:
    style = ContextParallel(ranges="ranges", comm=open_comms(rank, True))
    model = make()
    named = {"q": model.q, "k": model.k, "v": model.v, "o": model.out}
    applied = style.apply(model.core, init_device_mesh("cpu", (2,)), **named)

    def run(model: Attention, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (checkpoint(one, x, use_reentrant=False) for one in (model.q, model.k, model.v))
        y = model.core(q, k, v)
        out = checkpoint(model.out, y.flatten(2), use_reentrant=False)
        assert isinstance(out, torch.Tensor)
        return out

    for _ in range(2):
        model.zero_grad()
        assert_is_one_process(style, model, random(2, 8, 16), run=run)
    applied.remove()
    rank.log.assert_all_waited()


@distributed(2, 4)
def test_balance_with_odd_parts_loses_no_token(rank: Rank) -> None:
    """Halves of an odd part are not equal: 'narrow(half, half)' drops one."""
    for mode, (mesh, ulysses) in meshes(rank).items():
        for tokens in (9, 13, 7) if mode != "ulysses" else ():
            style = ContextParallel(
                ulysses=ulysses,
                balance="queries",
                sequence_length=tokens,
                ranges="ranges",
                comm=open_comms(rank, True),
            )
            model = make()
            style.apply(model.core, mesh, q=model.q, o=model.out)
            assert_is_one_process(style, model, random(2, tokens, 16))


@distributed(2)
def test_an_exception_in_attention_leaves_nothing_set(rank: Rank) -> None:
    """A process-wide override of causality stays set, in another system."""

    class Fails(Core):
        fails = True

        def forward(  # type: ignore[override]
            self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ranges: Any = None
        ) -> torch.Tensor:
            if self.fails:
                raise RuntimeError("on purpose")
            return super().forward(q, k, v, ranges)

    style = ContextParallel(
        ulysses=1, balance="queries", ranges="ranges", comm=open_comms(rank, True)
    )
    model = make()
    model.core = Fails()
    named = {"q": model.q, "k": model.k, "v": model.v, "o": model.out}
    style.apply(model.core, init_device_mesh("cpu", (2,)), **named)
    with pytest.raises(RuntimeError, match="on purpose"):
        model(random(2, 4, 16))
    model.core.fails = False
    assert_is_one_process(style, model, random(2, 8, 16))


@distributed(2)
def test_two_models_with_other_numbers_of_heads_do_not_meet(rank: Rank) -> None:
    """The number of key heads is one for the process, in another system: wrong numbers, hangs."""
    mesh = init_device_mesh("cpu", (2,))
    pairs = []
    for heads, kv_heads in ((4, 2), (6, 3), (5, 1)):
        style = ContextParallel(ranges="ranges", comm=open_comms(rank, True))
        model = make(heads=heads, kv_heads=kv_heads)
        style.apply(model.core, mesh, k=model.k, o=model.out)
        pairs.append((style, model))
    for _ in range(2):
        for style, model in pairs:
            model.zero_grad()
            assert_is_one_process(style, model, random(2, 8, model.width))


@distributed(2)
def test_attention_that_layers_share_keeps_their_calls_apart(rank: Rank) -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([make(), make()])
            self.layers[1].core = self.layers[0].core

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = x + layer(x)
            return x

    model, reference = Shared(), Shared()
    style = ContextParallel(ranges="ranges", comm=open_comms(rank, True))
    applied = style.apply(model.layers[0].core, init_device_mesh("cpu", (2,)))
    x = random(2, 8, 16)
    batch = style.shard_batch({"x": x})
    torch.testing.assert_close(
        model(batch["x"]), reference(x)[:, batch["positions"]], rtol=0, atol=1e-12
    )
    assert applied.calls == 2


@distributed(2)
def test_ranks_that_are_set_up_otherwise_are_told_instead_of_hanging(rank: Rank) -> None:
    mesh = init_device_mesh("cpu", (2,))
    layout = ("bshd", "bnsd")[rank.rank]
    balance = ("contiguous", "headtail")[rank.rank]
    heads = 4 + 2 * rank.rank
    different = [
        ({"layout": layout}, 4, f"layout {layout},"),
        ({"balance": balance}, 4, f"balance {balance}"),
        ({}, heads, rf"of \[1, -1, {heads}, 4\]"),
    ]
    for options, heads, mine in different:
        style = ContextParallel(comm=open_comms(rank, True), **options)
        core = Core(causal=False)
        style.apply(core, mesh)
        q = torch.zeros(1, 4, heads, 4)
        others = rf"another way than ranks \[{1 - rank.rank}\]"
        with pytest.raises(RankMismatchError, match=f"{others} .*{mine}"):
            core(q, q, q)


@distributed(2)
def test_a_mask_by_place_is_refused_like_one_by_name(rank: Rank) -> None:
    mesh = init_device_mesh("cpu", (2,))
    q = torch.zeros(1, 4, 2, 4, dtype=torch.float64)
    core = Core()
    ContextParallel(ulysses=1, mask="attn_mask").apply(core, mesh)
    with pytest.raises(ValueError, match="is_causal=True means another mask"):
        core(q, q, q, None, None, True)
    core = Core()
    ContextParallel(ulysses=1, ranges="ranges").apply(core, mesh)
    with pytest.raises(ValueError, match="'ranges', which the style is to fill"):
        core(q, q, q, None)


@distributed(2)
def test_a_style_is_not_copied_with_the_model(rank: Rank) -> None:
    model = make()
    ContextParallel(ranges="ranges").apply(model.core, init_device_mesh("cpu", (2,)))
    with pytest.raises(NotImplementedError, match="copy the model first"):
        copy.deepcopy(model)
