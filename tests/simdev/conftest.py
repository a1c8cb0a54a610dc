"""Makes `simdev` importable, and keeps it out of processes that test something else."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(HERE))


def _wanted(config: pytest.Config) -> bool:
    """Whether this run was asked for the simulator.

    Once registered, it is torch's accelerator for the whole process, whatever else there is, so a
    run of all tests on the CPU or on a GPU must not import it.
    """
    if config.getoption("device", "cpu") not in ("cpu", "cuda"):
        return True
    paths = [Path(str(argument).split("::")[0]).resolve() for argument in config.args]
    return any(path == HERE or HERE in path.parents for path in paths)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return None if _wanted(config) else True


def pytest_configure(config: pytest.Config) -> None:
    if _wanted(config):
        import torch

        torch.set_num_threads(1)  # OpenMP's threads and ours would fight for the cores
