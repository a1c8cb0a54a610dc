"""The native module has the names that its stub says: most of them are written by the compiler."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from memswap._native import native

STUB = Path(__file__).resolve().parents[2] / "python" / "memswap" / "_C.pyi"

pytestmark = pytest.mark.cpu_only


def names_in(body: list[ast.stmt]) -> set[str]:
    names = {one.name for one in body if isinstance(one, (ast.FunctionDef, ast.ClassDef))}
    targets = [one.target for one in body if isinstance(one, ast.AnnAssign)]
    targets += [target for one in body if isinstance(one, ast.Assign) for target in one.targets]
    return {name for name in names | {ast.unparse(one) for one in targets} if public(name)}


def public(name: str) -> bool:
    return not name.startswith("_")


def own(kind: Any) -> set[str]:
    return set(filter(public, vars(kind)))


STUBS = {one.name: one for one in ast.parse(STUB.read_text()).body if isinstance(one, ast.ClassDef)}
#: That Python code gives to an object.
GIVEN = {"Batch": {"engine"}}
BOUND = sorted(name for name in STUBS if hasattr(native, name))


def test_every_function_and_class_is_in_the_stub() -> None:
    told = names_in(ast.parse(STUB.read_text()).body)
    assert set(filter(public, dir(native))) <= told
    classes = {name for name in STUBS if name not in BOUND}
    aliases = {name for name in told - STUBS.keys() if name[0].isupper() and not name.isupper()}
    assert told - classes - aliases <= set(dir(native))


@pytest.mark.parametrize("name", BOUND)
def test_a_class_has_the_members_that_the_stub_says(name: str) -> None:
    assert own(getattr(native, name)) == names_in(STUBS[name].body) - GIVEN.get(name, set())
