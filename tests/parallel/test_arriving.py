"""Arriving tensors: they wait at their first use, both ways, and nothing reads them before."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import memswap.parallel.arriving as arriving_module
from memswap.parallel import HeadsToSequence, exchange
from memswap.parallel.arriving import ArrivingTensor, split_linear
from memswap.parallel.in_flight import InFlight
from ranks import Rank, distributed

LATE = pytest.mark.parametrize("late", [False, True], ids=["async", "late"])
FP64 = torch.float64


def heads_to_sequence(rank: Rank, late: bool) -> HeadsToSequence:
    comm = rank.open_comm(late=late)
    return HeadsToSequence(comm, ((0, 1), (2, 3)), (3, 2), 1, 2)


def attention_output() -> torch.Tensor:
    return torch.randn(2, 5, 2, 3, dtype=FP64)


class Doubled(torch.autograd.Function):
    """A kernel of somebody's own: torch does not see what it is given."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * 2


class PassedOn(torch.autograd.Function):
    """Makes its tensor in forward, as a reentrant checkpoint does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, make: Any) -> torch.Tensor:
        return make(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient.new_ones(2, 5, 2, 3) * gradient.sum(), None


def copied_and_edited(o: torch.Tensor) -> torch.Tensor:
    copied = o.transpose(1, 2).contiguous()
    o.mul_(2)
    return copied.sum() + o.sin().sum()


def in_inference(o: torch.Tensor) -> float:
    with torch.inference_mode():
        return float((o.flatten(2) * 2).sum())


def without_a_graph(o: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return o * 2


USES: dict[str, Any] = {
    "a function": lambda o: o.sin(),
    "a method of torch": lambda o: torch.mul(o, o),
    "rearranged": lambda o: o.flatten(2).unflatten(-1, (6, 2)).transpose(1, 2).contiguous() * 3,
    "copied and edited": copied_and_edited,
    "in place": lambda o: o.mul_(2) + o,
    "a custom Function": Doubled.apply,
    "a custom Function, rearranged": lambda o: Doubled.apply(o.transpose(1, 2).flatten(2)),
    "both": lambda o: Doubled.apply(o) + o.sin() + Doubled.apply(o.transpose(0, 1)).transpose(0, 1),
    "both, the custom one last": lambda o: o.sin() + Doubled.apply(o),
    "two consumers": lambda o: (o.flatten(2) * 2).sum() + o.cos().sum(),
    "detached": lambda o: o.detach() * 2 + o,
    "without a graph first": lambda o: without_a_graph(o) + o.sin(),
    "in inference first": lambda o: in_inference(o) + o.sin(),
    "a checkpoint": lambda o: checkpoint(torch.sin, o.flatten(2), use_reentrant=False),
    "a reentrant checkpoint": lambda o: checkpoint(torch.sin, o.flatten(2), use_reentrant=True),
    "a list": lambda o: torch.cat([o, o], dim=0),
    "a keyword": lambda o: torch.mul(input=o, other=o),
    "indexing": lambda o: o[:, 1:] * 2,
    "a DTensor": lambda o: DTensor.from_local(o, init_device_mesh("cpu", (2,))).to_local() * 2,
    "einsum": lambda o: torch.einsum("bthd,bthd->bth", o, o),
    "a C++ operator": lambda o: torch.ops.aten.mul(o, 2.0),
    "its data": lambda o: o.data * o,
    "numpy": lambda o: o * float(o.detach().numpy().sum()),
    "layer norm": lambda o: F.layer_norm(o, (3,)),
}


@distributed(2)
@LATE
def test_every_use_of_an_arriving_tensor_is_that_of_the_plain_one(rank: Rank, late: bool) -> None:
    spec = heads_to_sequence(rank, late)
    for name, use in USES.items():
        x = attention_output()
        results = []
        for arriving in (False, True):
            leaf = x.clone().requires_grad_()
            pending = exchange(leaf * 1, spec)
            o = pending.arriving() if arriving else pending.wait()
            assert isinstance(o, ArrivingTensor) == arriving
            assert o.shape == (2, (3, 2)[rank.rank], 4, 3) and o.requires_grad and o.dtype == FP64
            y = use(o)
            assert not isinstance(y, ArrivingTensor), name
            y.square().sum().backward()
            results.append((y.detach(), leaf.grad))
        (y, gradient), (late_y, late_gradient) = results
        assert torch.equal(y, late_y), name
        assert gradient is not None and late_gradient is not None
        torch.testing.assert_close(late_gradient, gradient, rtol=1e-15, atol=1e-15, msg=name)
        if "both" not in name:
            assert torch.equal(gradient, late_gradient), name
    rank.log.assert_all_waited()
    rank.same_everywhere(rank.log.events, "launches and waits")


@distributed(2)
@LATE
def test_a_use_outside_of_custom_functions_is_one_exchange_each_way(rank: Rank, late: bool) -> None:
    spec = heads_to_sequence(rank, late)
    x = attention_output().requires_grad_()
    o = exchange(x, spec, label="o").arriving()
    (o.flatten(2).sum() + o.sin().sum()).backward()
    names = ("all_to_all o", "all_to_all o gradient")
    assert rank.log.events == [f"{w}{name}" for name in names for w in ("", "wait ")]


@distributed(2)
@LATE
def test_a_tensor_that_another_node_returns_has_that_nodes_gradient(rank: Rank, late: bool) -> None:
    """Made where nothing is recorded, and given a history afterwards: a reentrant checkpoint."""
    spec = heads_to_sequence(rank, late)
    for rearrange in (lambda o: o, lambda o: o.flatten(2)):
        x = attention_output().requires_grad_()
        o = PassedOn.apply(x, lambda x: rearrange(exchange(x, spec).arriving()))
        assert isinstance(o, ArrivingTensor)
        o.flatten(1).sum().backward()
        assert x.grad is not None and torch.equal(x.grad, torch.full_like(x, float(o.numel())))


@distributed(2)
@LATE
def test_the_output_flies_beside_what_comes_before_its_first_use(rank: Rank, late: bool) -> None:
    """And its gradient beside the same in backward, and beside the projection's weight gradient."""
    spec = heads_to_sequence(rank, late)
    torch.manual_seed(1)
    project = nn.Linear(12, 4, dtype=FP64)
    beside = nn.Linear(3, 4, dtype=FP64)
    project.weight.register_hook(lambda _: rank.log("projection's weight gradient"))
    beside.weight.register_hook(lambda _: rank.log("branch gradient"))
    x, z = attention_output(), torch.randn(2, spec.lengths[rank.rank], 3, dtype=FP64)
    o = exchange(x.requires_grad_(), spec, label="o").arriving()
    branch = beside(z)
    rank.log("branch")
    (project(o.flatten(2)) + branch).square().sum().backward()
    launch = "all_to_all o gradient"
    assert rank.log.events[:4] == ["all_to_all o", "branch", "wait all_to_all o", launch]
    assert sorted(rank.log.events[4:6]) == ["branch gradient", "projection's weight gradient"]
    assert rank.log.events[6:] == [f"wait {launch}"]


class NoTicket:
    def wait(self) -> None:
        return None


class Unwaited(HeadsToSequence):
    """Hands out what has not arrived."""

    def launch(self, tensor: torch.Tensor, label: str) -> InFlight:
        launched = super().launch(tensor, label)
        return InFlight(NoTicket(), launched._unpack, launched.shape)


def weight_first(input: Any, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The input is made before the weight's side has its place."""
    x = input()
    return split_linear(lambda: x, weight, bias)


@distributed(2)
def test_each_broken_order_of_an_arriving_tensor_is_noticed(rank: Rank) -> None:
    spec = heads_to_sequence(rank, True)
    broken = Unwaited(spec.comm, spec.heads, spec.lengths, spec.seq_dim, spec.head_dim)
    for one, arrives in ((spec, True), (broken, False)):
        o = exchange(torch.ones(2, 5, 2, 3, dtype=FP64), one).arriving()
        assert bool((o * 1 == 1).all()) == arrives
    linear = nn.Linear(12, 4, dtype=FP64)
    linear.weight.register_hook(lambda _: rank.log("weight gradient"))
    for split, beside in ((split_linear, True), (weight_first, False)):
        with mock.patch.object(arriving_module, "split_linear", split):
            o = exchange(attention_output().requires_grad_(), spec, label="o").arriving()
            linear(o.flatten(2)).sum().backward()
        assert rank.log.before("all_to_all o gradient", "weight gradient") == beside
        rank.log.events.clear()


@distributed(2)
def test_what_dies_unused_is_waited_for(rank: Rank) -> None:
    spec = heads_to_sequence(rank, True)
    orphans: list[Any] = []
    o = exchange(attention_output(), spec).arriving(orphans=orphans)
    flat = o.flatten(2)
    del o
    assert not orphans
    del flat
    assert len(orphans) == 1
    orphans.pop()()
    with torch.inference_mode():
        assert not isinstance(exchange(attention_output(), spec).arriving(), ArrivingTensor)


@distributed(2)
def test_an_exception_between_the_gradients_of_an_arriving_tensor(rank: Rank) -> None:
    """What the failed pass left in flight does not get into the next one's gradient."""
    spec = heads_to_sequence(rank, True)
    fails = [True]

    def fail(gradient: torch.Tensor) -> None:
        if fails and fails.pop():
            raise RuntimeError("on purpose")

    results = []
    for use in (Doubled.apply, lambda o: Doubled.apply(o) + o * 2):
        x = torch.ones(2, 5, 2, 3, dtype=FP64, requires_grad=True)
        o = exchange(x, spec).arriving()
        y = use(o).sum()
        o_grad_fn = y.grad_fn.next_functions[0][0]
        handle = o_grad_fn.register_hook(lambda *_: fail(x))
        fails.append(True)
        with pytest.raises(RuntimeError, match="on purpose"):
            y.backward(retain_graph=True)
        handle.remove()
        y.backward()
        results.append(x.grad)
    assert torch.equal(results[0], torch.full_like(x, 2.0))
    assert torch.equal(results[1], torch.full_like(x, 4.0))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_a_split_linear_has_the_bits_of_the_whole_one(dtype: torch.dtype, bias: bool) -> None:
    torch.manual_seed(0)
    for shape in ((7, 12), (2, 5, 12), (2, 3, 5, 12)):
        for transposed in (False, True):
            linear = nn.Linear(12, 8, bias=bias, dtype=dtype)
            x = torch.randn(shape, dtype=dtype)
            x = (x.transpose(0, 1) if transposed and x.ndim > 2 else x).requires_grad_()
            y = linear(x)
            go = torch.randn_like(y)
            inputs = (x, *linear.parameters())
            expected = torch.autograd.grad(y, inputs, go)
            split = split_linear(lambda x=x: x, linear.weight, linear.bias)
            assert torch.equal(split, y)
            (alone,) = torch.autograd.grad(split, x, go, retain_graph=True)
            assert torch.equal(alone, expected[0])
            got = torch.autograd.grad(split, inputs, go)
            assert all(map(torch.equal, got, expected)), (shape, transposed)


@pytest.mark.slow
@distributed(2)
def test_compiled_code_may_get_an_arriving_tensor(rank: Rank) -> None:
    spec = heads_to_sequence(rank, True)
    linear = nn.Linear(12, 4, dtype=FP64)

    def project(o: torch.Tensor) -> torch.Tensor:
        return linear(o.flatten(2)).sin()

    gradients = []
    for run in (project, torch.compile(project, backend="eager")):
        x = torch.ones(2, 5, 2, 3, dtype=FP64, requires_grad=True)
        y = run(exchange(x, spec).arriving())
        y.sum().backward()
        gradients.append(x.grad)
    assert torch.equal(gradients[0], gradients[1])
