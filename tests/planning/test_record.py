"""Recorder: what a record says of storages whose sends end while it looks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest
import torch

from memswap import Action
from memswap.engine.entry import State
from memswap.engine.expectations import Key
from memswap.engine.record import Clock, Record, Recorder


class Saved:
    """An entry whose storage `holders` of the forward hold, beside its send."""

    def __init__(self, index: int, holders: int) -> None:
        self.index, self.holders, self.nbytes, self.keeps = index, holders, 1024, 0
        self.state, self.storage, self.away = State.LEAVING, None, object()
        self.sending = True  # the worker has the storage
        self.said_done = False  # and its ticket says that it has not
        self.identity = SimpleNamespace(lock=self._lock)
        self.departure = SimpleNamespace(done=lambda: self.said_done)
        self.reference = ref(self)
        self.engine = SimpleNamespace(ledger=SimpleNamespace(resident_bytes=0))

    def _lock(self) -> Any:
        count = 1 + self.holders + self.sending
        return SimpleNamespace(use_count=count) if count > 1 else None


def record_of(recorder: Recorder) -> Record:
    """What it took down of an iteration in which nothing failed."""
    recorder.close()
    record = recorder.take()
    assert record is not None
    return record


def looked(entry: Saved, recorder: Recorder) -> None:
    """The next mark: another storage is saved, which is of no interest."""
    recorder.choose(Key("unit", entry.index, 1024, torch.float32), Action.SWAP)
    recorder.saved(entry)


@pytest.mark.parametrize("let_go_at", [None, 3])
def test_a_send_that_has_let_go_and_not_said_so_is_not_taken_for_the_forward(let_go_at):
    recorder = Recorder(Clock(torch.device("cpu")), None, lambda: 1 << 20)
    entries = [Saved(index, holders=1 if index == 0 else 0) for index in range(5)]
    first = entries[0]
    for mark, entry in enumerate(entries):
        if mark == 1:
            first.sending = False  # the worker is between the two
        elif mark == 2:
            first.said_done = True
        if mark == let_go_at:
            first.holders = 0
        looked(entry, recorder)
    assert record_of(recorder).storages[0].held_until == let_go_at


def test_what_the_forward_let_go_of_during_its_send_is_known_from_then_on():
    recorder = Recorder(Clock(torch.device("cpu")), None, lambda: 1 << 20)
    entries = [Saved(index, holders=1 if index == 0 else 0) for index in range(4)]
    for mark, entry in enumerate(entries):
        if mark == 2:
            entries[0].holders = 0
        looked(entry, recorder)  # its send is under way all the time
    assert record_of(recorder).storages[0].held_until == 2


def test_a_save_that_fails_is_in_no_record():
    """It used to leave a key and an action behind, and each later storage had the one's before."""
    recorder = Recorder(Clock(torch.device("cpu")), None, lambda: 1 << 20)
    first, last = Saved(0, holders=0), Saved(2, holders=0)
    looked(first, recorder)
    recorder.choose(Key("unit", 1, 1024, torch.float32), Action.SWAP)  # and nothing is saved
    assert [one.key.ordinal for one in record_of(recorder).storages] == [0]
    looked(last, recorder)  # its number in the iteration is 2
    recorder.demanding(last)
    recorder.demanded(last)
    assert recorder.take() is None
