"""Which lane serves a device, and how it is set up.

Contracts: csrc/lane/lane.h, csrc/work/ticket.h.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from memswap._native import native
from memswap.engine.host_memory import host_share
from memswap.engine.pools import HostPool

if TYPE_CHECKING:
    from memswap._C import CodecLane

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


#: Pinned host memory for bytes between a device and a file: some seconds of a slow disk's work are
#: not worth more, and a drive that keeps up needs less.
STAGING_BYTES = 256 << 20


def open_staged_lane(
    device: torch.device, max_leaving_bytes: int = FIRST_LEAVING_BYTES
) -> native.StagedLane:
    """A new lane between an accelerator and pools that are files, or overflow into one.

    Bytes stand in pinned memory on their way, in `STAGING_BYTES` of it; in pageable memory where
    none can be pinned.
    """
    copies = native.StreamLane(device, max_leaving_bytes=max_leaving_bytes, chunk_bytes=CHUNK_BYTES)
    return native.StagedLane(
        copies,
        native.WorkerLane(workers=WORKER_THREADS),
        HostPool(device=device, pageable=False).native,
        HostPool(device="cpu", numa=None).native,
        device,
        max_staging_bytes=STAGING_BYTES,
    )


#: What of the host memory that pools may take can be set aside for frames that turn out longer. A
#: bfloat16 frame sets 0.3 of its raw bytes aside until the host has seen its header; who swaps
#: needs all of them.
OVERFLOW_SHARE = 1 / 4

#: What such memory is taken in, at least: bytes, from its pool and from the system.
ARENA_CHUNK_BYTES, OVERFLOW_SLAB_BYTES = 4 << 20, 8 << 20

#: Device bytes for the same, where no pinned memory serves, before anything is known about the
#: model; taken only as far as they are needed.
FIRST_ARENA_BYTES = 256 << 20

#: The same as a share of what one forward saves: for a third of a forward being under way.
ARENA_SHARE = 1 / 8


def overflow_pool(device: torch.device) -> HostPool:
    """Pinned memory for what turns out not to fit the frames of an accelerator."""
    budget = int(host_share().pool_bytes * OVERFLOW_SHARE)
    return HostPool(budget, slab=OVERFLOW_SLAB_BYTES, device=device, pageable=False)


#: What a CPU's pools take from the system at a time: bytes.
ORDINARY_SLAB_BYTES = 64 << 20


def ordinary_pool(keeps_pages: bool) -> native.Pool:
    """A pool in a CPU's memory, for frames or for decoded storages of one lane.

    Args:
        keeps_pages: whether the process keeps what blocks have left behind until the pool is
            trimmed.
    """
    return native.make_host_pool(
        torch.device("cpu"),
        host_share().pool_bytes,
        ORDINARY_SLAB_BYTES,
        keeps_pages=keeps_pages,
    )


def open_codec_lane(
    device: torch.device, frames: native.Pool | None = None, outputs: native.Pool | None = None
) -> CodecLane:
    """A new codec lane for storages on ``device``.

    Args:
        device: an accelerator, or the CPU.
        frames: on a CPU, where frames live; None: a pool of the lane's own. On an accelerator,
            pinned memory for what does not fit them; None: the device's own.
        outputs: on a CPU, where decoded storages live; None: the same.
    """
    if device.type != "cpu":
        return native.StreamCodecLane(
            device,
            max_leaving_bytes=FIRST_LEAVING_BYTES,
            arena_budget=FIRST_ARENA_BYTES,
            arena_chunk=ARENA_CHUNK_BYTES,
            arena_pool=frames,
        )
    # No workers: whoever waits does the work, on torch's own threads. They are as many as there are
    # processors, so a worker beside them would only make them wait for each other, and what it has
    # not begun yet would take memory meanwhile.
    #
    # A frame's pages go with it: what has been decoded makes room for gradients, as autograd's own
    # saved tensors do. Decoded storages come one after another in backward, so a few pages serve
    # them all: those stay mapped, and the codec is twice as fast on them as on new ones.
    frames = ordinary_pool(keeps_pages=False) if frames is None else frames
    outputs = ordinary_pool(keeps_pages=True) if outputs is None else outputs
    return native.WorkerCodecLane(workers=0, pool=frames, outputs=outputs)
