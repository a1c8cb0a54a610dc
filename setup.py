"""Builds memswap._C by CMake. Everything that can be said declaratively is in pyproject.toml."""

from __future__ import annotations

import importlib.metadata
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import setuptools
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()

#: Options of the build that the environment may set; CMake declares them.
OPTIONS = ("MEMSWAP_CUDA", "MEMSWAP_CUDA_ARCHITECTURES", "MEMSWAP_ASCEND", "MEMSWAP_WERROR")


def require_setuptools() -> None:
    """Stop with a sentence: an older setuptools rejects pyproject.toml in many lines."""
    if int(setuptools.__version__.partition(".")[0]) < 77:
        raise SystemExit(
            f"memswap needs setuptools >= 77 to build and found {setuptools.__version__}.\n"
            "Install it (pip install --upgrade 'setuptools>=77' cmake ninja) and build again."
        )


def require_torch() -> None:
    """Stop with a sentence instead of a traceback when torch is missing."""
    probe = subprocess.run([sys.executable, "-c", "import torch"], capture_output=True, check=False)
    if probe.returncode:
        raise SystemExit(
            "memswap is built against the torch that will import it, and this build environment "
            "has none.\nInstall torch first (for example: pip install torch==2.13.0), then build "
            "with:\n    pip install --no-build-isolation ."
        )


def required_torch() -> str:
    """What memswap needs: built, the minor version of torch that it was built against."""
    try:
        major, minor, *_ = importlib.metadata.version("torch").split(".")
    except importlib.metadata.PackageNotFoundError:
        return "torch>=2.11"
    return f"torch=={major}.{minor}.*"


def find_cmake() -> str:
    cmake = shutil.which("cmake")
    if cmake is None:
        raise SystemExit(
            "memswap needs CMake >= 3.25 to build and found none on PATH.\n"
            "Install it (for example: pip install cmake ninja) and build again."
        )
    return cmake


def choose_generator(cmake: str, configure: list[str], build: Path) -> list[str]:
    """Ninja, but make where CMake will find CANN, whose CMake functions run builds of their own.

    Args:
        cmake: CMake's program.
        configure: the arguments so far; a generator that they name stays.
        build: the folder of the build, which may have been configured with the other generator.
    """
    if os.environ.get("CMAKE_GENERATOR") or any(one.startswith("-G") for one in configure):
        return []
    definitions = [one for one in configure if one.startswith("-D")]
    script = ROOT / "third_party" / "FindCann.cmake"
    asked = subprocess.run(
        [cmake, *definitions, "-P", str(script)], capture_output=True, text=True, check=False
    )
    # A CANN whose package is no script's to read is a CANN as well.
    cann = asked.returncode != 0 or "memswap: CANN OFF" not in asked.stdout
    ninja = shutil.which("ninja") and not (cann and shutil.which("make"))
    generator = "Ninja" if ninja else "Unix Makefiles"
    cache = build / "CMakeCache.txt"
    before = f"CMAKE_GENERATOR:INTERNAL={generator}\n"
    fresh = cache.exists() and before not in cache.read_text(encoding="utf-8")
    return [f"-G{generator}", *(["--fresh"] if fresh else [])]


class CMakeBuild(build_ext):
    """Configure and build the CMake project, then put the module where setuptools wants it."""

    def build_extension(self, ext: Extension) -> None:
        require_torch()
        cmake = find_cmake()
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        tag = f"{sys.implementation.cache_tag}-{'debug' if self.debug else 'release'}"
        build = Path(os.environ.get("MEMSWAP_BUILD_DIR", ROOT / "build" / tag)).resolve()
        configure = [
            cmake,
            f"-S{ROOT}",
            f"-B{build}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-DCMAKE_BUILD_TYPE={'RelWithDebInfo' if self.debug else 'Release'}",
        ]
        # An option that is not set any more has its default again, whatever CMake remembers.
        for option in OPTIONS:
            asked = os.environ.get(option)
            configure.append(f"-U{option}" if asked is None else f"-D{option}={asked}")
        # Whatever a machine needs beyond that, such as -DPython_INCLUDE_DIR=...
        configure += shlex.split(os.environ.get("CMAKE_ARGS", ""))
        configure += choose_generator(cmake, configure, build)
        jobs = os.environ.get("MAX_JOBS", str(os.cpu_count() or 1))
        subprocess.run(configure, check=True)
        subprocess.run([cmake, "--build", str(build), "--parallel", jobs], check=True)
        install = [cmake, "--install", str(build), "--prefix", str(target.parent.parent)]
        subprocess.run(install, check=True)


require_setuptools()
setup(
    ext_modules=[Extension("memswap._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
    install_requires=[required_torch()],
)
