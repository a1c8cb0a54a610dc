"""What a debugger, a notebook and a log show of memswap's objects."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import memswap

SHOWN = {
    "saved_tensors": (lambda m: memswap.saved_tensors(), "0 B moved, 0 B resident, 0 B away"),
    "manager": (memswap.manage, r"Manager of 3 module\(s\): 0 B moved"),
    "budget": (lambda m: memswap.manage(m, budget="3GiB"), "budget 3.00 GiB, no plan yet"),
    "auto": (lambda m: memswap.manage(m, budget="auto"), "budget auto, no plan yet"),
    "chain": (memswap.chain, r"ScheduledModules of 3 module\(s\) under LayersAhead"),
    "pattern": (lambda m: memswap.swap_modules(m, "{*}"), r"ScheduledModules of 3 module\(s\)"),
    "checkpoints": (memswap.checkpoint_module, r"Checkpointing of 3 module\(s\)"),
    "groups": (lambda m: memswap.Groups(), "Groups: 0 B moved"),
    "group": (lambda m: memswap.Group("attention"), "group 'attention'"),
    "pool": (lambda m: memswap.HostPool("2MiB", device="cpu"), "budget 2.0 MiB"),
    "frame": (lambda m: memswap.encode(torch.zeros(7, 9)), r"\(7, 9\) torch.float32"),
    "policy": (lambda m: memswap.Policy(), "min_bytes=65536"),
    "windows": (lambda m: memswap.Windows(), "max_pending_bytes"),
}


@pytest.mark.parametrize("name", SHOWN)
def test_repr_says_what_it_is_and_what_it_holds(name):
    make, words = SHOWN[name]
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    shown = repr(make(model))
    assert " object at 0x" not in shown
    assert re.search(words, shown), shown


def test_repr_of_a_removed_manager_says_so():
    manager = memswap.manage(nn.Linear(4, 4))
    manager.remove()
    assert "no modules any more" in repr(manager)
