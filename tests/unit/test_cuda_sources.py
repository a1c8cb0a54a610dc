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
from pathlib import Path
from types import ModuleType

import pytest
from emulators import BUILD

ROOT = Path(__file__).resolve().parents[2]
TARGETS = {"memswap_delay": "libmemswap_delay.so"}


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("nvcc") is None:
        pytest.skip("nvcc is not on PATH, so CUDA sources cannot be compiled")
    if shutil.which("cmake") is None:
        pytest.skip("cmake is not on PATH")
    folder = tmp_path_factory.mktemp("cuda")
    configure = ["cmake", f"-S{ROOT}", f"-B{folder}", f"-DPython_EXECUTABLE={sys.executable}"]
    subprocess.run([*configure, "-DMEMSWAP_CUDA=ON"], check=True, capture_output=True)
    return folder


@pytest.mark.parametrize("target", TARGETS)
def test_cuda_sources_compile_for_every_architecture_without_spills(
    build: Path, target: str
) -> None:
    done = subprocess.run(
        ["cmake", "--build", str(build), "--target", target],
        capture_output=True,
        text=True,
        check=False,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    for architecture in ("sm_80", "sm_90"):
        assert f"for '{architecture}'" in said, f"nothing was compiled for {architecture}:\n{said}"
    spills = [int(found) for found in re.findall(r"(\d+) bytes spill", said)]
    assert spills and not any(spills), f"registers are spilled:\n{said}"
    assert (build / TARGETS[target]).exists()


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
    """What nvcc makes of the kernels. It takes half a minute: kept beside the build, and asked for
    anew when a source, a flag or nvcc is another one."""
    digest = hashlib.sha256()
    version = subprocess.run(["nvcc", "--version"], capture_output=True, check=True).stdout
    flags = [f"{name}={value}" for name, value in os.environ.items() if name.startswith("NVCC_")]
    digest.update(repr((version, sorted(flags))).encode())
    kernels = ROOT / "kernels"
    for path in sorted([*(kernels / "cuda").iterdir(), *(kernels / "include").rglob("*")]):
        if path.is_file() and path.suffix != ".json":
            digest.update(repr((path.relative_to(kernels).as_posix(), path.read_bytes())).encode())
    kept = BUILD / "cuda_resources" / f"{architecture}-{digest.hexdigest()}.json"
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        written = kept.with_suffix(f".{os.getpid()}")
        written.write_text(json.dumps(resources.measure((architecture,))), encoding="utf-8")
        written.replace(kept)
    return json.loads(kept.read_text(encoding="utf-8"))


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
    if shutil.which("nvcc") is None:
        pytest.skip("nvcc is not on PATH, so CUDA sources cannot be compiled")
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
