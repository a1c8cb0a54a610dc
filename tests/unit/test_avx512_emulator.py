"""The CPU codec's AVX-512 path, run by the emulator in tests/avx512_emulator: on any x86-64."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest
from emulators import ROOT, EmulatorRuns, build_emulator, expect_passed, googletest, run_program

FOLDER = ROOT / "tests" / "avx512_emulator"
# Of the codec's own tests, those that take seconds and reach no code that the others do not.
LONG = "*EveryFlippedBit*:*TensorsLarger*:*Edited*"
# Those whose frames several threads encode.
THREADS = "*Tasks.*"

pytestmark = [
    pytest.mark.cpu_only,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        platform.machine() not in ("x86_64", "AMD64"),
        reason="the AVX-512 path has a line of x86-64's assembly",
    ),
]


@pytest.fixture(scope="module")
def program() -> Path:
    return build_emulator("avx512_emulator") / "memswap_avx512_emulator_tests"


# Tests allocate a few pages and free them, over and over: little of it is worth remembering.
OPTIONS = {
    "ASAN_OPTIONS": "quarantine_size_mb=8:malloc_context_size=8",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}


def test_emulated_intrinsics_do_what_the_processors_do(
    emulator_runs: EmulatorRuns, program: Path
) -> None:
    emulator_runs.run_googletest(program, "Emulated*", OPTIONS)


def test_frames_are_the_oracles_on_the_emulator(emulator_runs: EmulatorRuns, program: Path) -> None:
    emulator_runs.run_googletest(program, f"*/avx512:-{LONG}:{THREADS}", OPTIONS)


def test_frames_of_several_threads_are_the_oracles_on_the_emulator(program: Path) -> None:
    expect_passed(run_program([str(program), *googletest(f"{THREADS}/avx512")], OPTIONS))


@pytest.mark.slow
def test_large_hostile_and_edited_frames_keep_their_promises_on_the_emulator(program: Path) -> None:
    names = ":".join(f"{name}/avx512" for name in LONG.split(":"))
    expect_passed(run_program([str(program), *googletest(names)], OPTIONS))


@pytest.mark.parametrize(
    "call",
    [
        "_mm512_extracti64x4_epi64(a, 2)",
        "_mm512_ternarylogic_epi64(a, a, a, 256)",
        "_mm512_shldi_epi16(a, a, -1)",
        "_mm512_rol_epi32(a, count)",
    ],
)
def test_constants_that_no_instruction_encodes_do_not_compile(call: str) -> None:
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not on PATH")

    def compiles(expression: str) -> bool:
        function = f"auto f(__m512i a, int count) {{ return (void)count, {expression}; }}"
        source = f"#include <immintrin.h>\n{function}\n"
        command = [compiler, "-std=c++20", f"-I{FOLDER / 'include'}", "-fsyntax-only", "-xc++", "-"]
        done = subprocess.run(command, input=source, capture_output=True, text=True, check=False)
        return done.returncode == 0

    assert compiles("_mm512_rol_epi32(a, 1)"), "the emulator's header does not compile"
    assert not compiles(call), f"{call} compiles, and no processor has it"
