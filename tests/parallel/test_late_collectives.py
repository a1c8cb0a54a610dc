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


CALLS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "functional collective": reduced,
    "DTensor": gathered,
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
