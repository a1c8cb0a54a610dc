"""Entry and Ledger: which storage an entry stands for, its steps, and what is left of it."""

from __future__ import annotations

import contextlib

import pytest
import torch
from helpers import files_no_longer_than

import memswap
from memswap._native import native
from memswap.codec import Shape, dtype_code
from memswap.engine.entry import Entry, State
from memswap.errors import EntryStateError

FLOAT32 = dtype_code(torch.float32)


def new_sender(pool=None):
    """What puts storages into a pool's blocks. A send begins when somebody waits for it."""
    pool = pool or memswap.HostPool(device="cpu", budget="4MiB", slab="1MiB")
    return native.BlockSender(native.WorkerLane(workers=0), pool.native)


def saved(engine, nbytes=100):
    """A tensor, its view and the entry that stands for its storage."""
    tensor = torch.empty(nbytes, dtype=torch.uint8)
    view = native.capture(tensor)
    return tensor, view, Entry(engine, view, native.StorageRef(tensor))


def test_a_step_that_is_not_legal_says_who_tried_what_and_changes_nothing():
    engine = native.Engine(0)
    tensor, _, entry = saved(engine)
    with pytest.raises(EntryStateError, match=r"100 bytes.*from resident to returning"):
        entry.move(State.RETURNING)
    with pytest.raises(TypeError, match="State"):
        entry.move("away")
    assert entry.state is State.RESIDENT
    assert engine.ledger.resident_bytes == tensor.nbytes


def test_an_entry_is_found_by_its_very_storage_and_content():
    engine = native.Engine(0)
    tensor, view, entry = saved(engine)
    ledger = engine.ledger
    assert ledger.find(view) is entry
    assert ledger.find(native.capture(tensor[10:])) is entry
    assert ledger.find(native.capture(tensor.clone())) is None
    tensor.add_(1)
    assert ledger.find(native.capture(tensor)) is None, "an edited storage is another one"
    again = Entry(engine, native.capture(tensor), native.StorageRef(tensor))
    del entry
    assert ledger.find(native.capture(tensor)) is again, "the first one took the second one along"
    del again
    assert ledger.known_storages == 0
    assert ledger.resident_bytes == 0


def test_a_storage_that_came_back_is_not_taken_for_what_has_its_old_address():
    engine = native.Engine(0)
    tensor, view, entry = saved(engine)
    before = view.key
    assert entry.swap(new_sender(), native.StorageRef(tensor))
    entry.departure.wait()
    expected = tensor.clone()
    del tensor
    assert not entry.lingers()
    entry.handles += 1
    storage = entry.bring()
    entry.arrival.wait()
    assert storage.key != before
    assert torch.equal(view.rebuild(storage, False), expected)
    assert engine.ledger.find(view) is None
    assert (engine.ledger.stalls, engine.ledger.returned_bytes) == (1, 100)


def test_a_send_that_failed_gives_the_storage_back(tmp_path):
    engine = native.Engine(0)
    tensor, _, entry = saved(engine, 1 << 16)
    pool = memswap.DiskPool(tmp_path, budget="4MiB", extent="1MiB")
    pool.reserve("1MiB")  # space is set aside, and then the disk fails
    storage = native.StorageRef(tensor)
    with files_no_longer_than(0), pytest.warns(UserWarning, match="a storage stays where it is"):
        assert entry.swap(new_sender(pool), storage)
        with contextlib.suppress(native.TransferError):
            entry.departure.wait()
        assert entry.sent()
    assert entry.state is State.RESIDENT and entry.away is None
    assert entry.storage is not None and entry.storage.key == storage.key
    assert engine.ledger.away_bytes == 0 and engine.ledger.kept_bytes == {"pool": 1 << 16}


def test_the_last_handle_takes_the_entry_along_and_abandons_its_tickets():
    engine = native.Engine(0)
    pool, outputs = (memswap.HostPool(device="cpu", budget="4MiB", slab="1MiB") for _ in range(2))
    lane = native.WorkerCodecLane(0, pool.native, outputs.native)
    sender = native.FrameSender(lane, works_ahead=True)
    tensor = torch.randn(1 << 14)
    view = native.capture(tensor)
    entry = Entry(engine, view, native.StorageRef(tensor))
    entry.leave(*sender.send(native.StorageRef(tensor), FLOAT32, Shape.DENSE))
    entry.departure.wait()
    del tensor
    assert entry.fetch_ahead(), "it is away, and has not been demanded"
    handles = [native.moved_handle(entry, view) for _ in range(2)]
    assert entry.handles == 2
    reference = entry.reference
    assert reference == entry.reference
    del entry
    handles.pop()
    assert reference() is not None and outputs.statistics().in_use_bytes > 0
    handles.pop()
    assert reference() is None
    assert outputs.statistics().in_use_bytes == 0, "a return that nobody waits for has its memory"
    assert pool.statistics().in_use_bytes == 0
    assert (engine.ledger.resident_bytes, engine.ledger.away_bytes) == (0, 0)


def test_an_entry_that_is_gone_is_found_by_nobody():
    engine = native.Engine(0)
    tensor, view, entry = saved(engine)
    iteration = native.Iteration(0)
    iteration.admit(100)
    iteration.place(entry)
    reference = entry.reference
    assert reference() is entry and iteration.entry(0) is entry
    del entry
    assert reference() is None and engine.ledger.find(view) is None
    assert iteration.entry(0) is None and iteration.over
    assert engine.ledger.resident_bytes == 0
    del tensor


def test_an_entry_keeps_what_it_counts_in():
    engine = native.Engine(0)
    tensor, view, entry = saved(engine)
    ledger = engine.ledger
    del engine
    assert ledger.find(view) is entry and entry.engine.ledger is ledger
    del entry
    assert (ledger.known_storages, ledger.resident_bytes) == (0, 0)
    del tensor


def test_what_stays_is_counted_once_for_as_long_as_it_is_known():
    ledger = native.Ledger()
    tensor = torch.empty(100, dtype=torch.uint8)
    stay = native.Stay(ledger, native.capture(tensor))
    assert ledger.find(native.capture(tensor[5:])) is stay
    assert (ledger.resident_bytes, ledger.known_storages) == (100, 1)
    del stay
    assert (ledger.resident_bytes, ledger.known_storages) == (0, 0)


@pytest.mark.parametrize("make", [native.moved_handle, Entry, native.Stay])
def test_what_is_no_engine_object_is_refused(make):
    wrong = (object(),) * (3 if make is Entry else 2)
    with pytest.raises(TypeError, match=r"incompatible (function|constructor) arguments"):
        make(*wrong)
    with pytest.raises(TypeError, match=r"incompatible (function|constructor) arguments"):
        make()
