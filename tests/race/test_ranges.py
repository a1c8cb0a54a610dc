"""StreamLane: byte ranges of storages, fetches into storages in use, and transfers in order."""

from __future__ import annotations

import pytest
import torch
from helpers import same_bits
from race_workloads import (
    DEVICE,
    new_bytes,
    new_lane,
    new_pool,
    send_stream,
    storage_of,
)

from memswap._native import native
from simdev import counters, mutations


# ---------------------------------------------------------------- ranges
@pytest.mark.parametrize("chunk_bytes", [512, 1000, 1 << 20])
@pytest.mark.parametrize(
    ("offset", "nbytes"), [(0, 1), (1, 511), (513, 1200), (70_000, 1), (3, 69_998), (70_001, 0)]
)
def test_any_range_of_a_storage_can_be_sent(offset: int, nbytes: int, chunk_bytes: int) -> None:
    lane, pool = new_lane(chunk_bytes=chunk_bytes), new_pool()
    tensor = new_bytes(70_001)
    expected = tensor.cpu()[offset : offset + nbytes]
    block = pool.native.allocate(nbytes)
    lane.send(storage_of(tensor), block, offset, nbytes).synchronize()
    found = torch.empty(nbytes, dtype=torch.uint8)
    block.read(found)
    assert same_bits(found, expected), f"{nbytes} bytes from {offset} in chunks of {chunk_bytes}"


@pytest.mark.parametrize("chunk_bytes", [512, 1000, 1 << 20])
@pytest.mark.parametrize("offset", [0, 1, 512, 65_904])
def test_a_fetch_into_a_storage_changes_its_range_and_nothing_else(
    offset: int, chunk_bytes: int
) -> None:
    lane, pool = new_lane(chunk_bytes=chunk_bytes), new_pool()
    part, target = new_bytes(4097, seed=1), new_bytes(70_001, seed=2)
    expected = target.cpu()
    expected[offset : offset + 4097] = part.cpu()
    block = pool.native.allocate(4097)
    lane.send(storage_of(part), block).wait()
    address = target.data_ptr()
    lane.fetch_into(block, storage_of(target), offset).wait()
    assert target.data_ptr() == address
    assert same_bits(target.cpu(), expected)


def test_a_range_without_a_length_reaches_to_the_end() -> None:
    lane, pool = new_lane(), new_pool()
    tensor, block = new_bytes(4097), pool.native.allocate(97)
    lane.send(storage_of(tensor), block, offset=4000).synchronize()
    found = torch.empty(97, dtype=torch.uint8)
    block.read(found)
    assert same_bits(found, tensor.cpu()[4000:])


def test_chunks_of_a_range_are_counted_from_its_begin() -> None:
    def tasks_of_sending(offset: int, chunk_bytes: int) -> int:
        lane, pool = new_lane(chunk_bytes=chunk_bytes), new_pool()
        tensor, block = new_bytes(70_001), pool.native.allocate(1025)
        torch.accelerator.synchronize()
        before = counters.tasks()[0]
        ticket = lane.send(storage_of(tensor), block, offset, 1025)
        tasks = counters.tasks()[0] - before
        ticket.wait()
        return tasks

    assert tasks_of_sending(511, 512) - tasks_of_sending(511, 1 << 20) == 2, "1025 bytes: 3 chunks"


def test_the_rest_of_a_storage_is_in_use_while_ranges_come_and_go() -> None:
    """Rows of one storage leave and return; compute writes the others meanwhile, unordered."""
    lane, pool = new_lane(chunk_bytes=512), new_pool()
    rows = torch.arange(8, dtype=torch.uint8).repeat_interleave(1000).view(8, 1000).to(DEVICE)
    blocks = [pool.native.allocate(1000) for _ in range(8)]
    departures = [
        lane.send(storage_of(rows), blocks[row], 1000 * row, 1000) for row in range(0, 8, 2)
    ]
    for row in range(1, 8, 2):
        rows[row].fill_(100 + row)  # beside what leaves
    for departure in departures:
        departure.wait()
    for row in range(0, 8, 2):
        rows[row].zero_()
    arrivals = [
        lane.fetch_into(blocks[row], storage_of(rows), 1000 * row) for row in range(0, 8, 2)
    ]
    for row in range(1, 8, 2):
        rows[row].add_(1)  # beside what returns
    for arrival in arrivals:
        arrival.wait()
    expected = [row if row % 2 == 0 else 101 + row for row in range(8)]
    assert rows.cpu()[:, ::999].tolist() == [[value, value] for value in expected]


def test_the_whole_storage_is_owned_and_counted_once() -> None:
    lane, pool = new_lane(max_leaving_bytes=5000, chunk_bytes=100), new_pool()
    tensor = new_bytes(4000)
    identity = native.WeakStorage(storage_of(tensor))
    tickets = [
        lane.send(storage_of(tensor), pool.native.allocate(1000), 1000 * i, 1000) for i in range(4)
    ]
    del tensor
    assert lane.leaving_bytes() in (0, 4000)
    for ticket in tickets[:3]:
        ticket.wait()
    assert lane.leaving_bytes() in (0, 4000)
    tickets[3].wait()
    assert lane.leaving_bytes() == 0 and identity.expired()


def test_parts_of_a_storage_beyond_the_bound_do_not_wait_for_each_other(
    request: pytest.FixtureRequest,
) -> None:
    lane, pool = new_lane(max_leaving_bytes=1000, chunk_bytes=100), new_pool()
    tensor = new_bytes(4000)
    torch.accelerator.synchronize()
    compute = torch.accelerator.current_stream()
    with mutations.drop_waits(waiter=compute, source=send_stream(lane)) as waits:
        tickets = [
            lane.send(storage_of(tensor), pool.native.allocate(1000), 1000 * i, 1000)
            for i in range(4)
        ]
        counted = waits.hits
    assert counted == 0, "a part of a storage that leaves already waited for another part"
    if "lazy" in request.node.name:
        assert not tickets[-1].done(), "the parts ended at once: nothing was shown"
    torch.accelerator.synchronize()


def test_every_stream_that_waits_for_a_send_comes_after_it() -> None:
    """So that each of them may write what was sent."""
    lane, pool = new_lane(), new_pool()
    tensor, block = new_bytes(70_001), pool.native.allocate(35_000)
    expected = tensor.cpu()[:35_000]
    torch.accelerator.synchronize()
    ticket = lane.send(storage_of(tensor), block, 0, 35_000)
    streams = [torch.Stream(device=DEVICE) for _ in range(3)]
    for i, stream in enumerate(streams):
        with stream:
            ticket.wait()
            tensor[10_000 * i : 10_000 * (i + 1)].zero_()
    for stream in streams:
        stream.synchronize()
    found = torch.empty(35_000, dtype=torch.uint8)
    ticket.synchronize()
    block.read(found)
    assert same_bits(found, expected), "a stream that waited wrote before the copy had read"


# ---------------------------------------------------------------- after
def test_a_transfer_comes_after_tickets_of_worker_lanes() -> None:
    lane, workers = new_lane(), native.WorkerLane(workers=0)
    pool, files = new_pool(), new_pool(device="cpu")
    source = torch.arange(200, dtype=torch.uint8)
    staged, block = files.native.allocate(200), pool.native.allocate(200)
    first = workers.send(storage_of(source), staged)
    tensor = new_bytes(200)
    expected = tensor.cpu()
    lane.send(storage_of(tensor), block, after=[first]).wait()
    assert first.done(), "the worker's transfer had not begun and was not waited for"
    storage, arrival = lane.fetch(block, after=[first])
    arrival.wait()
    assert same_bits(native.capture(tensor).rebuild(storage, False).cpu(), expected)


def test_work_of_a_worker_comes_after_tickets_of_a_stream() -> None:
    """A worker moves on what a stream has brought to pinned memory."""
    lane, workers = new_lane(chunk_bytes=512), native.WorkerLane(workers=1)
    pool, ordinary = new_pool(), new_pool(device="cpu")
    host = torch.zeros(4097, dtype=torch.uint8)
    tensor = new_bytes(4097)
    expected = tensor.cpu()
    staged, kept = pool.native.allocate(4097), ordinary.native.allocate(4097)
    departure = lane.send(storage_of(tensor), staged)
    unpinned = workers.fetch_into(staged, storage_of(host), 0, after=[departure])
    written = workers.send(storage_of(host), kept, after=[unpinned])
    written.wait()
    assert departure.done(), "the worker did not wait for the stream"
    found = torch.empty(4097, dtype=torch.uint8)
    kept.read(found)
    assert same_bits(found, expected)


def test_tickets_of_streams_are_ordered_without_the_host() -> None:
    lanes, pool = [new_lane(), new_lane()], new_pool()
    tensor = new_bytes(4000)
    blocks = [pool.native.allocate(4000) for _ in range(2)]
    before = counters.host_syncs()
    departure = lanes[0].send(storage_of(tensor), blocks[0])
    second = lanes[1].send(storage_of(tensor), blocks[1], after=[departure])
    arrival = lanes[0].fetch_into(blocks[1], storage_of(tensor), 0, after=[departure, second])
    assert counters.host_syncs() == before, "the host waited for a stream"
    arrival.wait()


# ---------------------------------------------------------------- refusals
@pytest.mark.parametrize(("offset", "nbytes"), [(0, 4098), (1, 4097), (4098, 0), (4098, None)])
def test_a_range_beyond_the_storage_is_refused(offset: int, nbytes: int | None) -> None:
    lane, pool = new_lane(), new_pool()
    tensor, block = new_bytes(4097), pool.native.allocate(nbytes or 1)
    with pytest.raises(ValueError, match=r"within a storage of 4097 bytes, found .* from offset"):
        lane.send(storage_of(tensor), block, offset, nbytes)


@pytest.mark.parametrize("offset", [3998, 4097, 2**63])
def test_a_fetch_beyond_the_storage_is_refused(offset: int) -> None:
    lane, pool = new_lane(), new_pool()
    tensor, block = new_bytes(4097), pool.native.allocate(100)
    with pytest.raises(ValueError, match=f"found 100 bytes from offset {offset}"):
        lane.fetch_into(block, storage_of(tensor), offset)


def test_a_fetch_into_another_device_or_nothing_is_refused() -> None:
    lane, pool = new_lane(), new_pool()
    block = pool.native.allocate(100)
    with pytest.raises(RuntimeError, match="this lane serves"):
        lane.fetch_into(block, storage_of(torch.zeros(100)), 0)
    with pytest.raises(ValueError, match="found None"):
        lane.fetch_into(block, None, 0)
    with pytest.raises(ValueError, match="found None"):
        lane.send(None, block)
    with pytest.raises(ValueError, match="found None"):
        lane.fetch(None)
