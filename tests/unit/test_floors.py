"""The floors of the house: a file imports only what stands below it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import memswap

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "python" / "memswap"

#: Modules and packages of memswap, from the ground.
FLOORS = (
    ("_C", "_warn"),
    ("_native", "errors"),
    ("codec",),
    ("engine",),
    ("planning", "hooks"),
    ("reports",),
    ("parallel", "windows", "inplace", "checkpoints"),
    ("groups", "optimizers"),
    ("activations",),
    ("checkpointing", "schedules"),
    ("compat", "integrations", "types"),
    ("__init__",),
    ("cli",),
    ("__main__",),
)
FLOOR = {name: floor for floor, names in enumerate(FLOORS) for name in names}

#: Lines that csrc/bind has at most: it converts, and what does more belongs in csrc/engine.
BINDING_LINES = 1500

#: Folders of csrc, from the ground.
NATIVE_FLOORS = ("work", "storage", "pool", "lane", "codec", "engine", "bind")

pytestmark = pytest.mark.cpu_only


def imports_of(path: Path) -> set[str]:
    """The modules of memswap that a file names in any import but those for types alone."""
    tree = ast.parse(path.read_text("utf-8"))
    typing_only = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for part in node.body
        for inner in ast.walk(part)
    }
    named: set[str] = set()
    for node in ast.walk(tree):
        if node in typing_only:
            continue
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute here"
            named.update(f"{node.module}.{name.name}" for name in node.names)
        elif isinstance(node, ast.Import):
            named.update(name.name for name in node.names)
    return {name for name in named if name.split(".")[0] == "memswap"}


def place_of(module: str) -> str:
    """The module or package of memswap that a dotted name is in."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in FLOOR else "__init__"


def python_files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def test_every_module_has_a_floor() -> None:
    found = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in python_files()}
    assert found == FLOOR.keys() - {"_C"}


def test_a_module_of_its_own_is_a_door() -> None:
    """What only other files of memswap use stands in a package, or has an underscore."""
    doors = {path.stem for path in PACKAGE.glob("*.py") if not path.name.startswith("_")}
    assert doors <= memswap._PLACES.keys() | {"types"}


def test_modules_import_what_stands_below_them() -> None:
    wrong = []
    for path in python_files():
        own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        for module in imports_of(path):
            other = place_of(module)
            if other != own and FLOOR[other] >= FLOOR[own]:
                wrong.append(f"{path.relative_to(ROOT)} imports {module}")
    assert not wrong, "\n".join(wrong)


def test_no_files_import_each_other_in_a_circle() -> None:
    """Within a package as well, and for types as well."""
    files = {
        "memswap." + ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path
        for path in python_files()
    }
    below: dict[str, set[str]] = {}
    for name, path in files.items():
        named = set(re.findall(r"from (memswap[\w.]*) import", path.read_text("utf-8")))
        below[name] = {other for other in named if other in files and other != name}
    while ground := [name for name, others in below.items() if not others]:
        for name in ground:
            del below[name]
        for others in below.values():
            others.difference_update(ground)
    assert not below, f"circles: {below}"


def test_hooks_on_modules_are_added_by_one_class() -> None:
    """By hand, each would find out anew what a call is that raises, recurs or is interrupted."""
    adds = re.compile(r"\.register_(?:module_)?(?:forward|full_backward)\w*hook\(")
    found = {path.name for path in python_files() if adds.search(path.read_text("utf-8"))}
    assert found == {"module_hooks.py"}


def native_files(folder: Path) -> list[Path]:
    kinds = {".h", ".cpp", ".cu", ".cuh"}
    return sorted(path for path in folder.rglob("*") if path.suffix in kinds)


def test_native_folders_include_what_stands_below_them() -> None:
    wrong = []
    for path in native_files(ROOT / "csrc"):
        own, *_ = path.relative_to(ROOT / "csrc").parts
        assert own in NATIVE_FLOORS, f"{path}: which floor is this?"
        for included in re.findall(r'#include "([^"]+)"', path.read_text("utf-8")):
            folder, slash, _ = included.partition("/")
            if not slash or folder == "memswap":  # the same folder; what kernels offer
                continue
            if NATIVE_FLOORS.index(folder) >= NATIVE_FLOORS.index(own):
                wrong.append(f"{path.relative_to(ROOT)} includes {included}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("folder", "forbidden"),
    [
        ("kernels", "torch|ATen|c10|pybind11|Python"),
        *[(f"csrc/{name}", "pybind11|Python") for name in NATIVE_FLOORS if name != "bind"],
    ],
)
def test_who_knows_neither_torch_nor_python(folder: str, forbidden: str) -> None:
    files = native_files(ROOT / folder)
    assert files
    pattern = re.compile(rf"#include <(?:{forbidden})[/.].*")
    wrong = [
        f"{path}: {found}" for path in files for found in pattern.findall(path.read_text("utf-8"))
    ]
    assert not wrong, "\n".join(wrong)


def test_the_bindings_stay_a_table_of_contents():
    lines = {one.name: len(one.read_text().splitlines()) for one in (ROOT / "csrc/bind").iterdir()}
    assert sum(lines.values()) < BINDING_LINES, lines
