"""manage(budget=..., windows=...): the plan says what is encoded, windows say when."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from helpers import nothing_measured
from planned_stacks import LAZY
from race_workloads import DEVICE, new_pool
from timed_layers import ROOMY, Product
from torch import nn

import memswap
from memswap import Action, Policy, Rates, Windows
from memswap.engine.engine import Engine
from simdev import laboratory, virtual_time

SIDE = 128
NBYTES = SIDE * SIDE * 2
ENCODE = Policy(action=Action.ENCODE, min_bytes=1)

#: What the machine reaches; there is no link to speak of.
RATES = Rates("simulated", *(1e6,) * 4, 9e9, 9e9, copy_latency_s=0.0, codec_latency_s=0.2e-6)


class Step:
    """A steady step: its time, its plan, its peak, its gradients."""

    def __init__(
        self,
        share: float | None,
        windows: Windows | None = None,
        layers: int = 10,
        policy: Policy = ENCODE,
    ) -> None:
        torch.manual_seed(0)
        stack = nn.ModuleList(Product(SIDE) for _ in range(layers)).to(DEVICE, torch.bfloat16)
        batch = torch.randn(SIDE, SIDE).to(DEVICE, torch.bfloat16)
        manager: Any = None

        def step() -> None:
            stack.zero_grad(set_to_none=True)
            x = batch
            for layer in stack:
                x = layer(x)
            x.float().sum().backward()

        told = windows is not None and windows.seconds is not None
        measured = nothing_measured() if told else contextlib.nullcontext()
        with virtual_time(**ROOMY) as clock, measured:
            if share is not None:
                kept = (2 * layers + 1) * NBYTES
                self.budget = int(share * kept)
                manager = memswap.manage(
                    stack, policy, pool=new_pool(), budget=self.budget, rates=RATES, windows=windows
                )
            for _ in range(5):
                step()
                torch.accelerator.synchronize()
            if manager is not None:
                manager.reset_stats()
            began = clock.elapsed_us()
            step()
            self.us = clock.elapsed_us() - began
        self.gradients = [parameter.grad.cpu() for parameter in stack.parameters()]
        if manager is not None:
            self.plan, self.stats = manager.plan, manager.stats()
            self.windows = manager.window_stats()
            manager.remove()


def in_laboratory(*arguments: Any, **options: Any) -> Step:
    with laboratory(LAZY):
        return Step(*arguments, **options)


@pytest.mark.own_laboratory
@pytest.mark.one_schedule
@pytest.mark.parametrize("share", [0.95, 0.85])
def test_windows_hide_what_a_budget_needs_encoded_and_the_plan_says_how_much(share):
    plain, at_once = in_laboratory(None), in_laboratory(share)
    hidden = in_laboratory(share, Windows())
    assert hidden.windows.encoded_in_windows == hidden.stats.encoded_storages > 0
    for found in (at_once, hidden):
        exposed_us, said_us = found.us - plain.us, found.plan.exposed_s * 1e6
        assert abs(exposed_us - said_us) <= 0.35 * said_us + 0.005 * plain.us, (
            f"{said_us:.0f} us exposed were predicted, {exposed_us:.0f} found in {plain.us:.0f}"
        )
        assert found.stats.peak_resident_bytes <= found.plan.peak_bytes <= found.budget
        assert found.plan.peak_bytes - found.stats.peak_resident_bytes <= 2 * NBYTES
    assert hidden.us - plain.us < 0.7 * (at_once.us - plain.us), "windows hid nothing"
    assert hidden.plan.exposed_s < 0.5 * at_once.plan.exposed_s, "the plan knows no windows"


@pytest.mark.parametrize(
    ("action", "seconds"),
    [(Action.ENCODE, 0.0), (Action.ENCODE_SWAP, 1.0)],
    ids=["none-fits", "all-fit"],
)
def test_a_budget_holds_whatever_windows_there_are_and_no_bit_differs(action, seconds):
    """On every schedule: what waits in vain for a window is encoded where its room is due."""
    windows = Windows(seconds=lambda operator, shapes: seconds)
    plain = Step(None, layers=5)
    found = Step(0.98, windows, layers=5, policy=Policy(action=action, min_bytes=1))
    assert all(map(torch.equal, found.gradients, plain.gradients)), "a gradient differs"
    assert found.plan.moved_bytes > 0 and found.stats.encoded_storages > 0
    assert found.stats.peak_resident_bytes <= found.budget, "what waited exceeded the budget"


@pytest.mark.own_laboratory
@pytest.mark.one_schedule
def test_without_hurry_what_waits_for_a_window_exceeds_the_budget(monkeypatch):
    """Nothing starts before the end of the forward, where no window is long enough either."""
    engine, begin, end = Windows.engine, Engine.begin_iteration, Engine.end_forward
    ended = [False]

    def engine_without_hurry(options: Windows, *arguments: Any) -> Engine:
        made = engine(options, *arguments)
        made.windows.is_current = lambda stream: ended[0]
        return made

    def begins(made: Engine) -> None:
        ended[0] = False
        begin(made)

    def ends(made: Engine) -> None:
        ended[0] = True
        end(made)

    monkeypatch.setattr(Windows, "engine", engine_without_hurry)
    monkeypatch.setattr(Engine, "begin_iteration", begins)
    monkeypatch.setattr(Engine, "end_forward", ends)
    never = Windows(seconds=lambda operator, shapes: 0.0)
    found = in_laboratory(0.8, never, layers=14)
    assert found.stats.peak_resident_bytes > found.budget
