"""Copies away and copies back slow each other down, and what predicts their times knows it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from planned_stacks import LAZY
from race_workloads import DEVICE, new_pool

from memswap._native import native
from memswap.engine.lane import open_lane
from simdev import laboratory, virtual_time

pytestmark = [pytest.mark.own_laboratory, pytest.mark.one_schedule]

COPIES, NBYTES, GB_PER_S = 12, 1 << 16, 1.0


def predicted_us(away: int, back: int, duplex: float) -> float:
    """When the last of so many copies ends that all wait for the link at the beginning.

    That the planner's model of a link (csrc/engine/link_model.h) says the same, its own test shows
    (tests/cpp/replay_test.cpp).
    """
    copy_us = NBYTES / (GB_PER_S * 1e9) * 1e6
    few, many = sorted((away, back))
    return (few / duplex + many - few) * copy_us


def measured_us(away: int, back: int, duplex: float) -> float:
    """The same on the simulated link, in virtual time."""

    def storage() -> native.StorageRef:
        return native.StorageRef(torch.zeros(NBYTES, dtype=torch.uint8, device=DEVICE))

    def run(elapsed_us: Callable[[], float]) -> float:
        lane, pool = open_lane(DEVICE), new_pool()
        blocks = [pool.native.allocate(NBYTES) for _ in range(away + back)]
        for block in blocks[:back]:
            lane.send(storage(), block).wait()
        leaving = [storage() for _ in range(away)]
        torch.accelerator.synchronize()
        began = elapsed_us()
        tickets = []
        for index in range(max(away, back)):
            if index < away:
                tickets.append(lane.send(leaving[index], blocks[back + index]))
            if index < back:
                tickets.append(lane.fetch(blocks[index])[1])
        for ticket in tickets:
            ticket.synchronize()
        return elapsed_us() - began

    with (
        laboratory(LAZY),
        virtual_time(
            host_us=0.0,
            launch_us=0.0,
            hbm_gb_per_s=1e6,
            h2d_gb_per_s=GB_PER_S,
            d2h_gb_per_s=GB_PER_S,
            duplex=duplex,
        ) as clock,
    ):
        return run(clock.elapsed_us)


@pytest.mark.parametrize("duplex", [0.5, 0.75])
def test_copies_that_meet_take_as_long_as_predicted(duplex):
    found = measured_us(COPIES, COPIES, duplex)
    assert found == pytest.approx(predicted_us(COPIES, COPIES, duplex), rel=0.08)
    ignorant = predicted_us(COPIES, COPIES, 1.0)
    assert found > 1.25 * ignorant, "who ignores contention would have been right"


@pytest.mark.parametrize(("away", "back"), [(COPIES, 0), (0, COPIES)])
def test_copies_in_one_direction_do_not_slow_each_other_down(away, back):
    found = measured_us(away, back, 0.5)
    assert found == pytest.approx(predicted_us(away, back, 0.5), rel=0.02)
    assert found == pytest.approx(predicted_us(away, back, 1.0), rel=0.02)


def test_a_few_copies_back_are_slowed_down_by_many_away_for_as_long_as_they_meet():
    few = COPIES // 3
    found = measured_us(COPIES, few, 0.5)
    assert found == pytest.approx(predicted_us(COPIES, few, 0.5), rel=0.08)
    assert found > 1.25 * predicted_us(COPIES, few, 1.0)
