"""Sharded training gives the bits of replicated training and of FSDP2."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from memswap.parallel import ShardContext, shard
from ranks import Rank, distributed
from sharding import (
    assert_same,
    fully_sharded,
    loss_of,
    make_net,
    moved,
    sharded,
    tokens_of,
    train,
    train_replicated,
)

SLOW = pytest.mark.slow

#: The late communicator shows what waits for nothing; the real one stands in the tests beside
#: `fully_shard`, of optimizers, of recipes and of state.
LATE = pytest.mark.parametrize(
    "late", [pytest.param(False, marks=SLOW, id="async"), pytest.param(True, id="late")]
)


@distributed(2)
@pytest.mark.parametrize("late", [pytest.param(False, marks=SLOW, id="async"), True])
@pytest.mark.parametrize("slots", [None, 1, 2, pytest.param(3, marks=SLOW)])
@pytest.mark.parametrize("reshard", [True, False], ids=["reshard", "keep"])
def test_training_equals_replicated_training(
    rank: Rank, late: bool, slots: int | None, reshard: bool
) -> None:
    train_beside_replicas(rank, late, slots, reshard)


@distributed(4)
@pytest.mark.parametrize("late", [pytest.param(False, marks=SLOW, id="async"), True])
@pytest.mark.parametrize("slots", [pytest.param(None, marks=SLOW), 2])
@pytest.mark.parametrize("reshard", [True, pytest.param(False, marks=SLOW)])
def test_training_equals_replicated_training_on_four_ranks(
    rank: Rank, late: bool, slots: int | None, reshard: bool
) -> None:
    train_beside_replicas(rank, late, slots, reshard)


def train_beside_replicas(rank: Rank, late: bool, slots: int | None, reshard: bool) -> None:
    start = make_net()
    reference = copy.deepcopy(start)
    net, context = sharded(
        rank, start, late=late, context={"slots": slots}, reshard_after_forward=reshard
    )
    train(net, rank)
    train_replicated(reference, rank)
    assert moved(net, start)
    assert_same(net, reference, rank, bitwise=rank.size == 2)
    assert context.stats().lent == 0, "weights were left behind"


@distributed(2)
def test_training_equals_fully_shard(rank: Rank) -> None:
    start = make_net(torch.float32)
    net, _ = sharded(rank, start, late=True, context={"slots": 2})
    peer = fully_sharded(rank, start)
    for mine, theirs in zip(train(net, rank), train(peer, rank), strict=True):
        assert torch.equal(mine, theirs)
    assert_same(net, peer, rank, bitwise=True)


@distributed(2)
@LATE
@pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
@pytest.mark.parametrize("checkpointed", [[0, 1, 2], [0, 1], [2]], ids=str)
def test_training_under_checkpointing(
    rank: Rank, late: bool, reentrant: bool, checkpointed: list[int]
) -> None:
    start = make_net()
    start.checkpointed, start.reentrant = checkpointed, reentrant
    reference = copy.deepcopy(start)
    net, _ = sharded(rank, start, late=late, context={"slots": 2})
    train(net, rank)
    train_replicated(reference, rank)
    assert_same(net, reference, rank, bitwise=True)


@distributed(2)
@LATE
@pytest.mark.parametrize("param", [None, torch.bfloat16], ids=["", "bf16"])
@pytest.mark.parametrize("reduce", [None, torch.float32], ids=["", "reduce32"])
def test_mixed_precision_equals_that_of_fully_shard(
    rank: Rank, late: bool, param: torch.dtype | None, reduce: torch.dtype | None
) -> None:
    start = make_net(torch.float32, layers=2)
    policy = MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce)
    net, _ = sharded(rank, start, late=late, context={"slots": 2}, mp_policy=policy)
    peer = fully_sharded(rank, start, mp_policy=policy)
    for mine, theirs in zip(train(net, rank), train(peer, rank), strict=True):
        assert torch.equal(mine, theirs)
    assert_same(net, peer, rank, bitwise=True)
    assert all(value.dtype == torch.float32 for value in net.parameters())


@distributed(2)
def test_inputs_and_outputs_are_cast_as_the_policy_says(rank: Rank) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    seen = []
    layer = nn.Linear(4, 4)
    layer.register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    out = shard(layer, rank.mesh, mp_policy=policy)(torch.ones(2, 4))
    assert seen == [torch.bfloat16]
    assert out.dtype == torch.float32


@distributed(2, 4)
@LATE
def test_tied_weights_in_one_call_stay_tied(rank: Rank, late: bool) -> None:
    start = make_net(tied=True, layers=2)
    reference = copy.deepcopy(start)
    net, context = (
        copy.deepcopy(start),
        ShardContext(slots=2, open_comm=lambda group: rank.open_comm(group, late=late)),
    )
    for layer in net.layers:
        shard(layer, rank.mesh, context=context)
    shard([net.embed, net.head, net.norm], rank.mesh, context=context)
    assert net.embed.weight is net.head.weight
    train(net, rank)
    train_replicated(reference, rank)
    assert moved(net, start)
    assert_same(net, reference, rank, bitwise=rank.size == 2)


@distributed(2)
@LATE
@pytest.mark.parametrize("sync_each", [True, False], ids=["reduce each", "reduce last"])
@pytest.mark.parametrize("residency", ["use", "step"])
def test_gradient_accumulation_both_ways(
    rank: Rank, late: bool, sync_each: bool, residency: str
) -> None:
    start = make_net(layers=2)
    reference = copy.deepcopy(start)
    net, context = sharded(rank, start, late=late, context={"slots": 2}, residency=residency)
    first, second = (tokens_of(step, rank.size)[rank.rank] for step in range(2))
    for last, tokens in ((False, first), (True, second)):
        net.set_requires_gradient_sync(sync_each or last)
        loss_of(net, tokens).backward()
        loss_of(reference, tokens).backward()
    launched = rank.log.count("all_gather layers.")
    if residency == "step" and not sync_each:
        assert launched == 2, "weights were gathered more than once in a step"
    assert rank.log.count("reduce_scatter") == (6 if sync_each else 3)
    assert context.stats().lent == 0
    for (name, mine), theirs in zip(net.named_parameters(), reference.parameters(), strict=True):
        dist.all_reduce(theirs.grad)
        torch.testing.assert_close(
            mine.grad.full_tensor(), theirs.grad / 2, rtol=0, atol=1e-15, msg=name
        )


@distributed(2)
def test_accumulation_in_low_precision_equals_that_of_fully_shard(rank: Rank) -> None:
    start = make_net(torch.float32, layers=1)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    net, _ = sharded(rank, start, late=True, mp_policy=policy)
    peer = fully_sharded(rank, start, mp_policy=policy)
    for step in range(3):
        for one in (net, peer):
            one.set_requires_gradient_sync(step == 2)
            loss_of(one, tokens_of(step, 2)[rank.rank]).backward()
    for mine, theirs in zip(net.parameters(), peer.parameters(), strict=True):
        assert torch.equal(mine.grad.full_tensor(), theirs.grad.full_tensor())


@distributed(2)
@LATE
@pytest.mark.parametrize("reentrant", [None, False, True], ids=["", "checkpoint", "reentrant"])
def test_frozen_weights_with_trained_adapters(
    rank: Rank, late: bool, reentrant: bool | None
) -> None:
    # A frozen weight is read by the operators that lead to the unit's input, after the adapter's
    # gradient is there already: weights that were dropped then would be missed.
    start = make_net()
    start.checkpointed, start.reentrant = ([] if reentrant is None else [0, 1, 2]), bool(reentrant)
    for name, parameter in start.named_parameters():
        parameter.requires_grad_("down" in name or "embed" in name)
    reference = copy.deepcopy(start)
    net, context = sharded(rank, start, late=late, context={"slots": 2})
    train(net, rank)
    train_replicated(reference, rank)
    assert_same(net, reference, rank, bitwise=True)
    assert context.stats().peak_lent <= 3, "frozen units kept their weights through backward"
    for name, parameter in net.named_parameters():
        assert (parameter.grad is None) == (not parameter.requires_grad), name


@distributed(2)
@LATE
def test_a_parameter_that_is_frozen_later_is_left_alone(rank: Rank, late: bool) -> None:
    start = make_net(layers=2)
    net, _ = sharded(rank, start, late=late)
    train(net, rank, steps=1)
    frozen = net.layers[0].wo.weight
    frozen.requires_grad_(False)
    before = frozen.full_tensor().clone()
    train(net, rank, steps=1)
    assert torch.equal(frozen.full_tensor(), before)
    assert torch.isfinite(net.layers[0].up.weight.full_tensor()).all()


class Branches(nn.Module):
    """Two linear layers of which a call uses one, or none."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(3, 3)
        self.right = nn.Linear(3, 3)
        self.never = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, branch: str) -> torch.Tensor:
        return self.left(x) if branch == "left" else self.right(x)


@distributed(2)
@LATE
def test_ranks_may_take_different_branches(rank: Rank, late: bool) -> None:
    torch.manual_seed(3)
    start = Branches().double()
    net = shard(
        copy.deepcopy(start),
        rank.mesh,
        context=ShardContext(open_comm=lambda group: rank.open_comm(group, late=late), debug=True),
    )
    x = torch.ones(2, 3, dtype=torch.float64)
    net(x, ["left", "right"][rank.rank]).sum().backward()
    start(x, "left").sum().backward()
    start(x, "right").sum().backward()
    for (name, mine), theirs in zip(net.named_parameters(), start.parameters(), strict=True):
        if "never" in name:
            assert mine.grad is None, "a parameter that no rank used got a gradient"
        else:
            assert torch.equal(mine.grad.full_tensor(), theirs.grad / 2), name


@distributed(2, 4)
@LATE
@pytest.mark.parametrize("rows", [1, 3, 4, 5])
def test_uneven_and_empty_shards(rank: Rank, late: bool, rows: int) -> None:
    torch.manual_seed(3)
    start = nn.Sequential(nn.Linear(2, rows), nn.Linear(rows, 3)).double()
    net = copy.deepcopy(start)
    context = ShardContext(
        slots=1, open_comm=lambda group: rank.open_comm(group, late=late), debug=True
    )
    for layer in net:
        shard(layer, rank.mesh, context=context)
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.1) for one in (net, start)]
    for _ in range(2):
        x = torch.randn(rank.size, 4, 2, dtype=torch.float64)
        net(x[rank.rank]).pow(2).sum().backward()
        (start(x.flatten(0, 1)).pow(2).sum() / rank.size).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same(net, start, rank, bitwise=False)


@distributed(2)
@LATE
def test_modules_that_run_twice_are_skipped_or_change_their_order(rank: Rank, late: bool) -> None:
    class Any(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

        def forward(self, x: torch.Tensor, order: list[int]) -> torch.Tensor:
            for i in order:
                x = self.layers[i](x).tanh()
            return x

    start = Any().double()
    net = copy.deepcopy(start)
    context = ShardContext(
        slots=2, open_comm=lambda group: rank.open_comm(group, late=late), debug=True
    )
    for layer in net.layers:
        shard(layer, rank.mesh, context=context)
    for order in ([0, 1, 2, 3], [3, 1, 1, 0], [2], [0, 0, 0, 3, 2, 1], [1, 3], [0, 1, 2, 3]):
        x = torch.randn(2, 3, 4, dtype=torch.float64)
        for one in (net, start):
            one.zero_grad()
        net(x[rank.rank], order).sum().backward()
        (start(x[0], order).sum() / 2 + start(x[1], order).sum() / 2).backward()
        for (name, mine), theirs in zip(net.named_parameters(), start.parameters(), strict=True):
            if theirs.grad is None:
                assert mine.grad is None
            else:
                torch.testing.assert_close(
                    mine.grad.full_tensor(), theirs.grad, rtol=0, atol=1e-14, msg=f"{order} {name}"
                )
    assert context.stats().overflows == 0
    assert context.stats().lent == 0


@distributed(2)
@LATE
def test_two_graphs_alive_as_in_a_pipeline(rank: Rank, late: bool) -> None:
    start = make_net(layers=2)
    reference = copy.deepcopy(start)
    net, context = sharded(rank, start, late=late, context={"slots": 2})
    tokens = [tokens_of(step, 2)[rank.rank] for step in range(3)]
    for one in (net, reference):
        first, second = loss_of(one, tokens[0]), loss_of(one, tokens[1])
        first.backward()
        third = loss_of(one, tokens[2])
        second.backward()
        third.backward()
    assert context.stats().lent == 0
    for mine, theirs in zip(net.parameters(), reference.parameters(), strict=True):
        dist.all_reduce(theirs.grad)
        torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad / 2, rtol=0, atol=1e-15)


@distributed(2)
@LATE
def test_an_embedding_needs_no_weights_in_backward(rank: Rank, late: bool) -> None:
    start = make_net(layers=1)
    reference = copy.deepcopy(start)
    net = copy.deepcopy(start)
    context = ShardContext(open_comm=lambda group: rank.open_comm(group, late=late), debug=True)
    shard(net.embed, rank.mesh, context=context, unshard_in_backward=False)
    shard(net.layers[0], rank.mesh, context=context)
    shard(net, rank.mesh, context=context)
    train(net, rank)
    train_replicated(reference, rank)
    assert_same(net, reference, rank, bitwise=True)
    assert rank.log.count("all_gather embed") == 3


@distributed(4)
@LATE
def test_dense_and_expert_groups_side_by_side(rank: Rank, late: bool) -> None:
    # Experts are sharded over pairs of ranks, the rest over all four; each has a communicator.
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "efsdp"))
    start = make_net(layers=2)
    reference = copy.deepcopy(start)
    net = copy.deepcopy(start)
    context = ShardContext(
        slots=2, open_comm=lambda group: rank.open_comm(group, late=late), debug=True
    )
    for layer in net.layers:
        shard(layer.down, mesh["efsdp"], context=context)
        shard(layer, rank.mesh, context=context)
    shard(net, rank.mesh, context=context)
    loss_of(net, tokens_of(0, 4)[rank.rank]).backward()
    loss_of(reference, tokens_of(0, 4)[rank.rank]).backward()
    for (name, mine), theirs in zip(net.named_parameters(), reference.parameters(), strict=True):
        expert = ".down." in name
        group = mesh["efsdp"].get_group() if expert else None
        dist.all_reduce(theirs.grad, group=group)
        torch.testing.assert_close(
            mine.grad.full_tensor(), theirs.grad / (2 if expert else 4), rtol=0, atol=1e-14
        )
    rank.same_everywhere(rank.log.events, "the order of collectives")


@SLOW
@distributed(2)
@pytest.mark.parametrize("checkpointed", [[], [0, 1]], ids=str)
def test_compiled_layers_train_the_same(rank: Rank, checkpointed: list[int]) -> None:
    start = make_net(torch.float32, layers=2)
    start.checkpointed = checkpointed
    net, _ = sharded(rank, start, late=True, context={"slots": 2})
    reference = copy.deepcopy(start)
    for model in (net, reference):
        for layer in model.layers:
            layer.compile(backend="aot_eager")
    train(net, rank, steps=2)
    train_replicated(reference, rank, steps=2)
    assert_same(net, reference, rank, bitwise=True)
    assert rank.log.count("all_gather layers.") == 8
