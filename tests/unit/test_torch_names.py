"""What we name of torch's exists, also where no test of a CPU goes.

Most of `torch.cuda` is Python and is in every build of torch. What is below it, in `torch._C`, is
in builds for CUDA alone; the stub that torch ships for type checkers lists it in every build.
"""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.cpu_only

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("python", "benchmarks", "examples", "tests")
#: Made by others than torch: by extensions, by operators' libraries.
OTHERS = ("torch.npu.", "torch.ops.")


def dotted(node: ast.expr) -> str | None:
    """`torch.cuda.Stream` of an expression that says so."""
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return before and f"{before}.{node.attr}"
    return "torch" if isinstance(node, ast.Name) and node.id == "torch" else None


def names_in(file: Path) -> set[str]:
    """The longest dotted names of torch's that a file has."""
    found: set[str] = set()
    inner: set[int] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"), str(file))):
        if isinstance(node, ast.Attribute):
            if id(node) not in inner and (name := dotted(node)):
                found.add(name)
            inner.add(id(node.value))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def in_stub(name: str) -> bool:
    stub = Path(torch.__file__).with_name("_C") / "__init__.pyi"
    what = name.removeprefix("torch._C.")
    return what != name and f"def {what}(" in stub.read_text(encoding="utf-8")


def exists(name: str) -> bool:
    value: Any = torch
    parts = name.split(".")
    for place in range(1, len(parts)):
        try:
            value = getattr(value, parts[place])
        except AttributeError:
            try:
                value = importlib.import_module(".".join(parts[: place + 1]))
            except ImportError:
                return in_stub(name)
        if not isinstance(value, type(torch)) and not isinstance(value, type):
            return True  # what a value has is not known before it is one
    return True


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_name_of_torch_exists(folder: str) -> None:
    missing = {
        f"{file.relative_to(ROOT)}: {name}"
        for file in sorted((ROOT / folder).rglob("*.py"))
        for name in names_in(file)
        if not name.startswith(OTHERS) and not exists(name)
    }
    assert not missing, "this torch has no\n" + "\n".join(sorted(missing))
