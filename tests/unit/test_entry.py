"""Entry and Ledger: which storage an entry stands for, its steps, and what is left of it."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

from memswap._native import native
from memswap.engine.entry import Entry, State, Stay
from memswap.engine.handle import Moved
from memswap.engine.stats import Ledger
from memswap.engine.timeline import Passage
from memswap.errors import EntryStateError


class Saver:
    """As much of a saver as an entry needs."""

    def __init__(self) -> None:
        self.ledger = Ledger()


class Way:
    """Away forms that are storages themselves."""

    stays_on_device = False
    frees_first = False
    short_of = "pool"

    def bring(self, away):
        return away, Ticket()


class Ticket:
    """Work of Python's that has ended."""

    def __init__(self, failed=False, storage=None, log=None):
        self._failed, self._storage, self._log = failed, storage, log

    def done(self):
        return True

    def failed(self):
        return self._failed

    def storage(self):
        return self._storage

    def synchronize(self):
        if self._failed:
            raise native.TransferError("the wire is cut")

    def abandon(self):
        if self._log is not None:
            self._log.append(threading.get_ident())


def saved(saver, nbytes=100):
    """A tensor, its view and the entry that stands for its storage."""
    tensor = torch.empty(nbytes, dtype=torch.uint8)
    view = native.capture(tensor)
    return tensor, view, Entry(saver, view, native.StorageRef(tensor))


def test_a_step_that_is_not_legal_says_who_tried_what_and_changes_nothing():
    saver = Saver()
    tensor, _, entry = saved(saver)
    with pytest.raises(EntryStateError, match=r"100 bytes.*from resident to returning"):
        entry.move(State.RETURNING)
    with pytest.raises(TypeError, match="needs a State"):
        entry.move("away")
    assert entry.state is State.RESIDENT
    assert saver.ledger.resident_bytes == tensor.nbytes


def test_an_entry_is_found_by_its_very_storage_and_content():
    saver = Saver()
    tensor, view, entry = saved(saver)
    ledger = saver.ledger
    assert ledger.find(view) is entry
    assert ledger.find(native.capture(tensor[10:])) is entry
    assert ledger.find(native.capture(tensor.clone())) is None
    tensor.add_(1)
    assert ledger.find(native.capture(tensor)) is None, "an edited storage is another one"
    again = Entry(saver, native.capture(tensor), native.StorageRef(tensor))
    del entry
    assert ledger.find(native.capture(tensor)) is again, "the first one took the second one along"
    del again
    assert ledger.known_storages == 0
    assert ledger.resident_bytes == 0


def test_a_storage_that_came_back_is_not_taken_for_what_has_its_old_address():
    saver = Saver()
    tensor, view, entry = saved(saver)
    away = native.StorageRef(torch.empty(100, dtype=torch.uint8))
    entry.leave(Way(), away, Ticket())
    del tensor
    assert not entry.lingers()
    entry.handles += 1
    assert entry.bring().key == away.key
    assert saver.ledger.find(view) is None
    assert (saver.ledger.stalls, saver.ledger.returned_bytes) == (1, 100)


def test_a_send_that_failed_gives_the_storage_back():
    saver = Saver()
    tensor, _, entry = saved(saver)
    storage = native.StorageRef(tensor)
    with pytest.warns(UserWarning, match="the wire is cut"):
        entry.leave(
            Way(), native.StorageRef(torch.empty(100)), Ticket(failed=True, storage=storage)
        )
        assert entry.sent()
    assert entry.state is State.RESIDENT and entry.storage is storage and entry.away is None
    assert saver.ledger.away_bytes == 0 and saver.ledger.kept_bytes == {"pool": 100}


def test_the_last_handle_takes_the_entry_along_and_abandons_its_tickets():
    saver, abandoned = Saver(), []
    tensor, view, entry = saved(saver)
    away = native.StorageRef(torch.empty(100, dtype=torch.uint8))
    entry.leave(Way(), away, Ticket(log=abandoned))
    handles = [Moved(entry, view), Moved(entry, view)]
    assert entry.handles == 2
    reference = entry.reference
    assert reference is entry.reference
    del entry
    handles.pop()
    assert reference() is not None and not abandoned
    handles.pop()
    assert reference() is None and len(abandoned) == 1
    assert (saver.ledger.resident_bytes, saver.ledger.away_bytes) == (0, 0)
    del tensor


def test_an_entry_in_a_cycle_is_collected_and_found_by_nobody():
    saver = Saver()
    tensor, view, entry = saved(saver)
    entry.order = [entry]
    passage = Passage(None, 0)
    passage.admit(100)
    passage.place(entry)
    reference = entry.reference
    del entry
    gc.collect()
    assert reference() is None and saver.ledger.find(view) is None
    assert passage.entry(0) is None
    assert saver.ledger.resident_bytes == 0
    del tensor


def test_what_stays_is_counted_once_for_as_long_as_it_is_known():
    ledger = Ledger()
    tensor = torch.empty(100, dtype=torch.uint8)
    stay = Stay(ledger, native.capture(tensor))
    assert ledger.find(native.capture(tensor[5:])) is stay
    assert (ledger.resident_bytes, ledger.known_storages) == (100, 1)
    del stay
    assert (ledger.resident_bytes, ledger.known_storages) == (0, 0)


@pytest.mark.parametrize("make", [Moved, Entry, Stay])
def test_what_is_no_engine_object_is_refused(make):
    wrong = (object(),) * (3 if make is Entry else 2)
    with pytest.raises(TypeError, match=r"needs an entry and a view|found <object object"):
        make(*wrong)
    with pytest.raises(TypeError, match=r"needs an entry and a view|arguments, got 0"):
        make()
