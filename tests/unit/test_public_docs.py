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


def takes_several(name: str, one: Any) -> bool:
    """Whether a function has more than two parameters beside self."""
    parameters = list(inspect.signature(one).parameters)
    return len(parameters) - (parameters[:1] in (["self"], ["cls"])) > 2


def others_define(kind: type, name: str) -> bool:
    """Whether a method overrides one of another library's class, which documents it."""
    bases = [one for one in kind.__mro__ if not one.__module__.startswith(("memswap", "builtins"))]
    return any(name in vars(one) for one in bases if one.__module__ not in ("abc", "typing"))


def functions_of(module: Any) -> list[tuple[str, Any, str]]:
    """Public functions and methods that a module defines, and what is said of their arguments."""
    found = []
    for name, one in vars(module).items():
        if name.startswith("_") or getattr(one, "__module__", None) != module.__name__:
            continue
        if inspect.isfunction(one):
            found.append((name, one, inspect.getdoc(one) or ""))
        elif inspect.isclass(one):
            for method, value in vars(one).items():
                value = getattr(value, "__func__", value)
                if not inspect.isfunction(value) or others_define(one, method):
                    continue
                written = value.__code__.co_filename == module.__file__  # not by dataclass
                if method == "__init__" and written:
                    found.append((name, value, inspect.getdoc(one) or ""))
                elif not method.startswith("_") and written:
                    said = [getattr(base, method, None) for base in one.__mro__]  # it may inherit
                    docs = "\n".join(inspect.getdoc(one) or "" for one in said if one is not None)
                    found.append((f"{name}.{method}", value, docs))
    return found


def test_functions_of_several_parameters_say_what_each_is() -> None:
    """`Args:` in the docstring, each parameter with a line of its own."""
    silent, looked_at = [], 0
    for path in sorted((ROOT / "python" / "memswap").rglob("*.py")):
        parts = path.relative_to(ROOT / "python").with_suffix("").parts
        if parts[-1].startswith("__"):
            continue
        try:
            module = import_module(".".join(parts))
        except ModuleNotFoundError:  # an integration's library is not here
            continue
        for name, one, said in functions_of(module):
            if not takes_several(name, one):
                continue
            looked_at += 1
            lines = said.partition("Args:\n")[2]
            named = set(re.findall(r"^ +\*{0,2}(\w+):", lines, flags=re.MULTILINE))
            missing = inspect.signature(one).parameters.keys() - named - {"self", "cls"}
            if missing:
                silent.append(f"{module.__name__}.{name}: {sorted(missing)}")
    assert looked_at > 200
    assert not silent, "help() does not say what these are:\n" + "\n".join(silent)


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
