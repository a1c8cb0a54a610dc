"""Trainer over two ranks: each has the bits that it has without the callback, and one reports."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
tiny = pytest.importorskip("tiny")

import trainer_ranks  # noqa: E402

pytestmark = [pytest.mark.cpu_only, pytest.mark.timeout(1200)]


@pytest.mark.parametrize("how", ["DDP", "FSDP2"])
def test_each_rank_keeps_its_bits_and_the_first_one_reports(tmp_path, how):
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", trainer_ranks.__file__, how, str(tmp_path)),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=Path(trainer_ranks.__file__).parent,
        capture_output=True,
        text=True,
        timeout=1100,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    reports = [int((tmp_path / rank / trainer_ranks.REPORTS).read_text()) for rank in "01"]
    trainings = len(trainer_ranks.TRAININGS) + 5  # two budgets, the optimizer's state, and resumed
    assert reports == [trainings, 0], "each training is reported once, by rank 0"
    plans = [(tmp_path / rank / trainer_ranks.PLAN).read_text() for rank in "01"]
    assert plans[0] == plans[1], "with group= all ranks have one plan"
