"""Buckets: small storages of one group travel together.

[Note: When storages travel together]
A copy costs the host a block, an event, a ticket and a launch, some 10 microseconds together, and
the link another few, whatever its length; at 50 GB/s that is the time of half a megabyte. So
storages of at most `SMALL_BYTES` are gathered, on the stream that computes, into one storage of at
most `BUCKET_BYTES`, and that one is sent. Gathering reads and writes them once in device memory, at
some fiftieth of what the link takes for them, and then they are free, before the link has begun.
Nothing is scattered on the way back: the returned storages are parts of the memory that was
fetched, which therefore lives as long as the last of them. (The threshold follows from these
numbers; it was not measured on a GPU.)

Larger storages gain nothing from it. They would be read and written once more, and the gathered
copy would take memory beside them until it has left.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, cast

from memswap._native import native

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from memswap._C import Block, StorageRef, WeakStorage
    from memswap.engine.entry import Entry
    from memswap.engine.lane import Ticket
    from memswap.engine.transfer import SwapWay

#: Storages of more bytes travel alone.
SMALL_BYTES = 1 << 20

#: Most bytes of a bucket, and so of the copy that it takes beside what it gathers.
BUCKET_BYTES = 32 << 20


class Part(NamedTuple):
    """The away form of a storage that travels with others."""

    bucket: Bucket
    offset: int
    nbytes: int


class Bucket:
    """A block of a pool with the bytes of several storages. Owned by their away forms."""

    stays_on_device = False
    frees_first = True
    short_of = "pool"
    works_ahead = True

    def __init__(self, way: SwapWay, block: Block) -> None:
        self._way = way
        self._block = block
        self._fetched: WeakStorage | None = None
        self._arrival: Ticket | None = None
        self._given: set[int] = set()  # offsets of the parts of what was fetched last

    def bring(self, part: Part) -> tuple[StorageRef, Ticket]:
        """The part's storage. The first that asks has the whole bucket fetched.

        Nobody gets memory that a reader has had before: it may have been written to.
        """
        whole = None if self._fetched is None else self._fetched.lock()
        if whole is None or self._arrival is None or part.offset in self._given:
            whole, self._arrival = self._way.lane.fetch(self._block)
            self._fetched = native.WeakStorage(whole)
            self._given.clear()
        self._given.add(part.offset)
        return native.part(whole, part.offset, part.nbytes), part_ticket(self._arrival, part)


class PartTicket:
    """The ticket of a part: its bucket's, which the other parts wait for as well."""

    def __init__(self, whole: Ticket, part: Part) -> None:
        self._whole = whole
        self._part = part

    def wait(self) -> None:
        self._whole.wait()

    def done(self) -> bool:
        return self._whole.done()

    def synchronize(self) -> None:
        self._whole.synchronize()

    def abandon(self) -> None:
        """Others may still wait; what they hold is let go of with the last of them."""

    def failed(self) -> bool:
        return self._whole.failed()

    def storage(self) -> StorageRef | None:
        whole = self._whole.storage()
        return None if whole is None else native.part(whole, self._part.offset, self._part.nbytes)


def part_ticket(whole: Ticket, part: Part) -> Ticket:
    """A ticket by its methods; native ones cannot be derived from."""
    return cast("Ticket", PartTicket(whole, part))


def packed(entries: Iterable[Entry]) -> list[list[Entry]]:
    """Storages that are small enough, in order, by the bucket that they travel in."""
    buckets: list[list[Entry]] = [[]]
    filled = 0
    for entry in entries:
        if buckets[-1] and filled + entry.nbytes > BUCKET_BYTES:
            buckets.append([])
            filled = 0
        buckets[-1].append(entry)
        filled += entry.nbytes
    return buckets


def send_together(
    way: SwapWay, storages: Sequence[StorageRef]
) -> tuple[Bucket, list[tuple[Part, Ticket]]] | None:
    """Start sending storages as one. None: the pool has no room, and nothing was started."""
    gathered, offsets = way.lane.gather(storages)
    sent = way.send(gathered, None)
    if sent is None:
        return None
    block, departure = sent
    bucket = Bucket(way, block)
    parts = [
        Part(bucket, offset, storage.nbytes)
        for offset, storage in zip(offsets, storages, strict=True)
    ]
    return bucket, [(part, part_ticket(departure, part)) for part in parts]
