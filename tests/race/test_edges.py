"""Ordering rule 1, edge by edge: each one broken on purpose is caught, twice.

Once by the race detector, once because gradients come out wrong under a schedule of the matrix. A
mutation that never struck, or that nothing noticed, fails the test: then either the edge is not
there or the laboratory is blind.

Under the eager schedule every transfer has ended by the time the host asks. The engine then takes
the way for which no wait is needed, and some mutations have nothing to strike; the table shows
`host` there.
"""

from __future__ import annotations

import pytest
from race_workloads import (
    EAGER,
    MATRIX,
    Observation,
    Workload,
    assert_silent_and_right,
    expected,
    observe,
    saved_region,
    two_streams_in_turn,
)
from swap_edges import EDGES, Edge, cell

from simdev import laboratory

pytestmark = [
    pytest.mark.own_laboratory,
    pytest.mark.one_schedule,
    pytest.mark.filterwarnings("ignore:memswap. a storage"),  # small pools are full at times
]


def row_of(edge: Edge, workload: Workload) -> list[Observation]:
    return [
        observe(schedule, workload, edge.broken, pool=edge.pool, **dict(edge.options))
        for schedule in MATRIX
    ]


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
    assert_silent_and_right(workload, prefetch_bytes=prefetch_bytes, pool=pool)


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
        pool = region()._engine._transfers.all()[0].pool
        waits = pool.native.statistics()["waits"]
        del region, pool
    assert waits > 0, "no block was handed out behind a ticket of its previous owner"
