"""What ``import memswap`` brings with it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from apart import run_python

import memswap
from memswap._native import native

PROGRAM = """
import sys, torch
before = set(sys.modules)
import memswap
weight = torch.randn(64, 64, requires_grad=True)
with memswap.saved_tensors(memswap.Policy(min_bytes=1)) as saved:
    loss = (torch.randn(64, 64) @ weight).tanh().sum()
loss.backward()
assert weight.grad is not None and saved.stats().encoded_storages == 2
heavy = {"torch._dynamo", "torch._inductor", "sympy", "numpy", "torch.distributed.fsdp"}
heavy |= {"memswap.integrations", "transformers", "accelerate", "lightning", "torchtitan"}
print(sorted(heavy & (set(sys.modules) - before)))
"""


def test_dynamo_is_not_imported_before_a_hook_needs_it() -> None:
    """It takes as long to import as the rest of torch."""
    ran = run_python(PROGRAM)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "[]\n"


def test_a_collection_at_any_moment_of_the_first_scope_is_survived() -> None:
    """While the first hook scope is made, the collector meets it without anything in it."""
    collecting = "import memswap, gc\ngc.set_threshold(1)"
    ran = run_python(PROGRAM.replace("import memswap", collecting, 1))
    assert ran.returncode == 0, ran.stderr


def test_another_torch_than_the_one_that_it_was_built_for_is_refused() -> None:
    ran = run_python(
        "import torch\ntorch.__version__ = '1.99.0+cu1'\nimport memswap; memswap.manage"
    )
    assert ran.returncode != 0
    built = native.torch_version
    assert f"memswap was built against torch {built}, and this is torch 1.99.0+cu1" in ran.stderr
    assert "pip install --no-build-isolation ." in ran.stderr


def test_help_is_told_without_torch() -> None:
    """It took as long as importing torch, which is seconds."""
    program = """
import sys
from memswap.__main__ import main
try:
    main(["--help"])
except SystemExit:
    print("torch" in sys.modules, "memswap._C" in sys.modules)
"""
    ran = run_python(program)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.endswith("False False\n")


def test_every_public_name_is_found_where_type_checkers_find_it() -> None:
    tree = ast.parse(Path(memswap.__file__).read_text("utf-8"))
    checked = next(
        node
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    told = {
        name.name: part.module.removeprefix("memswap").lstrip(".")
        for part in checked.body
        if isinstance(part, ast.ImportFrom) and part.module
        for name in part.names
    }
    assert told == memswap._PLACE_OF | {"integrations": "", "parallel": "", "types": ""}
    assert set(memswap.__all__) == memswap._PLACE_OF.keys()
    for name in told:
        assert getattr(memswap, name) is not None and name in dir(memswap)


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(
        AttributeError, match=r"no attribute 'Manager': it is memswap\.types\.Manager"
    ):
        _ = memswap.Manager  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="module 'memswap' has no attribute 'manag'"):
        _ = memswap.manag
