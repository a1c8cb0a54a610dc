"""Sharing: what copies take from compute where the same processors do both.

On a CPU threads write and read the pool's file. While they do, what computes has fewer cores and
less of the memory's bandwidth: a copy that nobody waits for is not free.
"""

from __future__ import annotations

import time
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from memswap._native import native
from memswap.engine.lane import open_lane
from memswap.engine.pools import DiskPool

if TYPE_CHECKING:
    from collections.abc import Iterable

    from memswap.planning.rates import Rates

#: Bytes of one copy beside compute: some milliseconds.
SHARED_BYTES = 8 << 20

#: Side of the float32 matrices that are multiplied meanwhile: three of them fit into most caches.
SIDE = 384

#: Products are done for so many times as long as the copies take alone, so that the copies end
#: beside them, slower as they are there.
LONGER = 2

ROUNDS = 5


def measure_copy_share(folder: Path | None = None) -> float:
    """Seconds of compute that each second of copying to and from a DiskPool takes, 1 at most.

    Matrix products on all of torch's threads are timed alone and beside copies, in turns.
    """
    lane = open_lane(torch.device("cpu"))
    block = DiskPool(folder, budget=4 * SHARED_BYTES).native.allocate(SHARED_BYTES)
    if block is None:
        return 0.0  # nothing can be swapped here
    tensor = torch.ones(SHARED_BYTES, dtype=torch.uint8)
    left, right, out = (torch.ones(SIDE, SIDE) for _ in range(3))

    def copy() -> None:
        lane.send(native.StorageRef(tensor), block).synchronize()
        lane.fetch(block)[1].synchronize()

    def compute(times: int) -> float:
        began = time.perf_counter()
        for _ in range(times):
            torch.mm(left, right, out=out)
        return time.perf_counter() - began

    copy()
    compute(1)
    began = time.perf_counter()
    copy()
    copy_s = time.perf_counter() - began
    times = ceil(LONGER * copy_s / min(compute(1) for _ in range(ROUNDS)))
    alone_s, beside_s = [], []
    for _ in range(ROUNDS):
        alone_s.append(compute(times))
        lane.send(native.StorageRef(tensor), block)
        _, back = lane.fetch(block)  # behind the send
        beside_s.append(compute(times))
        back.synchronize()
    # The least of each: whatever else the machine does only adds to it.
    return min(max((min(beside_s) - min(alone_s)) / copy_s, 0.0), 1.0)


def taken_s(sizes: Iterable[int], rates: Rates, measured_s: float) -> float:
    """Of compute that was measured beside copies, the seconds that these took.

    Args:
        sizes: bytes of each storage that went and came back.
        measured_s: how long compute took. A share s of copying is at most s / (1 + s) of that:
            copies take no more than while they run.
    """
    if not rates.copy_share:
        return 0.0
    asked_s = sum(rates.send_takes_s(nbytes) + rates.fetch_takes_s(nbytes) for nbytes in sizes)
    return min(asked_s, measured_s * rates.copy_share / (1 + rates.copy_share))
