"""Programs that are forked from a process end, fail and hang as if they had been started."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from warm_python import WarmPython


@pytest.fixture
def warm(tmp_path: Path) -> WarmPython:
    """A process that forks, with an empty torch: nothing here asks for more."""
    (tmp_path / "torch").mkdir()
    for name in ("__init__", "_dynamo"):
        (tmp_path / "torch" / f"{name}.py").touch()
    return WarmPython({"PYTHONPATH": str(tmp_path)})


def test_a_program_finds_its_arguments_and_its_outputs_are_told_apart(warm: WarmPython) -> None:
    program = "import sys; print(sys.argv[1]); print('no', file=sys.stderr); sys.exit(3)"
    done = warm.run(program, 60, ("yes",))
    assert (done.returncode, done.stdout, done.stderr) == (3, "yes\n", "no\n")


def test_a_program_that_hangs_is_killed_and_the_next_one_runs(warm: WarmPython) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        warm.run("import time; time.sleep(600)", timeout_s=0.2)
    assert warm.run("print('here')", 60).stdout == "here\n"


def test_a_program_that_ended_before_anybody_listened_did_not_hang(warm: WarmPython) -> None:
    class Late:
        """As on a machine that has other things to do once the program was sent."""

        def __init__(self, pipe: Any) -> None:
            self._pipe = pipe

        def write(self, said: bytes) -> None:
            self._pipe.write(said)
            time.sleep(1)

    warm._process.stdin = Late(warm._process.stdin)
    assert warm.run("print('here')", timeout_s=5).stdout == "here\n"


def test_a_process_that_no_longer_forks_is_told(warm: WarmPython) -> None:
    with pytest.raises(RuntimeError, match="ended with status -9"):
        warm.run("import os; os.kill(os.getppid(), 9)", 60)
