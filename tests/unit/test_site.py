"""The documentation site: it has every page and every public name, and it builds."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

import memswap
import memswap.parallel
import memswap.types

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.cpu_only

spec = importlib.util.spec_from_file_location("docs_site", ROOT / "docs" / "site.py")
assert spec is not None and spec.loader is not None
site = importlib.util.module_from_spec(spec)
spec.loader.exec_module(site)

SHOWN = {name for _, _, names in site.REFERENCE.values() for name in names}


def test_every_public_name_is_in_the_reference() -> None:
    public = {*memswap.__all__, *(f"types.{name}" for name in memswap.types.__all__)}
    public |= {f"parallel.{name}" for name in memswap.parallel.__all__}
    assert not public - SHOWN, "names without a place in the reference"


def test_every_page_is_in_the_navigation() -> None:
    named = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text("utf-8")))
    pages = {page.name for page in (ROOT / "docs").glob("*.md")}
    assert pages <= named, "pages that nobody finds"
    assert {f"reference/{name}.md" for name in site.REFERENCE} <= named


def test_links_out_of_the_pages_name_the_file() -> None:
    text = "[the header](../kernels/include/memswap/frame.h#L3), [home](../README.md), [x](a.md#b)"
    assert site.on_page_markdown(text) == (
        "the header (`kernels/include/memswap/frame.h`), [home](index.md), [x](a.md#b)"
    )


def test_the_site_builds_and_every_link_in_it_leads_somewhere(tmp_path: Path) -> None:
    pytest.importorskip("mkdocstrings_handlers.python", reason="the site's tools are not installed")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    ran = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    shown = (tmp_path / "reference" / "activations.html").read_text("utf-8")
    assert 'id="memswap.manage"' in shown and "BudgetError" in shown
    assert ":class:" not in shown, "a role of a docstring is shown as text"
