"""The Ascend codec on the emulator: the same frames as the CPU's codec, in both directions."""

from pathlib import Path

import pytest
from emulators import ROOT, EmulatorRuns, build_emulator

KERNELS = ROOT / "kernels"

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def programs() -> Path:
    """A folder with the test programs: kernels as C++17 for the emulator, the CPU's as C++20."""
    return build_emulator("ascend_emulator")


def run(runs: EmulatorRuns, *command: str | Path) -> None:
    """Run a test program; what it printed is the message if it failed."""
    ran = runs.run(*command)
    assert ran.returncode == 0, f"on the emulator:\n{ran.stdout[-4000:]}{ran.stderr[-2000:]}"
    assert " checks, 0 failures" in ran.stdout and "\n0 checks" not in "\n" + ran.stdout


@pytest.mark.parametrize("what", ["golden", "corpus", "bitmaps", "cores", "barriers", "cost"])
def test_frames_of_the_cpu_are_read_and_written(
    emulator_runs: EmulatorRuns, programs: Path, what: str
) -> None:
    run(emulator_runs, programs / "codec_test", KERNELS / "tests", what)


FLOATS = ("bf16", "fp16", "fp32", "fp64", "e4m3", "e5m2")
INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
FORMATS = {
    "dense": [f"{name}-dense" for name in FLOATS],
    "upcast": ["fp32-upcast"],
    "sparse": [f"{name}-sparse" for name in FLOATS],
    "bits": ["bool-bits"],
    "ints": [f"{name}-ints" for name in (*INTEGERS, "bf16", "fp32")],
    "raw": ["int8-raw", "bf16-raw", "int32-raw", "fp64-raw"],
}


@pytest.mark.parametrize("layout", FORMATS)
def test_every_layout_on_every_grid_and_schedule(
    emulator_runs: EmulatorRuns, programs: Path, layout: str
) -> None:
    run(emulator_runs, programs / "codec_test", KERNELS / "tests", *FORMATS[layout])


@pytest.mark.slow
def test_every_kernel_under_many_seeds(emulator_runs: EmulatorRuns, programs: Path) -> None:
    run(emulator_runs, programs / "codec_test", KERNELS / "tests", "seeds")


def test_host_side_tiles_launches_and_reports_errors(
    emulator_runs: EmulatorRuns, programs: Path
) -> None:
    run(emulator_runs, programs / "host_test")


def test_every_kernel_is_for_vector_cores_alone_and_none_waits_for_the_others() -> None:
    """CANN 8 takes a statement for it and CANN 9 a word; an emulator has no other cores."""
    entries = [
        (KERNELS / "ascend" / f"{name}.cpp").read_text() for name in ("encoders", "decoders")
    ]
    for text in entries:
        kernels = text.count("MEMSWAP_KERNEL memswap_ascend_")
        assert 0 < kernels == text.count("MEMSWAP_VECTOR_CORES_ONLY")
    declared = (KERNELS / "ascend" / "kernel_entry.h").read_text()
    assert "__global__ __vector__ void" in declared
    assert "KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY)" in declared
    sources = [path.read_text() for path in (KERNELS / "ascend").iterdir() if path.is_file()]
    assert not any("SyncAll" in text for text in sources)
