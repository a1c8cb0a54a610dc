"""The edges of a swap: each broken on purpose, and programs in which nothing else makes up for it.

Workloads on two streams exist because on one stream edges 3 and 7 follow from the others: compute
has waited for the send before it frees, and the fetch waits for compute.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from broken_edges import Breaking, Counter, drop
from race_workloads import (
    DEVICE,
    Observation,
    Region,
    Workload,
    WrappedLane,
    compute_streams,
    expected,
    fetch_stream,
    lanes_opened,
    new_pool,
    on_host,
    one_stream,
    plain,
    send_stream,
    two_streams,
    two_streams_in_turn,
)

from memswap._native import native
from memswap.engine import transfers
from simdev import mutations


# ---------------------------------------------------------------- workloads of their own
def let_go_at_once(region: Region) -> list[torch.Tensor]:
    """Sent, waited for and let go of; the memory is written again by whoever comes next."""
    sent = torch.full((1000,), 3.0, device=DEVICE)
    if region is plain:
        return on_host([sent])
    lane, pool = transfers.open_lane(DEVICE), new_pool()
    view, block = native.capture(sent), pool.native.allocate(4000)
    departure = lane.send(native.StorageRef(sent), block)
    del sent
    departure.wait()
    next_owner = torch.full((1000,), 7.0, device=DEVICE)
    storage, arrival = lane.fetch(block)
    arrival.wait()
    found = on_host([view.rebuild(storage, False).clone()])
    del next_owner
    torch.accelerator.synchronize()
    return found


def fetched_elsewhere(region: Region) -> list[torch.Tensor]:
    """Sent and waited for on one stream, fetched on another that waited for nothing."""
    a, b = torch.Stream(device=DEVICE), torch.Stream(device=DEVICE)
    with a:
        sent = torch.full((1000,), 3.0, device=DEVICE)
    if region is plain:
        a.synchronize()
        return on_host([sent])
    lane, pool = transfers.open_lane(DEVICE), new_pool()
    view, block = native.capture(sent), pool.native.allocate(4000)
    with a:
        departure = lane.send(native.StorageRef(sent), block)
        del sent
        departure.wait()
    with b:
        storage, arrival = lane.fetch(block)
        arrival.wait()
        copy = view.rebuild(storage, False).clone()
        found = on_host([copy])
    torch.accelerator.synchronize()
    return found


def freed_elsewhere(region: Region) -> list[torch.Tensor]:
    """Memory of one stream, sent from there, waited for and let go of on another."""
    a, b = torch.Stream(device=DEVICE), torch.Stream(device=DEVICE)
    with b:
        sent = torch.full((1000,), 3.0, device=DEVICE)
    if region is plain:
        b.synchronize()
        return on_host([sent])
    lane, pool = transfers.open_lane(DEVICE), new_pool()
    view, block = native.capture(sent), pool.native.allocate(4000)
    with b:
        departure = lane.send(native.StorageRef(sent), block)
        del sent
    with a:
        departure.wait()
    with b:
        storage, arrival = lane.fetch(block)
        arrival.wait()
        found = on_host([view.rebuild(storage, False).clone()])
    torch.accelerator.synchronize()
    return found


def block_sent_again(region: Region) -> list[torch.Tensor]:
    """Fetched and used on one stream; then another stream sends other bytes into the block."""
    a, b = torch.Stream(device=DEVICE), torch.Stream(device=DEVICE)
    with a:
        first = torch.full((1000,), 3.0, device=DEVICE)
    with b:
        second = torch.full((1000,), 4.0, device=DEVICE)
    if region is plain:
        torch.accelerator.synchronize()
        return on_host([second, first])
    lane, pool = transfers.open_lane(DEVICE), new_pool()
    view, block = native.capture(first), pool.native.allocate(4000)
    with a:
        departure = lane.send(native.StorageRef(first), block)
        del first
        departure.wait()
        storage, arrival = lane.fetch(block)
        arrival.wait()
        one = view.rebuild(storage, False).clone()
        del storage
    with b:
        departure = lane.send(native.StorageRef(second), block)
        del second
        departure.wait()
        storage, arrival = lane.fetch(block)
        arrival.wait()
        two = view.rebuild(storage, False).clone()
        del storage
        found = on_host([two])
    with a:
        found += on_host([one])
    torch.accelerator.synchronize()
    return found


# ---------------------------------------------------------------- mutations
class FetchesIntoItsOwnMemory(WrappedLane):
    """Edge 6: returned storages belong to the fetch stream's memory instead of compute's.

    Nor does the allocator hear who uses it, which would make up for that.
    """

    hits = 0

    def fetch(self, block: Any) -> Any:
        own = fetch_stream(self.lane)
        with mutations.allocate_on(own, when=compute_streams(self.lane)) as mutation:
            fetched = self.lane.fetch(block)
            self.hits += mutation.hits
        return fetched


@contextlib.contextmanager
def fetching_into_its_own_memory() -> Iterator[Counter]:
    counter = Counter()

    def react(lane: Any) -> Any:
        counter.parts.append(FetchesIntoItsOwnMemory(lane))
        return counter.parts[-1]

    with lanes_opened(react), mutations.drop_record_stream():
        yield counter


@dataclass(frozen=True)
class Edge:
    """One edge, what breaks exactly it, and the programs in which nothing else makes up for it."""

    number: str
    name: str
    broken: Breaking
    workloads: tuple[Workload, ...]
    options: tuple[tuple[str, Any], ...] = (("prefetch_bytes", 0),)
    pool: str = "64MiB"

    def __str__(self) -> str:
        return f"{self.number} {self.name}"


EDGES = [
    Edge("1", "producer -> leave", drop(send_stream, compute_streams), (one_stream, two_streams)),
    Edge(
        "2",
        "leave -> freed",
        drop(compute_streams, send_stream),
        (let_go_at_once, one_stream),
    ),
    Edge(
        "3",
        "leave -> return of the block",
        drop(fetch_stream, send_stream),
        (fetched_elsewhere, two_streams),
    ),
    Edge(
        "4",
        "allocation on compute -> return",
        drop(fetch_stream, compute_streams),
        (one_stream, two_streams),
    ),
    Edge("5", "return -> consumer", drop(compute_streams, fetch_stream), (one_stream, two_streams)),
    Edge("6", "last consumer -> freed", fetching_into_its_own_memory, (one_stream, two_streams)),
    Edge(
        "7",
        "return done -> block reused",
        drop(send_stream, fetch_stream),
        (block_sent_again, two_streams_in_turn),
        pool="32KiB",  # room for one model only: its blocks must pass to the other
    ),
    Edge(
        "2, 6",
        "the same with several streams (record_stream)",
        mutations.drop_record_stream,
        (freed_elsewhere, two_streams),
    ),
    Edge(
        "2, 7",
        "host-known completion (event queries lie)",
        mutations.lying_queries,
        (one_stream, two_streams),
    ),
]


def cell(seen: Observation, workload: Workload) -> str:
    """What a run showed, in words of the table that test_edges.py prints."""
    if not seen.hits:
        return "host"
    words = ["reports"] if seen.reports else []
    words += ["data"] if seen.differs_from(expected(workload)) else []
    return " + ".join(words) or "-"
