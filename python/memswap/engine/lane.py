"""Which lane serves a device, and how it is set up. Contracts: csrc/lane.h, csrc/ticket.h."""

from __future__ import annotations

import torch

from memswap._native import native

Lane = native.Lane
Ticket = native.Ticket

#: Longest single copy, bytes. Copies of different lanes interleave on a shared link at this grain
#: (8 to 32 MiB keeps a link busy without letting one transfer block another for long).
CHUNK_BYTES = 32 << 20

#: Device bytes that departing storages may hold before anything is known about the model.
FIRST_LEAVING_BYTES = 256 << 20

#: Threads of a lane for storages in host memory: one writes while one reads.
WORKER_THREADS = 2


def open_lane(device: torch.device, max_leaving_bytes: int = FIRST_LEAVING_BYTES) -> Lane:
    """A new lane for storages on ``device``: worker threads for the CPU, else two streams."""
    if device.type == "cpu":
        return native.WorkerLane(workers=WORKER_THREADS, max_leaving_bytes=max_leaving_bytes)
    return native.StreamLane(device, max_leaving_bytes=max_leaving_bytes, chunk_bytes=CHUNK_BYTES)
