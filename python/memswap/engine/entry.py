"""Entry: one storage that autograd saved, and where its bytes are."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple, NoReturn, Protocol

from memswap._native import native
from memswap.errors import EntryStateError

if TYPE_CHECKING:
    import torch

    from memswap._C import StorageRef
    from memswap.engine.action import Action
    from memswap.engine.lane import Ticket
    from memswap.engine.stats import Ledger
    from memswap.engine.timeline import Passage
    from memswap.engine.transfer import Away, Route, WayBack

#: Where an entry's bytes are. Which steps are legal: csrc/books/residence.h.
State = native.State

#: Why a storage stays that has lost its memory before it was sent.
RESIZED = "resized"

#: A storage that stays for good.
Stay = native.Stay


class Owner(Protocol):
    """What entries and handles need of the saver that they belong to."""

    ledger: Ledger

    def demand(self, entry: Entry) -> StorageRef:
        """The storage of an entry, ordered before what the caller does next."""

    def demand_kept(self, entry: Entry) -> None:
        """A storage that stayed is demanded."""


class Order(NamedTuple):
    """How an entry will leave, once it is told to."""

    route: Route
    action: Action
    unit: str
    ordinal: int
    dtype: torch.dtype


class Entry(native.Entry):
    """One saved storage that may leave, however many views and operators saved it.

    Owned by its handles: when the last one dies, so do the entry, its away form and its storage,
    whatever happened to the graph. Everything else refers to it weakly. Calls are serialised by the
    saver's lock.

    The steps that every storage takes are native (csrc/bind/entry.cpp): `leave` when it is sent,
    `gone` when nobody holds it any more, `fetch` when it starts back, `bring` when it is demanded.
    Here stands what happens now and then.
    """

    __slots__ = ()

    # Native members, by what they are in Python.
    saver: Owner
    away: Away | None
    way: WayBack | None
    departure: Ticket | None
    arrival: Ticket | None
    passage: Passage | None
    order: Order | None

    def __repr__(self) -> str:
        return f"<entry of {self.nbytes} bytes, {self.state.value}, {self.handles} save(s)>"

    def stay(self, departure: Ticket) -> None:
        """The send has failed: the ticket gives the storage back."""
        self.move(State.RESIDENT)
        self.storage = departure.storage()
        assert self.way is not None  # or nothing could have been sent
        ledger = self.saver.ledger
        ledger.keep(self.way.short_of, self.nbytes)
        self.drop_away()
        try:
            departure.synchronize()
        except native.TransferError as error:
            ledger.tell_once("transfer", f"a storage stays where it is: {error}")

    def sent_safely(self, wait: bool) -> bool:
        """Whether the bytes of a storage that was gathered are elsewhere for sure.

        If they could not be sent, what gathered them gives them back.
        """
        departure = self.departure
        assert departure is not None  # or it would not be leaving
        if wait:
            with suppress(native.TransferError):
                departure.wait()
                return True
        return self.sent() and self.state is State.LEAVING

    def held_by_handles_only(self) -> bool:
        """Whether nobody but our own handles holds a storage that stayed.

        Meant for its first demand, when all of them are still alive.
        """
        storage = self.identity.lock()
        return storage is not None and storage.use_count - 1 <= self.keeps

    @property
    def lost_memory(self) -> bool:
        """Whether the storage that it holds has been resized since it was saved.

        See [Note: Memory that is taken away] in csrc/storage/memory_share.h.
        """
        return self.storage is not None and self.storage.nbytes != self.nbytes

    def retain(self) -> bool:
        """Hold on to a storage that has not gone away yet: then nothing has to come back.

        Whether there was one.
        """
        if self.storage is None and not self.lock():
            return False
        if self.state in (State.LEAVING, State.AWAY):
            self.move(State.RESIDENT)
        return True

    def let_go(self) -> None:
        """Let go of a storage again whose away form is still there. Nothing is copied."""
        if self.storage is None or self.away is None:
            return
        if self.state is State.RETURNING:
            self.move(State.RESIDENT)
        self.drop_storage()


def illegal_move(entry: Entry, state: State) -> NoReturn:
    """Say who tried what."""
    raise EntryStateError(
        f"{entry!r} cannot go from {entry.state.value} to {state.value}; this is a bug in "
        "memswap, please report it with this traceback"
    )
