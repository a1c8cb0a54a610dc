"""The CUDA kernels, run by the emulator in tests/cuda_emulator: no GPU, and no nvcc."""

from __future__ import annotations

from pathlib import Path

import pytest
from emulators import BUILD, EmulatorRuns, build_emulator

SUITES = ("Frames", "Golden", "Bitmaps", "Hostile", "Launches", "Barriers", "Intrinsics")

pytestmark = [pytest.mark.cpu_only, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def program() -> Path:
    codec = BUILD / "kernels" / "libmemswap_codec_cpu.a"  # memswap's own, where it was just built
    option = f"-DMEMSWAP_CPU_CODEC={codec if codec.exists() else ''}"
    return build_emulator("cuda_emulator", option) / "memswap_cuda_emulator_tests"


@pytest.mark.parametrize("suite", SUITES)
def test_kernels_keep_their_promises_on_the_emulator(
    emulator_runs: EmulatorRuns, program: Path, suite: str
) -> None:
    # What breaks a barrier on purpose is caught in every run.
    runs = EmulatorRuns(again=True) if suite == "Barriers" else emulator_runs
    runs.run_googletest(program, f"{suite}*:*/{suite}*")
