"""The edges of state that streams through a step: each broken on purpose, and each caught.

They are those of a swap (csrc/lane/stream_lane.h), under an optimizer's own kernels; what is new is
who makes them, and when: optimizers/state.py and optimizers/step.py, broken here line by line.
(Edges 3 and 7 follow from the others: a step waits for its parameters, and so for the step before.)
Where the room is that of two parameters, memory passes from hand to hand, by edge 8.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from broken_edges import Breaking, Counter, drop
from optimizer_helpers import ROOM, loss_of, maker, manage, new_model
from race_workloads import (
    DEVICE,
    MATRIX,
    Region,
    Workload,
    assert_silent_and_right,
    compute_streams,
    expected,
    fetch_stream,
    new_pool,
    observe,
    on_host,
    plain,
    send_stream,
)

from memswap._native import native
from memswap.optimizers.state import AwayState, Returning, StateMover, away_of
from memswap.optimizers.step import StateStream
from simdev import mutations

pytestmark = [pytest.mark.own_laboratory, pytest.mark.one_schedule]


def managed_region(pool: str = "64MiB", **options: Any) -> Region:
    """One pool for all optimizers of a workload. What it is called with is managed."""
    shared = new_pool(pool, slab="64KiB")
    return lambda optimizer: manage(optimizer, shared, **options)  # type: ignore[call-arg]


# ---------------------------------------------------------------- programs
def one_optimizer(region: Region) -> list[torch.Tensor]:
    """Parameters after each of four steps, on the default stream; other memory is used between."""
    model = new_model(DEVICE, depth=5)
    optimizer = maker("AdamW", "foreach")(model.parameters())
    if region is not plain:
        region(optimizer)  # type: ignore[call-arg]
    found = []
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, DEVICE, step).backward()
        optimizer.step()
        churn = torch.full((24, 24), 7.0, device=DEVICE)  # may get the memory of what left
        found += [parameter.detach().clone() for parameter in model.parameters()]
        del churn
    return on_host(found)


def two_optimizers(region: Region) -> list[torch.Tensor]:
    """Two models on two streams that never wait for each other, with one pool for both."""
    streams = [torch.Stream(device=DEVICE) for _ in range(2)]
    models = [new_model(DEVICE, depth=4, seed=seed) for seed in range(2)]
    optimizers = [maker("AdamW", "foreach")(model.parameters()) for model in models]
    if region is not plain:
        for one in optimizers:
            region(one)  # type: ignore[call-arg]
    for stream in streams:
        stream.wait_stream(torch.accelerator.current_stream())
    found: list[list[torch.Tensor]] = [[], []]
    for step in range(4):
        for number in (0, 1) if step % 2 == 0 else (1, 0):
            with streams[number]:
                optimizers[number].zero_grad()
                loss_of(models[number], DEVICE, step).backward()
                optimizers[number].step()
                found[number] += [one.detach().clone() for one in models[number].parameters()]
    read = []
    for number in (1, 0):
        with streams[number]:
            read += on_host(found[number])
    torch.accelerator.synchronize()
    return read


def state_of_another_stream(region: Region) -> list[torch.Tensor]:
    """State that one stream has made leaves on another, while the first takes memory again."""
    a, b = torch.Stream(device=DEVICE), torch.Stream(device=DEVICE)
    model = new_model(DEVICE, depth=4)
    optimizer = maker("AdamW", "foreach")(model.parameters())
    a.wait_stream(torch.accelerator.current_stream())
    with a:
        loss_of(model, DEVICE, 0).backward()
        optimizer.step()
    b.wait_stream(a)
    with b:
        if region is not plain:
            region(optimizer)  # type: ignore[call-arg]
    with a:
        taken = [torch.full((24, 24), 7.0, device=DEVICE) for _ in range(8)]
    with b:
        optimizer.step()
        found = on_host(list(model.parameters()))
    del taken
    torch.accelerator.synchronize()
    return found


# ---------------------------------------------------------------- broken lines
@contextlib.contextmanager
def patched(owner: Any, name: str, wrong: Callable[..., Any]) -> Iterator[Counter]:
    """`wrong(counter, original, *arguments)` in the place of a method."""
    counter, original = Counter(), getattr(owner, name)

    def method(*arguments: Any) -> Any:
        return wrong(counter, original, *arguments)

    setattr(owner, name, method)
    try:
        yield counter
    finally:
        setattr(owner, name, original)


def arrivals_not_awaited() -> Any:
    """The step is launched although its state may still be under way."""

    def bring(counter: Counter, original: Any, away: AwayState) -> Any:
        returning = away.returning or Returning(*away.form.bring())
        away.returning = None
        counter.own += 1
        returning.let_go()
        unawaited.append(returning.arrival)  # dropped, it would wait
        return returning.storage

    unawaited: list[Any] = []

    @contextlib.contextmanager
    def breaking() -> Iterator[Counter]:
        with patched(AwayState, "bring", bring) as counter:
            yield counter
        torch.accelerator.synchronize()
        unawaited.clear()

    return breaking()


def sent_before_the_step() -> Any:
    """A chunk's state leaves when it has come, and not after the kernels that write it."""

    def enter(counter: Counter, original: Any, stream: StateStream, number: int) -> None:
        original(stream, number)
        for tensor in stream._stepped(number):
            if tensor.numel() > 1 and away_of(tensor) is None:
                counter.own += 1
                sent_by = stream._mover._transfers.to(tensor.device)
                key = ("early", 0, tensor.nbytes, tensor.dtype)
                sent = sent_by.send(native.Form.BLOCK, native.StorageRef(tensor), key)
                early[tensor.data_ptr()] = sent

    def start(counter: Counter, original: Any, mover: StateMover, *arguments: Any) -> Any:
        storage = arguments[2]
        for address in list(early):
            found = early.pop(address)
            if found[0].pool_nbytes == storage.nbytes:
                return found
        return original(mover, *arguments)

    early: dict[int, Any] = {}

    @contextlib.contextmanager
    def breaking() -> Iterator[Counter]:
        with patched(StateStream, "enter", enter) as counter:
            with patched(StateMover, "_start", start):
                yield counter
        early.clear()

    return breaking()


@dataclass(frozen=True)
class Edge:
    """One edge, what breaks it, and the programs in which nothing else makes up for it."""

    name: str
    broken: Breaking
    workloads: tuple[Workload, ...]
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name


EDGES = [
    Edge("step -> leave", drop(send_stream, compute_streams), (one_optimizer, two_optimizers)),
    Edge("leave -> freed", drop(compute_streams, send_stream), (one_optimizer,)),
    Edge(
        "allocation -> return", drop(fetch_stream, compute_streams), (one_optimizer, two_optimizers)
    ),
    Edge("return -> step", drop(compute_streams, fetch_stream), (one_optimizer, two_optimizers)),
    Edge(
        "leave -> freed, memory of another stream",
        mutations.drop_record_stream,
        (state_of_another_stream,),
    ),
    Edge(
        "leave -> return into the same memory",
        drop(fetch_stream, send_stream),
        (one_optimizer,),
        {"room": 1},
    ),
    Edge("a step does not wait for its state", arrivals_not_awaited, (one_optimizer,)),
    Edge("state leaves before it is stepped", sent_before_the_step, (one_optimizer,)),
]


@pytest.mark.parametrize(
    "workload", [one_optimizer, two_optimizers, state_of_another_stream], ids=lambda w: w.__name__
)
def test_unbroken_steps_race_under_no_schedule(workload: Workload) -> None:
    assert_silent_and_right(workload, new_region=managed_region)
    assert_silent_and_right(workload, new_region=managed_region, room=ROOM // 2, pool="128KiB")
    assert_silent_and_right(workload, new_region=managed_region, room=1)


@pytest.mark.parametrize("edge", EDGES, ids=str)
def test_a_broken_edge_is_caught(edge: Edge) -> None:
    for workload in edge.workloads:
        right = expected(workload)
        seen = [
            observe(schedule, workload, edge.broken, new_region=managed_region, **edge.options)
            for schedule in MATRIX
        ]
        struck = [one for one in seen if one.hits]
        where = f"{edge} in {workload.__name__}"
        assert struck, f"{where}: the mutation never struck"
        assert any(one.reports for one in struck), f"{where}: the detector said nothing"
        assert any(one.differs_from(right) for one in struck), f"{where}: no wrong data anywhere"
