"""Ways to break the machine on purpose, so that tests of ordering can be proven able to fail.

Nothing in the product knows of them: each is a context manager that makes the simulated driver
ignore or falsify one kind of call. What they yield counts how often they changed something, for a
mutation that never struck proves nothing:

    with mutations.drop_waits(source=lane_stream) as mutation:
        ...
    assert mutation.hits > 0

`laboratory` removes all of them at its end, also after an exception.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from . import _C

#: A stream: a torch.Stream, a stream id on device 0, or a (device index, stream id) pair.
#: The default stream of a device has the id 0.
StreamLike = Any


class Mutation:
    """A mutation in force."""

    def __init__(self, identifier: int) -> None:
        self._identifier: int | None = identifier
        self._hits = 0

    @property
    def hits(self) -> int:
        """How many calls it has changed so far."""
        if self._identifier is not None:
            self._hits = max(self._hits, _C.mutation_hits(self._identifier))
        return self._hits

    def _remove(self) -> None:
        if self._identifier is not None:
            self._hits = self.hits
            _C.remove_mutation(self._identifier)
            self._identifier = None


def _pair(stream: StreamLike) -> tuple[int, int]:
    if isinstance(stream, torch.Stream):
        return stream.device_index, stream.stream_id
    if isinstance(stream, int):
        return 0, stream
    device, index = stream
    return int(device), int(index)


def _pairs(streams: StreamLike | Iterable[StreamLike] | None) -> list[tuple[int, int]] | None:
    """None stands for every stream. A tuple is one (device, id) pair; lists and sets are many."""
    if streams is None:
        return None
    if isinstance(streams, (list, set, frozenset)):
        return [_pair(stream) for stream in streams]
    return [_pair(streams)]


@contextlib.contextmanager
def _in_force(identifier: int) -> Iterator[Mutation]:
    mutation = Mutation(identifier)
    try:
        yield mutation
    finally:
        mutation._remove()


def drop_waits(
    waiter: StreamLike | Iterable[StreamLike] | None = None,
    source: StreamLike | Iterable[StreamLike] | None = None,
) -> contextlib.AbstractContextManager[Mutation]:
    """Stream-waits-for-event calls are ignored: by the scheduler and by the vector clocks.

    Only those whose waiting stream is in `waiter` and whose event was recorded on a stream in
    `source`; None matches every stream. Waits of a stream for itself are never counted.
    """
    return _in_force(_C.mutate_drop_waits(_pairs(waiter), _pairs(source)))


def drop_synchronizes(
    source: StreamLike | Iterable[StreamLike] | None = None,
) -> contextlib.AbstractContextManager[Mutation]:
    """Host waits for an event or a stream return at once, without ordering anything.

    `source`: the stream synchronised, or on which the event was recorded. Blocking copies and
    item() are host waits as well. Device-wide synchronisation still works.
    """
    return _in_force(_C.mutate_drop_synchronizes(_pairs(source)))


def lying_queries(
    source: StreamLike | Iterable[StreamLike] | None = None,
) -> contextlib.AbstractContextManager[Mutation]:
    """Event and stream queries answer True at once, without ordering anything.

    `source`: the stream that is asked about, or on which the event was recorded.
    """
    return _in_force(_C.mutate_lying_queries(_pairs(source)))


def allocate_on(
    stream: StreamLike, when: StreamLike | Iterable[StreamLike] | None = None
) -> contextlib.AbstractContextManager[Mutation]:
    """Device memory allocated while the current stream is in `when` belongs to `stream` instead.

    So it comes out of that stream's pool, and its free is ordered by that stream only. `when`
    defaults to every stream.
    """
    return _in_force(_C.mutate_allocate_on(_pair(stream), _pairs(when)))


def drop_record_stream() -> contextlib.AbstractContextManager[Mutation]:
    """record_stream is ignored, for device and for pinned memory: frees do not wait for users.

    Includes what a non-blocking copy records for its pinned end.
    """
    return _in_force(_C.mutate_drop_record_stream())
