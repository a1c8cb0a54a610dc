"""The examples that need other stacks run as their first lines say, and something moves in them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

tiny = pytest.importorskip("tiny")

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.cpu_only


@pytest.mark.parametrize(
    ("name", "needs"),
    [
        ("finetune_trainer", "transformers"),
        ("lora_trl", "trl"),
        ("lightning_module", "lightning"),
    ],
)
def test_example_runs(tmp_path, name, needs):
    pytest.importorskip(needs)
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / f"{name}.py")],
        cwd=tmp_path,
        env={**os.environ, "ACCELERATE_USE_CPU": "true"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, f"examples/{name}.py fails:\n{done.stderr}"
    assert "loss" in done.stdout, f"examples/{name}.py says nothing of its loss:\n{done.stdout}"
    said = done.stdout + done.stderr  # Lightning's log has the report there
    assert tiny.moved(said), f"nothing moved in examples/{name}.py:\n{said}"
    assert not list(tmp_path.iterdir()), f"examples/{name}.py left files behind"
