"""StreamCodecLane: every edge of an encode, right under every schedule, seen failing when broken.

The detector must report each broken edge (codec_edges.py), and where the table says so, data must
come out wrong.
"""

from __future__ import annotations

import pytest
from codec_edges import (
    EDGES,
    Edge,
    Program,
    arena_used_again,
    arena_used_again_in_pinned_memory,
    decoded_elsewhere,
    decoded_into_used_memory,
    expected,
    frame_dropped_while_it_is_decoded,
    header_read_late,
    let_go_at_once,
    observe,
    pinned_memory_given_back,
    reports_read,
    swapped,
)
from codec_machine import LAZY, Machine, values
from helpers import same_bits
from race_workloads import MATRIX

from simdev import mutations


@pytest.mark.own_laboratory
@pytest.mark.one_schedule
@pytest.mark.parametrize("edge", EDGES, ids=str)
def test_a_broken_edge_of_an_encode_is_caught(edge: Edge) -> None:
    right = expected(edge.program)
    seen = {str(schedule): observe(schedule, edge.program, edge.broken) for schedule in MATRIX}
    struck = {name: one for name, one in seen.items() if one.hits}
    assert struck, f"edge {edge}: the mutation never struck"
    assert any(one.reports for one in struck.values()), f"edge {edge}: the detector said nothing"
    wrong = [name for name, one in struck.items() if one.differs_from(right)]
    assert bool(wrong) or not edge.shows_as_data, f"edge {edge}: no wrong data anywhere"


@pytest.mark.own_laboratory
@pytest.mark.one_schedule
@pytest.mark.parametrize(
    "program",
    [
        let_go_at_once,
        decoded_elsewhere,
        decoded_into_used_memory,
        swapped,
        arena_used_again,
        arena_used_again_in_pinned_memory,
        pinned_memory_given_back,
        frame_dropped_while_it_is_decoded,
        header_read_late,
        reports_read,
    ],
    ids=lambda program: program.__name__,
)
def test_an_unbroken_lane_is_silent_and_right_under_every_schedule(program: Program) -> None:
    for schedule in MATRIX:
        seen = observe(schedule, program)
        assert not seen.reports, f"{schedule}: {seen.reports[:3]}"
        assert not seen.differs_from(expected(program)), f"{schedule}: data differ"


@pytest.mark.own_laboratory
@pytest.mark.one_schedule
def test_a_report_that_was_read_too_early_is_noticed() -> None:
    """Events that claim to have passed: the host takes a header that has not arrived."""
    seen = observe(LAZY, reports_read, lambda _: mutations.lying_queries())
    assert seen.hits
    assert seen.differs_from(expected(reports_read)), "a header was read before it had arrived"


def test_the_programs_give_back_what_was_encoded() -> None:
    machine = Machine()
    for program in (let_go_at_once, swapped):
        for seed, back in enumerate(program(machine)):
            assert same_bits(back, values(seed) * 2)
    assert machine.lane.decode_status() == 0
