"""Sharing: what copies take from compute where the same processors do both.

On a CPU threads write and read the pool's file. While they do, what computes has fewer cores and
less of the memory's bandwidth: a copy that nobody waits for is not free.
"""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import torch

from memswap._native import native
from memswap.engine.lane import open_lane
from memswap.engine.pools import DiskPool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from memswap.engine.lane import Ticket
    from memswap.planning.rates import Rates

#: Bytes of one copy beside compute: some milliseconds.
SHARED_BYTES = 8 << 20

#: Side of the float32 matrices that are multiplied meanwhile: three of them fit into most caches.
SIDE = 384

#: Copies that are looked at, and products in a row that are timed before each of them.
ROUNDS, PRODUCTS = 8, 10


def measure_copy_share(folder: Path | None = None) -> float:
    """Seconds of compute that each second of copying to and from a DiskPool takes, 1 at most.

    Matrix products on all of torch's threads are timed one by one, alone and beside copies, in
    turns: of many short times the median says little of what else the machine does.
    """
    lane = open_lane(torch.device("cpu"))
    block = DiskPool(folder, budget=4 * SHARED_BYTES).native.allocate(SHARED_BYTES)
    if block is None:
        return 0.0  # nothing can be swapped here
    tensor = torch.ones(SHARED_BYTES, dtype=torch.uint8)
    left, right, out = (torch.ones(SIDE, SIDE) for _ in range(3))

    def start() -> Ticket:
        """There, and back behind it."""
        lane.send(native.StorageRef(tensor), block)
        back: Ticket = lane.fetch(block)[1]
        return back

    def seconds(work: Callable[[], object]) -> float:
        began = time.perf_counter()
        work()
        return time.perf_counter() - began

    def product() -> None:
        torch.mm(left, right, out=out)

    start().synchronize()
    for _ in range(PRODUCTS):  # threads and memory are there from here on
        product()
    idle, alone, beside, copies = [], [], [], []
    for _ in range(ROUNDS):
        idle.append(seconds(lambda: start().synchronize()))
        alone += [seconds(product) for _ in range(PRODUCTS)]
        began = time.perf_counter()
        copied = start()
        while not copied.done():
            beside.append(seconds(product))
        copies.append(time.perf_counter() - began)
    if not beside:
        return 0.0  # copies are over before a product is
    lost = max(1 - median(alone) / median(beside), 0.0)  # of each second beside copies
    return min(lost * median(copies) / median(idle), 1.0)


def taken_s(sizes: Iterable[int], rates: Rates, measured_s: float) -> float:
    """Of compute that was measured beside copies, the seconds that these took.

    Args:
        sizes: bytes of each storage that went and came back.
        rates: of the machine.
        measured_s: how long compute took. A share s of copying is at most s / (1 + s) of that:
            copies take no more than while they run.
    """
    if not rates.copy_share:
        return 0.0
    asked_s = sum(rates.send_takes_s(nbytes) + rates.fetch_takes_s(nbytes) for nbytes in sizes)
    return min(asked_s, measured_s * rates.copy_share / (1 + rates.copy_share))
