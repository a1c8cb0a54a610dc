"""A run that passed is looked up while nothing of it has changed, and no other run is."""

from __future__ import annotations

from pathlib import Path

import emulators
import pytest
from emulators import EmulatorRuns

pytestmark = pytest.mark.cpu_only


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Writes down that it ran, and passes."""
    monkeypatch.setattr(emulators, "BUILD", tmp_path / "build")
    return written(tmp_path, "echo passed")


def written(folder: Path, does: str) -> Path:
    path = folder / "program"
    path.write_text(f"#!/bin/sh\necho ran >> {folder}/runs\n{does}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


def runs(program: Path) -> int:
    return len(program.with_name("runs").read_text(encoding="utf-8").splitlines())


def test_what_passed_is_not_run_again_and_says_the_same(program: Path) -> None:
    for _ in range(2):
        done = EmulatorRuns(again=False).run(program, "first")
        assert (done.returncode, done.stdout) == (0, "passed\n")
    assert runs(program) == 1


def test_other_code_arguments_or_settings_are_another_run(program: Path) -> None:
    known = EmulatorRuns(again=False)
    known.run(program, "first")
    known.run(program, "second")
    assert runs(program) == 2, "other arguments"
    known.run(program, "first", environment={"SETTING": "1"})
    assert runs(program) == 3, "another environment"
    known.run(written(program.parent, "echo passed; true"), "first")
    assert runs(program) == 4, "another program"


def test_what_failed_runs_again(program: Path) -> None:
    written(program.parent, "exit 1")
    for _ in range(2):
        assert EmulatorRuns(again=False).run(program).returncode == 1
    assert runs(program) == 2


def test_the_slow_suite_runs_what_passed_as_well(program: Path) -> None:
    for _ in range(2):
        EmulatorRuns(again=True).run(program)
    assert runs(program) == 2


def test_other_frames_to_read_are_another_run(
    program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(emulators, "ROOT", tmp_path)
    for name in ("golden", "corpus"):
        (tmp_path / "kernels" / "tests" / name).mkdir(parents=True)
    EmulatorRuns(again=False).run(program)
    (tmp_path / "kernels" / "tests" / "golden" / "frame").write_bytes(b"1")
    EmulatorRuns(again=False).run(program)
    assert runs(program) == 2
