"""Entry: one storage that autograd saved, and where its bytes are."""

from __future__ import annotations

import enum
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol
from weakref import ref

from memswap._native import native
from memswap.engine.buckets import Bucket
from memswap.errors import EntryStateError

if TYPE_CHECKING:
    from memswap._C import SavedView, StorageRef
    from memswap.engine.group import Order
    from memswap.engine.lane import Ticket
    from memswap.engine.stats import Ledger
    from memswap.engine.timeline import Passage
    from memswap.engine.transfer import Away, WayBack


class State(enum.Enum):
    """Where an entry's bytes are."""

    RESIDENT = "resident"
    LEAVING = "leaving"
    AWAY = "away"
    RETURNING = "returning"

    __hash__ = object.__hash__  # members are singletons; Enum's own hash is ten times slower


LEGAL = frozenset(
    {
        (State.RESIDENT, State.LEAVING),  # sent
        (State.LEAVING, State.AWAY),  # the storage is gone
        (State.LEAVING, State.RESIDENT),  # demanded while somebody still held the storage
        (State.AWAY, State.RETURNING),  # fetched
        (State.RETURNING, State.RESIDENT),  # demanded
        (State.RESIDENT, State.AWAY),  # every save has seen it and the away form is still there
        (State.AWAY, State.RESIDENT),  # demanded again while a consumer still holds the storage
    }
)


class Owner(Protocol):
    """What entries and handles need of the saver that they belong to."""

    ledger: Ledger

    def demand(self, entry: Entry) -> StorageRef:
        """The storage of an entry, ordered before what the caller does next."""

    def demand_kept(self, entry: Entry) -> None:
        """A storage that stayed is demanded."""

    def forget_identity(self, entry: Entry) -> None:
        """The storage that the entry was known by is gone."""


class Remains:
    """What an entry leaves behind when it dies: bytes on the books, and tickets.

    An object of its own, because a finalizer runs while weak references to its object still work:
    another thread could take hold of an entry whose finalizer has begun. Nobody but its entry
    refers to this one.
    """

    __slots__ = (
        "arrival",
        "away_bytes",
        "departure",
        "frame_bytes",
        "ledger",
        "nbytes",
        "resident",
    )

    def __init__(self, ledger: Ledger, nbytes: int) -> None:
        self.ledger = ledger
        self.nbytes = nbytes
        self.resident = False
        self.frame_bytes = 0  # of an away form on the device
        self.away_bytes = 0  # of an away form elsewhere
        self.departure: Ticket | None = None
        self.arrival: Ticket | None = None

    def __del__(self) -> None:
        resident = self.nbytes if self.resident else 0
        self.ledger.retire(resident + self.frame_bytes, self.away_bytes)
        for ticket in (self.departure, self.arrival):
            if ticket is not None:
                ticket.abandon()

    def count_resident(self, resident: bool) -> None:
        if self.resident is not resident:
            self.resident = resident
            self.ledger.resident(self.nbytes if resident else -self.nbytes)

    def count_away(self, nbytes: int) -> None:
        """The away form takes so many bytes that are not the device's."""
        self.ledger.away(nbytes - self.away_bytes)
        self.away_bytes = nbytes

    def count_frame(self, nbytes: int) -> None:
        """The away form takes so many bytes of the device."""
        self.ledger.resident(nbytes - self.frame_bytes)
        self.frame_bytes = nbytes


class Stay:
    """One storage that stays for good: known, so that it is counted once.

    Owned by its handles, which also hold the storage; so its address names nothing else meanwhile.
    While its finalizer runs another thread may still take hold of it, and would then share a stay
    whose bytes are off the books: a number that is too low for a while, nothing more.
    """

    __slots__ = ("__weakref__", "ledger", "nbytes", "version")

    # What entries have: it never goes away.
    away = None
    fetched = False
    passage = None

    def __init__(self, ledger: Ledger, nbytes: int, version: int) -> None:
        self.ledger = ledger
        self.nbytes = nbytes
        self.version = version
        ledger.resident(nbytes)

    def __del__(self) -> None:
        self.ledger.retire(self.nbytes, 0)


class Entry:
    """One saved storage that may leave, however many views and operators saved it.

    Owned by its handles: when the last one dies, so do the entry, its away form and its storage,
    whatever happened to the graph. Everything else refers to it weakly. Calls are serialised by the
    saver's lock.
    """

    __slots__ = (
        "__weakref__",
        "away",
        "fetched",
        "handles",
        "identity",
        "index",
        "keeps",
        "nbytes",
        "order",
        "passage",
        "reference",
        "remains",
        "saver",
        "state",
        "storage",
        "unseen",
        "version",
        "way",
    )

    def __init__(self, saver: Owner, view: SavedView, storage: StorageRef) -> None:
        self.saver = saver
        self.reference = ref(self)
        self.nbytes: int = view.storage_nbytes
        self.version: int = view.version
        self.identity = native.WeakStorage(storage)
        self.state = State.RESIDENT
        self.storage: StorageRef | None = None  # only what was brought back is held
        self.fetched = False  # whether `identity` is a storage that memswap made
        self.away: Away | None = None
        self.way: WayBack | None = None
        self.handles = 0  # saves whose storage left
        self.keeps = 0  # saves whose tensor stayed
        self.unseen = 0
        self.passage: Passage[Entry] | None = None
        self.index = -1
        self.order: Order | None = None  # how it will leave, where a group says when
        self.remains = Remains(saver.ledger, self.nbytes)
        self.remains.count_resident(True)

    def __repr__(self) -> str:
        return f"<entry of {self.nbytes} bytes, {self.state.value}, {self.handles} save(s)>"

    def move(self, state: State) -> None:
        """Change the state, or say who tried what."""
        if (self.state, state) not in LEGAL:
            raise EntryStateError(
                f"{self!r} cannot go from {self.state.value} to {state.value}; this is a bug in "
                "memswap, please report it with this traceback"
            )
        self.state = state

    def leave(self, way: WayBack, away: Away, departure: Ticket) -> None:
        """The storage is being sent this way. The ticket holds the storage from here on."""
        self.remains.departure = departure
        self.move(State.LEAVING)
        self.way, self.away = way, away
        self.count_held()
        ledger = self.saver.ledger
        ledger.moved_storages += 1
        ledger.moved_bytes += self.nbytes

    def count_held(self) -> None:
        """Account for what the away form takes up now.

        Until the encoder has reported, that includes what is set aside for a frame's overflow.
        """
        away, way, remains = self.away, self.way, self.remains
        if away is None or way is None:
            return
        overflow = away.overflow_nbytes if isinstance(away, native.EncodedStorage) else 0
        if way.stays_on_device:
            remains.count_frame(away.nbytes + overflow)
        else:
            remains.count_away(away.nbytes)
            if overflow or remains.frame_bytes:
                remains.count_frame(overflow)

    def sent(self) -> bool:
        """Whether the send has ended. One that failed gives the storage back: nothing is lost."""
        departure = self.remains.departure
        if departure is None or not departure.done():
            return False
        if departure.failed():
            self.stay(departure)
        return True

    def stay(self, departure: Ticket) -> None:
        self.move(State.RESIDENT)
        self.storage = departure.storage()
        assert self.way is not None  # or nothing could have been sent
        ledger = self.saver.ledger
        ledger.keep(self.way.short_of, self.nbytes)
        self.away = None
        self.remains.count_away(0)
        self.remains.count_frame(0)
        try:
            departure.synchronize()
        except native.TransferError as error:
            ledger.tell_once("transfer", f"a storage stays where it is: {error}")

    def held_by_handles_only(self) -> bool:
        """Whether nobody but our own handles holds a storage that stayed.

        Meant for its first demand, when all of them are still alive.
        """
        storage = self.identity.lock()
        return storage is not None and storage.use_count - 1 <= self.keeps

    def gone(self, wait: bool = False) -> bool:
        """Notice whether a leaving storage really went away.

        What was gathered into a bucket is gone before its bytes are anywhere else for sure; `wait`
        for that, instead of saying no. If they could not be sent, the bucket gives them back.
        """
        if self.state is not State.LEAVING or not self.identity.expired():
            return self.state is State.AWAY
        if isinstance(self.way, Bucket) and not self._sent_safely(wait):
            return False
        self.move(State.AWAY)
        self.remains.count_resident(False)
        self.saver.ledger.freed_bytes += self.nbytes
        return True

    def _sent_safely(self, wait: bool) -> bool:
        departure = self.remains.departure
        assert departure is not None  # or it would not be leaving
        if wait:
            with suppress(native.TransferError):
                departure.wait()
                return True
        return self.sent() and self.state is State.LEAVING

    def _given_back(self) -> StorageRef:
        """The storage of a send that failed."""
        assert self.storage is not None
        return self.storage

    def fetch(self) -> StorageRef:
        """Start bringing the bytes back into a storage of our own."""
        assert self.way is not None  # or it could not be away
        storage, self.remains.arrival = self.way.bring(self.away)  # may be out of memory
        self.move(State.RETURNING)
        self.saver.forget_identity(self)
        self.storage, self.identity = storage, native.WeakStorage(storage)
        self.fetched = True
        self.unseen = self.handles
        self.remains.count_resident(True)
        self.saver.ledger.returned_storages += 1
        self.saver.ledger.returned_bytes += self.nbytes
        return storage

    @property
    def is_away(self) -> bool:
        """Whether the storage has left, or is leaving, as far as its owner is concerned."""
        return self.away is not None and self.storage is None

    def retain(self) -> bool:
        """Hold on to a storage that has not gone away yet: then nothing has to come back.

        Whether there was one.
        """
        storage = self.storage
        if storage is None:
            storage = self.identity.lock()
            if storage is None:
                return False
            self.storage = storage
            self.unseen = self.handles
            self.remains.count_resident(True)
        if self.state in (State.LEAVING, State.AWAY):
            self.move(State.RESIDENT)
        return True

    def let_go(self) -> None:
        """Let go of a storage again whose away form is still there. Nothing is copied."""
        if self.storage is None or self.away is None:
            return
        if self.state is State.RETURNING:
            self.move(State.RESIDENT)
        self.storage = None
        self.move(State.AWAY)
        self.remains.count_resident(False)

    def bring(self) -> tuple[StorageRef, bool]:
        """The storage, and whether it had to be fetched only now.

        The caller waits for ``remains.arrival`` before it reads, on the stream on which it reads.
        """
        late = False
        sent = self.state is State.LEAVING and self.sent()
        storage = self.storage
        if storage is None:
            storage = self.identity.lock()
            if storage is None:
                late = self.gone(wait=True)
                storage = self.fetch() if late else self._given_back()
            else:
                self.storage = storage
                self.unseen = self.handles
                self.remains.count_resident(True)
                if sent and self.passage is not None:
                    self.passage.held.add(self.index)  # leaving freed nothing
        if self.state is not State.RESIDENT:
            self.move(State.RESIDENT)
        self.unseen -= 1
        if self.unseen <= 0 and self.away is not None:
            # Every save has seen the bytes: whoever uses them holds them; the away form stays.
            self.storage = None
            self.move(State.AWAY)
            self.remains.count_resident(False)
        return storage, late
