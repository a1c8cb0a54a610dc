"""What is saved while a collective still writes it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import memswap
from ranks import Rank, distributed

LATE_S = 0.05


def reduced(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.linear(funcol.all_reduce(x, "sum", dist.group.WORLD), weight)


def gathered(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """As a linear layer after sequence-parallel ones: its input is still being gathered."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = DTensor.from_local(x, mesh, [Shard(0)]).redistribute(mesh, [Replicate()], async_op=True)
    replicated = DTensor.from_local(weight, mesh, [Replicate()], run_check=False)
    return F.linear(whole, replicated).to_local()


class Maximum(torch.autograd.Function):
    """As torch 2.15's own, for any torch: it saves what it gives, which nobody has waited for."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        world = dist.group.WORLD
        assert world is not None
        edited = x.clone().mul_(1)  # as torch's is: what was edited is sent at once
        largest = torch.ops._c10d_functional.all_reduce_(edited, "max", world.group_name)
        ctx.save_for_backward(x, largest)
        return largest

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        x, largest = ctx.saved_tensors
        return torch.where(x == largest, gradients[0], 0)


def maximum(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    largest: torch.Tensor = Maximum.apply(F.linear(x, weight))
    torch.ops._c10d_functional.wait_tensor(largest.detach())
    return largest * 3


CALLS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "functional collective": reduced,
    "DTensor": gathered,
    "a collective that saves what it gives": maximum,
}


@distributed(2)
@pytest.mark.parametrize("name", list(CALLS))
@pytest.mark.parametrize("action", [memswap.Action.ENCODE, memswap.Action.SWAP])
def test_what_a_collective_still_writes_is_saved_once_it_is_there(
    rank: Rank, name: str, action: memswap.Action
) -> None:
    def gradient(saving: Any) -> torch.Tensor:
        torch.manual_seed(rank.rank)
        x, weight = torch.randn(64, 32), torch.randn(32, 32, requires_grad=True)
        dist.barrier()
        time.sleep(LATE_S * rank.rank)  # the others have their part in flight until then
        with saving:
            out = CALLS[name](x, weight)
        del x
        out.square().sum().backward()
        assert weight.grad is not None
        return weight.grad

    saved = memswap.saved_tensors(memswap.Policy(min_bytes=1, action=action))
    found, expected = gradient(saved), gradient(contextlib.nullcontext())
    assert torch.equal(found, expected), "backward got what was there before the collective wrote"
    assert saved.stats().moved_storages, "nothing moved"
