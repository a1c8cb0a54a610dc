"""The edges of bytes that go to a file by way of pinned memory: each broken, and each caught.

Edges 1, 2, 4 and 5 are those of a swap; `a` and `c` are the host's ([Note: Two legs] in
csrc/lane/staged_lane.h): a thread that writes or reads pinned memory, which the race detector
cannot see, so that wrong bytes are what shows.
"""

from __future__ import annotations

import contextlib
import tempfile
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from broken_edges import Breaking, drop, on_every_lane
from race_workloads import (
    DEVICE,
    MATRIX,
    Region,
    Workload,
    assert_silent_and_right,
    compute_streams,
    expected,
    fetch_stream,
    observe,
    on_host,
    plain,
    send_stream,
)

import memswap
from memswap._native import native
from memswap.engine import lane as lanes
from memswap.engine import transfers
from simdev import mutations

pytestmark = [pytest.mark.own_laboratory, pytest.mark.one_schedule]

#: Two of these do not fit into the pinned memory, so that each fetch has the part of the last one.
LENGTH = 15_000


@pytest.fixture(autouse=True)
def _little_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which the same part is used again and again."""

    def host_pool(*, device: Any, **options: Any) -> memswap.HostPool:
        return memswap.HostPool(budget="64KiB", slab="64KiB", device=device, **options)

    monkeypatch.setattr(lanes, "HostPool", host_pool)
    monkeypatch.setattr(lanes, "STAGING_BYTES", 64 << 10)


def staged_region(**_: Any) -> Region:
    return contextlib.nullcontext


def filled(value: float) -> torch.Tensor:
    return torch.full((LENGTH,), value, device=DEVICE)


def by_way_of_a_file(region: Region) -> list[torch.Tensor]:
    """Four tensors go to a file, one after another, and come back from it in two rounds."""
    if region is plain:
        return on_host([filled(value) for value in (3.0, 4.0, 5.0, 6.0)] * 2)
    lane = transfers.open_staged_lane(DEVICE)
    pool = memswap.DiskPool(tempfile.gettempdir(), budget="1MiB", extent="1MiB")
    away = []
    for value in (3.0, 4.0, 5.0, 6.0):
        tensor = filled(value)
        view, block = native.capture(tensor), pool.native.allocate(4 * LENGTH)
        departure = lane.send(native.StorageRef(tensor), block)
        del tensor
        departure.wait()
        churn = filled(7.0)  # may get the memory of what left
        away.append((view, block))
        del churn
    lane.finish_writes()  # or they would come from pinned memory
    copies = []
    for _ in range(2):
        for view, block in away:
            storage, arrival = lane.fetch(block)
            arrival.wait()
            copies.append(view.rebuild(storage, False).clone())
            del storage
            churn = filled(8.0)
            del churn
    found = on_host(copies)
    torch.accelerator.synchronize()
    return found


# ---------------------------------------------------------------- mutations
on_staged_lanes = partial(on_every_lane, opener="open_staged_lane")
drop_staged = partial(drop, opener="open_staged_lane")


@dataclass(frozen=True)
class Edge:
    """One edge, what breaks it, and whether the detector can see it."""

    name: str
    broken: Breaking
    seen: bool = True
    workload: Workload = by_way_of_a_file

    def __str__(self) -> str:
        return self.name


EDGES = [
    Edge("1 producer -> copy", drop_staged(send_stream, compute_streams)),
    Edge("2 copy -> freed", drop_staged(compute_streams, send_stream)),
    Edge("4, e allocation -> copy", drop_staged(fetch_stream, compute_streams)),
    Edge("5 copy -> consumer", drop_staged(compute_streams, fetch_stream)),
    Edge(
        "a copy -> write",
        on_staged_lanes(lambda lane: mutations.drop_synchronizes(source=send_stream(lane))),
        seen=False,
    ),
    Edge(
        "c last use of pinned memory -> read",
        on_staged_lanes(lambda lane: mutations.drop_synchronizes(source=fetch_stream(lane))),
        seen=False,
    ),
]


def test_unbroken_transfers_race_under_no_schedule() -> None:
    assert_silent_and_right(by_way_of_a_file, new_region=staged_region)


@pytest.mark.parametrize("edge", EDGES, ids=str)
def test_a_broken_edge_is_caught(edge: Edge) -> None:
    right = expected(edge.workload)
    seen = [
        observe(schedule, edge.workload, edge.broken, new_region=staged_region)
        for schedule in MATRIX
    ]
    struck = [one for one in seen if one.hits]
    assert struck, f"{edge}: the mutation never struck"
    assert any(one.reports for one in struck) or not edge.seen, f"{edge}: the detector is silent"
    assert any(one.differs_from(right) for one in struck), f"{edge}: no wrong data anywhere"
