"""What others see of sharded parameters: state_dict, checkpoints, optimizers, clipping."""

from __future__ import annotations

import copy
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor, Shard

from memswap.parallel import ShardedModule, shard
from ranks import Rank, distributed
from sharding import (
    adamw,
    assert_same,
    fully_sharded,
    loss_of,
    make_net,
    sharded,
    tokens_of,
    train,
    train_replicated,
    whole,
)


@distributed(2)
def test_names_classes_and_shapes_stay_what_they_were(rank: Rank) -> None:
    start = make_net()
    net, _ = sharded(rank, start)
    assert list(net.state_dict()) == list(start.state_dict())
    assert type(net.layers[0].wo) is nn.Linear, "only the modules that were passed change"
    assert isinstance(net.layers[0], type(start.layers[0]))
    assert isinstance(net.layers[0], ShardedModule)
    for (name, mine), theirs in zip(net.named_parameters(), start.parameters(), strict=True):
        assert isinstance(mine, DTensor) and mine.placements == (Shard(0),), name
        assert mine.shape == theirs.shape and torch.equal(mine.full_tensor(), theirs), name


@distributed(4)
def test_shards_lie_as_fully_shards_do(rank: Rank) -> None:
    start = make_net()
    net, _ = sharded(rank, start)
    peer = fully_sharded(rank, start)
    for mine, theirs in zip(net.parameters(), peer.parameters(), strict=True):
        assert mine.placements == theirs.placements
        assert torch.equal(mine.to_local(), theirs.to_local())


@distributed(2)
def test_parameters_are_sharded_between_forward_and_backward_and_keep_identity(rank: Rank) -> None:
    net, _ = sharded(rank, make_net(), reshard_after_forward=False)
    before = list(net.layers.parameters())
    loss = loss_of(net, tokens_of(0, 2)[rank.rank])
    state = net.state_dict()  # weights are gathered still; nobody sees them
    assert all(isinstance(value, DTensor) for value in state.values())
    loss.backward()
    assert all(a is b for a, b in zip(before, net.layers.parameters(), strict=True))


@distributed(2)
@pytest.mark.parametrize("ours_first", [True, False])
def test_a_distributed_checkpoint_goes_to_fully_shard_and_back(
    rank: Rank, ours_first: bool
) -> None:
    start = make_net(torch.float32, layers=2)
    ours, theirs = sharded(rank, start)[0], fully_sharded(rank, make_net(torch.float32, layers=2))
    source, target = (ours, theirs) if ours_first else (theirs, ours)
    source_optimizer, target_optimizer = adamw(source), adamw(target)
    _step(source, source_optimizer, rank, 0)
    path = [tempfile.mkdtemp() if rank.rank == 0 else None]
    dist.broadcast_object_list(path)
    model_state, optimizer_state = get_state_dict(source, source_optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path[0])
    model_state, optimizer_state = get_state_dict(target, target_optimizer)
    loaded: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(loaded, checkpoint_id=path[0])
    set_state_dict(
        target,
        target_optimizer,
        model_state_dict=loaded["model"],
        optim_state_dict=loaded["optimizer"],
    )
    assert_same(target, source, rank, bitwise=True)
    for net, optimizer in ((source, source_optimizer), (target, target_optimizer)):
        _step(net, optimizer, rank, 1)
    assert_same(target, source, rank, bitwise=True)


def _step(net: nn.Module, optimizer: torch.optim.Optimizer, rank: Rank, step: int) -> None:
    optimizer.zero_grad()
    loss_of(net, tokens_of(step, rank.size)[rank.rank]).backward()
    optimizer.step()


@distributed(2)
@pytest.mark.parametrize("assign", [False, True])
def test_a_state_dict_that_is_loaded_is_used_at_once(rank: Rank, assign: bool) -> None:
    # Also where weights were gathered before: they would be the old ones.
    net, _ = sharded(rank, make_net(layers=2), reshard_after_forward=False)
    other, _ = sharded(rank, make_net(layers=2))
    train(other, rank, steps=1)
    tokens = tokens_of(3, 2)[rank.rank]
    loss_of(net, tokens)  # gathered, and never used by a backward
    net.load_state_dict(other.state_dict(), assign=assign)
    assert torch.equal(loss_of(net, tokens), loss_of(other, tokens))


@distributed(2, 4)
def test_the_gradient_norm_is_clipped_as_in_one_process(rank: Rank) -> None:
    start = make_net()
    reference = copy.deepcopy(start)
    net, _ = sharded(rank, start)
    loss_of(net, tokens_of(0, rank.size)[rank.rank]).backward()
    loss_of(reference, tokens_of(0, rank.size)[rank.rank]).backward()
    for parameter in reference.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= rank.size
    mine = nn.utils.clip_grad_norm_(net.parameters(), 0.01).full_tensor()
    theirs = nn.utils.clip_grad_norm_(reference.parameters(), 0.01)
    torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=0)
    for a, b in zip(net.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a.grad.full_tensor(), b.grad, rtol=0, atol=1e-15)


@distributed(2)
@pytest.mark.parametrize("kind", ["foreach", "fused", "sgd"])
def test_optimizers_step_on_shards(rank: Rank, kind: str) -> None:
    def make(net: nn.Module) -> torch.optim.Optimizer:
        if kind == "sgd":
            return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        return torch.optim.AdamW(net.parameters(), lr=1e-2, **{kind: True})

    start = make_net(layers=1)
    reference = copy.deepcopy(start)
    net, _ = sharded(rank, start, context={"slots": 1})
    train(net, rank, make=make)
    train_replicated(reference, rank, make=make)
    assert_same(net, reference, rank, bitwise=True)


@distributed(2)
@pytest.mark.parametrize("late", [False, True], ids=["async", "late"])
def test_an_optimizer_in_backward_steps_on_shards(rank: Rank, late: bool) -> None:
    start = make_net(layers=2)
    reference = copy.deepcopy(start)
    net, _ = sharded(rank, start, late=late, context={"slots": 2})
    optimizers = {p: torch.optim.AdamW([p], lr=1e-2, weight_decay=0.1) for p in net.parameters()}

    def step(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        parameter.grad = None

    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    for i in range(3):
        loss_of(net, tokens_of(i, 2)[rank.rank]).backward()
    train_replicated(reference, rank)
    assert_same(net, reference, rank, bitwise=True)


@distributed(2)
def test_weights_that_stayed_are_not_used_after_an_optimizer_step(rank: Rank) -> None:
    # An evaluation between two steps leaves weights behind; the next forward must not use them.
    start = make_net(layers=2)
    reference = copy.deepcopy(start)
    net, _ = sharded(rank, start, reshard_after_forward=False, residency="step")
    optimizers = [adamw(net), adamw(reference)]
    for step in range(3):
        tokens = tokens_of(step, 2)
        for one, optimizer in zip((net, reference), optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(one, tokens[rank.rank]).backward()
            if one is reference:
                for parameter in one.parameters():
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= 2
            with torch.no_grad():
                loss_of(one, tokens[0])  # gathers, and keeps
            optimizer.step()
        with torch.no_grad():
            assert torch.equal(loss_of(net, tokens[1]), loss_of(reference, tokens[1]))


@distributed(2)
def test_a_model_on_the_meta_device_is_sharded_and_then_filled(rank: Rank) -> None:
    start = make_net(torch.float32, layers=1)
    with torch.device("meta"):
        empty = make_net(torch.float32, layers=1)
    with_meta = copy.deepcopy(empty)
    for layer in with_meta.layers:
        shard(layer, rank.mesh)
    shard(with_meta, rank.mesh)
    with_meta.to_empty(device="cpu")
    source, _ = sharded(rank, start)
    with_meta.load_state_dict(source.state_dict())
    train(with_meta, rank, steps=1)
    train(source, rank, steps=1)
    assert_same(with_meta, source, rank, bitwise=True)


@distributed(2)
def test_a_model_may_change_its_dtype_after_sharding(rank: Rank) -> None:
    start = make_net(torch.float32, layers=1)
    net, _ = sharded(rank, start, context={"slots": 2})
    loss_of(net, tokens_of(0, 2)[rank.rank]).backward()
    net.zero_grad()
    net.double()
    reference = copy.deepcopy(start).double()
    train(net, rank)
    train_replicated(reference, rank)
    assert_same(net, reference, rank, bitwise=True)


@distributed(2)
def test_attributes_of_parameters_move_to_their_shards(rank: Rank) -> None:
    layer = nn.Linear(2, 2)
    layer.weight.no_decay = True  # type: ignore[attr-defined]
    shard(layer, rank.mesh)
    assert layer.weight.no_decay
    seen = []
    layer.register_forward_pre_hook(lambda module, args: seen.append(module.weight.no_decay))
    layer(torch.ones(1, 2))
    assert seen == [True]


@distributed(2)
def test_ignored_parameters_stay_as_they_are(rank: Rank) -> None:
    layer = nn.Linear(2, 2)
    bias = layer.bias
    shard(layer, rank.mesh, ignored_params={bias})
    layer(torch.ones(1, 2)).sum().backward()
    assert layer.bias is bias and bias.grad is not None
    assert isinstance(layer.weight, DTensor)


@distributed(2)
def test_a_gathered_copy_of_everything_is_what_one_process_has(rank: Rank) -> None:
    start = make_net()
    for name, value in whole(sharded(rank, start)[0]).items():
        assert torch.equal(value, dict(start.named_parameters())[name])
