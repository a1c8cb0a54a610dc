"""Attention that is causal by itself, where keys are gathered: right, or refused."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.utils.checkpoint import checkpoint

import memswap
from cut_attention import FP64, LATE_FIRST, Core, assert_is_one_process, make, meshes, open_comms
from cut_attention import random as random_tokens
from memswap.parallel import ContextParallel
from ranks import Rank, distributed


class Own(nn.Module):
    """Attention in the layout bshd, causal in a way of its own."""

    layout = "bshd"

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(64, 64, dtype=torch.bool).tril())
        if kind == "bias":
            self.bias = nn.Parameter(torch.zeros(128, dtype=FP64))  # says nothing at first
        self.dropout = nn.Dropout(0.5).eval()
        self.calls: list[int] = []
        self.kind = kind

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        causal: bool = False,
        attn_mask: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        self.calls.append(q.size(1))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        y = self.attend(q, k, v, causal, attn_mask, positions)
        return self.dropout(y).transpose(1, 2)

    def attend(
        self, q: Any, k: Any, v: Any, causal: bool, attn_mask: Any, positions: Any
    ) -> torch.Tensor:
        queries, keys = q.size(-2), k.size(-2)
        shape = queries, keys
        gqa = {"enable_gqa": q.size(1) != k.size(1)}
        sdpa = F.scaled_dot_product_attention
        if self.kind == "is_causal":
            return sdpa(q, k, v, is_causal=True, **gqa)
        if self.kind == "by argument":
            return sdpa(q, k, v, is_causal=causal, **gqa)
        if self.kind == "upper left":
            return sdpa(q, k, v, attn_mask=causal_upper_left(*shape), **gqa)
        if self.kind == "lower right":
            return sdpa(q, k, v, attn_mask=causal_lower_right(*shape), **gqa)
        if self.kind == "full":
            return sdpa(q, k, v, attn_mask, **gqa)
        group = q.size(1) // k.size(1)
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.size(-1))
        ones = torch.ones(shape, dtype=torch.bool)
        if self.kind == "tril":
            seen = torch.tril(ones)
        elif self.kind == "triu":
            scores = scores + torch.full(shape, -math.inf, dtype=FP64).triu(1)
            seen = ones
        elif self.kind == "triu in place":
            scores = scores + torch.full(shape, -math.inf, dtype=FP64).triu_(diagonal=1)
            seen = ones
        elif self.kind == "last queries":
            seen = ~torch.triu(ones, diagonal=keys - queries + 1)
        elif self.kind == "window":
            seen = ones.tril() & ones.triu(-3)
        elif self.kind == "buffer":
            seen = self.table[:queries, :keys]
        elif self.kind == "arange":
            seen = torch.arange(queries)[:, None] >= torch.arange(keys)
        elif self.kind == "positions":
            seen = positions[:, None] >= torch.arange(keys)
        elif self.kind == "kernel":  # as flash kernels have it: the queries are the last ones
            seen = torch.arange(queries)[:, None] + keys - queries >= torch.arange(keys)
        elif self.kind == "square":
            seen = torch.ones(queries, queries, dtype=torch.bool).tril()
        else:
            assert self.kind == "bias"
            distance = torch.arange(queries)[:, None] - torch.arange(keys) + 64
            scores = scores + self.bias[distance]
            seen = ones.tril()
        return scores.masked_fill(~seen, -math.inf).softmax(-1) @ v


SEEN = (
    *("is_causal", "by argument", "upper left", "lower right"),
    *("tril", "triu", "triu in place", "last queries", "window"),
)
#: Right if the keys end with the queries, which they can if a rank's queries are one range.
LAST = ("kernel",)
UNSEEN = ("buffer", "arange", "bias")


def make_own(kind: str, **options: Any) -> Any:
    model = make(**options)
    model.core = Wrapped(Own(kind)) if kind == "by argument" else Own(kind)
    return model


class Wrapped(nn.Module):
    """Says by an argument that attention is causal."""

    layout = "bshd"

    def __init__(self, core: Own) -> None:
        super().__init__()
        self.own = core

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return self.own(q, k, v, causal=True)


def attention_of(model: Any) -> nn.Module:
    return model.core.own if isinstance(model.core, Wrapped) else model.core


BALANCES = pytest.mark.parametrize("balance", ["contiguous", "headtail", "queries"])

#: What four ranks try in the fast suite: how a mask is made is the same for any number of them.
ON_FOUR = ("is_causal", "triu", "kernel")


@distributed(2)
@LATE_FIRST
@BALANCES
@pytest.mark.parametrize("kind", [*SEEN, *LAST])
def test_causal_attention_is_one_process_where_keys_are_gathered(
    rank: Rank, late: bool, kind: str, balance: Any
) -> None:
    assert_causal_attention_is_one_process(rank, late, kind, balance)


@distributed(4)
@LATE_FIRST
@BALANCES
@pytest.mark.parametrize(
    "kind",
    [pytest.param(one, marks=() if one in ON_FOUR else pytest.mark.slow) for one in (*SEEN, *LAST)],
)
def test_causal_attention_is_one_process_where_four_ranks_gather_keys(
    rank: Rank, late: bool, kind: str, balance: Any
) -> None:
    assert_causal_attention_is_one_process(rank, late, kind, balance)


def assert_causal_attention_is_one_process(rank: Rank, late: bool, kind: str, balance: Any) -> None:
    for mode, (mesh, ulysses) in meshes(rank).items():
        if mode == "ulysses":
            continue
        if kind in LAST and balance != "contiguous":
            model = make_own(kind)
            ContextParallel(ulysses=ulysses, balance=balance).apply(model.core, mesh)
            with pytest.raises(ValueError, match="another result"):
                model(random_tokens(2, 8, 16))
            continue
        for tokens in (16, 29):
            model = make_own(kind)
            style = ContextParallel(
                ulysses=ulysses,
                balance=balance,
                sequence_length=tokens,
                comm=open_comms(rank, late),
            )
            applied = style.apply(attention_of(model), mesh)
            batch = random_tokens(2, tokens, 16)
            assert_is_one_process(style, model, batch, reference=make_own(kind))
            assert applied.calls == 1
            own = attention_of(model)
            assert len(own.calls) == 1, "what the trial did to the module's own list"
            assert own.training and not own.dropout.training
            assert not torch.overrides._get_current_function_mode_stack()


@distributed(2, 4)
@pytest.mark.parametrize("kind", [*UNSEEN, "square"])
def test_a_mask_that_cannot_be_seen_is_refused_on_all_ranks(rank: Rank, kind: str) -> None:
    for mode, (mesh, ulysses) in meshes(rank).items():
        if mode == "ulysses":
            continue
        model = make_own(kind)
        state = torch.get_rng_state()
        ContextParallel(ulysses=ulysses, comm=open_comms(rank, False)).apply(model.core, mesh)
        what = "could not be tried" if kind == "square" else "another result"
        with pytest.raises(ValueError, match=what) as caught:
            model(random_tokens(2, 8, 16))
        assert "verify=False" in str(caught.value)
        assert rank.log.events == [], "before anything is sent"
        assert torch.equal(torch.get_rng_state(), state)
        assert not model.core.calls and model.core.training
        assert not any(bool(weight.any()) for weight in model.core.parameters())
        rank.same_everywhere(str(caught.value), "what is told")
        # Ulysses is exact whatever the mask, and nothing is tried.
        model = make_own(kind)
        line = init_device_mesh("cpu", (rank.size,))
        style = ContextParallel(heads=4)
        style.apply(model.core, line)
        y = model(style.shard_batch({"x": random_tokens(2, 16, 16)})["x"])
        expected = make_own(kind)(random_tokens(2, 16, 16)).chunk(rank.size, 1)[rank.rank]
        torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)


@distributed(2)
def test_what_does_not_go_by_places_is_let_through(rank: Rank) -> None:
    mesh = init_device_mesh("cpu", (2,))
    q = torch.randn(2, 16, 4, 4, dtype=FP64)
    mine = q.chunk(2, 1)[rank.rank]
    places = torch.arange(16).chunk(2)[rank.rank]
    seen = places[:, None] >= torch.arange(16)
    masks = [
        {"attn_mask": seen},
        {"attn_mask": torch.zeros(seen.shape, dtype=FP64).masked_fill(~seen, -math.inf)},
        {"attn_mask": torch.ones(2, 1, 1, 16, dtype=torch.bool)},
        {},
    ]
    for options in masks:
        core = Own("full")
        ContextParallel(ulysses=1).apply(core, mesh)
        found = core(mine, mine, mine, **options)
        expected = F.scaled_dot_product_attention(
            mine.transpose(1, 2), q.transpose(1, 2), q.transpose(1, 2), **options
        )
        torch.testing.assert_close(found, expected.transpose(1, 2), rtol=1e-12, atol=1e-12)
    core = Own("positions")
    ContextParallel(ulysses=1).apply(core, mesh)
    found = core(mine, mine, mine, positions=places)
    expected = F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, q, q)), is_causal=True
    ).transpose(1, 2)
    torch.testing.assert_close(found, expected.chunk(2, 1)[rank.rank], rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match="another result"):  # another call than the one tried
        core.kind = "arange"
        core(mine, mine, mine, causal=True)


@distributed(2)
def test_your_word_is_taken(rank: Rank) -> None:
    core = Own("arange")
    ContextParallel(ulysses=1, verify=False).apply(core, init_device_mesh("cpu", (2,)))
    q = torch.randn(2, 8, 4, 4, dtype=FP64)
    assert core(q, q, q).shape == q.shape
    assert core.calls == [8]


@distributed(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounding_is_no_difference(rank: Rank, dtype: torch.dtype) -> None:
    class Narrow(nn.Module):
        """Computes in the dtype, whatever it gets; other lengths are rounded otherwise."""

        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            wide = q.dtype
            q, k, v = (x.to(dtype).transpose(1, 2) for x in (q, k, v))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            y = y + (q.size(2) % 3) * torch.finfo(dtype).eps
            return y.transpose(1, 2).to(wide)

    for own in (dtype, torch.float32):
        core = Narrow()
        ContextParallel(ulysses=1).apply(core, init_device_mesh("cpu", (2,)))
        q = torch.randn(2, 8, 4, 64, dtype=own)
        assert core(q, q, q).shape == q.shape


@distributed(2)
def test_dropout_is_the_caller_s_own_random_numbers(rank: Rank) -> None:
    class Drops(nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.5, is_causal=True)
            if self.training:
                y = y * torch.bernoulli(torch.full_like(y, 0.5))
            return F.dropout(y, 0.5).transpose(1, 2)

    core = Drops()
    ContextParallel(ulysses=1).apply(core, init_device_mesh("cpu", (2,)))
    q = torch.randn(2, 8, 4, 4, dtype=FP64)
    results = []
    for _ in range(2):  # with the trial, and without
        torch.manual_seed(3)
        results.append(core(q, q, q))
    assert torch.equal(*results)
    assert bool((results[0] == 0).any()), "dropout drops"


@distributed(2)
def test_an_exception_in_attention_leaves_no_mode_behind(rank: Rank) -> None:
    class Fails(Core):
        fail = False

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            if self.fail:
                raise RuntimeError("in attention")
            return super().forward(*args, **kwargs)

    core = Fails(causal=False)
    ContextParallel(ulysses=1).apply(core, init_device_mesh("cpu", (2,)))
    q = torch.randn(2, 8, 4, 4, dtype=FP64)
    core(q, q, q)
    core.fail = True
    with pytest.raises(RuntimeError, match="in attention"):
        core(q, q, q)
    assert not torch.overrides._get_current_function_mode_stack()
    core.fail = False
    core(q, q, q)


@distributed(2)
def test_after_an_interrupt_in_attention_others_masks_are_as_they_were(rank: Rank) -> None:
    class Interrupted(Core):
        interrupt = False

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            if self.interrupt:
                raise KeyboardInterrupt
            return super().forward(*args, **kwargs)

    core = Interrupted(causal=False)
    ContextParallel(ulysses=1).apply(core, init_device_mesh("cpu", (2,)))
    q, square = torch.randn(2, 8, 4, 4, dtype=FP64), torch.ones(8, 16)
    expected = torch.tril(square)
    core(q, q, q)
    core.interrupt = True
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            core(q, q, q)
        assert torch.equal(torch.tril(square), expected), "it is taken for this rank's queries"
    core.interrupt = False
    core(q, q, q)
    assert not torch.overrides._get_current_function_mode_stack()


@distributed(2)
def test_causal_queries_that_are_not_this_rank_s_are_refused(rank: Rank) -> None:
    class Appends(nn.Module):
        """Adds a token to what it gets."""

        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            q, k, v = (F.pad(x.transpose(1, 2), (0, 0, 0, 1)) for x in (q, k, v))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return y[:, :, :-1].transpose(1, 2)

    core = Appends()
    ContextParallel(ulysses=1).apply(core, init_device_mesh("cpu", (2,)))
    q = torch.randn(2, 8, 4, 4, dtype=FP64)
    with pytest.raises(ValueError, match=r"found a causal attention of 9 queries .* has 8 of 16"):
        core(q, q, q)


@distributed(2)
@pytest.mark.parametrize("kind", ["is_causal", "tril", "arange"])
def test_compiled_attention_is_tried_and_placed_as_well(rank: Rank, kind: str) -> None:
    model, whole = make_own(kind), random_tokens(2, 16, 16)
    expected = make_own(kind)(whole).chunk(2, 1)[rank.rank]
    ContextParallel(ulysses=1).apply(model.core, init_device_mesh("cpu", (2,)))
    compiled = torch.compile(model, backend="eager")
    mine = whole.chunk(2, 1)[rank.rank]
    if kind == "arange":
        with pytest.raises(ValueError, match="another result"):
            compiled(mine)
        return
    for _ in range(2):
        torch.testing.assert_close(compiled(mine), expected, rtol=1e-12, atol=1e-12)


@distributed(2)
@pytest.mark.parametrize("kind", ["is_causal", "kernel"])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints_and_managed_layers_recompute_it_where_it_was(
    rank: Rank, kind: str, use_reentrant: bool
) -> None:
    whole = random_tokens(2, 16, 16)
    gradients = []
    for composed in (False, True):
        model = make_own(kind)
        style = ContextParallel(ulysses=1, comm=open_comms(rank, True))
        style.apply(model.core, init_device_mesh("cpu", (2,)))
        x = style.shard_batch({"x": whole})["x"].requires_grad_()
        with contextlib.ExitStack() as stack:
            if composed:
                stack.enter_context(memswap.manage([model], memswap.Policy(min_bytes=0)))
                y = checkpoint(model, x, use_reentrant=use_reentrant)
            else:
                y = model(x)
            y.square().sum().backward()
        gradients.append([x.grad, *(weight.grad for weight in model.parameters())])
    assert all(map(torch.equal, *gradients))
    assert not torch.overrides._get_current_function_mode_stack()
