"""Lane and Ticket: where transfers run in order, and how others come after them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

from memswap._native import native

if TYPE_CHECKING:
    StorageRef = Any
    Block = Any

#: Longest single copy, bytes. Copies of different lanes interleave on a shared link at this grain
#: (reference: 8 to 32 MiB keeps a link busy without letting one transfer block another for long).
CHUNK_BYTES = 32 << 20

#: Device bytes that departing storages may hold before anything is known about the model.
FIRST_LEAVING_BYTES = 256 << 20

#: Threads of a lane for storages in host memory: one writes while one reads.
WORKER_THREADS = 2


class Ticket(Protocol):
    """The completion of submitted work; see csrc/ticket.h for the contract."""

    def wait(self) -> None:
        """What the caller does next comes after the work. Idempotent."""

    def done(self) -> bool:
        """Whether the host knows that the work has ended."""

    def synchronize(self) -> None:
        """Block until the work has ended."""

    def failed(self) -> bool:
        """Whether the work has ended badly."""

    def storage(self) -> StorageRef | None:
        """The storage of a failed send, as it was."""

    def abandon(self) -> None:
        """Let go of what the ticket owns, in order; nobody will wait."""


class Lane(Protocol):
    """Moves whole storages to blocks of a pool and back; see csrc/lane.h for the contract."""

    def send(self, storage: StorageRef, block: Block) -> Ticket:
        """Copy the storage into the block, after everything submitted so far."""

    def fetch(self, block: Block) -> tuple[StorageRef, Ticket]:
        """A new storage, allocated on the current stream, filled from the block."""

    def settle(self) -> None:
        """Order everything after the sends under way and let go of their storages."""

    def leaving_bytes(self) -> int:
        """Bytes of storages that sends still own."""

    def set_max_leaving_bytes(self, nbytes: int) -> None:
        """Bound :meth:`leaving_bytes`; a send beyond it first waits for the oldest."""


def open_lane(device: torch.device, max_leaving_bytes: int = FIRST_LEAVING_BYTES) -> Lane:
    """A new lane for storages on ``device``: worker threads for the CPU, else two streams."""
    if device.type == "cpu":
        lane: Lane = native.WorkerLane(workers=WORKER_THREADS, max_leaving_bytes=max_leaving_bytes)
    else:
        lane = native.StreamLane(
            device, max_leaving_bytes=max_leaving_bytes, chunk_bytes=CHUNK_BYTES
        )
    return lane
