"""manage_optimizer where parameters and state are DTensors: fully_shard, memswap.parallel.shard."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict as get_state
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict as set_state
from torch.distributed.tensor import DTensor

import memswap
from memswap.optimizers import ManagedOptimizer
from memswap.optimizers.state import away_of, plain_tensors
from ranks import Rank, distributed
from sharding import adamw, assert_same, fully_sharded, loss_of, make_net, sharded, tokens_of


def new_net(rank: Rank, by: str) -> nn.Module:
    start = make_net(torch.float32, layers=2)
    return fully_sharded(rank, start) if by == "fully_shard" else sharded(rank, start)[0]


def manage(optimizer: torch.optim.Optimizer) -> ManagedOptimizer:
    pool = memswap.DiskPool(tempfile.mkdtemp(), budget="64MiB", extent="1MiB")
    return memswap.manage_optimizer(optimizer, pool=pool, room="4KiB", min_bytes=1)


def step(net: nn.Module, optimizer: torch.optim.Optimizer, rank: Rank, number: int) -> None:
    optimizer.zero_grad()
    loss_of(net, tokens_of(number, rank.size)[rank.rank]).backward()
    nn.utils.clip_grad_norm_(net.parameters(), 0.5)
    optimizer.step()


def local_state(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    saved = optimizer.state_dict()["state"]
    return [one for key in sorted(saved) for one in plain_tensors(saved[key])]


#: State of two moments, in each form of the step; of one; of a sum.
MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1),
    "AdamW foreach": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, foreach=True),
    "AdamW fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
    "SGD foreach": lambda parameters: torch.optim.SGD(
        parameters, lr=1e-2, momentum=0.9, foreach=True
    ),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=1e-2),
}


#: By what weights are sharded in the fast suite; an optimizer that is not here by both.
BY = {
    "AdamW": "fully_shard",
    "Adagrad": "fully_shard",
    "AdamW fused": "shard",
    "SGD foreach": "shard",
}


@distributed(2)
@pytest.mark.parametrize(
    ("name", "by"),
    [
        pytest.param(name, by, marks=() if BY.get(name, by) == by else pytest.mark.slow)
        for name in MAKERS
        for by in ("fully_shard", "shard")
    ],
)
@pytest.mark.parametrize("steps", [8, pytest.param(20, marks=pytest.mark.slow)])
def test_sharded_state_is_away_between_steps(rank: Rank, name: str, by: str, steps: int) -> None:
    ours, plain = new_net(rank, by), new_net(rank, by)
    managed, untouched = MAKERS[name](ours.parameters()), MAKERS[name](plain.parameters())
    manager = manage(managed)
    for number in range(steps):
        step(ours, managed, rank, number)
        step(plain, untouched, rank, number)
    assert manager.statistics().chunks > 1
    assert manager.statistics().away_bytes > 0
    value = [one for one in next(iter(managed.state.values())).values() if isinstance(one, DTensor)]
    assert value and any(away_of(one._local_tensor) is not None for one in value)
    assert_same(ours, plain, rank, bitwise=True)
    for mine, theirs in zip(local_state(managed), local_state(untouched), strict=True):
        assert torch.equal(mine, theirs)


@distributed(2)
@pytest.mark.parametrize("by", ["fully_shard", "shard"])
def test_a_distributed_checkpoint_resumes_sharded_state(rank: Rank, by: str) -> None:
    ours, plain = new_net(rank, by), new_net(rank, by)
    managed, untouched = adamw(ours), adamw(plain)
    manage(managed)
    for number in range(3):
        step(ours, managed, rank, number)
        step(plain, untouched, rank, number)
    path = [tempfile.mkdtemp() if rank.rank == 0 else None]
    dist.broadcast_object_list(path)
    dcp.save({"optimizer": get_state(ours, managed)}, checkpoint_id=path[0])
    again = adamw(ours)
    manager = manage(again)
    again.zero_grad()
    loaded: dict[str, Any] = {"optimizer": get_state(ours, again)}
    dcp.load(loaded, checkpoint_id=path[0])
    set_state(ours, again, loaded["optimizer"])
    assert manager.statistics().away_bytes > 0, "what was loaded stays"
    for number in range(3, 6):
        step(ours, again, rank, number)
        step(plain, untouched, rank, number)
    assert_same(ours, plain, rank, bitwise=True)
