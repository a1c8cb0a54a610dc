"""What ``import memswap`` brings with it."""

from __future__ import annotations

from apart import run_python

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
print(sorted(heavy & (set(sys.modules) - before)))
"""


def test_dynamo_is_not_imported_before_a_hook_needs_it() -> None:
    """It takes as long to import as the rest of torch."""
    ran = run_python(PROGRAM)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "[]\n"
