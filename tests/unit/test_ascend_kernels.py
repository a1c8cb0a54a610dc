"""The Ascend codec on the emulator: the same frames as the CPU's codec, in both directions."""

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
FLAGS += [f"-I{EMULATOR}", f"-I{KERNELS / 'ascend'}", f"-I{KERNELS / 'tests'}"]

pytestmark = pytest.mark.skipif(COMPILER is None, reason="the emulator is compiled with g++")

# The longest to compile first.
EMULATED = [EMULATOR / f"emulated_{name}.cpp" for name in ("encoders", "decoders", "launch", "acl")]
HOST = [KERNELS / "ascend" / f"{name}.cpp" for name in ("codec", "runtime")]
# The oracle alone: without the instruction sets' files the codec has nothing else to choose.
CPU_SOURCES = sorted(
    path
    for path in (KERNELS / "cpu").glob("*.cpp")
    if not path.name.startswith(("avx512", "vector"))
)


def compile_object(source: Path, folder: Path, standard: str) -> Path:
    """Compile one file to an object in `folder`."""
    assert COMPILER is not None
    target = folder / f"{source.parent.name}_{source.stem}.o"
    command = [COMPILER, *FLAGS, f"-std={standard}", "-c", str(source), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{source.name} does not compile:\n{done.stderr[-4000:]}"
    return target


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the test programs: kernels as C++17 for the emulator, the CPU's as C++20."""
    assert COMPILER is not None
    folder = tmp_path_factory.mktemp("ascend_kernels")
    names = ("codec_test", "host_test")
    sources = [(path, "c++17") for path in EMULATED]
    sources += [(EMULATOR / f"{name}.cpp", "c++17") for name in names]
    sources += [(path, "c++17") for path in HOST] + [(path, "c++20") for path in CPU_SOURCES]
    with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
        pending = [pool.submit(compile_object, path, folder, std) for path, std in sources]
        objects = [job.result() for job in pending]
    mains = {name: folder / f"ascend_emulator_{name}.o" for name in names}
    library = [str(path) for path in objects if path not in mains.values()]
    for name, main in mains.items():
        command = [COMPILER, str(main), *library, "-pthread", "-o", str(folder / name)]
        subprocess.run(command, check=True)
    return folder


def run(*command: str | Path) -> None:
    """Run a test program; what it printed is the message if it failed."""
    ran = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert ran.returncode == 0, f"on the emulator:\n{ran.stdout[-4000:]}{ran.stderr[-2000:]}"
    assert " checks, 0 failures" in ran.stdout and "\n0 checks" not in "\n" + ran.stdout


@pytest.mark.parametrize("what", ["golden", "corpus", "bitmaps", "cores", "barriers", "cost"])
def test_frames_of_the_cpu_are_read_and_written(programs: Path, what: str) -> None:
    run(programs / "codec_test", KERNELS / "tests", what)


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


@pytest.mark.parametrize("shape", FORMATS)
def test_every_shape_on_every_grid_and_schedule(programs: Path, shape: str) -> None:
    run(programs / "codec_test", KERNELS / "tests", *FORMATS[shape])


@pytest.mark.slow
def test_every_kernel_under_many_seeds(programs: Path) -> None:
    run(programs / "codec_test", KERNELS / "tests", "seeds")


def test_host_side_tiles_launches_and_reports_errors(programs: Path) -> None:
    run(programs / "host_test")


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
