"""Programs in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import memswap
from warm_python import warm_python


def run_warm(program: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a program that begins where torch has been imported; a hang is a failure."""
    return warm_python().run(program, 120, tuple(map(str, arguments)))


def run_python(program: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a program that imports torch itself, and finds the memswap of this process."""
    package = Path(memswap.__path__[0]).parent
    return subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(package)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
