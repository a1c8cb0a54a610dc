"""Generations: saved storages that leave and return when they are told to.

A group engine differs from its base in one point: a storage that would leave is held instead, and
its entry joins the generation that is being collected. From then on the owner of the generation
says when it leaves and when it returns.

[Note: Groups hold nothing]
Autograd's handles own entries and generations; a generation refers to its entries weakly. A graph
that is consumed or dropped takes everything with it, whatever state its generation is in. Letting
go of a storage means dropping the group's reference: nothing is resized, so a storage that a
parameter, a layer's output, another group or the user still holds stays as it is, and its load
costs nothing.

[Note: When storages travel together]
A copy costs the host a block, an event, a ticket and a launch, some 10 microseconds together, and
the link another few, whatever its length; at 50 GB/s that is the time of half a megabyte. So
storages of at most `SMALL_BYTES` are gathered, on the stream that computes, into one storage of at
most `BUCKET_BYTES`, and that one is sent (csrc/engine/bucket.h). Gathering reads and writes them
once in device memory, at some fiftieth of what the link takes for them, and then they are free,
before the link has begun. Nothing is scattered on the way back: the returned storages are parts of
the memory that was fetched, which therefore lives as long as the last of them. (The threshold
follows from these numbers; it was not measured on a GPU.)

Larger storages gain nothing from it. They would be read and written once more, and the gathered
copy would take memory beside them until it has left.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

import torch

from memswap._native import native
from memswap.engine.action import Action
from memswap.engine.autograd import graph_task
from memswap.engine.engine import Engine
from memswap.engine.entry import RESIZED, Entry, State
from memswap.engine.hook_scope import HookScope
from memswap.errors import GroupError, TransferError

if TYPE_CHECKING:
    from memswap._C import EntryReference, Iteration, LeaveOrder, SavedView, StorageRef
    from memswap.engine.action import Decider
    from memswap.engine.engine import Place
    from memswap.engine.handle import Handle
    from memswap.engine.transfer import Pool, Route


#: Storages of more bytes travel alone.
SMALL_BYTES = 1 << 20

#: Most bytes of a bucket, and so of the copy that it takes beside what it gathers.
BUCKET_BYTES = 32 << 20


class GroupEngine(Engine):
    """Entries, lanes and a pool for any number of groups. A storage of two groups moves once."""

    def __init__(self, policy: Decider, pool: Pool | None) -> None:
        super().__init__(policy, pool, window_bytes=0)
        self.shares_batches = True
        self._generation: Generation | None = None  # that saves now

    def begin_iteration(self) -> None:
        """A generation is an iteration, and its group begins it."""

    def save(self, tensor: torch.Tensor, view: SavedView, scope: native.HookScope) -> Handle:
        assert isinstance(scope, GroupScope)
        self._generation = scope.generation
        self.iteration = scope.generation.iteration
        try:
            return super().save(tensor, view, scope)
        finally:
            self._generation = None  # it owns this engine

    def join(self, entry: Entry, view: SavedView) -> Handle:
        """Its handle belongs to the generation that saves now, and owns it."""
        generation = self._generation
        assert generation is not None  # save() has set it
        generation.join(entry)
        return native.moved_handle(entry, view, generation)

    def depart(
        self,
        entry: Entry,
        storage: StorageRef,
        route: Route,
        action: Action,
        place: Place,
        dtype: torch.dtype,
    ) -> str | None:
        route.meet_stream(action)
        entry.storage = storage
        entry.order = native.LeaveOrder(action.value, place.unit, place.ordinal, dtype)
        return None

    def notice_demand(self, entry: Entry, generation: Generation) -> None:
        """A save of this generation is about to be demanded."""
        with self.lock:
            missing = entry.storage is None and entry.identity.expired()
            generation.notice_demand(entry)
            if missing and entry.storage is not None:
                self.ledger.stalls += 1  # it was asked for only now, together with others

    def send(self, entries: Iterable[Entry]) -> None:
        """Send entries that were not told to leave before. The lock is held."""
        together: dict[Route, list[Entry]] = {}
        alone: list[tuple[Entry, Route, LeaveOrder]] = []
        nbytes: dict[Route, int] = {}
        for entry in entries:
            order, entry.order = entry.order, None
            if order is None or entry.storage is None:
                continue
            if entry.lost_memory:
                self.ledger.keep(RESIZED, entry.nbytes)
                continue
            route = self.route(entry.device)
            assert route is not None  # or it would have stayed
            nbytes[route] = nbytes.get(route, 0) + entry.nbytes
            if order.action == Action.SWAP.value and entry.nbytes <= SMALL_BYTES:
                together.setdefault(route, []).append(entry)
            else:
                alone.append((entry, route, order))
        for route in nbytes:
            # How much may be on its way at once is the caller's affair: no send waits for another.
            route.begin_iteration(0, nbytes[route])
        for route, small in together.items():
            for bucket in packed(small):
                if len(bucket) == 1 or not self._send_bucket(route, bucket):
                    for entry in bucket:
                        self._send_alone(entry, route, Action.SWAP, None)
        for entry, route, order in alone:
            self._send_alone(entry, route, Action(order.action), order)

    def _send_bucket(self, route: Route, entries: list[Entry]) -> bool:
        storages = [entry.storage for entry in entries if entry.storage is not None]
        parts = route.swap.send_together(storages)
        storages.clear()  # or they would not be gone yet when they are looked at
        if parts is None:
            return False
        for entry, (part, departure) in zip(entries, parts, strict=True):
            entry.leave(part, departure)
            entry.storage = None  # its ticket holds it now
            self.departing.add(entry)
        return True

    def _send_alone(
        self, entry: Entry, route: Route, action: Action, order: LeaveOrder | None
    ) -> None:
        storage = entry.storage
        assert storage is not None  # send() has looked
        if order is None:
            refused = self._swap(entry, storage, route)
        else:
            refused = super().depart(entry, storage, route, action, order, order.dtype)
        if refused is None:
            entry.storage = None  # its ticket holds it now
        else:
            self.ledger.keep(refused, entry.nbytes)  # and goes on holding its storage


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


class Phase(enum.Enum):
    """What a generation was told last."""

    COLLECTED = "collected"
    OFFLOADING = "offloading"
    OFFLOADED = "offloaded"
    LOADING = "loading"
    LOADED = "loaded"


class Generation:
    """What one block of a group saved, and the four calls that move it.

    Any order of calls is legal in which nothing is waited for that was not launched and nothing is
    loaded that was not offloaded; each call may be repeated. Loading may follow at once, before the
    offload was waited for: what has not gone away yet then stays. After a load everything may be
    offloaded again, which copies nothing. Calls order the calling thread's current stream and
    are ordered behind it.
    """

    def __init__(self, name: str, engine: GroupEngine, iteration: Iteration) -> None:
        self.name = name
        self.phase = Phase.COLLECTED
        self.iteration = iteration
        #: Called, under the engine's lock, when a backward pass first demands one of its storages.
        self.on_demand: Callable[[Generation], None] | None = None
        self.engine = engine
        self._entries: dict[EntryReference, None] = {}
        self._read_by: int | None = None  # the backward pass that demanded last
        self._closed = False

    def __repr__(self) -> str:
        return f"<generation of group {self.name!r}, {self.phase.value}>"

    @property
    def alive(self) -> bool:
        """Whether any of its saved tensors may still be demanded."""
        return any(reference() is not None for reference in self._entries)

    @property
    def launched(self) -> bool:
        """Whether :meth:`launch_offload` was called."""
        return self.phase is not Phase.COLLECTED

    @property
    def nbytes(self) -> int:
        """Bytes of the storages that it can move."""
        return sum(entry.nbytes for entry in self._living())

    def launch_offload(self) -> None:
        """Start sending the storages away. The forward may still use them."""
        engine = self.engine
        with engine.lock:
            self._check_open("launch_offload")
            if self.phase in (Phase.LOADING, Phase.LOADED):
                for entry in self._living():
                    entry.let_go()
                self.phase = Phase.COLLECTED
            engine.send(list(self._living()))
            if self.phase is Phase.COLLECTED:
                self.phase = Phase.OFFLOADING
            self._read_by = None

    def wait_offload(self) -> None:
        """What follows comes after the send, and the memory of what was sent is free for it.

        Raises:
            GroupError: :meth:`launch_offload` was not called.
        """
        engine = self.engine
        self._check_open("wait_offload")
        if self.phase is Phase.COLLECTED:
            self._refuse("wait_offload", "nothing was launched", "launch_offload() first")
        for entry in self._living():
            departure = entry.departure
            if departure is None or entry.state is not State.LEAVING:
                continue
            with suppress(native.TransferError):
                departure.wait()
            with engine.lock:
                if not entry.gone(wait=True) and entry.is_away:
                    entry.sent()  # if it failed: takes the storage back and tells about it once
        if self.phase is Phase.OFFLOADING:
            self.phase = Phase.OFFLOADED

    def launch_load(self, readings: int = 1) -> None:
        """Start bringing the storages back, each into memory of the calling thread's stream.

        Once a backward pass has read some and let go of them, they may be loaded again for another.

        Args:
            readings: how many backward passes will read them before they are let go of again: 2
                where gradients of inputs and of weights are computed apart.

        Raises:
            GroupError: :meth:`launch_offload` was not called.
        """
        with self.engine.lock:
            self._check_open("launch_load")
            if self.phase is Phase.COLLECTED:
                self._refuse("launch_load", "nothing was offloaded", "launch_offload() first")
            if self.phase in (Phase.LOADING, Phase.LOADED) and self._read_by is None:
                return
            self.phase = Phase.LOADING
            for entry in self._living():
                if entry.away is None or entry.storage is not None:
                    continue  # it stayed, or was demanded meanwhile
                if not entry.retain():
                    if not entry.gone(wait=True):
                        continue  # it could not be sent, and was given back
                    try:
                        entry.fetch()
                    except torch.OutOfMemoryError:
                        return  # whatever is missing is asked for again when it is demanded
                    assert entry.arrival is not None
                    if not entry.away.works_ahead:
                        with suppress(native.TransferError):  # nobody else would do the work
                            entry.arrival.wait()
                entry.unseen += entry.handles * (readings - 1)

    def wait_load(self) -> None:
        """What follows on this stream may use the storages.

        Raises:
            GroupError: :meth:`launch_load` was not called.
            TransferError: the pool cannot give bytes back.
        """
        self._check_open("wait_load")
        if self.phase not in (Phase.LOADING, Phase.LOADED):
            self._refuse("wait_load", "no load was launched", "launch_load() first")
        for entry in self._living():
            arrival = entry.arrival
            if arrival is None or entry.storage is None:
                continue
            try:
                arrival.wait()
            except native.TransferError as error:
                raise TransferError(
                    f"group {self.name!r}: a saved tensor cannot be brought back: {error}"
                ) from error
        self.phase = Phase.LOADED

    def close(self) -> None:
        """Nobody may call it any more. What is away still returns when backward demands it."""
        self._closed = True

    def join(self, entry: Entry) -> None:
        """An entry was saved by the block of this generation. The lock is held."""
        self._entries[entry.reference] = None

    def notice_demand(self, entry: Entry) -> None:
        """Backward demands an entry. The lock is held."""
        task = graph_task()
        if task == self._read_by:
            return
        self._read_by = task
        if entry.state is State.AWAY and entry.fetched:
            self.phase = Phase.OFFLOADED  # every save has seen it: it has been let go of
        if self.on_demand is not None:
            self.on_demand(self)

    def _living(self) -> Iterator[Entry]:
        for reference in list(self._entries):
            entry = reference()
            if entry is not None:
                yield entry

    def _check_open(self, call: str) -> None:
        if self._closed:
            self._refuse(call, "the group was closed", "a new Group")

    def _refuse(self, call: str, found: str, expected: str) -> None:
        raise GroupError(
            f"group {self.name!r}: {call}() is not possible now: {found}; call {expected}. "
            f"(The generation is {self.phase.value}.)"
        )


class GroupScope(HookScope):
    """The hooks of one block of a group."""

    __slots__ = ("generation",)

    def __init__(
        self,
        engine: GroupEngine,
        generation: Generation,
        unit: str | None = None,
        action: Action | None = None,
        group: int | None = None,
    ) -> None:
        super().__init__(engine, generation.name if unit is None else unit, action, group)
        self.generation = generation

    def within(self, unit: str, action: Action | None, group: int | None) -> GroupScope:
        return GroupScope(self.generation.engine, self.generation, unit, action, group)
