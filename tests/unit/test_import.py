"""What ``import memswap`` brings with it."""

from __future__ import annotations

from apart import run_python

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


def test_another_torch_than_the_one_that_it_was_built_for_is_refused() -> None:
    ran = run_python("import torch\ntorch.__version__ = '1.99.0+cu1'\nimport memswap")
    assert ran.returncode != 0
    built = native.torch_version
    assert f"memswap was built against torch {built}, and this is torch 1.99.0+cu1" in ran.stderr
    assert "pip install --no-build-isolation ." in ran.stderr
