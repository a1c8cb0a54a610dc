"""Sharded weights under torch's own pipeline schedules: a mesh of stages and shards."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

from memswap.parallel import ShardContext, shard
from ranks import Rank, distributed
from sharding import Block

WIDTH, MICROBATCHES = 8, 4


class Chunk(nn.Module):
    """Three blocks: an odd number, so that parities of blocks collide where chunks meet."""

    def __init__(self, index: int) -> None:
        super().__init__()
        torch.manual_seed(index)
        self.layers = nn.ModuleList(Block(WIDTH, i) for i in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@distributed(4)
@pytest.mark.parametrize("residency", ["use", "step"])
def test_interleaved_1f1b_trains_the_same_with_sharded_chunks(rank: Rank, residency: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    stage_rank, data_rank = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
    indices = [stage_rank, stage_rank + 2]
    start = [Chunk(index).double() for index in indices]
    contexts = ShardContext(
        slots=2, debug=True, open_comm=lambda group: rank.open_comm(group, late=True)
    )
    ours, plain = copy.deepcopy(start), copy.deepcopy(start)
    for chunk in ours:
        for layer in chunk.layers:
            shard(layer, mesh["dp"], context=contexts, residency=residency)

    def schedule(chunks: list[Chunk]) -> ScheduleInterleaved1F1B:
        stages = [
            PipelineStage(chunk, index, 4, torch.device("cpu"), group=mesh.get_group("pp"))
            for chunk, index in zip(chunks, indices, strict=True)
        ]
        return ScheduleInterleaved1F1B(
            stages, MICROBATCHES, loss_fn=lambda out, target: (out - target).square().sum()
        )

    schedules = [schedule(ours), schedule(plain)]
    for step in range(2):
        # torch's trial backward, in the first step, is for inputs alone: no unit knows its end.
        overflows = contexts.stats().overflows
        generator = torch.Generator().manual_seed(2 * step + data_rank)
        shape = (MICROBATCHES, 3, WIDTH)
        x, target = (torch.randn(shape, generator=generator).double() for _ in range(2))
        for chunks, one in zip((ours, plain), schedules, strict=True):
            for chunk in chunks:
                chunk.zero_grad()
            if stage_rank == 0:
                one.step(x)
            else:
                one.step(target=target)
    for mine, theirs in zip(ours, plain, strict=True):
        for (name, a), b in zip(mine.named_parameters(), theirs.parameters(), strict=True):
            assert b.grad is not None and b.grad.any()
            dist.all_reduce(b.grad, group=mesh.get_group("dp"))
            torch.testing.assert_close(
                a.grad.full_tensor(), b.grad / 2, rtol=1e-12, atol=1e-12, msg=name
            )
    assert contexts.stats().lent == 0
    assert contexts.stats().overflows == overflows
