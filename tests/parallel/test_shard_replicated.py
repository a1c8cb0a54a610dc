"""Weights sharded over one dimension of a mesh and replicated over another (HSDP)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard

from memswap.parallel import ShardContext, describe, shard
from memswap.parallel.unit import Reduction
from ranks import Rank, distributed
from sharding import Net, assert_same, loss_of, make_net, moved, tokens_of, train, whole

LATE = pytest.mark.parametrize("late", [False, True], ids=["async", "late"])


def grid() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def replicated(
    rank: Rank, net: Net, mesh: DeviceMesh, late: bool = False, **how: Any
) -> tuple[Net, ShardContext]:
    """A copy of the net, each layer and the rest sharded over rows of the mesh."""
    net = copy.deepcopy(net)
    context = ShardContext(
        slots=2, open_comm=lambda group: rank.open_comm(group, late=late), debug=True
    )
    for module in (*net.layers, net):
        shard(module, mesh, context=context, **how)
    return net, context


def fully_replicated(net: Net, mesh: DeviceMesh, **how: Any) -> Net:
    net = copy.deepcopy(net)
    for module in (*net.layers, net):
        fully_shard(module, mesh=mesh, **how)
    return net


@distributed(4)
@pytest.mark.parametrize("low", [False, True], ids=["fp64", "bf16"])
@pytest.mark.parametrize("late", [pytest.param(False, marks=pytest.mark.slow, id="async"), True])
def test_training_equals_that_of_fully_shard_on_the_same_mesh(
    rank: Rank, late: bool, low: bool
) -> None:
    mesh = grid()
    start = make_net(torch.float32 if low else torch.float64)
    start.checkpointed = [0]
    how = {}
    if low:
        how["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    net, context = replicated(rank, start, mesh, late, **how)
    reference = fully_replicated(start, mesh, **how)
    for mine, theirs in zip(net.parameters(), reference.parameters(), strict=True):
        assert mine.placements == theirs.placements == (Replicate(), Shard(0))
        assert torch.equal(mine.to_local(), theirs.to_local())
    train(net, rank)
    train(reference, rank)
    assert moved(net, start)
    assert_same(net, reference, rank, bitwise=True)
    norms = [
        nn.utils.clip_grad_norm_(one.parameters(), 0.01).full_tensor() for one in (net, reference)
    ]
    assert torch.equal(*norms)
    assert context.stats().lent == 0 and context.stats().overflows == 0
    rank.same_everywhere(rank.log.events, "the order of collectives")


@distributed(4)
def test_each_reduction_flies_beside_a_backward_then_the_replicas_one_beside_the_next(
    rank: Rank,
) -> None:
    net, _ = replicated(rank, make_net(layers=4), grid())
    for layer in net.layers:
        layer.log = rank.log
    loss_of(net, tokens_of(0, 4)[rank.rank]).backward()
    log = rank.log
    assert log.count("reduce_scatter") == log.count("all_reduce") == 5
    for i in (3, 2):
        order = [
            f"reduce_scatter layers.{i}",
            f"B{i - 1}",
            f"wait reduce_scatter layers.{i}",
            f"all_reduce layers.{i}",
            f"reduce_scatter layers.{i - 1}",
            f"B{i - 2}",
            f"wait all_reduce layers.{i}",
        ]
        assert [log.index(event) for event in order] == sorted(map(log.index, order)), log.events
    assert "all-reduce layers.3: reduce-scatter arrived" in describe(net)


@distributed(4)
@LATE
def test_accumulation_branches_and_sums_over_replicas(rank: Rank, late: bool) -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.each, self.some, self.none = (nn.Linear(3, 3).double() for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.each(x)
            return self.some(x) if rank.rank == 3 else x

    torch.manual_seed(1)
    start = Branches()
    net, plain = copy.deepcopy(start), start
    context = ShardContext(open_comm=lambda group: rank.open_comm(group, late=late), debug=True)
    shard(net, grid(), context=context)
    net.set_gradient_divide_factor(1)
    x = torch.arange(6.0).double().view(2, 3) + rank.rank
    for sync in (False, True):
        net.set_requires_gradient_sync(sync)
        net(x).sum().backward()
        plain(x).sum().backward()
    for name, parameter in plain.named_parameters():
        mine = net.get_parameter(name).grad
        if name.startswith("none"):
            assert mine is None, "nobody used it"
            continue
        total = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        dist.all_reduce(total)
        torch.testing.assert_close(mine.full_tensor(), total, rtol=0, atol=1e-12, msg=name)


@distributed(4)
@pytest.mark.parametrize("broken", [False, True], ids=["", "broken"])
def test_training_notices_when_replicas_reduce_what_has_not_arrived(
    rank: Rank, broken: bool
) -> None:
    def replicate(reduction: Reduction) -> bool:
        comm = reduction.unit.replicas
        assert comm is not None
        if not reduction.replicated:
            reduction.replicated = True
            first, tensors = reduction.ticket, [*reduction.outputs, reduction.used]
            reduction.ticket = comm.all_reduce(tensors, label=reduction.unit.name)
            reduction.ticket.wait()
            reduction.ticket = first
        return True

    start, mesh = make_net(layers=2), grid()
    reference = fully_replicated(start, mesh)
    train(reference, rank, steps=1)
    with pytest.MonkeyPatch.context() as patched:
        if broken:
            patched.setattr(Reduction, "replicate", replicate)
        net, _ = replicated(rank, start, mesh, late=True)
        train(net, rank, steps=1)
    right = whole(reference)
    equal = all(torch.equal(value, right[name]) for name, value in whole(net).items())
    assert equal is not broken, "training was the same with the edge broken"
