"""What the pages say to write exists: names, imports and keywords of every example."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
EXAMPLE = re.compile(r"^```python\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)

pytestmark = [
    pytest.mark.cpu_only,
    pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name),
]


def examples(page: Path) -> list[ast.Module]:
    return [ast.parse(code, str(page)) for code in EXAMPLE.findall(page.read_text("utf-8"))]


def found(name: str) -> Any:
    """What a dotted name stands for."""
    first, *rest = name.split(".")
    value = importlib.import_module(first)
    for place, part in enumerate(rest, start=1):
        try:
            value = getattr(value, part)
        except AttributeError:
            value = importlib.import_module(".".join([first, *rest[:place]]))
    return value


def test_every_name_of_memswap_exists(page: Path) -> None:
    for name in set(re.findall(r"(?<![\w/.-])memswap(?:\.[A-Za-z_]\w*)+", page.read_text("utf-8"))):
        try:
            found(name)
        except ImportError:
            pytest.fail(f"{page.name} names {name}, which does not exist")


def test_every_import_works(page: Path) -> None:
    for tree in examples(page):
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("memswap"):
                for alias in node.names:
                    assert hasattr(importlib.import_module(node.module or ""), alias.name), (
                        f"{page.name} imports {alias.name} from {node.module}"
                    )


def test_every_keyword_is_one(page: Path) -> None:
    for tree in examples(page):
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            name = ast.unparse(call.func)
            if not re.fullmatch(r"memswap(\.\w+)+", name):
                continue
            parameters = inspect.signature(found(name)).parameters.values()
            if any(one.kind is one.VAR_KEYWORD for one in parameters):
                continue
            known = {one.name for one in parameters}
            for keyword in call.keywords:
                assert keyword.arg in known, f"{page.name} calls {name}({keyword.arg}=...)"


def test_there_are_examples(page: Path) -> None:
    if page.name in ("README.md", "migration.md", "integrations.md", "checkpointing.md"):
        assert examples(page), f"no example was found in {page.name}"
