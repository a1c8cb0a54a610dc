"""The edges of an encode, broken one by one under a whole engine: each is caught, twice.

All of them are broken in test_codec_edges.py, lane by lane (the reuse of the arena there alone: a
whole engine orders it twice). Here a model trains, and what must not go unnoticed is a gradient:
the race detector speaks, and some schedule gives other bits.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from broken_edges import EncodeEdge, assert_caught, drop_between
from helpers import assert_same_gradients, frames_expected
from race_workloads import (
    EAGER,
    MATRIX,
    Workload,
    assert_silent_and_right,
    expected,
    observe,
    one_stream,
    open_small_arenas,
    saved_region,
    two_streams,
)

from memswap import Action, Policy
from simdev import laboratory

pytestmark = [
    pytest.mark.own_laboratory,
    pytest.mark.one_schedule,
    pytest.mark.usefixtures("every_tensor_is_encoded"),
    pytest.mark.filterwarnings("ignore:memswap. a storage"),  # small arenas are full at times
]

ENCODE = Policy(action=Action.ENCODE, min_bytes=1)
ENCODE_SWAP = Policy(action=Action.ENCODE_SWAP, min_bytes=1)

#: As much as the frames of one forward of these models set aside, and little more.
ARENA_BYTES = 512 << 10


@pytest.fixture
def no_capacity(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Frames without a variable part: every payload goes to an arena, which is soon full."""
    open_small_arenas(monkeypatch, ARENA_BYTES)
    with frames_expected(margin=0, margin_units=0):
        yield


# ---------------------------------------------------------------- mutations
EDGES = [
    EncodeEdge("producer -> encode", drop_between("encode", "compute"), ENCODE, one_stream),
    EncodeEdge("encode -> freed", drop_between("compute", "encode"), ENCODE, two_streams),
    EncodeEdge("encode -> decode", drop_between("decode", "encode"), ENCODE, two_streams),
    EncodeEdge("allocation -> decode", drop_between("decode", "compute"), ENCODE, one_stream),
    EncodeEdge("decode -> consumer", drop_between("compute", "decode"), ENCODE, one_stream),
    EncodeEdge("encode -> copy", drop_between("send", "encode", True), ENCODE_SWAP, one_stream),
    EncodeEdge("copy -> decode", drop_between("decode", "fetch", True), ENCODE_SWAP, one_stream),
]


@pytest.mark.parametrize("edge", EDGES, ids=str)
def test_a_broken_edge_is_caught_by_the_detector_and_as_wrong_data(edge: EncodeEdge) -> None:
    assert_caught(edge, prefetch_bytes=0)


@pytest.mark.parametrize("action", [Action.ENCODE, Action.ENCODE_SWAP], ids=lambda a: a.value)
@pytest.mark.parametrize("workload", [one_stream, two_streams], ids=lambda w: w.__name__)
@pytest.mark.parametrize("prefetch_bytes", ["auto", 0])
def test_an_unbroken_engine_is_silent_and_right_under_every_schedule(
    workload: Workload, action: Action, prefetch_bytes: int | str
) -> None:
    policy = Policy(action=action, min_bytes=1)
    assert_silent_and_right(workload, policy=policy, prefetch_bytes=prefetch_bytes)


@pytest.mark.parametrize("action", [Action.ENCODE, Action.ENCODE_SWAP], ids=lambda a: a.value)
@pytest.mark.parametrize("workload", [one_stream, two_streams], ids=lambda w: w.__name__)
def test_payloads_that_overflow_come_back_from_the_arena(
    workload: Workload, action: Action, no_capacity: None
) -> None:
    used = 0
    for schedule in MATRIX:
        with laboratory(schedule.with_check("collect")):
            region = saved_region(policy=Policy(action=action, min_bytes=1))
            found = workload(region)
            torch.accelerator.synchronize()
            transfers = region()._engine._transfers.all()[0]
            arena = transfers.codec_lane.arena_statistics()
            used += arena["resets"]
            assert arena["reserved_bytes"] > 0, "nothing overflowed"
            del region, transfers
        assert_same_gradients(found, expected(workload))
    assert used > 0, "the arena was never used a second time"


def test_the_eager_schedule_reports_what_it_can_see() -> None:
    """Its order hides no missing edge from the detector, whatever the data looks like."""
    edge = EDGES[0]
    seen = observe(EAGER, edge.workload, edge.broken, policy=edge.policy, prefetch_bytes=0)
    assert seen.hits and seen.reports
