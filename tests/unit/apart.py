"""Programs in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import memswap


def run_python(program: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a program that finds the memswap of this process; a hang is a failure."""
    package = Path(memswap.__path__[0]).parent
    return subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(package)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
