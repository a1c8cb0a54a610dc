"""The codec's own benchmarks, kernels/bench, which need no torch."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CUDA = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))


def find_tool(name: str) -> str | None:
    """A program of the CUDA toolkit: on PATH, beside nvcc, or where toolkits usually are."""
    nvcc = shutil.which("nvcc")
    folders = [Path(nvcc).resolve().parent] if nvcc else []
    folders += [CUDA / "bin", CUDA / "compute-sanitizer"]
    folders += sorted(Path("/usr/local").glob("cuda-*/bin"), reverse=True)
    return shutil.which(name) or shutil.which(name, path=os.pathsep.join(map(str, folders)))


def build_cuda_bench() -> Path:
    """The program for GPUs, built for MEMSWAP_CUDA_ARCHITECTURES or for all that we support.

    Raises:
        FileNotFoundError: nvcc or cmake is missing.
        RuntimeError: it does not compile; with what was said.
    """
    nvcc = find_tool("nvcc")
    if nvcc is None:
        raise FileNotFoundError("the standalone benchmark needs nvcc")
    architectures = os.environ.get("MEMSWAP_CUDA_ARCHITECTURES", "")
    options = ["-DMEMSWAP_CUDA=ON", f"-DMEMSWAP_CUDA_ARCHITECTURES={architectures}"]
    folder = build("cuda_bench", options, {"CUDACXX": nvcc}, target="memswap_cuda_bench")
    return folder / "cuda" / "memswap_cuda_bench"


def build_cpu_bench() -> Path:
    """The program for this machine's processor.

    Raises:
        FileNotFoundError: cmake or Google Benchmark is missing.
        RuntimeError: it does not compile; with what was said.
    """
    program = build("cpu_bench", ["-DMEMSWAP_CUDA=OFF"], {}) / "bench" / "memswap_codec_cpu_bench"
    if not program.exists():
        raise FileNotFoundError("it needs Google Benchmark (Debian: libbenchmark-dev)")
    return program


def build(name: str, options: list[str], variables: dict[str, str], target: str = "all") -> Path:
    """Build the benchmarks of kernels/ in a folder of that name, and return the folder."""
    cmake = shutil.which("cmake")
    if cmake is None:
        raise FileNotFoundError("the standalone benchmark needs cmake")
    folder = Path(os.environ.get("MEMSWAP_BUILD_DIR", ROOT / "build")) / name
    configure = [cmake, f"-S{ROOT / 'kernels'}", f"-B{folder}", "-DMEMSWAP_KERNELS_BENCH=ON"]
    configure += [*options, *(["-GNinja"] if shutil.which("ninja") else [])]
    compile_it = [cmake, "--build", str(folder), "--target", target]
    compile_it += ["--parallel", str(os.cpu_count() or 1)]
    for step in (configure, compile_it):
        done = subprocess.run(
            step,
            env={**variables, **os.environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(step)}\n{done.stdout[-4000:]}")
    return folder
