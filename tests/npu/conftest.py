"""Tests on the real torch_npu. They need its wheel and a virtual environment: `make test-npu`."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent
HAS_WHEEL = importlib.util.find_spec("torch_npu") is not None

sys.path[:0] = [str(TESTS / "race"), str(TESTS / "fake_acl")]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return None if HAS_WHEEL and config.getoption("--device") == "npu" else True


def pytest_report_header() -> str | None:
    return None if HAS_WHEEL else "tests/npu: left out, torch_npu is not installed (make test-npu)"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.definition.get_closest_marker("own_laboratory") is None and HAS_WHEEL:
        from simdev import SCHEDULES

        metafunc.parametrize("_machine", SCHEDULES[:5], ids=str, indirect=True)


@pytest.fixture(autouse=True)
def _machine(request: pytest.FixtureRequest) -> Iterator[None]:
    """One schedule, with the race detector; what a test breaks is whole again for the next one."""
    from fake_acl import _C
    from simdev import laboratory

    schedule = getattr(request, "param", None)
    with laboratory(schedule) if schedule else contextlib.nullcontext():
        try:
            yield
        finally:
            _C.repair()


@pytest.fixture
def run_apart() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a program in a process of its own: where a task queue has failed, it stays failed."""

    def run(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
        path = [str(TESTS / "fake_acl"), str(TESTS / "engine"), str(TESTS / "race"), *sys.path]
        return subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ
            | {"PYTHONPATH": os.pathsep.join(filter(None, path)), "OMP_NUM_THREADS": "1"}
            | environment,
            capture_output=True,
            text=True,
            errors="replace",  # torch_npu prints the device's index as a character
            timeout=300,  # a busy machine is no hang
            check=False,
        )

    return run
