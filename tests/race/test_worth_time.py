"""In virtual time: manage(model) that is left all choices is as fast as plain where it declines."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from planned_stacks import COMPUTE, LAZY, Stack
from torch import nn

import memswap
from memswap._native import native
from memswap.planning import worth
from memswap.planning.holding import SAMPLES
from simdev import capturing, laboratory, virtual_time

#: After so many steps a comparison is over, and the device has passed its last moment.
DECIDED = worth.WARM_UP + 2 * SAMPLES + 1

pytestmark = [pytest.mark.own_laboratory, pytest.mark.one_schedule]


class Model(nn.Module):
    """A stack of layers, called as a model is."""

    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float().sum()


class Times:
    """What each step takes, in virtual microseconds, and whether something moved in it."""

    def __init__(self, gb_per_s: float, managed: bool) -> None:
        stack = Stack(0)
        model = Model(stack.layers)
        self.us: list[float] = []
        self.moved: list[bool] = []
        self.found: list[list[torch.Tensor]] = []
        links = {"h2d_gb_per_s": gb_per_s, "d2h_gb_per_s": gb_per_s}
        with virtual_time(**COMPUTE, **links, queries_wait=False) as clock:
            policy = memswap.Policy(min_bytes=1)
            manager: Any = memswap.manage(model, policy) if managed else None
            for _ in range(DECIDED + 4):
                if manager is not None:
                    manager.reset_stats()
                began = clock.elapsed_us()
                model.zero_grad(set_to_none=True)
                model(stack.x).backward()
                self.us.append(clock.elapsed_us() - began)
                self.moved.append(manager is not None and manager.stats().moved_storages > 0)
                self.found.append(stack.gradients())
            if manager is not None:
                self.plan = manager.plan
                manager.remove()


def times(*arguments: Any) -> Times:
    """In a laboratory of its own, whose end finds races and leaks."""
    with laboratory(LAZY):
        return Times(*arguments)


def test_a_link_that_exposes_copies_has_everything_stay_and_a_step_is_as_fast_as_plain():
    plain, found = times(0.05, False), times(0.05, True)
    assert all(found.moved[: worth.WARM_UP]) and found.us[worth.WARM_UP - 1] > 1.5 * plain.us[-1]
    assert found.moved[worth.WARM_UP : DECIDED - 1].count(False) == SAMPLES
    assert not any(found.moved[-4:]) and found.plan is not None and found.plan.declined
    assert found.us[-1] == pytest.approx(plain.us[-1], rel=1e-3)
    assert found.plan.compute_s * 1e6 >= 0.99 * plain.us[-1]
    for ours, theirs in zip(found.found, plain.found, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert torch.equal(one, other)


def test_a_link_that_hides_copies_is_used_on():
    plain, found = times(10.0, False), times(10.0, True)
    assert found.us[worth.WARM_UP - 1] <= 1.01 * plain.us[-1], "copies are not hidden"
    assert all(found.moved[-4:]) and found.plan is None


def train_into_a_capture(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The moments that are recorded from the capture on, amid a comparison."""
    recorded: list[Any] = []

    class Recording:
        def __init__(self, device: torch.device) -> None:
            self._clock = native.Clock(device)

        def now(self) -> Any:
            recorded.append(self._clock.now())
            return recorded[-1]

    monkeypatch.setattr(worth, "Clock", Recording)
    stack = Stack(0)
    model = Model(stack.layers)
    with memswap.manage(model, memswap.Policy(min_bytes=1)):
        for _ in range(worth.WARM_UP + 2):
            model(stack.x).backward()
        assert recorded, "nothing was compared"
        recorded.clear()
        with capturing(torch.accelerator.current_stream(stack.x.device)):
            loss = model(stack.x)
        loss.backward()
        model(stack.x).backward()
    return recorded


def test_while_a_graph_is_captured_nothing_is_compared(monkeypatch):
    """A moment that is recorded then belongs to the graph, and asking about one is an error."""
    with laboratory(LAZY):
        recorded = train_into_a_capture(monkeypatch)
    assert not recorded
