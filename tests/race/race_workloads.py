"""What the race tests share: workloads, a way to run them in a laboratory, and access to lanes."""

from __future__ import annotations

import contextlib
import functools
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from eventually import eventually
from helpers import EVERYTHING, new_input, new_stack, same_bits

import memswap
from memswap._native import native
from memswap.engine import transfers
from simdev import _C, NAME, LaboratoryError, Schedule, laboratory, schedules
from warm_python import warm_python

DEVICE = torch.device(NAME, 0)

#: The matrix, with the detector collecting, so that a run goes on after a report.
MATRIX = [schedule.with_check("collect") for schedule in schedules(5)]
EAGER = MATRIX[0]

#: Opens the context of one forward: `saved_tensors`, or nothing.
Region = Callable[[], contextlib.AbstractContextManager[Any]]
Workload = Callable[[Region], list[torch.Tensor]]


def new_pool(budget: int | str = "64MiB", slab: int | str = "1MiB", device: Any = DEVICE) -> Any:
    return memswap.HostPool(budget=budget, slab=slab, device=device, pageable=False)


def storage_of(tensor: torch.Tensor) -> Any:
    return native.StorageRef(tensor)


def plain() -> contextlib.AbstractContextManager[Any]:
    """The region of a run without memswap."""
    return contextlib.nullcontext()


def on_host(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.detach().cpu() for tensor in tensors]


# ---------------------------------------------------------------- workloads
def one_stream(region: Region) -> list[torch.Tensor]:
    """Gradients of three steps on the default stream; after each a graph is dropped unused.

    Sizes are few, so that memory and blocks are reused at once, and data differs from step to step,
    so that stale bytes show.
    """
    model = new_stack(DEVICE, depth=2)
    found: list[torch.Tensor] = []
    for step in range(3):
        model.zero_grad(set_to_none=True)
        x = new_input(DEVICE, seed=step)
        with region():
            loss = model(x)
        loss.backward()
        del loss
        found += [parameter.grad.clone() for parameter in model.parameters()]
        with region():
            dropped = model(x + step)
        del dropped
    return on_host(found)


def one_stream_of_the_users_own(region: Region, steps: int = 3) -> list[torch.Tensor]:
    """Gradients, summed up, of each step on a stream beside the default one."""
    stream = torch.Stream(device=DEVICE)
    stream.wait_stream(torch.accelerator.current_stream())
    with stream:
        model, found = new_stack(DEVICE, depth=2), []
        for step in range(steps):
            with region():
                loss = model(new_input(DEVICE, seed=step))
            loss.backward()
            found += [parameter.grad.clone() for parameter in model.parameters()]
        return on_host(found)


def backward_on_another_stream(region: Region) -> list[torch.Tensor]:
    """Gradients, summed up, of three forwards on one stream, with backward called on another."""
    forward, backward = torch.Stream(device=DEVICE), torch.Stream(device=DEVICE)
    model, found = new_stack(DEVICE, depth=2), []
    for step in range(3):
        forward.wait_stream(torch.accelerator.current_stream())
        with forward, region():
            loss = model(new_input(DEVICE, seed=step))
        backward.wait_stream(forward)
        with backward:
            loss.backward()
            found += [parameter.grad.clone() for parameter in model.parameters()]
        del loss
        torch.accelerator.current_stream().wait_stream(backward)
    with backward:
        return on_host(found)


def source_freed_elsewhere(region: Region) -> list[torch.Tensor]:
    """For recipes: the operator ran on the main stream, and its result is used on another; once
    backward has run it again there, its source's memory goes back to the main stream, which fills
    it at once."""
    main, other = torch.accelerator.current_stream(), torch.Stream(device=DEVICE)
    found = []
    for step in range(3):
        leaf = torch.full((4096,), 0.25 + step, device=DEVICE, requires_grad=True)
        with region():
            source = leaf * 2
            made = source.sin() + source.cos()  # both save the source
            other.wait_stream(main)
            with other:
                loss = (made * made).sum()
            made.record_stream(other)  # the program's own: memory of the main stream
        del source, made
        main.wait_stream(other)
        loss.backward()
        del loss
        filled = [torch.full((4096,), 9.0, device=DEVICE) for _ in range(4)]
        main.wait_stream(other)
        assert leaf.grad is not None
        found.append(leaf.grad + filled[0])
    return on_host(found)


def two_streams(region: Region) -> list[torch.Tensor]:
    """Gradients of two models on two streams that never wait for each other.

    One region serves both, so a lane's transfers and a pool's blocks pass from one stream to the
    other, in alternating order, and only the lane's own edges order them.
    """
    streams = [torch.Stream(device=DEVICE) for _ in range(2)]
    models = [new_stack(DEVICE, depth=1, seed=seed) for seed in range(2)]
    inputs = [[new_input(DEVICE, seed=10 * step + m) for m in range(2)] for step in range(4)]
    for stream in streams:
        stream.wait_stream(torch.accelerator.current_stream())
    found: list[list[torch.Tensor]] = [[], []]
    for step in range(4):
        order = (0, 1) if step % 2 == 0 else (1, 0)
        losses: dict[int, torch.Tensor] = {}
        for m in order:
            with streams[m], region():
                losses[m] = models[m](inputs[step][m])
        for m in order:
            with streams[m]:
                losses.pop(m).backward()
                found[m] += [parameter.grad.clone() for parameter in models[m].parameters()]
                models[m].zero_grad(set_to_none=True)
    read = []
    for m in (1, 0):  # the stream that began is read last: a lazy machine runs the other first
        with streams[m]:
            read += on_host(found[m])
        del found[m][:]
    torch.accelerator.synchronize()
    return read


def two_streams_in_turn(region: Region) -> list[torch.Tensor]:
    """Two models on two streams, step by step in turn: each leaves its blocks to the other."""
    streams = [torch.Stream(device=DEVICE) for _ in range(2)]
    models = [new_stack(DEVICE, depth=1, seed=seed) for seed in range(2)]
    inputs = [[new_input(DEVICE, seed=10 * step + m) for m in range(2)] for step in range(3)]
    for stream in streams:
        stream.wait_stream(torch.accelerator.current_stream())
    found: list[list[torch.Tensor]] = [[], []]
    for step in range(3):
        for m in (0, 1):
            with streams[m]:
                with region():
                    loss = models[m](inputs[step][m])
                loss.backward()
                del loss
                found[m] += [parameter.grad.clone() for parameter in models[m].parameters()]
                models[m].zero_grad(set_to_none=True)
    read = []
    for m in (1, 0):
        with streams[m]:
            read += on_host(found[m])
        del found[m][:]
    torch.accelerator.synchronize()
    return read


def new_bytes(nbytes: int, seed: int = 0) -> torch.Tensor:
    """Random bytes on the device, and nobody else's reference to them."""
    generator = torch.Generator().manual_seed(seed + nbytes)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator).to(DEVICE)


# ---------------------------------------------------------------- lanes
def new_lane(max_leaving_bytes: int = 0, chunk_bytes: int = 1 << 20, device: Any = DEVICE) -> Any:
    return native.StreamLane(device, max_leaving_bytes=max_leaving_bytes, chunk_bytes=chunk_bytes)


def open_small_arenas(monkeypatch: pytest.MonkeyPatch, nbytes: int, chunks: int = 8) -> None:
    """Codec lanes of the engine have an arena of so many bytes, in so many chunks."""

    def open_codec_lane(device: torch.device, frames: Any = None) -> Any:
        return native.StreamCodecLane(
            device, max_leaving_bytes=0, arena_budget=nbytes, arena_chunk=nbytes // chunks
        )

    monkeypatch.setattr(transfers, "open_codec_lane", open_codec_lane)
    monkeypatch.setattr(transfers, "FIRST_ARENA_BYTES", nbytes)
    monkeypatch.setattr(transfers, "ARENA_SHARE", 0.0)


@contextlib.contextmanager
def lanes_opened(react: Callable[[Any], Any], opener: str = "open_lane") -> Iterator[None]:
    """Every lane that the engine opens by `opener` passes through `react`, which may wrap it."""
    original = getattr(transfers, opener)

    def open_lane(*arguments: Any, **options: Any) -> Any:
        return react(original(*arguments, **options))

    setattr(transfers, opener, open_lane)
    try:
        yield
    finally:
        setattr(transfers, opener, original)


def pair(stream: torch.Stream) -> tuple[int, int]:
    """A stream as mutations take it: (device index, stream id)."""
    return stream.device_index, stream.stream_id


def send_stream(lane: Any) -> tuple[int, int]:
    return pair(lane.send_stream)


def fetch_stream(lane: Any) -> tuple[int, int]:
    return pair(lane.fetch_stream)


def compute_streams(lane: Any) -> list[tuple[int, int]]:
    """Every stream of the lane's device but the lane's own."""
    own = {send_stream(lane), fetch_stream(lane)}
    device_index = send_stream(lane)[0]
    every = [(device_index, index) for index in range(_C.pool_streams + 1)]
    return [stream for stream in every if stream not in own]


class WrappedLane(native.LaneAround):
    """A lane that passes everything on; mutations of the engine override one method."""

    def __init__(self, lane: Any) -> None:
        super().__init__(lane)
        self.lane = lane

    def __getattr__(self, name: str) -> Any:
        return getattr(self.lane, name)


# ---------------------------------------------------------------- running
@dataclass
class Observation:
    """What one run under one schedule showed."""

    results: list[torch.Tensor] | None = None  # None: the run itself failed
    reports: list[str] = field(default_factory=list)
    hits: int = 0
    error: str = ""

    def differs_from(self, expected: list[torch.Tensor]) -> bool:
        if self.results is None:
            return True
        return not all(same_bits(a, b) for a, b in zip(self.results, expected, strict=True))


def saved_region(
    pool: str = "64MiB", policy: memswap.Policy = EVERYTHING, **options: Any
) -> Region:
    """One `saved_tensors` with a pool of its own, entered again for each forward."""
    saved = memswap.saved_tensors(policy, pool=new_pool(pool, slab="64KiB"), **options)
    return lambda: saved


@functools.cache
def expected(workload: Workload) -> list[torch.Tensor]:
    """What it gives without memswap."""
    with laboratory(EAGER.with_check("throw")):
        return workload(plain)


def observe(
    schedule: Schedule,
    workload: Workload,
    breaking: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    new_region: Callable[..., Region] = saved_region,
    **options: Any,
) -> Observation:
    """The workload under memswap in a laboratory, on a machine or an engine broken by `breaking`.

    `breaking` yields something with `hits`, or None.
    """
    seen = Observation()
    try:
        with laboratory(schedule.with_check("collect")) as lab:
            try:
                with breaking() as mutation:
                    try:
                        seen.results = workload(new_region(**options))
                        torch.accelerator.synchronize()
                    finally:
                        seen.hits = getattr(mutation, "hits", 0)
            except (RuntimeError, IndexError) as error:
                seen.error = str(error)
                if not mutation:
                    raise
            seen.reports = lab.forgive()
    except LaboratoryError as error:
        if not seen.hits or error.leaks:
            raise
        seen.reports += error.reports
        seen.error = seen.error or str(error.task_error)
    return seen


def assert_silent_and_right(workload: Workload, **options: Any) -> None:
    """Where nothing is broken the detector says nothing, and no bit differs under any schedule."""
    right = expected(workload)
    for schedule in MATRIX:
        seen = observe(schedule, workload, **options)
        assert not seen.reports, f"{schedule}: {seen.reports[:3]}"
        assert not seen.differs_from(right), f"{schedule}: wrong data"


def until_forgotten(lab: Any) -> None:
    """Waits until nothing of a backward pass that failed is alive.

    Autograd's device thread lets go of the exception, and with its traceback of the frames of
    hooks, at a moment of its own after the caller has got it.
    """
    eventually(lambda: not lab.live_device_bytes() + lab.live_pinned_bytes(), collect=True)


def run_apart(program: str, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    """A program in a process of its own, with simdev and memswap within reach."""
    return warm_python(SIMDEV_NAME=NAME, OMP_NUM_THREADS="1").run(program, timeout_s)
