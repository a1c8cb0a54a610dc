"""The codec's own benchmark, kernels/bench/cuda_bench.cu, which needs no torch."""

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
    return shutil.which(name) or shutil.which(name, path=os.pathsep.join(map(str, folders)))


def build_cuda_bench() -> Path:
    """The program, built for MEMSWAP_CUDA_ARCHITECTURES or for all that we support.

    Raises:
        FileNotFoundError: nvcc or cmake is missing.
        RuntimeError: it does not compile; with what was said.
    """
    nvcc, cmake = find_tool("nvcc"), shutil.which("cmake")
    if nvcc is None or cmake is None:
        raise FileNotFoundError("the standalone benchmark needs nvcc and cmake")
    folder = Path(os.environ.get("MEMSWAP_BUILD_DIR", ROOT / "build")) / "cuda_bench"
    architectures = os.environ.get("MEMSWAP_CUDA_ARCHITECTURES", "")
    configure = [cmake, f"-S{ROOT / 'kernels'}", f"-B{folder}", "-DMEMSWAP_KERNELS_BENCH=ON"]
    configure += ["-DMEMSWAP_CUDA=ON", "-DMEMSWAP_WERROR=OFF"]
    configure += [f"-DMEMSWAP_CUDA_ARCHITECTURES={architectures}"]
    configure += ["-GNinja"] if shutil.which("ninja") else []
    build = [cmake, "--build", str(folder), "--target", "memswap_cuda_bench"]
    build += ["--parallel", str(os.cpu_count() or 1)]
    for step in (configure, build):
        done = subprocess.run(
            step,
            env={"CUDACXX": nvcc, **os.environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(step)}\n{done.stdout[-4000:]}")
    return folder / "cuda" / "memswap_cuda_bench"
