"""Whoever asks for help gets some: public names have docstrings, and reasons an explanation."""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODULES = [
    "memswap",
    "memswap.optimizers",
    "memswap.parallel",
    "memswap.types",
    "memswap.compat.hyper_parallel",
    "memswap.compat.internevo",
    "memswap.compat.mindspeed",
]

pytestmark = pytest.mark.cpu_only


def public(module: str) -> list[tuple[str, Any]]:
    """Functions and classes that a module names, and the public methods of these classes."""
    named = [(name, getattr(import_module(module), name)) for name in import_module(module).__all__]
    found = [(name, one) for name, one in named if inspect.isclass(one) or inspect.isroutine(one)]
    found = [(name, one) for name, one in found if one.__module__.startswith("memswap")]
    for name, one in [pair for pair in found if inspect.isclass(pair[1])]:
        for method, value in vars(one).items():
            value = getattr(value, "__func__", getattr(value, "fget", value))
            if not method.startswith("_") and inspect.isfunction(value):
                found.append((f"{name}.{method}", value))
    return found


@pytest.mark.parametrize("module", MODULES)
def test_everything_public_has_a_docstring(module: str) -> None:
    silent = [name for name, one in public(module) if not inspect.getdoc(one)]
    assert not silent, f"help() is silent about {module}: {silent}"


def test_each_reason_to_stay_is_explained() -> None:
    """``stats().kept`` says one of these words; docs/choosing.md says what it means."""
    package, native = ROOT / "python" / "memswap", ROOT / "csrc"
    said = re.findall(r'\] = "([^"]+)"', (native / "engine" / "reasons.h").read_text("utf-8"))
    stays = re.compile(r'(?:keep|stay)\([^()"]*"([a-z ]+)"')
    for path in native.rglob("*.cpp"):
        assert not stays.findall(path.read_text("utf-8")), f"{path}: reasons are in reasons.h"
    sources = [*(package / "engine").glob("*.py"), package / "checkpoints" / "region.py"]
    code = "\n".join(path.read_text("utf-8") for path in sources)
    said += stays.findall(code)
    said += re.findall(r'\breturn "([a-z ]+)";', code)
    said += re.findall(r'\breason = "([a-z ]+)"', code)
    said += re.findall(r'"([a-z ]+)" if (?:is_collective|written)', code)
    assert {
        "small",
        "parameter",
        "pool",
        "codec room",
        "planned",
        "collective",
        "traced",
        "resized",
    } <= set(said), said
    page = (ROOT / "docs" / "choosing.md").read_text("utf-8")
    table = page.partition("## What stays, and why")[2].partition("\n## ")[0]
    for reason in sorted(set(said)):
        assert f"`{reason}`" in table, f"docs/choosing.md does not explain {reason!r}"
