"""compute-sanitizer on the codec's kernels: memory, races in shared memory, barriers.

Runs the standalone benchmark, which compares every tensor that it decodes. Needs --device cuda, but
not memswap's module.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from standalone import build_cuda_bench, find_tool

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def bench() -> Path:
    try:
        return build_cuda_bench()
    except FileNotFoundError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck", "initcheck"])
def test_the_sanitizer_finds_nothing(bench: Path, tool: str) -> None:
    sanitizer = find_tool("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer was not found")
    command = [sanitizer, f"--tool={tool}", "--error-exitcode=9", str(bench), "--small"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = done.stdout[-4000:] + done.stderr[-4000:]
    if "Device not supported" in said:
        pytest.skip(f"compute-sanitizer does not work on this machine: {said[-300:]}")
    assert done.returncode == 0, said
    assert "ERROR SUMMARY: 0 errors" in said or "0 hazards" in said, said
