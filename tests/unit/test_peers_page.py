"""The tables of docs/alternatives.md are those of the results that they name."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "peers_page.py"

pytestmark = [
    pytest.mark.cpu_only,
    pytest.mark.skipif(not SCRIPT.exists(), reason="no benchmarks in this distribution"),
]


def test_the_tables_are_those_of_the_results() -> None:
    names = runpy.run_path(str(SCRIPT))
    page = names["PAGE"].read_text("utf-8")
    assert len(names["MARKED"].findall(page)) == 2, "the page has lost the places of its tables"
    assert names["filled"](page) == page, "results have changed: run benchmarks/peers_page.py"


def test_a_way_that_is_not_there_is_told_with_its_reason() -> None:
    names = runpy.run_path(str(SCRIPT))
    measured = {"held_bytes": 3 << 20, "peak_bytes": 4 << 20, "same_bits": True}
    result = {
        "environment": {"device": "cpu", "torch": "2.13.0", "commit": "0123456789"},
        "simulated": False,
        "sizes": {"layers": 4, "hidden": 512, "batch": 2, "sequence": 512},
        "ways": [
            {"way": "plain", "step_s": 2.0, "plain_step_s": 1.0, **measured},
            {"way": "save_on_cpu", "absent": "needs an accelerator"},
        ],
    }
    text = names["table"](result)
    assert "| plain | 3.0 MiB | 4.0 MiB | 2.00x | the same bits |" in text
    assert "Not here: save_on_cpu (needs an accelerator)." in text
