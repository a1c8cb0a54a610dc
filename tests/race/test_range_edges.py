"""Each edge of transfers of byte ranges broken on purpose, as test_edges.py does for the engine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from broken_edges import Breaking, Counter, drop
from race_workloads import (
    DEVICE,
    EAGER,
    MATRIX,
    Observation,
    Region,
    Workload,
    assert_silent_and_right,
    compute_streams,
    expected,
    fetch_stream,
    lanes_opened,
    new_pool,
    observe,
    on_host,
    plain,
    send_stream,
    storage_of,
)

from memswap.engine import transfers
from simdev import mutations


# Programs of two parts, so that one wait only makes what it is to make. `plain` is the truth.
def range_of_fresh_bytes(region: Region) -> list[torch.Tensor]:
    """Written on compute, then a range of it is sent."""
    tensor = torch.full((3000,), 3.0, device=DEVICE)
    if region is plain:
        return on_host([tensor[1000:2001]])
    lane, pool = transfers.open_lane(DEVICE), new_pool()
    block = pool.native.allocate(4004)
    tensor.add_(1).sub_(1)
    lane.send(storage_of(tensor), block, 4000, 4004).synchronize()
    found = torch.empty(1001)
    block.read(found)
    return [found]


def range_written_after_it_was_sent(region: Region) -> list[torch.Tensor]:
    """The storage stays; its owner waits for the send and writes the range again."""
    tensor = torch.full((3000,), 3.0, device=DEVICE)
    if region is plain:
        return on_host([tensor[1000:2001]])
    lane, pool = transfers.open_lane(DEVICE), new_pool()
    block = pool.native.allocate(4004)
    departure = lane.send(storage_of(tensor), block, 4000, 4004)
    departure.wait()
    tensor.fill_(9.0)
    torch.accelerator.current_stream().synchronize()
    departure.synchronize()
    found = torch.empty(1001)
    block.read(found)
    return [found]


def _block_of(value: float, count: int, pool: Any) -> Any:
    """A block with `count` floats that no ticket has to be waited for."""
    block = pool.native.allocate(4 * count)
    block.write(torch.full((count,), value))
    return block


def fetched_over_bytes_in_use(region: Region) -> list[torch.Tensor]:
    """What compute read and wrote in the storage comes before the fetch into it."""
    storage = torch.full((3000,), 3.0, device=DEVICE)
    if region is plain:
        before = storage.clone()
        storage[1000:2001] = 7.0
        return on_host([before, storage])
    lane, pool = transfers.open_lane(DEVICE), new_pool()
    block = _block_of(7.0, 1001, pool)
    before = storage.clone()
    arrival = lane.fetch_into(block, storage_of(storage), 4000)
    arrival.wait()
    return on_host([before, storage])


def read_after_a_fetch_into_it(region: Region) -> list[torch.Tensor]:
    """The consumer of the range, and a writer of it, come after the fetch."""
    storage = torch.full((3000,), 3.0, device=DEVICE)
    if region is plain:
        storage[1000:2001] = 7.0
        return on_host([storage * 2, storage])
    lane, pool = transfers.open_lane(DEVICE), new_pool()
    block = _block_of(7.0, 1001, pool)
    arrival = lane.fetch_into(block, storage_of(storage), 4000)
    arrival.wait()
    doubled = storage * 2
    return on_host([doubled, storage])


def range_sent_and_fetched_into_elsewhere(region: Region) -> list[torch.Tensor]:
    """A range is sent on one stream; another, that waited for nothing, fetches its block."""
    a, b = torch.Stream(device=DEVICE), torch.Stream(device=DEVICE)
    with a:
        sent = torch.full((3000,), 3.0, device=DEVICE)
    with b:
        storage = torch.full((3000,), 5.0, device=DEVICE)
        if region is plain:
            storage[:1001] = 3.0
            return on_host([storage])
    lane, pool = transfers.open_lane(DEVICE), new_pool()
    block = pool.native.allocate(4004)
    with a:
        departure = lane.send(storage_of(sent), block, 4000, 4004)
    with b:
        lane.fetch_into(block, storage_of(storage), 0).wait()
        found = on_host([storage])
    with a:
        departure.wait()
    torch.accelerator.synchronize()
    return found


def fetched_into_then_sent_again(region: Region) -> list[torch.Tensor]:
    """A block is fetched into a storage of one stream and filled anew by another stream."""
    a, b = torch.Stream(device=DEVICE), torch.Stream(device=DEVICE)
    with a:
        storage = torch.full((3000,), 5.0, device=DEVICE)
    with b:
        second = torch.full((3000,), 4.0, device=DEVICE)
    if region is plain:
        torch.accelerator.synchronize()
        storage[:1001] = 7.0
        return on_host([second[:1001], storage])
    lane, pool = transfers.open_lane(DEVICE), new_pool()
    block = _block_of(7.0, 1001, pool)
    with a:
        arrival = lane.fetch_into(block, storage_of(storage), 0)
    with b:
        departure = lane.send(storage_of(second), block, 4000, 4004)
        departure.synchronize()
        found = torch.empty(1001)
        block.read(found)
    with a:
        arrival.wait()
        return [found, *on_host([storage])]


def ranges_swapped_in_place(region: Region) -> list[torch.Tensor]:
    """The range is sent, and another block is fetched into it behind the send's ticket.

    Compute waits for the fetch only: nothing else orders the two copies.
    """
    storage = torch.full((3000,), 3.0, device=DEVICE)
    if region is plain:
        before = storage[1000:2001].clone()
        storage[1000:2001] = 7.0
        return on_host([storage, before])
    lane, pool = transfers.open_lane(DEVICE), new_pool()
    there, back = pool.native.allocate(4004), _block_of(7.0, 1001, pool)
    departure = lane.send(storage_of(storage), there, 4000, 4004)
    arrival = lane.fetch_into(back, storage_of(storage), 4000, after=[departure])
    arrival.wait()
    found = on_host([storage])
    departure.synchronize()
    before = torch.empty(1001)
    there.read(before)
    return [*found, before]


def sent_behind_another_lanes_fetch(region: Region) -> list[torch.Tensor]:
    """What one lane brings, another lane sends on: ordered by the ticket, not by compute."""
    if region is plain:
        return [torch.full((1001,), 7.0)]
    storage = torch.full((3000,), 3.0, device=DEVICE)
    torch.accelerator.synchronize()
    lanes, pool = [transfers.open_lane(DEVICE) for _ in range(2)], new_pool()
    back, there = _block_of(7.0, 1001, pool), pool.native.allocate(4004)
    arrival = lanes[0].fetch_into(back, storage_of(storage), 4000)
    departure = lanes[1].send(storage_of(storage), there, 4000, 4004, after=[arrival])
    departure.synchronize()
    found = torch.empty(1001)
    there.read(found)
    arrival.wait()
    return [found]


def let_go_on_another_stream(region: Region) -> list[torch.Tensor]:
    """Memory of stream b; fetched into, waited for and let go of on stream a."""
    a, b = torch.Stream(device=DEVICE), torch.Stream(device=DEVICE)
    if region is plain:
        return [torch.full((1001,), 9.0), torch.full((1001,), 14.0)]
    with b:
        storage = torch.full((1001,), 3.0, device=DEVICE)
    b.synchronize()
    lane, pool = transfers.open_lane(DEVICE), new_pool()
    block = _block_of(7.0, 1001, pool)
    with a:
        arrival = lane.fetch_into(block, storage_of(storage), 0)
        arrival.wait()
        doubled = storage * 2
        del storage
    with b:
        next_owner = torch.full((1001,), 9.0, device=DEVICE)
        b.synchronize()
    with a:
        doubled = on_host([doubled])[0]
    with b:
        return [*on_host([next_owner]), doubled]


def every_send_stream_after_every_fetch_stream() -> contextlib.AbstractContextManager[Any]:
    """As `drop`, between the streams of different lanes."""

    @contextlib.contextmanager
    def breaking() -> Iterator[Counter]:
        counter = Counter()
        lanes: list[Any] = []
        with contextlib.ExitStack() as stack:

            def react(lane: Any) -> Any:
                for other in lanes:
                    mutation = mutations.drop_waits(
                        waiter=send_stream(lane), source=fetch_stream(other)
                    )
                    counter.parts.append(stack.enter_context(mutation))
                lanes.append(lane)
                return lane

            stack.enter_context(lanes_opened(react))
            yield counter

    return breaking()


@dataclass(frozen=True)
class Edge:
    name: str
    broken: Breaking
    workload: Workload


EDGES = [
    Edge("1 producer -> send", drop(send_stream, compute_streams), range_of_fresh_bytes),
    Edge(
        "2 send -> range written again",
        drop(compute_streams, send_stream),
        range_written_after_it_was_sent,
    ),
    Edge(
        "3 send -> fetch of the block",
        drop(fetch_stream, send_stream),
        range_sent_and_fetched_into_elsewhere,
    ),
    Edge(
        "4 everything before -> fetch into",
        drop(fetch_stream, compute_streams),
        fetched_over_bytes_in_use,
    ),
    Edge(
        "5 fetch into -> consumer", drop(compute_streams, fetch_stream), read_after_a_fetch_into_it
    ),
    Edge("6 consumer -> freed elsewhere", mutations.drop_record_stream, let_go_on_another_stream),
    Edge(
        "7 fetch into -> block used again",
        drop(send_stream, fetch_stream),
        fetched_into_then_sent_again,
    ),
    Edge("8 after a send -> fetch into", drop(fetch_stream, send_stream), ranges_swapped_in_place),
    Edge(
        "8 after another lane's fetch -> send",
        every_send_stream_after_every_fetch_stream,
        sent_behind_another_lanes_fetch,
    ),
]

each_edge = pytest.mark.parametrize("edge", EDGES, ids=lambda edge: edge.name)


@pytest.mark.own_laboratory
@pytest.mark.one_schedule
@each_edge
def test_a_broken_edge_is_caught_by_the_detector_and_as_wrong_data(edge: Edge) -> None:
    right = expected(edge.workload)
    seen: dict[str, Observation] = {
        str(schedule): observe(schedule, edge.workload, edge.broken) for schedule in MATRIX
    }
    struck = {schedule: one for schedule, one in seen.items() if one.hits}
    assert struck, "the mutation never struck"
    assert str(EAGER) in struck and struck[str(EAGER)].reports, "not reported when run eagerly"
    assert any(one.differs_from(right) for one in struck.values()), "no wrong data anywhere"


@pytest.mark.own_laboratory
@pytest.mark.one_schedule
@each_edge
def test_unbroken_lanes_are_silent_and_right_under_every_schedule(edge: Edge) -> None:
    assert_silent_and_right(edge.workload)
