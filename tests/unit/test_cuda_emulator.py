"""The CUDA kernels, run by the emulator in tests/cuda_emulator: no GPU, and no nvcc."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SUITES = ("Frames", "Golden", "Bitmaps", "Hostile", "Launches", "Barriers")

pytestmark = [pytest.mark.cpu_only, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def program() -> Path:
    if shutil.which("cmake") is None:
        pytest.skip("cmake is not on PATH")
    # Kept between runs: compiling it takes longer than running it.
    build = Path(os.environ.get("MEMSWAP_BUILD_DIR", ROOT / "build"))
    folder = build / "cuda_emulator"
    codec = build / "kernels" / "libmemswap_codec_cpu.a"  # memswap's own, where it was just built
    configured = subprocess.run(
        [
            "cmake",
            f"-S{ROOT / 'tests/cuda_emulator'}",
            f"-B{folder}",
            f"-DMEMSWAP_CPU_CODEC={codec if codec.exists() else ''}",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    if "GTest" in configured.stderr:
        pytest.skip("GoogleTest was not found")
    assert configured.returncode == 0, configured.stderr
    built = subprocess.run(
        ["cmake", "--build", str(folder), "--parallel", "2"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return folder / "memswap_cuda_emulator_tests"


@pytest.mark.parametrize("suite", SUITES)
def test_kernels_keep_their_promises_on_the_emulator(program: Path, suite: str) -> None:
    done = subprocess.run(
        [str(program), f"--gtest_filter={suite}*:*/{suite}*", "--gtest_brief=1"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert "PASSED" in done.stdout and " 0 tests" not in done.stdout, done.stdout[-2000:]
