"""Masks that go by a query's place only at a distance, where keys are gathered: refused in time."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from cut_attention import FP64, assert_is_one_process, make, meshes, open_comms
from cut_attention import random as random_tokens
from memswap.compat import hyper_parallel
from memswap.parallel import ContextParallel, proof
from memswap.parallel.attention import Lengths
from memswap.parallel.gathered import Tried
from ranks import Rank, distributed

#: More than the four tokens per rank of the first trial.
WINDOW = 20
TOKENS = 64

#: The lengths of the queries with which any of these modules was called, trials included.
CALLS: list[int] = []


class Windowed(nn.Module):
    """Causal attention in the layout bshd that sees the last keys of a window."""

    layout = "bshd"

    def __init__(self, kind: str, window: int = WINDOW) -> None:
        super().__init__()
        self.kind, self.window = kind, window
        places = torch.arange(TOKENS)
        self.register_buffer("places", places)
        self.register_buffer("table", places[:, None] - places < window)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None = None
    ) -> torch.Tensor:
        CALLS.append(q.size(1))
        queries, keys = q.size(1), k.size(1)
        if self.kind == "half" and q.dtype != torch.bfloat16:
            raise TypeError("a kernel for bfloat16")
        if self.kind == "raises":
            raise ZeroDivisionError("in attention")
        if self.kind == "out of memory" and queries > TOKENS // 2:
            raise torch.OutOfMemoryError("tried to allocate more than there is")
        if self.kind == "table of its own length":
            assert queries <= TOKENS // 2
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        ones = torch.ones(queries, keys, dtype=torch.bool)
        seen = ones.tril() & self.near(queries, keys, self.window if window is None else window)
        group = q.size(1) // k.size(1)
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.size(-1))
        if self.kind == "bias":
            distance = self.places[:queries, None] - torch.arange(keys)
            scores = scores + 0.5 * (distance - self.window).clamp(min=0)
        return (scores.masked_fill(~seen, -math.inf).softmax(-1) @ v).transpose(1, 2)

    def near(self, queries: int, keys: int, window: int) -> torch.Tensor:
        ones = torch.ones(queries, keys, dtype=torch.bool)
        if self.kind == "triu":
            return ones.triu(1 - window)
        if self.kind == "bias":
            return ones
        if self.kind == "table":
            return self.table[:queries, :keys]
        if self.kind == "linspace":
            places = torch.linspace(0, queries - 1, queries)
        elif self.kind == "cumsum":
            places = torch.ones(queries).cumsum(0) - 1
        elif self.kind == "buffer":
            places = self.places[:queries]
        else:
            places = torch.arange(queries)
        return places[:, None] - torch.arange(keys) < window


def make_windowed(kind: str, window: int = WINDOW) -> Any:
    model = make()
    model.core = Windowed(kind, window)
    return model


def gathering(rank: Rank) -> list[tuple[Any, Any]]:
    return [found for mode, found in meshes(rank).items() if mode != "ulysses"]


UNSEEN = ("arange", "linspace", "cumsum", "buffer", "table", "bias")


@distributed(2, 4)
@pytest.mark.parametrize("balance", ["contiguous", "headtail", "queries"])
@pytest.mark.parametrize("kind", UNSEEN)
def test_a_window_that_is_wider_than_a_trial_is_refused_on_all_ranks(
    rank: Rank, kind: str, balance: Any
) -> None:
    for mesh, ulysses in gathering(rank):
        model = make_windowed(kind)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        state = torch.get_rng_state()
        style = ContextParallel(ulysses=ulysses, balance=balance, comm=open_comms(rank, False))
        style.apply(model.core, mesh)
        with pytest.raises(ValueError, match="another result") as caught:
            model(style.shard_batch({"x": random_tokens(2, TOKENS, 16)})["x"])
        for advice in ("sliding window", "ranges=", "mask=", "verify=False"):
            assert advice in str(caught.value)
        assert rank.log.events == [], "something was sent"
        rank.same_everywhere(str(caught.value), "what is told")
        assert torch.equal(torch.get_rng_state(), state)
        assert model.core.training
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@distributed(2, 4)
@pytest.mark.parametrize("style", ["ContextParallel", "AsyncContextParallel"])
def test_hyper_parallel_scripts_do_not_train_on_with_another_window(rank: Rank, style: str) -> None:
    """Colossal and hybrid; a projection may have sent its tensor, and no rank waits for another."""
    for degree in range(1, rank.size):
        if rank.size % degree:
            continue
        model = make_windowed("arange")
        theirs = getattr(hyper_parallel, style)(ulysses_degree=degree)
        projections = {f"{name}_proj": getattr(model, name) for name in "qkv"}
        theirs.apply(model.core, rank.mesh, **(projections if "Async" in style else {}))
        with pytest.raises(ValueError, match="sliding window") as caught:
            model(random_tokens(2, TOKENS, 16).chunk(rank.size, 1)[rank.rank])
        rank.same_everywhere(str(caught.value), "what is told")


@distributed(2, 4)
@pytest.mark.parametrize("kind", ["triu", "arange"])
def test_a_window_is_let_through_where_it_is_right(rank: Rank, kind: str) -> None:
    """By triu always, and where no sequence is longer than it."""
    tokens = TOKENS if kind == "triu" else WINDOW
    for mesh, ulysses in gathering(rank):
        style = ContextParallel(ulysses=ulysses, comm=open_comms(rank, True))
        model = make_windowed(kind)
        style.apply(model.core, mesh)
        batch = random_tokens(2, tokens, 16)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert_is_one_process(style, model, batch, reference=make_windowed(kind))


@distributed(2)
def test_it_is_tried_again_where_a_sequence_is_longer_and_no_more_often(rank: Rank) -> None:
    core = Windowed("arange")
    ContextParallel(ulysses=1, comm=open_comms(rank, False)).apply(core, rank.mesh)
    for tokens, trials in ((16, True), (16, False), (12, False), (WINDOW, True), (16, False)):
        q = torch.randn(1, tokens // 2, 2, 4, dtype=FP64)
        CALLS.clear()
        core(q, q, q)
        assert (tokens in CALLS) == trials, f"{CALLS} for {tokens} tokens"
        assert trials or [tokens // 2] == CALLS
    q = torch.randn(1, TOKENS // 2, 2, 4, dtype=FP64)
    sent = len(rank.log.events)
    with pytest.raises(ValueError, match="another result"):
        core(q, q, q)
    assert len(rank.log.events) == sent


@distributed(2)
def test_a_window_that_is_an_argument_is_tried_for_each_of_its_values(rank: Rank) -> None:
    core = Windowed("arange")
    ContextParallel(ulysses=1).apply(core, rank.mesh)
    q = torch.randn(1, TOKENS // 2, 2, 4, dtype=FP64)
    core(q, q, q, window=TOKENS)
    with pytest.raises(ValueError, match="another result"):
        core(q, q, q, window=WINDOW)
    core = Windowed("triu")
    ContextParallel(ulysses=1).apply(core, rank.mesh)
    with pytest.warns(UserWarning, match=r"more than 32 combinations of arguments.*verify=False"):
        for window in range(1, 35):
            core(q, q, q, window=window)


@distributed(2)
def test_a_window_that_is_made_shorter_is_tried_and_what_calls_count_is_not(rank: Rank) -> None:
    class Counts(Windowed):
        calls = 0

        def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            self.calls += 1
            return super().forward(*args, **kwargs)

    core = Counts("arange", window=TOKENS)
    ContextParallel(ulysses=1).apply(core, rank.mesh)
    q = torch.randn(1, TOKENS // 2, 2, 4, dtype=FP64)
    core(q, q, q)
    for _ in range(3):
        CALLS.clear()
        core(q, q, q)
        assert CALLS == [TOKENS // 2], "it was tried again"
    assert core.calls == 4
    core.window = WINDOW
    with pytest.raises(ValueError, match="another result"):
        core(q, q, q)
    core.window, core.kind = TOKENS, "raises"
    with (
        pytest.warns(UserWarning, match=r"attributes of it have changed.*ZeroDivisionError"),
        pytest.raises(ZeroDivisionError),
    ):
        core(q, q, q)


@distributed(2)
def test_a_kernel_for_half_precision_alone_is_tried_in_it(rank: Rank) -> None:
    core = Windowed("half")
    ContextParallel(ulysses=1).apply(core, rank.mesh)
    q = torch.randn(3, TOKENS // 2, 2, 4, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"another result.*sliding window"):
        core(q, q, q)
    core.window = TOKENS
    core(q, q, q)


@distributed(2)
def test_where_a_whole_sequence_takes_too_much_memory_that_is_told(rank: Rank) -> None:
    """Longer sequences than a few tokens are tried all the same."""
    limit, proof.TRIAL_BYTES = proof.TRIAL_BYTES, 2 * 40 * 40 * 8
    try:
        q = torch.randn(1, TOKENS // 2, 2, 4, dtype=FP64)
        core = Windowed("arange")
        ContextParallel(ulysses=1).apply(core, rank.mesh)
        CALLS.clear()
        with pytest.raises(ValueError, match="another result"):
            core(q, q, q)
        assert TOKENS not in CALLS, "more memory was taken than allowed"
        core = Windowed("arange", window=TOKENS - 8)
        ContextParallel(ulysses=1).apply(core, rank.mesh)
        told = r"Windowed.* was tried with \d\d of 64 tokens.*ranges=.*mask=.*verify=False"
        with pytest.warns(UserWarning, match=told) as caught:
            core(q, q, q)
        assert caught[0].filename == __file__, "it points at the user's own line"
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            core(q, q, q)
    finally:
        proof.TRIAL_BYTES = limit


@distributed(2)
def test_where_a_device_has_no_memory_for_a_whole_sequence_that_is_told(rank: Rank) -> None:
    q = torch.randn(1, TOKENS // 2, 2, 4, dtype=FP64)
    core = Windowed("out of memory", window=TOKENS // 2)
    ContextParallel(ulysses=1).apply(core, rank.mesh)
    with pytest.warns(UserWarning, match=r"tried with 32 of 64 tokens.*too much memory"):
        core(q, q, q)
    core = Windowed("out of memory")
    ContextParallel(ulysses=1).apply(core, rank.mesh)
    with pytest.raises(ValueError, match="a part of 32 queries another result"):
        core(q, q, q)


@distributed(2)
def test_where_a_module_runs_on_no_whole_sequence_that_is_told(rank: Rank) -> None:
    core = Windowed("table of its own length", window=TOKENS)
    ContextParallel(ulysses=1).apply(core, rank.mesh)
    q = torch.randn(1, TOKENS // 2, 2, 4, dtype=FP64)
    with pytest.warns(UserWarning, match=r"tried on a few tokens only.*AssertionError.*verify="):
        core(q, q, q)


@distributed(2)
def test_a_word_is_taken_for_windows_as_well(rank: Rank) -> None:
    core = Windowed("arange")
    ContextParallel(ulysses=1, verify=False).apply(core, init_device_mesh("cpu", (2,)))
    q = torch.randn(1, TOKENS // 2, 2, 4, dtype=FP64)
    CALLS.clear()
    assert core(q, q, q).shape == q.shape
    assert CALLS == [TOKENS // 2]


def test_a_verdict_covers_what_is_no_longer_than_something_tried() -> None:
    tried = Tried(False)
    calls = [(10, 100), (20, 50), (10, 100), (20, 50), (9, 99), (20, 51), (20, 50), (30, 200)]
    covered = []
    for queries, keys in calls:
        lengths = Lengths(((0, 1),), queries, keys)
        covered.append(tried.covers(lengths))
        tried = tried if covered[-1] else tried.tried_with(lengths)
    assert covered == [False, False, True, True, True, False, True, False]
    assert tried.lengths == ((30, 200),)
