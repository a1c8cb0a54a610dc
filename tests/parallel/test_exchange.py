"""exchange: what arrives, what its gradient is, when each is launched and waited."""

from __future__ import annotations

import tempfile
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import memswap
from memswap.parallel import (
    GatherSequence,
    HeadPlan,
    HeadsToSequence,
    SequenceShards,
    SequenceToHeads,
    exchange,
)
from memswap.parallel.layouts import LAYOUTS
from ranks import Rank, distributed

LATE = pytest.mark.parametrize("late", [False, True], ids=["async", "late"])
#: For the big ones: over the worst network always, over gloo's own in the slow run.
LATE_FIRST = pytest.mark.parametrize(
    "late", [pytest.param(False, marks=pytest.mark.slow, id="async"), pytest.param(True, id="late")]
)
SIZES = {"bshd": "bshd", "bnsd": "bhsd", "sbhd": "sbhd", "thd": "shd"}


def whole(layout: str, tokens: int, heads: int) -> torch.Tensor:
    """The tensor of all ranks: every element another number."""
    sizes = {"b": 2, "s": tokens, "h": heads, "d": 3}
    shape = [sizes[letter] for letter in SIZES[layout]]
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def take(tensor: torch.Tensor, dim: int, places: Any) -> torch.Tensor:
    return tensor.index_select(dim, torch.as_tensor(places))


@distributed(2, 4)
@LATE_FIRST
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_sequence_to_heads_and_back_in_every_layout_with_uneven_parts(
    rank: Rank, late: bool, layout: str
) -> None:
    comm = rank.open_comm(late=late)
    where = LAYOUTS[layout]
    for heads, kv_heads in ((4, 4), (5, 5), (6, 3), (4, 2), (4, 1), (7, 1)):
        plan = HeadPlan(heads, kv_heads, rank.size)
        shards = SequenceShards.cut(11, rank.size)
        full = whole(layout, 11, kv_heads)
        mine = take(full, where.seq_dim, shards.positions(rank.rank)).requires_grad_()
        keys = plan.keys()
        spec = SequenceToHeads(comm, keys, shards.lengths, where.seq_dim, where.head_dim)
        got = exchange(mine, spec).wait()
        assert torch.equal(got, take(full, where.head_dim, keys[rank.rank]))
        # The gradient of a head that went to several ranks is the sum of theirs.
        (got * (rank.rank + 1)).sum().backward()
        weight = torch.zeros(kv_heads, dtype=torch.float64)
        for other, own in enumerate(keys):
            weight[list(own)] += other + 1
        expected = torch.ones_like(mine).movedim(where.head_dim, -1) * weight
        assert mine.grad is not None
        assert torch.equal(mine.grad, expected.movedim(-1, where.head_dim))
        # And back, where every head is at one rank.
        queries = plan.queries()
        full = whole(layout, 11, heads)
        back = HeadsToSequence(comm, queries, shards.lengths, where.seq_dim, where.head_dim)
        part = take(full, where.head_dim, queries[rank.rank]).requires_grad_()
        home = exchange(part, back).wait()
        assert torch.equal(home, take(full, where.seq_dim, shards.positions(rank.rank)))
        home.backward(take(full, where.seq_dim, shards.positions(rank.rank)))
        assert part.grad is not None and torch.equal(part.grad, part)


@distributed(2, 4)
@LATE
@pytest.mark.parametrize("balance", ["contiguous", "headtail"])
def test_gather_sequence_is_in_natural_order_and_sums_gradients(
    rank: Rank, late: bool, balance: Any
) -> None:
    comm = rank.open_comm(late=late)
    for layout, where in LAYOUTS.items():
        for tokens in (8, 13, 3):  # even, odd local lengths, ranks without a token
            shards = SequenceShards.cut(tokens, rank.size, balance)
            full = whole(layout, tokens, 2)
            positions = shards.positions(rank.rank)
            mine = take(full, where.seq_dim, positions).requires_grad_()
            got = exchange(mine, GatherSequence(comm, shards, where.seq_dim)).wait()
            assert torch.equal(got, full), f"{layout} {tokens}"
            (got * full * (rank.rank + 1)).sum().backward()
            ranks = sum(range(1, rank.size + 1))
            expected = take(full, where.seq_dim, positions) * ranks
            torch.testing.assert_close(mine.grad, expected, rtol=1e-14, atol=0)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


class Layer:
    """Projections, attention by heads, output: of one process, or of all ranks by exchange."""

    def __init__(self, comm: Any = None, tokens: int = 8, heads: int = 4) -> None:
        generator = torch.Generator().manual_seed(3)
        self.weights = [
            torch.randn(12, 12, dtype=torch.float64, generator=generator).requires_grad_()
            for _ in range(4)
        ]
        self.x = torch.randn(1, tokens, 12, dtype=torch.float64, generator=generator)
        self.heads = heads
        self.comm = comm
        if comm is not None:
            self.shards = SequenceShards.cut(tokens, comm.size)
            self.x = self.x[:, self.shards.positions(comm.rank)]
            plan = HeadPlan(heads, heads, comm.size)
            arguments = (comm, plan.queries(), self.shards.lengths, 1, 2)
            self.to_heads = SequenceToHeads(*arguments)
            self.to_sequence = HeadsToSequence(*arguments)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = ((x @ w).unflatten(-1, (self.heads, -1)) for w in self.weights[:3])
        if self.comm is None:
            y = attention(q, k, v)
        else:
            names = zip((q, k, v), "qkv", strict=True)
            pending = [exchange(t, self.to_heads, label=name) for t, name in names]
            y = attention(*(one.wait() for one in pending))
            y = exchange(y, self.to_sequence, label="o").wait()
        # Another consumer of q, or else its gradient could be replaced instead of added.
        return y.flatten(2) @ self.weights[3] + (q * q).flatten(2)


RUNS = {
    "plain": lambda f, x: f(x),
    "torch-checkpoint": lambda f, x: checkpoint(f, x, use_reentrant=False),
    "torch-reentrant": lambda f, x: checkpoint(f, x, use_reentrant=True),
    "memswap-checkpoint": memswap.checkpoint,
}


def step(layer: Layer, x: torch.Tensor, run: str) -> tuple[torch.Tensor, ...]:
    x = x.clone().requires_grad_()
    y = RUNS[run](layer, x)
    y.square().sum().backward()
    assert x.grad is not None
    return y.detach(), x.grad


@distributed(2, 4)
@LATE_FIRST
@pytest.mark.parametrize("run", sorted(RUNS))
def test_a_layer_is_that_of_one_process_under_every_checkpoint(
    rank: Rank, late: bool, run: str
) -> None:
    layer, reference = Layer(rank.open_comm(late=late)), Layer()
    y, gradient = step(layer, layer.x, run)
    y_all, gradient_all = step(reference, reference.x, "plain")
    positions = layer.shards.positions(rank.rank)
    torch.testing.assert_close(y, y_all[:, positions], rtol=0, atol=1e-12)
    torch.testing.assert_close(gradient, gradient_all[:, positions], rtol=1e-12, atol=1e-11)
    summed = torch.stack([w.grad for w in layer.weights if w.grad is not None])
    torch.distributed.all_reduce(summed)
    for mine, theirs in zip(summed, reference.weights, strict=True):
        torch.testing.assert_close(mine, theirs.grad, rtol=1e-12, atol=1e-11)
    rank.same_everywhere(rank.log.events, "launches and waits")


@distributed(2)
@LATE
def test_gradients_are_all_launched_before_the_first_is_waited(rank: Rank, late: bool) -> None:
    layer = Layer(rank.open_comm(late=late))
    x = layer.x.clone().requires_grad_()
    y = layer(x)
    assert rank.log.events == [
        *(f"all_to_all {name}" for name in "qkv"),
        *(f"wait all_to_all {name}" for name in "qkv"),
        "all_to_all o",
        "wait all_to_all o",
    ]
    rank.log.events.clear()
    y.sum().backward()
    launched = [f"all_to_all {name} gradient" for name in "vkq"]
    assert rank.log.events[:2] == ["all_to_all o gradient", "wait all_to_all o gradient"]
    assert rank.log.events[2:] == [*launched, *(f"wait {launch}" for launch in launched)]


@distributed(2)
@LATE
def test_several_microbatches_in_flight(rank: Rank, late: bool) -> None:
    """Two forwards, then two backwards, in either order: no slot per layer to mix them up in."""
    layer = Layer(rank.open_comm(late=late))
    inputs = [layer.x.clone() + i for i in range(2)]
    expected = [step(layer, x, "plain")[1] for x in inputs]
    for order in ([0, 1], [1, 0]):
        leaves = [x.clone().requires_grad_() for x in inputs]
        outputs = [layer(x) for x in leaves]
        for i in order:
            outputs[i].square().sum().backward()
        for leaf, gradient in zip(leaves, expected, strict=True):
            assert leaf.grad is not None and torch.equal(leaf.grad, gradient)


@distributed(2)
@LATE
def test_the_graph_can_be_walked_twice(rank: Rank, late: bool) -> None:
    layer = Layer(rank.open_comm(late=late))
    x = layer.x.clone().requires_grad_()
    y = layer(x).square().sum()
    (first,) = torch.autograd.grad(y, x, retain_graph=True)
    (second,) = torch.autograd.grad(y, x)
    assert torch.equal(first, second)


@distributed(2)
@LATE
def test_what_arrived_is_saved_by_memswap(rank: Rank, late: bool) -> None:
    layer = Layer(rank.open_comm(late=late), tokens=16)
    expected = step(layer, layer.x, "plain")
    policy = memswap.Policy(action=memswap.Action.SWAP, min_bytes=1)
    with tempfile.TemporaryDirectory() as folder:
        with memswap.saved_tensors(policy, pool=memswap.DiskPool(folder)) as saved:
            x = layer.x.clone().requires_grad_()
            y = layer(x)
        y.square().sum().backward()
        assert saved.stats().moved_storages >= 3
    assert x.grad is not None
    assert torch.equal(y, expected[0]) and torch.equal(x.grad, expected[1])


@distributed(2)
def test_anomaly_mode_sees_nothing_that_is_in_flight(rank: Rank) -> None:
    """What is in flight is NaN here; a node that handed it on would be reported."""
    layer = Layer(rank.open_comm(late=True))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is slow
        with torch.autograd.detect_anomaly(check_nan=True):
            step(layer, layer.x, "plain")


@distributed(2)
@LATE
def test_the_input_may_be_edited_after_the_launch(rank: Rank, late: bool) -> None:
    comm = rank.open_comm(late=late)
    shards = SequenceShards.cut(4, 2)
    for spec, shape in (
        (GatherSequence(comm, shards, 0), (2, 1, 2)),  # dimension 0: nothing to rearrange
        (SequenceToHeads(comm, ((0,), (1,)), (2, 2), 0, 1), (2, 2, 1)),
        (HeadsToSequence(comm, ((0,), (1,)), (2, 2), 0, 1), (4, 1, 1)),
    ):
        x = torch.full(shape, 1.0 + rank.rank)
        pending = exchange(x, spec)
        x.fill_(100.0)
        assert pending.wait().max() <= 2.0


@distributed(2)
def test_parts_that_do_not_fit_raise_before_they_are_sent(rank: Rank) -> None:
    comm = rank.open_comm()
    shards = SequenceShards.cut(4, 2)
    with pytest.raises(ValueError, match=r"found 3 tokens .* expected 2 on this rank"):
        exchange(torch.zeros(3, 2), GatherSequence(comm, shards, 0))
    with pytest.raises(ValueError, match=r"found 5 heads .* expected 2 on this rank"):
        exchange(torch.zeros(2, 5), SequenceToHeads(comm, ((0,), (1,)), (2, 2), 0, 1))
    with pytest.raises(ValueError, match="2 ranks of the group"):
        GatherSequence(comm, SequenceShards.cut(4, 3), 0)
    assert rank.log.events == []


@distributed(2)
@LATE
def test_an_exchange_that_is_not_wanted_leaves_nothing_behind(rank: Rank, late: bool) -> None:
    comm = rank.open_comm(late=late)
    spec = GatherSequence(comm, SequenceShards.cut(4, 2), 0)
    x = torch.ones(2, 1, requires_grad=True)
    pending = exchange(x, spec, label="unwanted")
    pending.discard()
    assert rank.log.events == ["all_gather unwanted", "wait all_gather unwanted"]
    (x * 3).sum().backward()
    assert x.grad is not None and torch.equal(x.grad, torch.full((2, 1), 3.0))


@distributed(2)
@LATE
def test_an_exception_in_backward_does_not_spoil_the_next(rank: Rank, late: bool) -> None:
    comm = rank.open_comm(late=late)
    spec = GatherSequence(comm, SequenceShards.cut(4, 2), 0)
    x = torch.ones(2, 1, requires_grad=True)
    pending = exchange(x, spec)
    fails = [True]

    def fail(gradient: torch.Tensor) -> None:
        if fails.pop() if fails else False:
            raise RuntimeError("on purpose")

    assert pending._token is not None
    pending._token.register_hook(fail)  # between the launch and the wait of the gradient
    loss = pending.wait().sum()
    with pytest.raises(RuntimeError, match="on purpose"):
        loss.backward(retain_graph=True)
    rank.log.events.clear()
    loss.backward()
    assert x.grad is not None and torch.equal(x.grad, torch.full((2, 1), 2.0))
    launch = "reduce_scatter exchange gradient"  # the first one was waited for as well
    assert rank.log.events == [f"wait {launch}", launch, f"wait {launch}"]


@distributed(2)
@LATE
def test_the_output_flies_beside_another_branch_both_ways(rank: Rank, late: bool) -> None:
    comm = rank.open_comm(late=late)
    spec = HeadsToSequence(comm, ((0,), (1,)), (2, 2), 0, 1)
    x = torch.ones(4, 1, requires_grad=True)
    branch = torch.ones(2, 2, requires_grad=True)
    pending = exchange(x * 2, spec, label="o")
    beside = branch * 3
    rank.log("branch")
    beside.register_hook(lambda _: rank.log("branch gradient"))
    (pending.wait() + beside).sum().backward()
    assert rank.log.events == [
        "all_to_all o",
        "branch",
        "wait all_to_all o",
        "all_to_all o gradient",
        "branch gradient",
        "wait all_to_all o gradient",
    ]
