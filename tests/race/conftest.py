"""The race tests need the simulated accelerator; anywhere else they are left out, and say so."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
SIMULATED = ("sim", "npu")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    on_simulator = config.getoption("--device") in SIMULATED
    return None if on_simulator or HERE not in collection_path.parents else True


def pytest_report_header(config: pytest.Config) -> str | None:
    if config.getoption("--device") in SIMULATED:
        return None
    return "tests/race: left out, it needs the simulated accelerator (--device sim)"
