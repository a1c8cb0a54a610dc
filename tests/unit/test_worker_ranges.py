"""Promises of the worker lane: byte ranges, fetches into storages in use, transfers in order."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from memswap._native import native
from memswap.engine.pools import DiskPool, HostPool

WORKERS = [0, 1, 2]
LONG = 2**20 + 3


def bytes_tensor(nbytes: int, seed: int = 0) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=random)


def bytes_of(block: Any) -> torch.Tensor:
    found = torch.empty(block.nbytes, dtype=torch.uint8)
    block.read(found)
    return found


@pytest.fixture(params=["host", "disk"])
def pool(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    if request.param == "host":
        return HostPool("64MiB", "4MiB", device="cpu").native
    return DiskPool(tmp_path, "64MiB", "4MiB").native


RANGES = [(0, LONG), (0, 1), (1, 511), (4097, 700_001), (LONG - 1, 1), (LONG, 0)]


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize(("offset", "nbytes"), RANGES)
def test_any_range_leaves_and_returns_to_any_place(
    pool: Any, workers: int, offset: int, nbytes: int
) -> None:
    lane = native.WorkerLane(workers=workers)
    source, target = bytes_tensor(LONG), bytes_tensor(LONG, seed=1)
    expected = target.clone()
    place = LONG - offset - nbytes
    expected[place : place + nbytes] = source[offset : offset + nbytes]
    block = pool.allocate(nbytes)
    lane.send(native.StorageRef(source), block, offset, nbytes)
    ticket = lane.fetch_into(block, native.StorageRef(target), place)
    ticket.wait()
    assert torch.equal(target, expected), "the range is wrong, or other bytes were touched"


def test_a_range_without_a_length_reaches_to_the_end(pool: Any) -> None:
    lane = native.WorkerLane()
    source, block = bytes_tensor(1000), pool.allocate(100)
    lane.send(native.StorageRef(source), block, offset=900).wait()
    assert torch.equal(bytes_of(block), source[900:])


@pytest.mark.parametrize("workers", WORKERS)
def test_a_transfer_comes_after_the_tickets_it_is_given(workers: int) -> None:
    """A chain over two lanes, waited for at its end: only `after` keeps it in order."""
    pool = HostPool("64MiB", "4MiB", device="cpu").native
    lanes = [native.WorkerLane(workers=workers) for _ in range(2)]
    for attempt in range(20):
        source = bytes_tensor(LONG, seed=attempt)
        rooms = [torch.zeros(LONG, dtype=torch.uint8) for _ in range(3)]
        tickets, storage = [], native.StorageRef(source)
        for i, room in enumerate(rooms):
            block = pool.allocate(LONG)
            departure = lanes[i % 2].send(storage, block, after=tickets)
            storage = native.StorageRef(room)
            tickets = [lanes[(i + 1) % 2].fetch_into(block, storage, 0, after=[departure])]
        tickets[0].wait()
        assert torch.equal(rooms[-1], source), "a transfer ran ahead of the one it comes after"


@pytest.mark.parametrize("workers", WORKERS)
def test_a_fetch_into_a_range_comes_after_the_send_of_it_that_is_named(workers: int) -> None:
    pool = HostPool("64MiB", "4MiB", device="cpu").native
    lane = native.WorkerLane(workers=workers)
    for attempt in range(20):
        storage, other = bytes_tensor(LONG, seed=attempt), bytes_tensor(LONG, seed=99)
        before = storage.clone()
        there, back = pool.allocate(LONG), pool.allocate(LONG)
        back.write(other)
        departure = lane.send(native.StorageRef(storage), there)
        lane.fetch_into(back, native.StorageRef(storage), 0, after=[departure]).wait()
        departure.wait()
        assert torch.equal(bytes_of(there), before), "overwritten before it had left"
        assert torch.equal(storage, other)


def test_a_fetch_may_come_after_another_lanes_fetch_of_the_same_block() -> None:
    """Fetches of one block do not wait for each other, unless they are told to."""
    pool = HostPool("64MiB", "4MiB", device="cpu").native
    lane = native.WorkerLane(workers=0)
    block = pool.allocate(100)
    block.write(bytes_tensor(100))
    _, first = lane.fetch(block)
    _, second = lane.fetch(block)
    second.wait()
    assert not first.done()
    _, third = lane.fetch(block, after=[first])
    third.wait()
    assert first.done(), "the fetch did not wait for the ticket it comes after"


def broken_fetch(lane: Any, folder: Path) -> Any:
    """The ticket of work that fails: its file has lost its bytes."""
    import os

    pool = DiskPool(folder, "1MiB", "1MiB").native
    block = pool.allocate(100_000)
    lane.send(native.StorageRef(bytes_tensor(100_000)), block).wait()
    for entry in Path("/proc/self/fd").iterdir():
        if entry.exists() and os.readlink(entry).startswith(str(folder)):
            os.truncate(entry, 0)
    return lane.fetch(block)[1]


@pytest.mark.parametrize("workers", WORKERS)
def test_a_transfer_after_work_that_failed_fails_and_says_so(workers: int, tmp_path: Path) -> None:
    lane = native.WorkerLane(workers=workers)
    failed = broken_fetch(lane, tmp_path)
    pool = HostPool("1MiB", "1MiB", device="cpu").native
    storage = native.StorageRef(bytes_tensor(100))
    block, other = pool.allocate(100), pool.allocate(100)
    other.write(torch.zeros(100, dtype=torch.uint8))
    departure = lane.send(storage, block, after=[failed])
    with pytest.raises(native.TransferError, match=r"work that comes first had failed: .*expected"):
        departure.wait()
    assert departure.failed() and departure.storage().key == storage.key, "the storage is lost"
    target = bytes_tensor(100)
    expected = target.clone()
    with pytest.raises(native.TransferError, match="had failed"):
        lane.fetch_into(other, native.StorageRef(target), 0, after=[failed]).wait()
    assert torch.equal(target, expected), "bytes were moved that should never have been there"
    with pytest.raises(native.TransferError, match="never sent away"):
        lane.fetch(block)[1].wait()


def test_tickets_that_are_given_are_let_go_of_when_the_transfer_has_ended(tmp_path: Path) -> None:
    """Seen by a ticket that holds something to the end: a send that failed keeps its storage."""
    pool = HostPool("1MiB", "1MiB", device="cpu").native
    lane = native.WorkerLane(workers=0)
    storage = native.StorageRef(bytes_tensor(100))
    weak = native.WeakStorage(storage)
    first = lane.send(storage, pool.allocate(100), after=[broken_fetch(lane, tmp_path)])
    second = lane.send(native.StorageRef(bytes_tensor(100)), pool.allocate(100), after=[first])
    with pytest.raises(native.TransferError):
        second.wait()
    lane.settle()
    assert not weak.expired()
    del storage, first
    assert weak.expired(), "a transfer that has ended still holds the tickets it came after"


def test_a_storage_with_several_sends_counts_once() -> None:
    pool = HostPool("1MiB", "1MiB", device="cpu").native
    lane = native.WorkerLane(workers=0, max_leaving_bytes=1000)
    storage = native.StorageRef(bytes_tensor(4000))
    tickets = [lane.send(storage, pool.allocate(1000), 1000 * i, 1000) for i in range(4)]
    assert lane.leaving_bytes() == 4000
    assert not any(ticket.done() for ticket in tickets), "parts of one storage wait for each other"
    tickets[1].wait()
    assert lane.leaving_bytes() == 4000, "three sends still own the storage"
    lane.settle()
    assert lane.leaving_bytes() == 0


def test_the_other_bytes_of_a_storage_may_be_written_meanwhile() -> None:
    pool = HostPool("64MiB", "4MiB", device="cpu").native
    lane = native.WorkerLane(workers=2)
    storage = torch.zeros(8, LONG, dtype=torch.uint8)
    blocks = [pool.allocate(LONG) for _ in range(4)]
    for i, block in enumerate(blocks):
        block.write(torch.full((LONG,), 50 + i, dtype=torch.uint8))

    def write_odd_rows() -> None:
        for row in range(1, 8, 2):
            storage[row].fill_(row)

    writer = threading.Thread(target=write_odd_rows)
    writer.start()
    tickets = [
        lane.fetch_into(block, native.StorageRef(storage), 2 * i * LONG)
        for i, block in enumerate(blocks)
    ]
    for ticket in tickets:
        ticket.wait()
    writer.join()
    assert [row.unique().tolist() for row in storage] == [
        [50], [1], [51], [3], [52], [5], [53], [7]
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("offset", "nbytes"), [(0, 11), (1, 10), (11, 0), (11, None), (2**63, 2**63)]
)
def test_a_range_beyond_the_storage_is_refused(offset: int, nbytes: int | None) -> None:
    lane, pool = native.WorkerLane(), HostPool("1MiB", "1MiB", device="cpu").native
    with pytest.raises(ValueError, match=r"within a storage of 10 bytes, found .* from offset"):
        lane.send(native.StorageRef(bytes_tensor(10)), pool.allocate(11), offset, nbytes)


def test_wrong_arguments_of_a_fetch_into_are_named() -> None:
    lane, pool = native.WorkerLane(), HostPool("1MiB", "1MiB", device="cpu").native
    block, storage = pool.allocate(10), native.StorageRef(bytes_tensor(10))
    with pytest.raises(ValueError, match="found 10 bytes from offset 1"):
        lane.fetch_into(block, storage, 1)
    with pytest.raises(ValueError, match="found None"):
        lane.fetch_into(None, storage, 0)
    with pytest.raises(ValueError, match="found None"):
        lane.fetch_into(block, None, 0)
    with pytest.raises(ValueError, match="on meta"):
        lane.fetch_into(block, native.StorageRef(torch.empty(10, device="meta")), 0)
    with pytest.raises(TypeError, match=r"send\(\): incompatible function arguments"):
        lane.send(storage, block, after="yesterday")
    with pytest.raises(ValueError, match="found None"):
        lane.fetch(block, after=[None])


def test_nothing_to_gather_is_named() -> None:
    lane = native.WorkerLane()
    with pytest.raises(ValueError, match="found no storages"):
        lane.gather([])
    with pytest.raises(ValueError, match="found None"):
        lane.gather([native.StorageRef(bytes_tensor(10)), None])
