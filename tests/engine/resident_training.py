"""A training under a budget for a CPU's resident memory: a program, for a process of its own.

What a process has resident depends on all that ran in it before, and malloc keeps what is free.

    python resident_training.py STORAGE ROOM LATER ACTION

trains with storages of STORAGE bytes within what is resident at the start and ROOM bytes more,
takes LATER bytes for itself in the middle, and prints as JSON what was planned and what was
measured. ACTION is what becomes of what moves.
"""

from __future__ import annotations

import ctypes
import json
import sys
import tempfile
from collections.abc import Callable

import torch
from budget_layers import rates_for
from torch import nn

import memswap
from memswap._native import native
from memswap.planning.device import DevicePlan

#: malloc takes what is as long as this from the system, and gives it back at once. By itself it
#: does so from 128 KiB on at first, and later from the longest that was freed on, up to 32 MiB.
MAPPED_BYTES = 1 << 20
M_MMAP_THRESHOLD = -3  # of mallopt(3)


def map_storages() -> None:
    """Let this process give storages of MAPPED_BYTES and more back as it gives long ones back."""
    assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MAPPED_BYTES) == 1


class Cheap(nn.Module):
    """Saves two storages."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1024))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.scale).tanh()


class CheapStack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Cheap() for _ in range(5)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.mean()


def trained(
    nbytes: int,
    room: int,
    group: object = None,
    after: Callable[[], None] = lambda: None,
    later: int = 0,
    action: str = "swap",
) -> dict:
    """What was planned and measured.

    Args:
        nbytes: of a storage: whole rows of 1024 elements.
        room: bytes beyond what is resident now.
        group: ranks that plan together.
        after: is called after each step.
        later: bytes that are resident from the sixth step on, when a plan is followed.
        action: of storages that move.
    """
    device = torch.device("cpu")
    torch.manual_seed(0)
    model = CheapStack()
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.linspace(-2, 2, nbytes // 4).reshape(-1, 1024)
    budget = native.MemoryGauge(device).now + room
    taken = []
    with memswap.manage(
        model,
        memswap.Policy(action, min_bytes=1),
        optimizer=optimizer,
        budget=f"device:{budget}B",
        pool=memswap.DiskPool(tempfile.gettempdir(), budget="1GiB"),
        rates=rates_for(device),
        group=group,
    ) as manager:
        for step in range(12):
            optimizer.zero_grad()
            model(x).backward()
            optimizer.step()
            manager.wait_for_plan()
            after()
            if step == 5:
                taken.append(torch.ones(later, dtype=torch.uint8))
        plan = manager.plan
        assert isinstance(plan, DevicePlan)
        return {
            "budget_bytes": budget,
            "moved_bytes": plan.moved_bytes,
            "measured_bytes": plan.measured_device_bytes,
            "planned_bytes": plan.device_peak_bytes,
            "moves": [one.action.value for one in plan.storages],
            "weights": [parameter.sum().item().hex() for parameter in model.parameters()],
        }


if __name__ == "__main__":
    nbytes, room, later = map(int, sys.argv[1:4])
    if nbytes < 33 << 20:
        map_storages()
    print(json.dumps(trained(nbytes, room, later=later, action=sys.argv[4])))
