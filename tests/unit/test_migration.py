"""docs/migration.md: what it says to write exists."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

import pytest

import memswap

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "migration.md").read_text(encoding="utf-8")

pytestmark = pytest.mark.cpu_only


def test_every_name_of_memswap_exists() -> None:
    names = set(re.findall(r"memswap\.(\w+)", PAGE)) - {"compat"}
    assert len(names) > 6
    for name in names:
        assert hasattr(memswap, name), f"docs/migration.md names memswap.{name}"


def test_every_import_works() -> None:
    imports = re.findall(r"^from (memswap\S+) import (.+)$", PAGE, flags=re.MULTILINE)
    assert len(imports) >= 3
    for module, names in imports:
        for name in names.split(","):
            assert hasattr(importlib.import_module(module), name.strip())


def test_every_keyword_is_one() -> None:
    for call, keywords in re.findall(r"memswap\.(\w+)\(([^)]*)\)", PAGE):
        parameters = inspect.signature(getattr(memswap, call)).parameters
        for keyword in re.findall(r"(\w+)=", keywords):
            assert keyword in parameters, f"docs/migration.md calls {call}({keyword}=...)"
