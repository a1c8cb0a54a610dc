"""Pools of a training on the simulator: pinned memory, a file, and pinned memory before a file."""

from __future__ import annotations

from typing import Any

import pytest
from race_workloads import DEVICE, new_pool

import memswap
from memswap.engine import lane as lanes

#: Where bytes go, by name.
WHERE = ("host", "disk", "overflow")


def pool_at(where: str, folder: Any) -> Any:
    """A pool of one of `WHERE`; the pinned memory before a file is soon full."""
    if where == "host":
        return new_pool()
    disk = memswap.DiskPool(folder, budget="64MiB", extent="1MiB")
    if where == "disk":
        return disk
    return memswap.HostPool(budget="16KiB", slab="16KiB", device=DEVICE, overflow=disk)


def little_staging(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pinned memory on the way to a file comes in small slabs, and is full after some."""

    def host_pool(*, device: Any, **options: Any) -> memswap.HostPool:
        return memswap.HostPool(budget="64MiB", slab="64KiB", device=device, **options)

    monkeypatch.setattr(lanes, "STAGING_BYTES", 64 << 10)
    monkeypatch.setattr(lanes, "HostPool", host_pool)


def finish_writes(pool: Any) -> None:
    """Wait for what is still written to a file."""
    for lane in pool.lanes.values():
        if hasattr(lane, "finish_writes"):
            lane.finish_writes()
