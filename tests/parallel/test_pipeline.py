"""Pipeline schedules: microbatches that wait are away, and every gradient is what it is without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

import memswap
from memswap.schedules.pipeline import periods
from ranks import Rank, distributed

WIDTH, ROWS, MICROBATCHES = 16, 4, 8

#: Schedule, stages of a rank, and whether the stages of a rank form a V.
SCHEDULES: dict[str, tuple[Any, int, bool]] = {
    "gpipe": (ScheduleGPipe, 1, False),
    "1f1b": (Schedule1F1B, 1, False),
    "interleaved": (ScheduleInterleaved1F1B, 2, False),
    "zero_bubble": (ScheduleInterleavedZeroBubble, 2, False),
    "zbv": (ScheduleZBVZeroBubble, 2, True),
}


class Part(nn.Module):
    """A stage: two layers with a residual."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


def stage_indices(rank: Rank, per_rank: int, v: bool) -> list[int]:
    if v:
        return [rank.rank, 2 * rank.size - 1 - rank.rank]
    return [rank.rank + turn * rank.size for turn in range(per_rank)]


class Run:
    """A schedule over fresh stages; `manage` may put memswap on them."""

    def __init__(self, rank: Rank, name: str) -> None:
        kind, per_rank, v = SCHEDULES[name]
        self.indices = stage_indices(rank, per_rank, v)
        self.first, self.last = 0 in self.indices, per_rank * rank.size - 1 in self.indices
        self.parts = [Part(index) for index in self.indices]
        self.stages = [
            PipelineStage(part, index, per_rank * rank.size, torch.device("cpu"))
            for part, index in zip(self.parts, self.indices, strict=True)
        ]
        options = {"loss_fn": lambda out, goal: (out - goal).square().mean()}
        one = self.stages if per_rank > 1 else self.stages[0]
        self.schedule = kind(one, MICROBATCHES, **options)

    def step(self, seed: int) -> list[torch.Tensor]:
        """Losses and gradients of one step."""
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(MICROBATCHES * ROWS, WIDTH, generator=generator)
        goal = torch.randn(MICROBATCHES * ROWS, WIDTH, generator=generator)
        losses: list[torch.Tensor] = []
        for part in self.parts:
            part.zero_grad(set_to_none=True)
        inputs = (x,) if self.first else ()
        if self.last:
            self.schedule.step(*inputs, target=goal, losses=losses)
        else:
            self.schedule.step(*inputs)
        grads = [p.grad.clone() for part in self.parts for p in part.parameters()]
        return [loss.detach() for loss in losses] + grads


def compare(rank: Rank, name: str, manage: Callable[[Run], Any], steps: int = 3) -> Any:
    """Three steps, plain and managed, bit for bit; the managed run's manager."""
    plain, managed = Run(rank, name), Run(rank, name)
    manager = manage(managed)
    for seed in range(steps):
        if seed == steps - 1:
            manager.reset_stats()
        expected, found = plain.step(seed), managed.step(seed)
        assert len(found) == len(expected) > 0
        for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
            assert torch.equal(ours, theirs), f"step {seed}: loss or gradient {number} differs"
    assert manager.stats().away_bytes == 0, "bytes are away although no microbatch is alive"
    return manager


EVERYTHING = memswap.Policy(memswap.Action.SWAP, min_bytes=1)


def moves_something(rank: Rank, name: str, min_gap: int) -> bool:
    """Whether a microbatch waits for so many actions on this rank."""
    if name == "1f1b":  # torch's own pipeline_order of it is one microbatch off on the last stage
        return 2 * (rank.size - rank.rank) - 1 >= min_gap
    per_rank, v = SCHEDULES[name][1:]
    order = Run(rank, name).schedule.pipeline_order
    for period in periods(order, set(stage_indices(rank, per_rank, v))):
        begun = {(s.stage, s.chunk): at for at, s in enumerate(period) if not s.reading}
        for at, step in enumerate(period):
            if step.reading == 1 and at - begun[step.stage, step.chunk] >= min_gap:
                return True
    return False


@distributed(2, 4)
@pytest.mark.parametrize("name", list(SCHEDULES))
def test_gradients_are_those_of_the_plain_schedule(rank: Rank, name: str) -> None:
    min_gap = 2 if rank.size == 2 else 4

    def manage(run: Run) -> Any:
        pool = memswap.DiskPool()
        return memswap.manage_pipeline(
            run.stages, run.schedule, policy=EVERYTHING, pool=pool, min_gap=min_gap
        )

    stats = compare(rank, name, manage).stats()
    waits = moves_something(rank, name, min_gap)
    assert (stats.moved_storages > 0) is waits, f"moved {stats.moved_storages}, expected {waits}"
    assert stats.stalls == 0, f"{stats.stalls} storages were not back when backward came"


@distributed(2)
@pytest.mark.parametrize("told", [True, False])
def test_an_order_that_is_not_told_is_learnt(rank: Rank, told: bool) -> None:
    """Told, the first step stalls in torch's trial forward at most; else for each chunk."""
    run = Run(rank, "gpipe")
    schedule = run.schedule if told else None
    pool = memswap.DiskPool()
    with memswap.manage_pipeline(run.stages, schedule, policy=EVERYTHING, pool=pool) as manager:
        run.step(0)
        first = manager.stats().stalls
        manager.reset_stats()
        run.step(1)
        assert manager.stats().stalls == 0
        assert first <= 1 if told else first > 4, f"{first} stalls in the first step"


@distributed(2)
def test_waiting_microbatches_may_be_encoded_instead(rank: Rank) -> None:
    policy = memswap.Policy(memswap.Action.ENCODE_SWAP, min_bytes=1)

    def manage(run: Run) -> Any:
        pool = memswap.DiskPool()
        return memswap.manage_pipeline(run.stages, run.schedule, policy=policy, pool=pool)

    stats = compare(rank, "zero_bubble", manage).stats()
    assert stats.moved_storages > 0


@distributed(2)
def test_memory_holds_a_few_microbatches_not_all(rank: Rank) -> None:
    def manage(run: Run) -> Any:
        pool = memswap.DiskPool()
        return memswap.manage_pipeline(run.stages, run.schedule, policy=EVERYTHING, pool=pool)

    stats = compare(rank, "gpipe", manage).stats()
    one = stats.moved_bytes / (MICROBATCHES - 3)  # the last three are needed too soon to leave
    assert stats.peak_resident_bytes < 5.5 * one, "microbatches that wait are not away"
