"""Where nvcc is found, every CUDA source compiles for the architectures we support, GPU or not."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
from emulators import BUILD, ROOT, keep


class Target(NamedTuple):
    """One of CMakeLists.txt."""

    source: Path
    library: str


TARGETS = {"memswap_delay": Target(ROOT / "tests" / "gpu" / "delay.cu", "libmemswap_delay.so")}


def kept(name: str, sources: list[Path], make: Callable[[], str]) -> str:
    """What nvcc says. It takes half a minute: kept beside the build, and asked for anew when a
    source, a flag or nvcc is another one."""
    if shutil.which("nvcc") is None:
        pytest.skip("nvcc is not on PATH, so CUDA sources cannot be compiled")
    digest = hashlib.sha256()
    version = subprocess.run(["nvcc", "--version"], capture_output=True, check=True).stdout
    ours = ("NVCC_", "CUDA", "MEMSWAP_CUDA")
    flags = [one for one in os.environ.items() if one[0].startswith(ours)]
    digest.update(repr((version, sorted(flags))).encode())
    for path in sources:
        digest.update(repr((path.relative_to(ROOT).as_posix(), path.read_bytes())).encode())
    file = BUILD / "cuda_resources" / f"{name}-{digest.hexdigest()}.txt"
    if not file.exists():
        keep(file, make())
    return file.read_text(encoding="utf-8")


def compile_target(target: str, folder: Path) -> str:
    """What the build of a target says."""
    if shutil.which("cmake") is None:
        pytest.skip("cmake is not on PATH")
    configure = ["cmake", f"-S{ROOT}", f"-B{folder}", f"-DPython_EXECUTABLE={sys.executable}"]
    subprocess.run([*configure, "-DMEMSWAP_CUDA=ON"], check=True, capture_output=True)
    build = ["cmake", "--build", str(folder), "--target", target]
    done = subprocess.run(build, capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert (folder / TARGETS[target].library).exists()
    return said


@pytest.mark.parametrize("target", TARGETS)
def test_cuda_sources_compile_for_every_architecture_without_spills(
    tmp_path: Path, target: str
) -> None:
    lists = [ROOT / "CMakeLists.txt", *sorted((ROOT / "third_party").glob("*.cmake"))]
    lists += [ROOT / "kernels" / "CMakeLists.txt", *(ROOT / "kernels").glob("*/CMakeLists.txt")]
    said = kept(target, [*lists, TARGETS[target].source], lambda: compile_target(target, tmp_path))
    for architecture in ("sm_80", "sm_90"):
        assert f"for '{architecture}'" in said, f"nothing was compiled for {architecture}:\n{said}"
    spills = [int(found) for found in re.findall(r"(\d+) bytes spill", said)]
    assert spills and not any(spills), f"registers are spilled:\n{said}"


def test_every_cuda_source_belongs_to_a_target() -> None:
    lists = ("CMakeLists.txt", "kernels/cuda/CMakeLists.txt")
    listed = "".join((ROOT / name).read_text(encoding="utf-8") for name in lists).split()
    listed = {Path(word.strip("()")).name for word in listed}
    sources = [
        one for folder in ("csrc", "kernels", "tests") for one in (ROOT / folder).rglob("*.cu")
    ]
    assert sources, "no CUDA source was found"
    for source in sources:
        assert source.name in listed, f"{source.name} is never compiled"


def measured(resources: ModuleType, architecture: str) -> dict[str, dict[str, dict[str, int]]]:
    """What nvcc makes of the kernels."""
    kernels = ROOT / "kernels"
    every = sorted([*(kernels / "cuda").iterdir(), *(kernels / "include").rglob("*")])
    sources = [path for path in every if path.is_file() and path.suffix != ".json"]
    said = kept(architecture, sources, lambda: json.dumps(resources.measure((architecture,))))
    return json.loads(said)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "architecture",
    [
        pytest.param("sm_80", marks=pytest.mark.slow),
        "sm_90",
        pytest.param("sm_100", marks=pytest.mark.slow),
    ],
)
def test_codec_kernels_take_no_more_registers_and_instructions_than_they_did(
    architecture: str,
) -> None:
    path = ROOT / "kernels/cuda/resources.py"
    spec = importlib.util.spec_from_file_location("resources", path)
    assert spec is not None and spec.loader is not None
    resources = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(resources)
    baseline = json.loads(resources.BASELINE.read_text(encoding="utf-8"))
    assert architecture in resources.ARCHITECTURES and set(baseline) == set(resources.ARCHITECTURES)
    found = resources.regressions(measured(resources, architecture), baseline)
    said = "\n".join(found)
    assert not found, f"{said}\nif this is meant: python kernels/cuda/resources.py --update"
