"""Builds and runs the emulators of tests/: CMake projects of their own, and their test programs."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
#: Where memswap is built, and the emulators beside it.
BUILD = Path(os.environ.get("MEMSWAP_BUILD_DIR", ROOT / "build"))


def build_emulator(name: str, *options: str) -> Path:
    """Where ``tests/<name>`` is built; skips the test where CMake or GoogleTest is missing."""
    if shutil.which("cmake") is None:
        pytest.skip("cmake is not on PATH")
    folder = BUILD / name  # kept between runs: compiling it takes longer than running it
    configured = _run(["cmake", f"-S{ROOT / 'tests' / name}", f"-B{folder}", *options])
    if "GTest" in configured.stderr:
        pytest.skip("GoogleTest was not found")
    assert configured.returncode == 0, configured.stderr
    built = _run(["cmake", "--build", str(folder), "--parallel", "2"])
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


def run_googletest(program: Path, names: str, environment: Mapping[str, str] | None = None) -> None:
    """Run the tests that GoogleTest's filter names; one has to be there, and all have to pass."""
    done = _run([str(program), f"--gtest_filter={names}", "--gtest_brief=1"], environment)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-8000:]
    assert "PASSED" in done.stdout and " 0 tests" not in done.stdout, done.stdout[-2000:]


def _run(
    command: list[str], environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        check=False,
    )
