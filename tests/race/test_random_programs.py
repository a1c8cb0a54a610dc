"""Random programs: managed and plain agree bit for bit, whatever a program does, on any schedule.

A program is made from a seed alone and runs the same way with and without memswap: layers of many
kinds, views and storages that are saved twice, edits in place that autograd allows, microbatches in
any order, graphs kept, used twice or dropped, streams of the user's own. So a failure names its
seed, and `run_program(seed, ...)` repeats it.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import assert_nothing_left, same_bits
from race_workloads import (
    DEVICE,
    Region,
    WrappedLane,
    lanes_opened,
    new_pool,
    on_host,
    plain,
)
from torch.nn import functional as F

import memswap
from memswap.engine import recipes
from simdev import SCHEDULES, Schedule, run_in

pytestmark = [
    pytest.mark.own_laboratory,
    pytest.mark.filterwarnings("ignore:memswap. a storage"),  # small pools are full at times
    # Two graphs of one leaf on two streams: what is warned of costs time only.
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream"),
]

WIDTH = 8
PER_RUN, PER_SLOW_RUN = 40, 600

Layer = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

#: Each takes (rows, WIDTH) and a WIDTH x WIDTH weight to (rows, WIDTH).
LAYERS: dict[str, Layer] = {
    "linear": F.linear,
    "matmul, tanh": lambda x, w: (x @ w).tanh(),
    "same storage twice": lambda x, w: x * x + x.t().contiguous().t() * x,
    "views": lambda x, w: x.view(-1, 2, WIDTH // 2).transpose(1, 2).reshape(x.shape).sin() * x,
    "slice at an offset": lambda x, w: torch.cat([x[1:].exp() * 0.1, x[:1].cos()]),
    "stride zero": lambda x, w: x * x[:1].expand_as(x),
    "as_strided": lambda x, w: x.contiguous().as_strided((x.shape[0], WIDTH), (WIDTH, 1)).sigmoid(),
    "softmax": lambda x, w: torch.softmax(x @ w, dim=-1) * x,
    "layer norm": lambda x, w: F.layer_norm(x, (WIDTH,), w[0], w[1]),
    "gelu": lambda x, w: F.gelu(x @ w.t()) + x,
    "residual": lambda x, w: x + (x @ w).relu(),
    "dropout": lambda x, w: F.dropout(x @ w, 0.3),
    "complex": lambda x, w: torch.fft.ifft(torch.fft.fft(x) * torch.fft.fft(w[0])).real,
    "mask": lambda x, w: torch.where(x > 0, x @ w, x * 0.1),
    "index": lambda x, w: x[torch.arange(x.shape[0], device=x.device).flip(0)] * x,
    "edit a fresh result": lambda x, w: (x @ w).add_(1.0).mul_(0.5).tanh(),
    "edit, then save": lambda x, w: F.linear(x, w).relu_() * 0.5,
    "edit a slice": lambda x, w: edit_slice(x @ w).tanh(),
    "detached": lambda x, w: x * x.detach().square() + (x @ w),
    "bfloat16": lambda x, w: (x.bfloat16() @ w.bfloat16()).float().tanh(),
    "max": lambda x, w: x + (x @ w).max(dim=-1, keepdim=True).values,
}


def edit_slice(y: torch.Tensor) -> torch.Tensor:
    y[:, ::2] += 1.0
    return y


class Program:
    """What a seed decides, without touching the device."""

    def __init__(self, seed: int) -> None:
        choose = random.Random(seed)
        self.seed = seed
        self.rows = choose.choice([3, 8, 33])
        self.stacks = [choose.choices(list(LAYERS), k=choose.randint(2, 7)) for _ in range(2)]
        self.steps = choose.randint(1, 4)
        self.events = [self._events(choose) for _ in range(self.steps)]
        self.streams = choose.choice([1, 1, 2, 3])
        self.options: dict[str, Any] = {
            "prefetch_bytes": choose.choice(["auto", 0, 256, 2048, "1MiB"]),
            "min_bytes": choose.choice([1, 1, 200, 1024]),
            "pool": choose.choice(["64MiB", "64MiB", "16KiB", "4KiB"]),
            "keep_one_in": choose.choice([0, 0, 2, 3]),
        }

    def _events(self, choose: random.Random) -> list[tuple[str, int]]:
        """Forwards and what becomes of their graphs, in an order that some schedule has."""
        events: list[tuple[str, int]] = []
        alive: list[int] = []
        for microbatch in range(choose.randint(1, 4)):
            events.append(("forward", microbatch))
            alive.append(microbatch)
            while alive and choose.random() < 0.4:
                events.append(self._end(choose, alive))
        while alive:
            events.append(self._end(choose, alive))
        return events

    def _end(self, choose: random.Random, alive: list[int]) -> tuple[str, int]:
        microbatch = alive.pop(choose.randrange(len(alive)))
        return choose.choice(["backward", "backward", "backward", "twice", "drop"]), microbatch

    @property
    def recomputes(self) -> bool:
        """Whether operators are run again; what has no recipe is swapped."""
        return self.seed % 3 == 0

    def policy(self) -> memswap.Policy:
        if self.recomputes:
            return memswap.Policy("recompute", min_bytes=self.options["min_bytes"])
        one_in, counter = self.options["keep_one_in"], [0]

        def some_stay(tensor: torch.Tensor, info: memswap.TensorInfo) -> memswap.Action:
            counter[0] += 1
            return memswap.Action.SWAP if counter[0] % one_in else memswap.Action.KEEP

        return memswap.Policy(min_bytes=self.options["min_bytes"], fn=some_stay if one_in else None)

    def __str__(self) -> str:
        return f"seed {self.seed}: {self.stacks} {self.events} {self.streams} {self.options}"


def run(program: Program, region: Region) -> list[torch.Tensor]:
    """Gradients and losses, read at the end."""
    torch.manual_seed(program.seed)
    generator = torch.Generator().manual_seed(program.seed)
    weights = [
        [(torch.randn(WIDTH, WIDTH, generator=generator) / 3).to(DEVICE) for _ in stack]
        for stack in program.stacks
    ]
    leaves = [weight.requires_grad_() for stack in weights for weight in stack]
    inputs = [
        torch.randn(program.rows, WIDTH, generator=generator).to(DEVICE).requires_grad_(i % 2 == 0)
        for i in range(4)
    ]
    main = torch.accelerator.current_stream()
    streams = [main] + [torch.Stream(device=DEVICE) for _ in range(program.streams - 1)]
    losses: list[torch.Tensor] = []
    for events in program.events:
        graphs: dict[int, torch.Tensor] = {}
        for kind, microbatch in events:
            stream = streams[microbatch % len(streams)]
            stream.wait_stream(main)
            with stream:
                if kind == "forward":
                    which = microbatch % 2
                    x = inputs[microbatch]
                    first = weights[which][0][0]  # so that every program has a gradient
                    with region():
                        x = x * first
                        for name, weight in zip(program.stacks[which], weights[which], strict=True):
                            x = LAYERS[name](x, weight)
                        graphs[microbatch] = x.square().mean()
                    del x
                    losses.append(graphs[microbatch].detach())
                elif kind == "drop":
                    del graphs[microbatch]
                else:
                    if kind == "twice":
                        graphs[microbatch].backward(retain_graph=True)
                    graphs.pop(microbatch).backward()
            main.wait_stream(stream)
    torch.accelerator.synchronize()
    leaves += [x for x in inputs if x.requires_grad]
    return on_host(losses + [leaf.grad for leaf in leaves if leaf.grad is not None])


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recipes are used before they are proven: a program has too few steps to learn."""
    monkeypatch.setattr(recipes, "PROOFS", 0)


def managed(program: Program) -> tuple[list[torch.Tensor], memswap.types.Stats]:
    pool = new_pool(budget=program.options["pool"], slab="4KiB")
    saved = memswap.saved_tensors(
        program.policy(), pool=pool, prefetch_bytes=program.options["prefetch_bytes"]
    )
    results = run(program, lambda: saved)
    assert_nothing_left(saved.stats())
    assert pool.native.statistics()["blocks"] == 0, "blocks outlive every graph"
    return results, saved.stats()


@pytest.mark.one_schedule
def test_operators_are_run_again_in_some_of_them(schedule: Schedule) -> None:
    programs = [Program(seed) for seed in range(0, PER_RUN, 3)]
    runs = sum(run_in(schedule, managed, program)[1].recipe_runs for program in programs)
    assert runs > len(programs), "hardly an operator was run again: nothing is said of recipes"


@functools.cache
def plainly(seed: int) -> list[torch.Tensor]:
    """What a program comes to without memswap, once for all schedules: it orders its streams."""
    program = Program(seed)
    try:
        return run_in(SCHEDULES[0], run, program, plain)
    except AssertionError as error:
        raise RuntimeError(f"the program itself is not right: {program}") from error


def run_program(seed: int, schedule: Schedule) -> int:
    """Managed in a laboratory of its own, compared with plain. Returns how many storages moved."""
    program = Program(seed)
    expected = plainly(seed)
    try:
        found, stats = run_in(schedule, managed, program)
    except Exception as error:
        raise AssertionError(f"{schedule}: {program}") from error
    for number, (ours, right) in enumerate(zip(found, expected, strict=True)):
        assert same_bits(ours, right), f"result {number} differs under {schedule}: {program}"
    return stats.moved_storages


@pytest.mark.parametrize("first", [0, 1000])
def test_random_programs_give_the_same_bits(schedule: Schedule, first: int) -> None:
    moved = sum(run_program(seed, schedule) for seed in range(first, first + PER_RUN))
    assert moved > PER_RUN, "hardly anything moved: the programs say nothing"


@pytest.mark.slow
def test_many_random_programs_give_the_same_bits(schedule: Schedule) -> None:
    for seed in range(10_000, 10_000 + PER_SLOW_RUN):
        run_program(seed, schedule)


@pytest.mark.one_schedule
def test_every_layer_and_every_event_occurs_in_the_default_run() -> None:
    programs = [Program(first + i) for first in (0, 1000) for i in range(PER_RUN)]
    used = {name for program in programs for stack in program.stacks for name in stack}
    assert used == set(LAYERS), f"never used: {set(LAYERS) - used}"
    kinds = {kind for program in programs for events in program.events for kind, _ in events}
    assert kinds == {"forward", "backward", "twice", "drop"}
    assert {program.streams for program in programs} == {1, 2, 3}


@pytest.mark.one_schedule
def test_a_lane_that_loses_a_byte_is_found_out(schedule: Schedule) -> None:
    """The comparison itself: one bit of one returned storage is flipped."""

    class Loses(WrappedLane):
        def fetch(self, block: Any) -> Any:
            wrong = torch.zeros(block.nbytes, dtype=torch.uint8)
            torch.accelerator.synchronize()
            block.read(wrong)
            wrong[0] ^= 1  # an index stays an index, a mask a mask
            block.write(wrong)
            return self.lane.fetch(block)

    with lanes_opened(Loses), pytest.raises(AssertionError, match="differs under"):
        for seed in range(PER_RUN):
            run_program(seed, schedule)
