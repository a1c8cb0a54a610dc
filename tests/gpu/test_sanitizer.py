"""compute-sanitizer on the codec's kernels: memory, races in shared memory, barriers.

Runs the standalone benchmark, which compares every tensor that it decodes. Needs --device cuda, but
not memswap's module.
"""

from __future__ import annotations

import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest
from standalone import build_cuda_bench, find_tool

pytestmark = pytest.mark.gpu


TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")


@pytest.fixture(scope="module")
def ended() -> dict[str, subprocess.CompletedProcess[str]]:
    """The benchmark under each tool, beside each other: most of a tool's time is a CPU's."""
    sanitizer = find_tool("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer was not found")
    try:
        bench = build_cuda_bench()
    except FileNotFoundError as error:
        pytest.skip(str(error))

    def under(tool: str) -> subprocess.CompletedProcess[str]:
        command = [sanitizer, f"--tool={tool}", "--error-exitcode=9", str(bench), "--small"]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    with ThreadPoolExecutor(len(TOOLS)) as threads:
        return dict(zip(TOOLS, threads.map(under, TOOLS), strict=True))


@pytest.mark.parametrize("tool", TOOLS)
def test_the_sanitizer_finds_nothing(
    ended: dict[str, subprocess.CompletedProcess[str]], tool: str
) -> None:
    done = ended[tool]
    said = done.stdout[-4000:] + done.stderr[-4000:]
    if "Device not supported" in said:
        pytest.skip(f"compute-sanitizer does not work on this machine: {said[-300:]}")
    assert done.returncode == 0, said
    assert "ERROR SUMMARY: 0 errors" in said or "0 hazards" in said, said
