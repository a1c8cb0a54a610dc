"""The README's promise: its code runs as shown, and so do the examples."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from warm_python import warm_python

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)

pytestmark = pytest.mark.cpu_only


def test_readme_code_runs_as_shown(capfd: pytest.CaptureFixture[str]) -> None:
    assert len(BLOCKS) == 2, "the README's usage examples were not found"
    # One process for all blocks: the second goes on where the first ended.
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(BLOCKS)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, f"the README's example fails:\n{done.stderr}"
    lines = done.stdout.strip().splitlines()
    assert len(lines) > 1, "the README's example printed no report"
    moved = re.fullmatch(r"(\d+) bytes were away and came back", lines[-1])
    assert moved and int(moved[1]) > 0, f"the README's second example moved nothing: {lines[-1]}"


def test_first_example_is_short() -> None:
    code = [line for line in BLOCKS[0].splitlines() if line.strip()]
    assert len(code) <= 10, "the README promises an example of ten lines"


def test_readme_is_short() -> None:
    assert len(README.splitlines()) < 150


def test_the_walk_from_pack_to_unpack_fits_on_two_pages() -> None:
    """Some 500 words to the page. Files that it names without a folder are in csrc or python."""
    walk = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    assert len(walk.split()) <= 1000, "docs/architecture.md is to be read in one go"
    folders = (ROOT / "csrc", ROOT / "python" / "memswap")
    there = {path.name for folder in folders for path in folder.rglob("*") if path.is_file()}
    named = set(re.findall(r"`(?:[\w/]+/)?(\w+\.(?:h|cpp|py))`", walk))
    assert named and named <= there, f"not there: {sorted(named - there)}"


#: These run in tests/integrations, and on several processes in tests/parallel.
ELSEWHERE = ("finetune_trainer", "lora_trl", "lightning_module", "fsdp2_context_parallel")
EXAMPLES = [one for one in sorted((ROOT / "examples").glob("*.py")) if one.stem not in ELSEWHERE]

#: What they are called with, where they take long by themselves.
OPTIONS = {"long_sequence": ["--lengths", "64", "128", "256"]}


def test_examples_are_short() -> None:
    """Nobody reads a long one."""
    for example in (ROOT / "examples").glob("*.py"):
        lines = len(example.read_text("utf-8").splitlines())
        assert lines < 80, f"{example.name} has {lines} lines"


#: As `python EXAMPLE OPTIONS` does in a folder; the README's code imports torch itself.
IN_A_FOLDER = """
import os, runpy, sys
folder, example, *sys.argv[1:] = sys.argv[1:]
os.chdir(folder)
runpy.run_path(example, run_name="__main__")
"""


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda p: p.stem)
def test_example_runs(example: Path, tmp_path: Path) -> None:
    arguments = (str(tmp_path), str(example), *OPTIONS.get(example.stem, ()))
    done = warm_python().run(IN_A_FOLDER, 300, arguments)
    assert done.returncode == 0, f"examples/{example.name} fails:\n{done.stderr}"
    assert done.stdout.strip(), f"examples/{example.name} printed nothing"
    assert "DIFFERENT" not in done.stdout, f"examples/{example.name}: other gradients"
    assert not list(tmp_path.iterdir()), f"examples/{example.name} left files behind"
