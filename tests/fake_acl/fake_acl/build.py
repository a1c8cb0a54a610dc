"""Builds the fake runtime and the extension, where anything has changed since the last time.

Imports neither torch nor torch_npu: the latter cannot be imported before the libraries are loaded.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REPOSITORY = ROOT.parent.parent
EXTENSION = f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"


def directory() -> Path:
    """Where it is built: one folder for each torch_npu and Python, brought up to date each time.

    The environment variable FAKE_ACL_BUILD names another parent than the repository's build/.
    """
    versions = [importlib.metadata.version(name) for name in ("torch", "torch_npu")]
    key = hashlib.sha256(f"{versions} {sys.prefix} {sys.version}".encode()).hexdigest()[:12]
    return Path(os.environ.get("FAKE_ACL_BUILD", REPOSITORY / "build")) / f"fake-acl-{key}"


def _run(command: list[str]) -> None:
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"fake_acl: {' '.join(command)} failed:\n{done.stdout[-8000:]}")


def ensure_built() -> Path:
    """The folder with libascendcl.so, its companions and the extension."""
    build = directory()
    build.mkdir(parents=True, exist_ok=True)
    with open(build / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        cmake = shutil.which("cmake")
        if cmake is None:
            raise RuntimeError("fake_acl: cmake is needed to build the fake ACL runtime")
        began = time.monotonic()
        if not (build / "CMakeCache.txt").exists():
            print(f"fake_acl: building in {build}", file=sys.stderr)
            generator = ["-G", "Ninja"] if shutil.which("ninja") else []
            python = f"-DFAKE_ACL_PYTHON={sys.executable}"
            _run([cmake, "-S", str(ROOT), "-B", str(build), *generator, python])
        _run([cmake, "--build", str(build), "--parallel", os.environ.get("MAX_JOBS", "2")])
        if (elapsed_s := time.monotonic() - began) > 5:
            print(f"fake_acl: built in {elapsed_s:.0f} s", file=sys.stderr)
    return build
