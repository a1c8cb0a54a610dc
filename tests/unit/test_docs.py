"""What the pages say to write exists: names, imports and keywords of every example."""

from __future__ import annotations

import ast
import importlib
import importlib.util
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


#: Libraries that modules of memswap.integrations are for; each may be missing here.
#: tests/integrations runs the examples where they are there.
OTHERS = {"accelerate", "lightning", "torchtitan", "transformers"}


def is_there(module: str, name: str | None = None) -> bool:
    """Whether memswap has a module, and a name in it, also where it cannot be imported here."""
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in OTHERS:
            return False
        spec = importlib.util.find_spec(module)
        assert spec is not None and spec.origin is not None
        tree = ast.parse(Path(spec.origin).read_text("utf-8"))
        return name is None or name in {getattr(node, "name", None) for node in tree.body}
    return name is None or hasattr(found, name)


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
        module, _, last = name.rpartition(".")
        if module.startswith("memswap.integrations"):
            assert is_there(name) or is_there(module, last), f"{page.name} names {name}"
            continue
        try:
            found(name)
        except ImportError:
            pytest.fail(f"{page.name} names {name}, which does not exist")


def test_every_import_works(page: Path) -> None:
    for tree in examples(page):
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("memswap"):
                for alias in node.names:
                    assert is_there(node.module or "", alias.name), (
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


def anchors(page: Path) -> set[str]:
    """What GitHub makes of a page's titles."""
    titles = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text("utf-8")):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        there = (page.parent / name).resolve() if name else page
        assert there.exists(), f"{page.name} links {target}, which is not there"
        if anchor:
            assert anchor in anchors(there), f"{page.name} links {target}, which has no such title"


def test_every_file_that_is_named_is_there(page: Path) -> None:
    folders = "tests|csrc|kernels|docs|python|examples|benchmarks"
    named = rf"(?<![\w/.-])(?:{folders})/[\w./-]+\.(?:py|h|cpp|cu|cuh|md|svg|png|json)\b"
    for name in set(re.findall(named, page.read_text("utf-8"))):
        assert (ROOT / name).exists(), f"{page.name} names {name}, which is not there"


def test_there_are_examples(page: Path) -> None:
    if page.name in ("README.md", "migration.md", "integrations.md", "checkpointing.md"):
        assert examples(page), f"no example was found in {page.name}"
