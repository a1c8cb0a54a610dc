"""Tries a wheel where nothing of this checkout is: installs it, and runs the self-test.

    python tests/wheel.py dist/memswap-*.whl

`make wheel` runs it. The environment is made under build/ and taken away afterwards. It has the
torch of this Python, which a wheel is for, and no memswap but the wheel's.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

USE = """
import importlib.metadata, memswap, torch
assert importlib.metadata.files("memswap"), "the wheel left no record of what it installed"
print(memswap.__file__)
print(*(one for one in importlib.metadata.requires("memswap") if "extra" not in one))
"""


def clean_environment() -> dict[str, str]:
    """The variables of this process without what a checkout sets up."""
    set_up = ("PYTHONPATH", "PYTHONHOME", "MEMSWAP_BUILD_DIR")
    return {name: value for name, value in os.environ.items() if name not in set_up}


def run(command: list[str], cwd: Path) -> str:
    """Run a command and return what it printed; stop with all of it where it fails."""
    done = subprocess.run(
        command, cwd=cwd, env=clean_environment(), capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} fails:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    return done.stdout


def make_environment(home: Path) -> Path:
    """A new environment that sees this one's packages behind its own. Returns its Python.

    A path file shows them, whose own path files (an editable memswap's) are not read.
    """
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    asked = run([str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], home)
    shown = [sysconfig.get_path("purelib"), *(path for path in sys.path if "site-packages" in path)]
    lines = "".join(f"{path}\n" for path in dict.fromkeys(shown))
    Path(asked.strip(), "outer.pth").write_text(lines, encoding="utf-8")
    return python


def try_wheel(wheel: Path) -> None:
    """Install a wheel into an environment of its own and run its self-test.

    Raises:
        SystemExit: it does not install, is not what was imported, or fails its self-test.
    """
    build = ROOT / "build"
    build.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=build, prefix="wheel-") as folder:
        home = Path(folder, "environment")
        python = make_environment(home)
        pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
        run([*pip, "--no-deps", "--no-index", str(wheel)], home)
        imported, required = run([str(python), "-c", USE], home).splitlines()[-2:]
        if home not in Path(imported).parents:
            raise SystemExit(f"{imported} was imported instead of the wheel's memswap")
        run([str(python), "-m", "memswap", "selftest"], home)
    print(f"{wheel.name}: installed into a new environment; its self-test passed ({required})")


def main() -> int:
    """Try the wheels that are named; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheels", nargs="+", type=Path)
    for wheel in parser.parse_args().wheels:
        try_wheel(wheel.resolve())
    return 0


if __name__ == "__main__":
    sys.exit(main())
