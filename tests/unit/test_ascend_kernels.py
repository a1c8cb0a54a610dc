"""The Ascend kernels on the emulator: the same frames as the CPU's codec, in both directions."""

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EMULATOR = ROOT / "tests" / "ascend_emulator"
KERNELS = ROOT / "kernels"
COMPILER = shutil.which("g++")
FLAGS = ["-O1", "-Wall", "-Wextra", "-Werror", f"-I{KERNELS / 'include'}"]

pytestmark = pytest.mark.skipif(COMPILER is None, reason="the emulator is compiled with g++")

# The oracle alone: without the instruction sets' files the codec has nothing else to choose.
CPU_SOURCES = sorted(
    path
    for path in (KERNELS / "cpu").glob("*.cpp")
    if not path.name.startswith(("avx512", "vector"))
)


def compile_object(source: Path, folder: Path, *flags: str) -> Path:
    """Compile one file to an object in `folder`."""
    assert COMPILER is not None
    target = folder / f"{source.stem}.o"
    command = [COMPILER, *FLAGS, *flags, "-c", str(source), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{source.name} does not compile:\n{done.stderr[-4000:]}"
    return target


@pytest.fixture(scope="module")
def codec_test(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The test program: kernels as C++17 for the emulator, the CPU's codec as C++20."""
    assert COMPILER is not None
    folder = tmp_path_factory.mktemp("ascend_kernels")
    kernel_flags = ["-std=c++17", f"-I{EMULATOR}", f"-I{KERNELS / 'ascend'}"]
    with ThreadPoolExecutor(max_workers=min(2, os.cpu_count() or 1)) as pool:
        pending = [pool.submit(compile_object, EMULATOR / "codec_test.cpp", folder, *kernel_flags)]
        pending += [pool.submit(compile_object, path, folder, "-std=c++20") for path in CPU_SOURCES]
        objects = [str(job.result()) for job in pending]
    binary = folder / "codec_test"
    subprocess.run([COMPILER, *objects, "-pthread", "-o", str(binary)], check=True)
    return binary


@pytest.mark.parametrize(
    "name",
    [
        *("bf16", "fp16", "fp32", "raw8", "raw16", "raw32", "raw64", "bits"),
        *("int8", "uint8", "int16", "uint16", "int32", "uint32"),
    ],
)
def test_frames_are_those_of_the_cpu(codec_test: Path, name: str) -> None:
    ran = subprocess.run([str(codec_test), name], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, f"{name} frames on the emulator:\n{ran.stdout[-4000:]}"
    assert " 0 failures" in ran.stdout and not ran.stdout.startswith("0 checks")
