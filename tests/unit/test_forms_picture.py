"""The picture in docs/choosing.md shows what the cost model says."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "draw_forms.py"

pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="no benchmarks in this distribution")


def test_the_picture_is_what_the_script_draws() -> None:
    drawn = runpy.run_path(str(SCRIPT))["draw"]()
    assert drawn == (ROOT / "docs" / "forms.svg").read_text(), (
        "rates or shapes have changed: run python benchmarks/draw_forms.py"
    )


def test_recomputing_is_the_cheapest_room_of_all() -> None:
    """What docs/choosing.md says of both machines."""
    names = runpy.run_path(str(SCRIPT))
    for machine in ("H200", "CPU"):
        dtype = next(iter(names[machine].matmul_flops))
        costs = names["seconds_per_gib"](names[machine], dtype)
        assert min(costs, key=costs.get) == "RECOMPUTE"
