"""A Llama-8B's layers on an H200 by its data sheet: what the cost model predicts is what happens.

`benchmarks/bench_budget_curve.py` draws the curve by prediction alone. Here two layers' operators
are placeholders with the real shapes' times, and a step under a plan is timed in virtual time.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path

import pytest
from race_workloads import DEVICE

import memswap
from memswap import Action
from memswap.planning.cost_model import hardware
from memswap.planning.planner import make_plan

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SETS = {
    "swap": (memswap.Policy(action=Action.SWAP, min_bytes=1), (Action.SWAP,)),
    "all": (
        memswap.Policy(min_bytes=1),
        (Action.SWAP, Action.ENCODE_SWAP, Action.ENCODE, Action.RECOMPUTE),
    ),
}


@pytest.mark.own_laboratory
@pytest.mark.one_schedule
@pytest.mark.parametrize("name", SETS)
def test_half_of_the_bytes_take_the_time_that_the_cost_model_predicts(name, monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    operators = importlib.import_module("llama_operators")
    curve = importlib.import_module("executed_curve")
    policy, actions = SETS[name]
    card = hardware("H200")
    marks = operators.Marks(*operators.llama(2, 1, 8192, card))
    step = marks.step(actions, regions=False)
    predicted = make_plan(step, replace(card.rates(), copy_latency_s=0.0), "50%")
    found = curve.executed(DEVICE, card, marks, policy, "50%")
    assert found.same, "a gradient has other bits"
    assert found.plain_s == pytest.approx(step.compute_s, rel=0.01), "operators take other times"
    assert found.peak <= 0.5 < found.peak + 0.05, "the budget was not met, or not used"
    assert found.slowdown == pytest.approx(found.planned, rel=0.02, abs=1e-4)
    assert found.slowdown == pytest.approx(predicted.slowdown, rel=0.06, abs=1e-4)
    assert (found.slowdown < 0.02) == (name == "all"), "half of the bytes at 2 % of the time"
