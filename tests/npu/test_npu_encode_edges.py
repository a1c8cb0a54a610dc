"""Every edge of an encode, broken on purpose under the real torch_npu.

The programs and mutations are those of tests/race/codec_edges.py. The kernels are memswap's AscendC
ones, launched on torch_npu's streams.
"""

from __future__ import annotations

import codec_edges as lanes
import pytest
from race_workloads import MATRIX, expected, observe, one_stream, two_streams

from memswap import Action, Policy

pytestmark = [
    pytest.mark.own_laboratory,
    pytest.mark.one_schedule,
    pytest.mark.filterwarnings("ignore:memswap. a storage"),  # small arenas are full at times
]
#: eager, lazy, side_first, main_first, random
SCHEDULES = MATRIX[:5]
#: AscendC's kernels do not reach pinned memory.
EDGES = [edge for edge in lanes.EDGES if edge.program not in lanes.IN_PINNED_MEMORY]
PROGRAMS = sorted({edge.program for edge in EDGES}, key=lambda program: program.__name__)


@pytest.mark.parametrize("edge", EDGES, ids=str)
def test_a_broken_edge_of_an_encode_is_reported_and_gives_wrong_data(edge) -> None:
    right = lanes.expected(edge.program)
    seen = [lanes.observe(schedule, edge.program, edge.broken) for schedule in SCHEDULES]
    struck = [one for one in seen if one.hits]
    assert struck, f"edge {edge}: the mutation never struck"
    assert any(one.reports for one in struck), f"edge {edge}: the race detector said nothing"
    wrong = any(one.differs_from(right) for one in struck)
    assert wrong or not edge.shows_as_data, f"edge {edge}: the data was right under every schedule"


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_an_unbroken_codec_lane_is_silent_and_right(program) -> None:
    for schedule in SCHEDULES:
        seen = lanes.observe(schedule, program)
        assert not seen.reports, f"{schedule}: {seen.reports[:3]}"
        assert not seen.differs_from(lanes.expected(program)), f"{schedule}: data differ"


@pytest.mark.parametrize("action", [Action.ENCODE, Action.ENCODE_SWAP], ids=lambda a: a.value)
@pytest.mark.parametrize("workload", [one_stream, two_streams], ids=lambda w: w.__name__)
@pytest.mark.usefixtures("every_tensor_is_encoded")
def test_an_unbroken_engine_that_encodes_is_silent_and_right(workload, action) -> None:
    for schedule in SCHEDULES:
        seen = observe(schedule, workload, policy=Policy(action=action, min_bytes=1))
        assert not seen.reports, f"{schedule}: {seen.reports[:3]}"
        assert not seen.differs_from(expected(workload)), f"{schedule}: gradients differ"
