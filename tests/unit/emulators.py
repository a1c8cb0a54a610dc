"""Builds and runs the emulators of tests/: CMake projects of their own, and their test programs.

An emulated machine has one thread and draws from seeds that its tests name: the same program says
the same each time, minutes later. What it said when it passed is kept beside it, and it runs again
once its code, its arguments or the frames that it reads are others, or with --slow.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
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
    configured = run_program(["cmake", f"-S{ROOT / 'tests' / name}", f"-B{folder}", *options])
    if "GTest" in configured.stderr:
        pytest.skip("GoogleTest was not found")
    assert configured.returncode == 0, configured.stderr
    built = run_program(["cmake", "--build", str(folder), "--parallel", "2"])
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


@dataclass(frozen=True)
class EmulatorRuns:
    """Runs of test programs, those that passed before looked up.

    Attributes:
        again: run them all the same.
    """

    again: bool

    def run(
        self, *command: str | Path, environment: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """What a program of one thread says, or said when it passed."""
        words = [str(word) for word in command]
        settings = dict(environment or {})
        program = Path(words[0])
        kept = BUILD / "emulators_passed" / f"{program.name}-{_digest(words, settings)}.txt"
        if kept.exists() and not self.again:
            return subprocess.CompletedProcess(words, 0, kept.read_text(encoding="utf-8"), "")
        done = run_program(words, settings)
        if done.returncode == 0:
            keep(kept, done.stdout)
        return done

    def run_googletest(
        self, program: Path, names: str, environment: Mapping[str, str] | None = None
    ) -> None:
        """Tests of one thread that GoogleTest's filter names."""
        expect_passed(self.run(program, *googletest(names), environment=environment))


@pytest.fixture
def emulator_runs(request: pytest.FixtureRequest) -> EmulatorRuns:
    return EmulatorRuns(again=request.config.getoption("--slow"))


def keep(file: Path, said: str) -> None:
    """Write down what a program said, at once for whoever reads it beside."""
    file.parent.mkdir(parents=True, exist_ok=True)
    written = file.with_suffix(f".{os.getpid()}")
    written.write_text(said, encoding="utf-8")
    written.replace(file)


def googletest(names: str) -> tuple[str, str]:
    """Arguments for the tests that GoogleTest's filter names."""
    return f"--gtest_filter={names}", "--gtest_brief=1"


def expect_passed(done: subprocess.CompletedProcess[str]) -> None:
    """One test has to be there, and all have to pass."""
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-8000:]
    assert "PASSED" in done.stdout and " 0 tests" not in done.stdout, done.stdout[-2000:]


def run_program(
    command: list[str], environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        check=False,
    )


def _digest(words: list[str], settings: dict[str, str]) -> str:
    """Of a program's code, of all that it reads, and of the machine."""
    digest = hashlib.sha256(Path(words[0]).read_bytes())
    digest.update(repr((words, sorted(settings.items()), platform.uname())).encode())
    for folder in ("golden", "corpus"):
        for path in sorted((ROOT / "kernels" / "tests" / folder).iterdir()):
            digest.update(repr((path.name, path.read_bytes())).encode())
    return digest.hexdigest()
