"""Installing works in the ordinary and the editable way, and a missing torch is a clear answer."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("CMakeLists.txt", "setup.py", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in")
FOLDERS = ("csrc", "kernels", "python", "tests", "third_party")
BUILT = shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info", "build")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.cpu_only,
    pytest.mark.skipif(shutil.which("cmake") is None, reason="needs cmake: pip install cmake"),
]


def run(
    *command: str | Path, cwd: Path, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    clean = {
        name: value
        for name, value in os.environ.items()
        # What the caller's own checkout set up must not help.
        if name not in ("PYTHONPATH", "MEMSWAP_BUILD_DIR", "PYTHONHOME")
    }
    return subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env={**clean, **(environment or {})},
        capture_output=True,
        text=True,
        check=False,
        timeout=1200,
    )


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A copy of what a build reads, with nothing built in it."""
    copy = tmp_path / "clone"
    copy.mkdir()
    for name in SOURCES:
        shutil.copy(ROOT / name, copy / name)
    for name in FOLDERS:
        if (ROOT / name).exists():
            shutil.copytree(ROOT / name, copy / name, ignore=BUILT)
    return copy


@pytest.fixture
def fresh_python(tmp_path: Path) -> Path:
    """A new environment that sees the torch and tools of this one, and no memswap.

    ``--system-site-packages`` would show the packages of the Python that this environment was made
    from, not this environment's own; a path file shows both. Without a pip of its own, for that
    would bring an old setuptools that hides the one here.
    """
    home = tmp_path / "environment"
    venv.create(home, with_pip=False, system_site_packages=True)
    python = home / "bin" / "python"
    asked = run(
        python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path
    )
    outer = sysconfig.get_path("purelib")
    Path(asked.stdout.strip(), "outer.pth").write_text(outer + "\n", encoding="utf-8")
    return python


USE = """
import torch, memswap
layers = [torch.nn.Linear(256, 256) for _ in range(2)]
with memswap.saved_tensors() as saved:
    states = torch.randn(256, 256)
    for layer in layers:
        states = torch.nn.functional.gelu(layer(states))
states.sum().backward()
assert saved.stats().moved_bytes > 0
print(memswap.__file__)
"""


def install(python: Path, sources: Path, *options: str) -> None:
    done = run(
        sys.executable, "-m", "pip", "--python", python, "install",
        "--no-build-isolation", "--no-deps", "--no-index", *options, ".", cwd=sources,
    )  # fmt: skip
    assert done.returncode == 0, f"pip install fails:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"


def test_ordinary_install_works(sources: Path, fresh_python: Path, tmp_path: Path) -> None:
    install(fresh_python, sources)
    done = run(fresh_python, "-c", USE, cwd=tmp_path)
    assert done.returncode == 0, f"the installed package does not work:\n{done.stderr}"
    installed = Path(done.stdout.strip())
    assert fresh_python.parents[1] in installed.parents, f"imported {installed} instead"
    assert (installed.parent / "py.typed").exists(), "users' type checkers see no types"
    assert list(installed.parent.glob("_C*.so")), "the native module was not installed"
    assert not list(installed.parent.parent.glob("simdev*")), "a test-only package was installed"


def test_editable_install_works(sources: Path, fresh_python: Path, tmp_path: Path) -> None:
    install(fresh_python, sources, "--editable")
    done = run(fresh_python, "-c", USE, cwd=tmp_path)
    assert done.returncode == 0, f"the editable install does not work:\n{done.stderr}"
    assert Path(done.stdout.strip()) == sources / "python" / "memswap" / "__init__.py"


def test_a_wheel_installs_elsewhere_and_passes_its_selftest() -> None:
    """`make wheel` of this checkout, which is built already."""
    folder = os.environ.get("MEMSWAP_BUILD_DIR", str(ROOT / "build" / "wheels"))
    make = ("make", "wheel", "VENV=none", f"PYTHON={sys.executable}")
    done = run(*make, cwd=ROOT, environment={"MEMSWAP_BUILD_DIR": folder})
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    minor = ".".join(torch.__version__.split(".")[:2])
    assert f"its self-test passed (torch=={minor}.*" in done.stdout, done.stdout


def test_build_with_an_old_setuptools_says_what_to_do(sources: Path, tmp_path: Path) -> None:
    # A new environment of Python 3.10 or 3.11 has setuptools 65, which pip does not replace when it
    # is asked for "setuptools". Old ones stop within setup().
    shadow = tmp_path / "shadow" / "setuptools"
    (shadow / "command").mkdir(parents=True)
    old = "__version__ = '65.5.0'\nExtension = dict\ndef setup(**_): raise ValueError('config')\n"
    (shadow / "__init__.py").write_text(old)
    (shadow / "command" / "build_ext.py").write_text("build_ext = object\n")
    done = run(
        sys.executable, "setup.py", "--version",
        cwd=sources, environment={"PYTHONPATH": str(shadow.parent)},
    )  # fmt: skip
    assert done.returncode != 0
    assert "needs setuptools >= 77 to build and found 65.5.0" in done.stderr
    assert "Traceback" not in done.stderr


def test_build_without_torch_says_what_to_do(sources: Path, tmp_path: Path) -> None:
    # A torch that cannot be imported stands for none: the tools must come from somewhere.
    shadow = tmp_path / "shadow"
    (shadow / "torch").mkdir(parents=True)
    (shadow / "torch" / "__init__.py").write_text("raise ImportError('no torch here')\n")
    done = run(
        sys.executable, "setup.py", "build_ext", "--inplace",
        cwd=sources, environment={"PYTHONPATH": str(shadow)},
    )  # fmt: skip
    assert done.returncode != 0
    assert "Install torch first" in done.stderr
    assert "--no-build-isolation" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_build_for_another_system_says_what_is_needed(sources: Path, tmp_path: Path) -> None:
    done = run(
        "cmake", "-S", sources, "-B", tmp_path / "b", "-DCMAKE_SYSTEM_NAME=FreeBSD", cwd=sources
    )
    assert done.returncode != 0
    assert "written for Linux and found FreeBSD" in " ".join(done.stderr.split())
