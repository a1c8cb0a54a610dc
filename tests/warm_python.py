"""Programs in interpreters of their own, which begin where torch has been imported.

Importing torch takes seconds, most of which are torch._dynamo's: one process does it once, and each
program runs in a fork of that process. No thread has been started and no device opened by then, so
a program finds what it would find on its own, and its interpreter ends as any other does. A program
for which memory of its own is what counts, or the import of torch, is started by itself instead.
"""

from __future__ import annotations

import functools
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

#: Of each program it says the process's id, and when that has ended its status.
SERVER = """
import json, os, sys
import torch, torch._dynamo

def next_program():
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if child == 0:
            for number, path in enumerate([os.devnull, *job["output"]]):
                os.dup2(os.open(path, os.O_RDWR), number)
            sys.argv[1:] = job["arguments"]
            os.environ.clear()
            os.environ.update(job["environment"])
            return job["program"]
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    sys.exit()

exec(next_program())  # in a child: it ends where the program does
"""


class WarmPython:
    """A process that has imported torch, and forks."""

    def __init__(self, environment: dict[str, str]) -> None:
        path = [entry for entry in sys.path if entry] + [os.environ.get("PYTHONPATH", "")]
        self._own = {"PYTHONPATH": os.pathsep.join(filter(None, path)), **environment}
        self._process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-c", SERVER],
            env=os.environ | self._own,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,  # select does not see a line that was read together with the one before
        )

    def run(
        self, program: str, timeout_s: float, arguments: tuple[str, ...] = ()
    ) -> subprocess.CompletedProcess[str]:
        """Run a program as `python -c` does, in the environment that this process has by now.

        Args:
            program: its text.
            timeout_s: after so long it is killed.
            arguments: what it finds in sys.argv[1:].

        Raises:
            subprocess.TimeoutExpired: the program hangs, and has been killed.
            RuntimeError: the process that forks is no longer there.
        """
        assert self._process.stdin is not None
        with tempfile.TemporaryDirectory() as folder:
            output = [Path(folder) / "stdout", Path(folder) / "stderr"]
            for file in output:
                file.touch()
            job = {
                "program": program,
                "arguments": arguments,
                "output": list(map(str, output)),
                "environment": os.environ | self._own,
            }
            self._process.stdin.write(json.dumps(job).encode() + b"\n")
            child = self._next_number()
            ended, _, _ = select.select([self._process.stdout], [], [], timeout_s)
            if not ended:
                os.kill(child, signal.SIGKILL)
            status = self._next_number()
            said, errors = (file.read_text(encoding="utf-8") for file in output)
        if not ended:
            raise subprocess.TimeoutExpired("a program", timeout_s, said, errors)
        return subprocess.CompletedProcess("a program", status, said, errors)

    def _next_number(self) -> int:
        assert self._process.stdout is not None
        if line := self._process.stdout.readline():
            return int(line)
        raise RuntimeError(f"the process that forks ended with status {self._process.wait()}")


@functools.cache
def warm_python(**environment: str) -> WarmPython:
    """The session's process with these variables in its environment; it ends with the session."""
    return WarmPython(environment)
