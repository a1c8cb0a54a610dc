"""ContextParallel(...).apply(o=...): attention's output is waited for where it is first used."""

from __future__ import annotations

import tempfile
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import memswap
from cut_attention import (
    FP64,
    LATE,
    Attention,
    from_layout,
    make,
    meshes,
    open_comms,
    random,
)
from memswap.parallel import ContextParallel
from ranks import Rank, distributed


def late_output(rank: Rank, late: bool, **options: Any) -> tuple[ContextParallel, Attention, Any]:
    style = ContextParallel(heads=4, ranges="ranges", comm=open_comms(rank, late))
    model = make(**options)
    mesh = init_device_mesh("cpu", (rank.size,))
    named = {"q": model.q, "k": model.k, "v": model.v, "o": model.out}
    return style, model, style.apply(model.core, mesh, **named)


class Beside(nn.Module):
    """Attention, and something beside it that does not need its output."""

    def __init__(self, attention: Attention, log: Any) -> None:
        super().__init__()
        self.attention = attention
        self.beside = nn.Linear(attention.width, attention.width, dtype=FP64)
        self.log = log
        self.beside.weight.register_hook(lambda _: log("B beside"))
        attention.out.weight.register_hook(lambda _: log("B out"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one = self.attention
        y = one.core(one.q(x), one.k(x), v=one.v(x))
        self.log("F beside")
        z = self.beside(x)
        return one.out(y.flatten(2)) + z


@distributed(2, 4)
@LATE
def test_the_output_flies_beside_what_comes_before_the_projection(rank: Rank, late: bool) -> None:
    """And its gradient beside the projection's weight gradient."""
    for mode, (mesh, ulysses) in meshes(rank).items():
        style = ContextParallel(ulysses=ulysses, ranges="ranges", comm=open_comms(rank, late))
        torch.manual_seed(3)
        model = Beside(make(), rank.log)
        applied = style.apply(model.attention.core, mesh, o=model.attention.out)
        x = style.shard_batch({"x": random(2, 16, 16)})["x"].requires_grad_()
        rank.log.events.clear()
        model(x).square().sum().backward()
        log, gradient = rank.log, "all_to_all o gradient"
        assert applied.late == (0 if mode == "gather" else 1)
        if mode == "gather":
            assert log.count("all_to_all") == 0
            continue
        assert log.before("all_to_all o", "F beside") and log.before(
            "F beside", "wait all_to_all o"
        )
        assert log.before(gradient, "B out") and log.before("B out", f"wait {gradient}")
        assert log.before(gradient, "B beside") and log.before("B beside", f"wait {gradient}")
        assert [log.events.count(e) for e in ("all_to_all o", gradient)] == [1, 1]
        rank.same_everywhere(log.events, "launches and waits")
        # The same without it: waited for at once, both ways.
        applied.remove()
        style.apply(model.attention.core, mesh)
        log.events.clear()
        model(x).square().sum().backward()
        assert log.before("wait all_to_all o", "F beside")
        assert log.before("B out", gradient)


@distributed(2)
@LATE
def test_a_late_output_has_the_bits_of_one_that_is_waited_for_at_once(
    rank: Rank, late: bool
) -> None:
    """Over two microbatches in flight, in both orders, with activations swapped away."""
    for layout in ("bshd", "bnsd", "sbhd"):
        inputs = [random(2, 4, 16, seed) for seed in range(2)]
        results = []
        for named in (False, True):
            style = ContextParallel(ranges="ranges", layout=layout, comm=open_comms(rank, late))
            model = make(layout=layout)
            applied = style.apply(
                model.core, init_device_mesh("cpu", (2,)), o=model.out if named else None
            )
            for order in ([0, 1], [1, 0]):
                policy = memswap.Policy(action=memswap.Action.SWAP, min_bytes=1)
                leaves = [x.clone().requires_grad_() for x in inputs]
                with tempfile.TemporaryDirectory() as folder:
                    with memswap.saved_tensors(policy, pool=memswap.DiskPool(folder)) as saved:
                        outputs = [model(x) for x in leaves]
                    for i in order:
                        outputs[i].square().sum().backward()
                    assert saved.stats().moved_storages > 0
                results.append([*outputs, *(x.grad for x in leaves)])
            results.append([w.grad for w in model.parameters()])
            assert applied.late == (4 if named else 0)
        for mine, theirs in zip(results[:3], results[3:], strict=True):
            assert all(map(torch.equal, mine, theirs)), layout


@distributed(2)
@LATE
def test_an_output_that_something_else_uses_first_is_waited_for_there(
    rank: Rank, late: bool
) -> None:
    class Gated(Attention):
        def forward(self, x: torch.Tensor, source: torch.Tensor | None = None) -> torch.Tensor:
            y = self.core(self.q(x), self.k(x), v=self.v(x))
            return self.out(from_layout(y * y, self.core.layout).flatten(2))

    style, model, applied = late_output(rank, late)
    plain, reference, _ = late_output(rank, late)
    for one in (model, reference):
        one.__class__ = Gated
    plain.applied[0].remove()
    plain.apply(reference.core, init_device_mesh("cpu", (2,)))
    x = style.shard_batch({"x": random(2, 8, 16)})["x"]
    with pytest.warns(UserWarning, match="mul used attention's output before the projection"):
        got = model(x)
    with warnings.catch_warnings():  # once
        warnings.simplefilter("error")
        assert torch.equal(model(x), got)
    assert torch.equal(reference(x), got)
    assert applied.late == 0


@distributed(2)
@LATE
def test_a_projection_that_is_no_linear_layer_gets_a_plain_tensor(rank: Rank, late: bool) -> None:
    """Its kernels may be anybody's."""

    class Own(nn.Module):
        def __init__(self, linear: nn.Linear) -> None:
            super().__init__()
            self.weight, self.bias = linear.weight, linear.bias

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert type(x) is torch.Tensor
            return torch.nn.functional.linear(x, self.weight, self.bias)

    for wrap in (Own, nn.Sequential):
        style = ContextParallel(ranges="ranges", comm=open_comms(rank, late))
        model = make()
        names = [name for name, _ in model.named_parameters()]
        model.out = wrap(model.out)  # type: ignore[assignment]
        applied = style.apply(model.core, init_device_mesh("cpu", (2,)), o=model.out)
        x = style.shard_batch({"x": random(2, 8, 16)})["x"]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            y = model(x)
        reference = make()
        theirs = ContextParallel(ranges="ranges")
        theirs.apply(reference.core, init_device_mesh("cpu", (2,)))
        expected = reference(x)
        assert torch.equal(y, expected) and applied.late == 1
        y.sum().backward()
        expected.sum().backward()
        assert len(names) == len(list(model.parameters()))
        for mine, one in zip(model.parameters(), reference.parameters(), strict=True):
            assert torch.equal(mine.grad, one.grad)


@distributed(2)
def test_an_output_that_nobody_used_is_waited_for_at_the_next_launch(rank: Rank) -> None:
    """An exception between attention and its projection: the next step is right."""
    style, model, applied = late_output(rank, True)
    x = style.shard_batch({"x": random(2, 8, 16)})["x"]
    expected = model(x)
    rank.log.events.clear()
    y = model.core(model.q(x), model.k(x), model.v(x))
    assert rank.log.count("wait all_to_all o") == 0
    del y  # as an exception would
    again = model(x)
    assert torch.equal(again, expected)
    assert rank.log.events.count("wait all_to_all o") == 2
    again.sum().backward()
    del again, expected
    model.core(model.q(x), model.k(x), model.v(x))
    applied.remove()
    assert rank.log.events.count("wait all_to_all o") == 3


@distributed(2)
def test_frozen_weights_and_inputs_take_the_ordinary_linear_layer(rank: Rank) -> None:
    for frozen in ("weights", "inputs", "all"):
        style, model, applied = late_output(rank, True)
        for name, weight in model.named_parameters():
            weight.requires_grad_(
                (frozen == "weights" and not name.startswith("out"))
                or (frozen == "inputs" and name.startswith("out"))
            )
        assert_no_graph = frozen == "all"
        y = model(style.shard_batch({"x": random(2, 8, 16)})["x"])
        assert applied.late == 1 and y.requires_grad != assert_no_graph
        if not assert_no_graph:
            y.sum().backward()
            for weight in model.parameters():
                assert (weight.grad is not None) == weight.requires_grad


@distributed(4)
def test_describe_says_who_launched_which_exchange(rank: Rank) -> None:
    mesh, ulysses = meshes(rank)["hybrid"]
    style = ContextParallel(ulysses=ulysses, heads=4, ranges="ranges")
    model = nn.ModuleDict({"attention": make(), "other": make()})
    one = model["attention"]
    style.apply(one.core, mesh, q=one.q, k=one.k, o=one.out)
    ContextParallel(ulysses=ulysses).apply(model["other"].core, mesh)
    x = style.shard_batch({"x": random(2, 16, 16)})["x"]
    one(x).sum().backward()
    table = [line.split() for line in memswap.parallel.describe(model).splitlines()[1:]]
    # 2 x 4 tokens, 4 heads of 4 numbers of 8 bytes: 1 KiB of q and o, half of it of k and v.
    forward = [
        ["q", "all-to-all", "ul", "1.0", "1", "q's", "projection"],
        ["k", "all-to-all", "ul", "0.5", "1", "k's", "projection"],
        ["v", "all-to-all", "ul", "0.5", "1", "attention"],
        ["k", "all-gather", "co", "0.5", "1", "arrival", "of", "k"],
        ["v", "all-gather", "co", "0.5", "1", "arrival", "of", "v"],
        ["o", "all-to-all", "ul", "1.0", "1", "attention"],
    ]
    assert table[:6] == [["attention.core", *line] for line in forward]
    backward = {(line[1], line[3]) for line in table[6:12]}
    assert all(line[2] == "gradient" and line[-1] == "backward" for line in table[6:12])
    assert len(table[6:12]) == 6 and ("k", "reduce-scatter") in backward
    assert table[12:] == [["other.core", "never", "ran"]]
    with pytest.raises(ValueError, match="no sharded module and no ContextParallel"):
        memswap.parallel.describe(nn.Linear(1, 1))


@distributed(2)
def test_what_is_around_attention_hands_a_late_output_on(rank: Rank) -> None:
    """A manager or a checkpoint of attention alone has an output without data to deal with."""
    mesh = init_device_mesh("cpu", (2,))
    x = random(2, 4, 16)

    def run(around: str) -> list[Any]:
        style = ContextParallel(ranges="ranges", comm=open_comms(rank, True))
        model = make()
        applied = style.apply(model.core, mesh, o=model.out if around else None)
        core = model.core.__call__
        manager = None
        if around in ("torch", "memswap"):
            one = torch.utils.checkpoint.checkpoint if around == "torch" else memswap.checkpoint
            options = {"use_reentrant": False} if around == "torch" else {}
            call = lambda q, k, v: one(core, q, k, v, **options)  # noqa: E731
        elif around == "reentrant":
            call = lambda q, k, v: torch.utils.checkpoint.checkpoint(  # noqa: E731
                core, q, k, v, use_reentrant=True
            )
        else:
            call = core
        if around == "manage":
            manager = memswap.manage([model.core, model.out])
        leaf = x.clone().requires_grad_()
        y = model.out(call(model.q(leaf), model.k(leaf), model.v(leaf)).flatten(2))
        y.square().sum().backward()
        if manager is not None:
            manager.remove()
        if around:
            assert applied.late == 1, around
        return [y, leaf.grad, *(weight.grad for weight in model.parameters())]

    expected = run("")
    for around in ("nothing", "torch", "reentrant", "memswap", "manage"):
        assert all(map(torch.equal, run(around), expected)), around
