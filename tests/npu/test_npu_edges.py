"""Every edge of a swap, broken on purpose under the real torch_npu.

The programs and mutations are those of tests/race/swap_edges.py. torch_npu's allocator is not the
simulator's (it takes the block that fits best, where the simulator takes the one freed last), so an
edge counts as caught where one of its programs shows it; each must be both reported and seen as
wrong data.
"""

from __future__ import annotations

import pytest
from race_workloads import MATRIX, expected, observe
from swap_edges import EDGES, Edge, cell

pytestmark = [
    pytest.mark.own_laboratory,
    pytest.mark.one_schedule,
    pytest.mark.filterwarnings("ignore:memswap. a storage"),  # small pools are full at times
]
#: eager, lazy, side_first, main_first, random
SCHEDULES = MATRIX[:5]
WORKLOADS = sorted({w for edge in EDGES for w in edge.workloads}, key=lambda w: w.__name__)


@pytest.mark.parametrize("edge", EDGES, ids=str)
def test_a_broken_edge_is_reported_and_gives_wrong_data(edge: Edge) -> None:
    hits, reported, wrong = 0, False, False
    for workload in edge.workloads:
        for schedule in SCHEDULES:
            seen = observe(
                schedule, workload, edge.broken, pool=edge.pool, **dict(edge.options)
            )  # fmt: skip
            print(f"| {edge} | {workload.__name__} | {schedule} | {cell(seen, workload)} |")
            hits += seen.hits
            reported |= bool(seen.hits and seen.reports)
            wrong |= bool(seen.hits) and seen.differs_from(expected(workload))
    assert hits > 0, f"edge {edge}: the mutation never struck"
    assert reported, f"edge {edge}: the race detector said nothing"
    assert wrong, f"edge {edge}: the data was right under every schedule"


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda w: w.__name__)
@pytest.mark.parametrize("pool", ["64MiB", "32KiB"])
def test_an_unbroken_engine_is_silent_and_right(workload, pool: str) -> None:
    for schedule in SCHEDULES:
        seen = observe(schedule, workload, pool=pool)
        assert not seen.reports, f"{schedule}: {seen.reports[:3]}"
        assert not seen.differs_from(expected(workload)), f"{schedule}: gradients differ"
