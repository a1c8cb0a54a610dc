"""Sharded weights together with managed activations and checkpointing."""

from __future__ import annotations

import copy
import tempfile

import pytest
import torch

import memswap
from ranks import Rank, distributed
from sharding import assert_same, loss_of, make_net, moved, sharded, tokens_of, train


@distributed(2)
@pytest.mark.parametrize("late", [pytest.param(False, marks=pytest.mark.slow, id="async"), True])
@pytest.mark.parametrize("action", ["swap", "encode"])
@pytest.mark.parametrize("checkpointed", [[], [0], [0, 1, 2]], ids=str)
def test_shard_manage_and_checkpoint_compose(
    rank: Rank, late: bool, action: str, checkpointed: list[int]
) -> None:
    start = make_net(torch.float32, d=64)
    reference, _ = sharded(rank, start)
    net, context = sharded(rank, start, late=late, context={"slots": 2})
    net.checkpointed = checkpointed
    with tempfile.TemporaryDirectory() as folder:
        manager = memswap.manage(
            net.layers,
            memswap.Policy(action=memswap.Action(action), min_bytes=1),
            pool=memswap.DiskPool(folder),
        )
        losses = train(net, rank)
        stats = manager.stats()
        manager.remove()
    for mine, theirs in zip(losses, train(reference, rank), strict=True):
        assert torch.equal(mine, theirs)
    assert moved(net, start)
    assert_same(net, reference, rank, bitwise=True)
    assert context.stats().lent == 0
    if len(checkpointed) < 3:
        assert stats.moved_storages > 0, "no activation moved"
        assert stats.kept["parameter"].tensors > 0, "gathered weights were offered and not known"


@distributed(2)
@pytest.mark.parametrize("swapped", [False, True], ids=["recomputed", "swapped"])
def test_regions_inside_a_unit_are_recomputed_with_its_weights(rank: Rank, swapped: bool) -> None:
    # checkpoint_module replaces forward: the hooks that gather do not run again in the recompute.
    start = make_net()
    reference, _ = sharded(rank, start)
    net, context = sharded(rank, start, late=True, context={"slots": 2})

    def policy(ctx: object, op: object, *args: object, **kwargs: object) -> object:
        chosen = memswap.CheckpointPolicy
        return chosen.MUST_SWAP if swapped and "mm" in str(op) else chosen.PREFER_RECOMPUTE

    with tempfile.TemporaryDirectory() as folder:
        regions = memswap.checkpoint_module(
            net.layers, policy, pool=memswap.DiskPool(folder), min_bytes=1
        )
        losses = train(net, rank)
        moved_storages = regions.stats().moved_storages
        regions.remove()
    assert rank.log.count("all_gather layers.") == 3 * 6
    assert (moved_storages > 0) == swapped
    for mine, theirs in zip(losses, train(reference, rank), strict=True):
        assert torch.equal(mine, theirs)
    assert_same(net, reference, rank, bitwise=True)
    assert context.stats().lent == 0


@distributed(2)
@pytest.mark.parametrize("frozen", [False, True])
def test_gathered_weights_are_never_moved(rank: Rank, frozen: bool) -> None:
    start = make_net(layers=1)
    for parameter in start.layers.parameters():
        parameter.requires_grad_(not frozen)
    net, context = sharded(rank, start, context={"slots": 1})
    seen: list[int] = []

    def choose(tensor: torch.Tensor, info: memswap.TensorInfo) -> memswap.Action:
        seen.append(tensor.untyped_storage().data_ptr())
        return memswap.Action.ENCODE

    with memswap.saved_tensors(memswap.Policy(fn=choose, min_bytes=1)) as saved:
        loss = loss_of(net, tokens_of(0, 2)[rank.rank])
    (slots,) = context.pool._slots.values()
    assert seen and slots[0].memory.data_ptr() not in seen
    assert saved.stats().kept["parameter"].tensors >= 3
    loss.backward()
    reference, _ = sharded(rank, copy.deepcopy(start))
    loss_of(reference, tokens_of(0, 2)[rank.rank]).backward()
    for mine, theirs in zip(net.parameters(), reference.parameters(), strict=True):
        if mine.requires_grad:
            assert torch.equal(mine.grad.full_tensor(), theirs.grad.full_tensor())
