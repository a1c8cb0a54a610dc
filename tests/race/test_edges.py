"""Ordering rule 1, edge by edge: each one broken on purpose is caught, twice.

Once by the race detector, once because gradients come out wrong under a schedule of the matrix. A
mutation that never struck, or that nothing noticed, fails the test: then either the edge is not
there or the laboratory is blind.

Under the eager schedule every transfer has ended by the time the host asks. The engine then takes
the way for which no wait is needed, and some mutations have nothing to strike; the table shows
`host` there. Workloads on two streams exist because on one stream edges 3 and 7 follow from the
others: compute has waited for the send before it frees, and the fetch waits for compute.
"""

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
    WrappedLane,
    compute_streams,
    fetch_stream,
    lanes_opened,
    new_pool,
    observe,
    on_host,
    one_stream,
    plain,
    run_plain,
    saved_region,
    send_stream,
    two_streams,
    two_streams_in_turn,
)

from memswap._native import native
from memswap.engine import transfer
from simdev import laboratory, mutations

pytestmark = [
    pytest.mark.own_laboratory,
    pytest.mark.one_schedule,
    pytest.mark.filterwarnings("ignore:memswap. a storage"),  # small pools are full at times
]


# ---------------------------------------------------------------- workloads of their own
def let_go_at_once(region: Region) -> list[torch.Tensor]:
    """Sent, waited for and let go of; the memory is written again by whoever comes next."""
    sent = torch.full((1000,), 3.0, device=DEVICE)
    if region is plain:
        return on_host([sent])
    lane, pool = transfer.open_lane(DEVICE), new_pool()
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
    lane, pool = transfer.open_lane(DEVICE), new_pool()
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
    lane, pool = transfer.open_lane(DEVICE), new_pool()
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
    lane, pool = transfer.open_lane(DEVICE), new_pool()
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

_expected: dict[Workload, list[torch.Tensor]] = {}


def expected(workload: Workload) -> list[torch.Tensor]:
    """Results of the plain run, once per workload."""
    if workload not in _expected:
        _expected[workload] = run_plain(workload)
    return _expected[workload]


def row_of(edge: Edge, workload: Workload) -> list[Observation]:
    return [
        observe(schedule, workload, edge.broken, pool=edge.pool, **dict(edge.options))
        for schedule in MATRIX
    ]


def cell(seen: Observation, workload: Workload) -> str:
    if not seen.hits:
        return "host"
    words = ["reports"] if seen.reports else []
    words += ["data"] if seen.differs_from(expected(workload)) else []
    return " + ".join(words) or "-"


def edge_table(rows: list[tuple[Edge, Workload, list[Observation]]]) -> str:
    """Which schedule caught which broken edge, as Markdown for docs/.

    `reports`: the race detector spoke. `data`: gradients differ from the plain run's. `-`: this
    schedule hides the fault. `host`: the wait that the mutation removes was not needed, because
    the host had seen the transfer end.
    """
    head = ["edge", "program", *(str(schedule) for schedule in MATRIX)]
    lines = [head, ["---"] * len(head)]
    for edge, workload, seen in rows:
        cells = [cell(one, workload) for one in seen]
        lines.append([str(edge), workload.__name__, *cells])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


_rows: list[tuple[Edge, Workload, list[Observation]]] = []


@pytest.mark.parametrize("edge", EDGES, ids=str)
def test_a_broken_edge_is_caught_by_the_detector_and_as_wrong_data(edge: Edge) -> None:
    reported_eagerly = False
    for workload in edge.workloads:
        right = expected(workload)
        seen = row_of(edge, workload)
        _rows.append((edge, workload, seen))
        where = f"edge {edge} in {workload.__name__}"
        assert sum(one.hits for one in seen) > 0, f"{where}: the mutation never struck"
        struck = [one for one in seen if one.hits]
        assert any(one.reports for one in struck), f"{where}: the detector said nothing"
        assert any(one.differs_from(right) for one in struck), f"{where}: no wrong data anywhere"
        eager = seen[MATRIX.index(EAGER)]
        reported_eagerly |= bool(eager.hits and eager.reports)
    assert reported_eagerly, f"edge {edge}: not reported under the eager schedule"


@pytest.mark.parametrize(
    "workload",
    sorted({w for edge in EDGES for w in edge.workloads}, key=lambda w: w.__name__),
    ids=lambda w: w.__name__,
)
@pytest.mark.parametrize("prefetch_bytes", ["auto", 0])
@pytest.mark.parametrize("pool", ["64MiB", "32KiB"])
def test_an_unbroken_engine_is_silent_and_right_under_every_schedule(
    workload: Workload, prefetch_bytes: int | str, pool: str
) -> None:
    for schedule in MATRIX:
        seen = observe(schedule, workload, prefetch_bytes=prefetch_bytes, pool=pool)
        assert not seen.reports, f"{schedule}: {seen.reports[:3]}"
        assert not seen.differs_from(expected(workload)), f"{schedule}: gradients differ"


def test_every_edge_was_tried_and_the_table_can_be_printed() -> None:
    """Runs last: prints the table under -s."""
    tried = {edge.number for edge, _, _ in _rows}
    if tried != {edge.number for edge in EDGES}:
        pytest.skip("only some edges were selected")
    table = edge_table(_rows)
    print("\n" + table)
    assert len(table.splitlines()) == 2 + sum(len(edge.workloads) for edge in EDGES)


def test_blocks_do_pass_from_stream_to_stream_behind_tickets() -> None:
    """Otherwise edge 7 would be tested on blocks that nobody waits for."""
    lazy = next(schedule for schedule in MATRIX if schedule.policy == "lazy")
    with laboratory(lazy):
        region = saved_region(pool="32KiB", prefetch_bytes=0)
        two_streams_in_turn(region)
        pool = region()._saver._routes.open_routes()[0].pool
        waits = pool.native.statistics()["waits"]
        del region, pool
    assert waits > 0, "no block was handed out behind a ticket of its previous owner"
