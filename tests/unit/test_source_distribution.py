"""A source distribution holds what a build reads, and what tells that the build works."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = ("CMakeLists.txt", "MANIFEST.in", "Makefile", "setup.py", "pyproject.toml", "LICENSE")
PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")
FOLDERS = ("benchmarks", "csrc", "docs", "examples", "kernels", "python", "tests", "third_party")
MADE = shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info", "build", ".hypothesis")

pytestmark = pytest.mark.cpu_only


def test_a_source_distribution_is_complete(tmp_path: Path) -> None:
    sources = tmp_path / "clone"
    sources.mkdir()
    for name in (*FILES, *PAGES):
        shutil.copy(ROOT / name, sources / name)
    for name in FOLDERS:
        shutil.copytree(ROOT / name, sources / name, ignore=MADE)
    expected = {str(path.relative_to(sources)) for path in sources.rglob("*") if path.is_file()}
    done = subprocess.run(
        [sys.executable, "setup.py", "--quiet", "sdist", "--dist-dir", str(tmp_path / "dist")],
        cwd=sources,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, f"sdist fails:\n{done.stderr}"
    (archive,) = (tmp_path / "dist").iterdir()
    with tarfile.open(archive) as packed:
        there = {str(Path(*Path(name).parts[1:])) for name in packed.getnames()}
    missing = sorted(expected - there)
    assert not missing, f"the source distribution lacks {len(missing)} files: {missing[:10]}"
