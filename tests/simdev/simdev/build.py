"""Builds the extension once per torch version and state of the sources."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REPOSITORY = ROOT.parent.parent
KERNEL_HEADERS = REPOSITORY / "kernels/include/memswap"


def source_hash() -> str:
    """A hash of everything that the extension is built from."""
    import torch

    digest = hashlib.sha256()
    own = [ROOT / "CMakeLists.txt", *sorted((ROOT / "csrc").rglob("*"))]
    names = {path: path.relative_to(ROOT).as_posix() for path in own}
    names |= {KERNEL_HEADERS / name: name for name in ("codec.h", "frame.h")}
    for path, name in names.items():
        if path.is_file():
            digest.update(name.encode() + b"\0")
            digest.update(path.read_bytes() + b"\0")
    # The same torch version may be installed twice, and the build links to one of them.
    digest.update(f"{torch.__file__}\0{sys.version}".encode())
    return digest.hexdigest()[:16]


def cache_directory() -> Path:
    import torch

    return REPOSITORY / "build" / f"simdev-{torch.__version__}-{source_hash()}"


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def cmake_build(build: Path, target: str, definitions: dict[str, str]) -> None:
    """Configures ROOT into `build` and builds one target. Raises RuntimeError with the output."""
    cmake = shutil.which("cmake")
    if cmake is None:
        raise RuntimeError("simdev: cmake is needed to build the simulated accelerator")
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    configure = [cmake, "-S", str(ROOT), "-B", str(build), *generator]
    configure += [f"-D{name}={value}" for name, value in definitions.items()]
    jobs = os.environ.get("SIMDEV_JOBS", "2")
    compile_ = [cmake, "--build", str(build), "--target", target, "--parallel", jobs]
    for command in (configure, compile_):
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"simdev: {' '.join(command)} failed:\n{done.stdout[-8000:]}")


def ensure_built() -> Path:
    """Returns the path of the extension, building it if this state of it was never built."""
    directory = cache_directory()
    extension = directory / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
    if extension.exists():
        return extension
    with _locked(directory.with_name(directory.name + ".lock")):
        if extension.exists():  # another process has just built it
            return extension
        print(f"simdev: building the simulated accelerator in {directory}", file=sys.stderr)
        began = time.monotonic()
        # Built beside and moved: a build that was interrupted is never taken for a finished one.
        work = directory.with_name(directory.name + ".work")
        cmake_build(work, "simdev_extension", {"SIMDEV_PYTHON": sys.executable})
        directory.mkdir(exist_ok=True)
        os.replace(work / extension.name, extension)
        shutil.rmtree(work, ignore_errors=True)
        print(f"simdev: built in {time.monotonic() - began:.0f} s", file=sys.stderr)
    return extension
