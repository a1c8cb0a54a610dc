"""A CUDA toolkit is probed before it is used: here against scripts that stand in for nvcc.

With MEMSWAP_CUDA=AUTO what is wrong with it leaves the CPU's part as it is, and one line says what
is missing and how to get it; with ON that line ends the build.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from memswap._native import native
from memswap.cli import info

ROOT = Path(__file__).resolve().parents[2]
PROBE = ROOT / "third_party" / "ProbeCuda.cmake"

pytestmark = [
    pytest.mark.cpu_only,
    pytest.mark.skipif(shutil.which("cmake") is None, reason="cmake is not on PATH"),
]

NVCC = """#!/bin/sh
case "$1" in
  --version) echo "Cuda compilation tools, release {release}, V{release}.1";;
  --list-gpu-arch) printf '{architectures}';;
  *) {compile};;
esac
"""
NO_HOST_COMPILER = """
echo "host_config.h:143:2: error: unsupported GNU version! later than 12" >&2; exit 1"""
CLANG_ALONE = """
case "$*" in *"-ccbin /usr/bin/some-clang++"*) exit 0;; esac; echo "error: no g++" >&2; exit 1"""


def stand_in(
    folder: Path, release: str, compile_: str = "exit 0", known: tuple[int, ...] = (75, 80, 90)
) -> Path:
    """Write a script that answers as nvcc of this release does, and compiles nothing."""
    folder.mkdir(exist_ok=True)
    nvcc = folder / "nvcc"
    architectures = "".join(f"compute_{one}\\n" for one in known)
    nvcc.write_text(NVCC.format(release=release, architectures=architectures, compile=compile_))
    nvcc.chmod(0o755)
    return nvcc


def environment(**changes: str) -> dict[str, str]:
    """This process's environment without what names a toolkit."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("CUDACXX", "CUDA_HOME", "CUDA_PATH", "CUDAHOSTCXX")
    }
    return {**kept, **changes}


def script(tmp_path: Path, lines: str, **changes: str) -> dict[str, str]:
    """Run lines of CMake behind the probe; return what the variables of their `show(...)` hold."""
    source = tmp_path / "script.cmake"
    show = (
        'macro(show)\nforeach(n ${ARGN})\nmessage(STATUS "${n}=${${n}}")\nendforeach()\nendmacro()'
    )
    policies = "cmake_minimum_required(VERSION 3.25)"  # as CMakeLists.txt
    source.write_text(f"{policies}\ninclude({PROBE})\n{show}\n{lines}\n")
    done = subprocess.run(
        ["cmake", "-P", str(source)],
        env=environment(**changes),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = [line.removeprefix("-- ") for line in done.stdout.splitlines()]
    return dict(line.split("=", 1) for line in told)


def probe(tmp_path: Path, before: str = "", **changes: str) -> dict[str, str]:
    lines = f'{before}\nmemswap_probe_nvcc({tmp_path} "Get one.")\n'
    return script(
        tmp_path,
        lines + "show(memswap_nvcc memswap_nvcc_version memswap_nvcc_architectures "
        "memswap_nvcc_host memswap_nvcc_problem)",
        **changes,
    )


def path_with(folder: Path) -> str:
    return f"{folder}:{os.environ['PATH']}"


def test_a_toolkit_that_works_is_found_on_path_and_asked_what_it_knows(tmp_path: Path) -> None:
    nvcc = stand_in(tmp_path / "bin", "12.8", known=(80, 90, 100, 120))
    found = probe(tmp_path, PATH=path_with(tmp_path / "bin"))
    assert found == {
        "memswap_nvcc": str(nvcc),
        "memswap_nvcc_version": "12.8",
        "memswap_nvcc_architectures": "80;90;100;120",
        "memswap_nvcc_host": "",
        "memswap_nvcc_problem": "",
    }


@pytest.mark.parametrize("variable", ["CUDACXX", "CUDA_HOME"])
def test_a_toolkit_that_is_named_comes_first(tmp_path: Path, variable: str) -> None:
    stand_in(tmp_path / "bin", "11.5")
    (tmp_path / "named").mkdir()
    nvcc = stand_in(tmp_path / "named" / "bin", "12.6")
    named = str(nvcc if variable == "CUDACXX" else tmp_path / "named")
    found = probe(tmp_path, PATH=path_with(tmp_path / "bin"), **{variable: named})
    assert found["memswap_nvcc"] == str(nvcc) and not found["memswap_nvcc_problem"]


def test_what_is_wrong_with_a_toolkit_is_one_sentence(tmp_path: Path) -> None:
    def problem(**changes: str) -> str:
        return probe(tmp_path, **changes)["memswap_nvcc_problem"]

    nvcc = str(stand_in(tmp_path / "old", "11.5"))
    assert problem(CUDACXX=nvcc) == (
        f"nvcc 11.5 ({nvcc}) is too old: the sources need 11.8 or newer. Get one."
    )
    nvcc = str(stand_in(tmp_path / "broken", "12.8", NO_HOST_COMPILER))
    said = problem(CUDACXX=nvcc)
    assert said.startswith(f"nvcc 12.8 ({nvcc}) does not compile a file of two lines: ")
    assert "unsupported GNU version" in said and "CUDAHOSTCXX" in said
    assert problem(CUDACXX="/nowhere/nvcc") == (
        "CUDACXX is '/nowhere/nvcc', and there is no such program. Get one."
    )
    said = problem(CUDACXX=shutil.which("true") or "true")
    assert "does not say its version as an nvcc does. Get one." in said


def test_no_toolkit_at_all_is_a_sentence(tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "cmake").symlink_to(Path(shutil.which("cmake") or "").resolve())
    nowhere = f"set(memswap_cuda_folders {tmp_path / 'nowhere'})"
    said = probe(tmp_path, nowhere, PATH=str(tools))["memswap_nvcc_problem"]
    assert said.startswith("no nvcc was found (on PATH, in CUDACXX") and said.endswith("Get one.")


def test_a_machine_with_clang_alone_gives_nvcc_its_compiler(tmp_path: Path) -> None:
    nvcc = str(stand_in(tmp_path / "bin", "12.8", CLANG_ALONE))
    clang = "set(CMAKE_CXX_COMPILER /usr/bin/some-clang++)"
    found = probe(tmp_path, clang, CUDACXX=nvcc)
    assert found["memswap_nvcc_host"] == "/usr/bin/some-clang++"
    assert not found["memswap_nvcc_problem"]
    # A host compiler that was asked for is not replaced.
    found = probe(tmp_path, clang, CUDACXX=nvcc, CUDAHOSTCXX="g++-99")
    assert "error: no g++" in found["memswap_nvcc_problem"]


@pytest.mark.parametrize(
    ("nvcc", "of_torch", "driver", "expected"),
    [
        ("13.0", "13.0", "", ""),
        ("11.8", "13.0", "13.0", ""),
        ("12.8", "12.6", "12.4", ""),
        ("13.0", "12.6", "13.0", "nvcc 13.0 is newer than torch's CUDA 12.6."),
        ("13.0", "13.0", "12.4", "nvcc 13.0 is newer than the driver, which has CUDA 12.4."),
    ],
)
def test_a_toolkit_is_compared_with_torch_and_the_driver(
    tmp_path: Path, nvcc: str, of_torch: str, driver: str, expected: str
) -> None:
    lines = f'memswap_compare_cuda("{nvcc}" "{of_torch}" "{driver}")\nshow(memswap_cuda_mismatch)'
    said = script(tmp_path, lines)["memswap_cuda_mismatch"]
    assert said.startswith(expected) and bool(said) == bool(expected)
    if said:
        assert "an nvcc of CUDA 12 in CUDACXX" in said


@pytest.mark.parametrize("words", ["CUDA Version: 12.4 ", "CUDA UMD Version: 12.4 "])
def test_the_driver_says_its_version_by_nvidia_smi(tmp_path: Path, words: str) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\necho '| Driver Version: 550.54  {words}|'\n")
    smi.chmod(0o755)
    lines = "memswap_probe_driver()\nshow(memswap_driver_cuda)"
    assert script(tmp_path, lines, PATH=path_with(tmp_path)) == {"memswap_driver_cuda": "12.4"}


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        ("75;80;90", "80-real;90-real;90-virtual"),
        ("80;90;100", "80-real;90-real;100-real;100-virtual"),
        ("80;90;100;110;120", "80-real;90-real;100-real;120-real;100-virtual"),
        ("90;100;120;130", "90-real;100-real;120-real;100-virtual"),
    ],
)
def test_machine_code_is_made_for_what_nvcc_knows(
    tmp_path: Path, known: str, expected: str
) -> None:
    lines = f'memswap_choose_architectures("{known}" chosen)\nshow(chosen)'
    assert script(tmp_path, lines) == {"chosen": expected}


@dataclass
class Configured:
    code: int
    said: str  # both streams, in one line
    left_out: str  # what `python -m memswap info` would say


def configure(tmp_path: Path, option: str, torch_cuda: str | None, **changes: str) -> Configured:
    """Configure memswap itself beside a torch that says this of its CUDA."""
    fake = tmp_path / "shadow" / "torch"
    fake.mkdir(parents=True)
    (fake / "__init__.py").write_text(
        f"__version__ = '2.13.0'\nclass version: cuda = {torch_cuda!r}\n"
    )
    build = tmp_path / "build"
    done = subprocess.run(
        [
            "cmake", f"-S{ROOT}", f"-B{build}", f"-DPython_EXECUTABLE={sys.executable}",
            f"-DMEMSWAP_CUDA={option}", "-DMEMSWAP_ASCEND=OFF",
        ],
        env=environment(PYTHONPATH=str(fake.parent), **changes),
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    written = build / "generated" / "left_out.cpp"
    text = written.read_text() if written.exists() else ""
    left_out = text.partition('{"cuda", R"note(')[2].partition(')note"')[0]
    return Configured(done.returncode, " ".join((done.stdout + done.stderr).split()), left_out)


CASES = {
    "too old": ("11.5", "exit 0", "13.0", "is too old: the sources need 11.8 or newer. Install the "
                "CUDA toolkit 13.0, as torch has it"),
    "newer than torch": ("13.0", "exit 0", "12.6", "nvcc 13.0 is newer than torch's CUDA 12.6."),
    "does not compile": ("12.8", NO_HOST_COMPILER, "12.8", "does not compile a file of two lines"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_auto_builds_the_cpus_part_and_says_in_one_line_what_is_missing(
    tmp_path: Path, case: str
) -> None:
    release, compile_, torch_cuda, expected = CASES[case]
    nvcc = stand_in(tmp_path / "bin", release, compile_)
    done = configure(tmp_path, "AUTO", torch_cuda, CUDACXX=str(nvcc))
    assert done.code == 0, done.said
    assert expected in done.left_out and "\n" not in done.left_out
    assert f"memswap: no CUDA codec in this build: {done.left_out}" in done.said
    assert "memswap: CUDA codec OFF" in done.said


@pytest.mark.parametrize("case", CASES)
def test_on_stops_with_what_is_missing(tmp_path: Path, case: str) -> None:
    release, compile_, torch_cuda, expected = CASES[case]
    nvcc = stand_in(tmp_path / "bin", release, compile_)
    done = configure(tmp_path, "ON", torch_cuda, CUDACXX=str(nvcc))
    assert done.code != 0
    assert "MEMSWAP_CUDA=ON, but " in done.said and expected in done.said


def test_a_torch_without_cuda_needs_no_toolkit(tmp_path: Path) -> None:
    nvcc = stand_in(tmp_path / "bin", "11.5")
    done = configure(tmp_path, "AUTO", None, CUDACXX=str(nvcc))
    assert done.code == 0, done.said
    assert done.left_out == "torch 2.13.0 has no CUDA" and "no CUDA codec" not in done.said


def test_info_says_which_codec_the_build_lacks() -> None:
    lines = info.describe_left_out()
    assert len(lines) == len(native.codecs_left_out)
    for device_type, reason in native.codecs_left_out.items():
        assert f"no {device_type} codec in this build: {reason}" in lines
        assert reason
    if "cuda" in native.codecs_left_out:
        assert native.codec_name(torch.device("cuda")) is None
