"""Plans are made anew when the machine or the model changes its speed, and not for noise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from planned_stacks import COMPUTE, LAZY, SWAP, Stack, link
from race_workloads import new_pool
from torch import nn

import memswap
import simdev
from memswap.planning import kinds
from memswap.planning.holding import SAMPLES
from simdev import laboratory, virtual_time

pytestmark = [pytest.mark.own_laboratory, pytest.mark.one_schedule]

FAST, SLOW = 0.6, 0.12
RETIME_AFTER = 4


@pytest.fixture(autouse=True)
def _often(monkeypatch):
    monkeypatch.setattr(kinds, "RETIME_AFTER", RETIME_AFTER)


class Machine:
    """A managed stack on a machine whose speed changes."""

    def __init__(self, clock: Any, budget: int | str, gb_per_s: float) -> None:
        self.clock = clock
        self.stack = Stack(1)
        self.manager = memswap.manage(
            self.stack.layers, SWAP, pool=new_pool(), budget=budget, rates=link(gb_per_s)
        )

    def steps(self, count: int, gb_per_s: float, **compute: float) -> float:
        """So many steps at these speeds; microseconds of the last one."""
        speeds: dict[str, Any] = {**COMPUTE, **compute}
        base = (speeds["host_us"], speeds["launch_us"], speeds["hbm_gb_per_s"])
        simdev._C.set_cost_model(*base, gb_per_s, gb_per_s, 0, True)
        for _ in range(count):
            began = self.clock.elapsed_us()
            self.stack.step()
        return self.clock.elapsed_us() - began

    @property
    def plan(self) -> memswap.types.Plan:
        return self.manager.plan

    @property
    def replans(self) -> int:
        return self.manager._director._latest.plans - 1


def in_laboratory(body: Callable[[Machine], Any], budget: int | str, gb_per_s: float) -> Any:
    """What a body found, whose machine is gone at the laboratory's end."""

    def run() -> Any:
        with virtual_time() as clock:
            machine = Machine(clock, budget, gb_per_s)
            found = body(machine)
            machine.manager.remove()
        return found

    with laboratory(LAZY):
        return run()


def settled(budget: int | str, gb_per_s: float) -> tuple[float, memswap.types.Plan]:
    """A step of a machine that has always been so fast, and its plan."""
    count = 7 + compared(budget)
    return in_laboratory(lambda one: (one.steps(count, gb_per_s), one.plan), budget, gb_per_s)


def compared(budget: int | str) -> int:
    """Steps in which a plan is compared with plain ones, that are some of these."""
    return 3 * SAMPLES if budget == "auto" else 0


@pytest.mark.parametrize("budget", ["auto", 120 << 10])
def test_a_link_that_becomes_slower_and_faster_again_is_noticed(budget):
    slow_us, slow_plan = settled(budget, SLOW)
    fast_us, fast_plan = settled(budget, FAST)

    def body(machine: Machine) -> None:
        more = compared(budget)
        machine.steps(6 + more, FAST)
        assert machine.plan.moved_bytes == fast_plan.moved_bytes
        machine.steps(4 * RETIME_AFTER + 4 * more, SLOW)
        assert machine.replans >= 1, "a link five times slower changed nothing"
        us = machine.steps(3, SLOW)
        assert us <= 1.05 * slow_us, f"{us:.0f} us, and {slow_us:.0f} with a plan for this link"
        machine.steps(4 * RETIME_AFTER + 4 * more, FAST)
        us = machine.steps(3, FAST)
        assert us <= 1.05 * fast_us, f"{us:.0f} us, and {fast_us:.0f} with a plan for this link"
        assert machine.plan.moved_bytes >= 0.9 * fast_plan.moved_bytes > 0

    in_laboratory(body, budget, FAST)
    assert slow_plan.moved_bytes <= fast_plan.moved_bytes


def test_a_model_that_becomes_faster_is_planned_anew():
    def body(machine: Machine) -> None:
        machine.steps(6, FAST)
        before = machine.plan.compute_s
        machine.steps(4 * RETIME_AFTER, FAST, hbm_gb_per_s=9.0)
        assert machine.replans == 1
        assert machine.plan.compute_s < 0.8 * before

    in_laboratory(body, 120 << 10, FAST)


def test_noise_changes_no_plan():
    """Each step is a little slower or faster than the last one, and one is very slow."""

    def body(machine: Machine) -> None:
        machine.steps(6, FAST)
        for number in range(6 * RETIME_AFTER):
            factor = 1 + 0.12 * (-1) ** number
            factor = 0.25 if number == 2 * RETIME_AFTER else factor
            machine.steps(1, FAST * factor, hbm_gb_per_s=3.0 * factor)
        assert machine.replans == 0

    in_laboratory(body, 120 << 10, FAST)


def test_a_timed_step_of_another_structure_is_no_error():
    """A hook that somebody left behind saves more, or less: training goes on."""

    def body(machine: Machine) -> None:
        machine.steps(6, FAST)
        doubled = nn.Sequential(machine.stack.layers[-1], machine.stack.layers[-1])
        plain = machine.stack.layers
        for number in range(2 * RETIME_AFTER):
            machine.stack.layers = nn.ModuleList([*plain[:-1], doubled]) if number % 2 else plain
            machine.steps(1, FAST)
        assert machine.plan is not None

    in_laboratory(body, 120 << 10, FAST)
