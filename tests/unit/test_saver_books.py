"""What a saver keeps natively: its lock, what departs, the swap way, and a visit's calls."""

from __future__ import annotations

import gc
import sys
import threading
import time

import pytest
import torch

import memswap
from memswap._native import native
from memswap.engine.entry import Entry, State
from memswap.engine.handle import Moved, Passed, unpack
from memswap.engine.saver import Saver
from memswap.engine.transfer import SwapWay
from memswap.engine.visit import Visit
from memswap.planning.policy import Policy

SWAP = Policy(action=memswap.Action.SWAP, min_bytes=1)
CPU = torch.device("cpu")


def new_saver(pool=None):
    return Saver(SWAP, pool or memswap.HostPool(device=CPU, budget="4MiB", slab="1MiB"), 0)


def saved(saver, nbytes=100):
    """A tensor and its entry, which has left nothing and is nowhere."""
    tensor = torch.empty(nbytes, dtype=torch.uint8)
    return tensor, Entry(saver, native.capture(tensor), native.StorageRef(tensor))


def computed(elements):
    """What an operator of a graph made: it leaves at once."""
    return torch.ones(elements, requires_grad=True).exp()


class Ticket:
    """Work of Python's."""

    def __init__(self, done=True, failed=False, storage=None):
        self.ended, self._failed, self._storage = done, failed, storage

    def done(self):
        return self.ended

    def failed(self):
        return self._failed

    def storage(self):
        return self._storage

    def synchronize(self):
        if self._failed:
            raise native.TransferError("the wire is cut")

    def abandon(self):
        pass


class Way:
    stays_on_device = False
    frees_first = False
    works_ahead = True
    short_of = "pool"


# --- the lock ---


def test_the_lock_may_be_taken_again_by_its_thread_and_by_no_other():
    lock = native.Lock()
    order: list[str] = []

    def other():
        with lock:
            order.append("other")

    thread = threading.Thread(target=other)
    with lock, lock:
        thread.start()
        time.sleep(0.02)  # it waits without the GIL, or this would never end
        order.append("first")
    thread.join()
    assert order == ["first", "other"]


def test_the_lock_is_free_again_after_an_exception():
    lock = native.Lock()
    with pytest.raises(KeyError), lock:
        raise KeyError
    taken = []
    thread = threading.Thread(target=lambda: taken.append(lock.__enter__()))
    thread.start()
    thread.join(60)
    assert taken == [lock]


def test_a_pack_that_raises_lets_go_of_the_lock():
    saver = new_saver()

    def raising(tensor, view, visit):
        raise KeyError("on purpose")

    saver.save = raising
    with pytest.raises(KeyError, match="on purpose"):
        Visit(saver, "").pack(computed(10))
    thread = threading.Thread(target=saver.stats)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "the lock is still held"


# --- what departs ---


def test_what_departs_is_accounted_for_once_nobody_holds_it():
    saver, departing = new_saver(), native.Departing()
    tensors, entries = zip(*(saved(saver) for _ in range(5)), strict=True)
    for entry in entries:
        entry.leave(Way(), native.part(native.StorageRef(torch.empty(8)), 0, 8), Ticket())
        departing.add(entry)
    departing.notice_gone()
    assert len(departing) == 5 and saver.ledger.freed_bytes == 0
    tensors = tensors[:2]
    departing.notice_gone(looks=2)
    assert len(departing) == 5, "more were looked at than was asked for"
    departing.notice_gone()
    assert len(departing) == 2 and saver.ledger.freed_bytes == 300
    assert [entry.state for entry in entries[:2]] == [State.LEAVING] * 2
    del tensors


def test_sends_are_looked_at_in_their_order_and_the_first_that_runs_ends_the_look():
    saver, departing = new_saver(), native.Departing()
    runs = Ticket(done=False)
    kept = [saved(saver) for _ in range(2)]
    for (_, entry), ticket in zip(kept, (runs, Ticket()), strict=True):
        entry.leave(Way(), native.StorageRef(torch.empty(8)), ticket)
        departing.add(entry)
    departing.notice_gone(looks=0)
    assert len(departing) == 2
    runs.ended = True
    departing.notice_gone(looks=0)
    del entry
    kept.pop()
    assert len(departing) == 1, "one that is dead still departs"
    kept.clear()
    assert len(departing) == 0


def test_a_send_that_failed_departs_no_more_and_has_its_bytes():
    saver, departing = new_saver(), native.Departing()
    tensor, entry = saved(saver)
    entry.leave(
        Way(),
        native.StorageRef(torch.empty(8)),
        Ticket(failed=True, storage=native.StorageRef(tensor)),
    )
    departing.add(entry)
    with pytest.warns(UserWarning, match="the wire is cut"):
        departing.notice_gone()
    assert len(departing) == 0 and entry.state is State.RESIDENT
    assert saver.ledger.kept_tensors["pool"] == 1


def test_a_ticket_that_raises_loses_no_entry():
    class Raises(Ticket):
        def done(self):
            raise KeyError("on purpose")

    saver, departing = new_saver(), native.Departing()
    tensor, entry = saved(saver)
    entry.leave(Way(), native.StorageRef(torch.empty(8)), Raises())
    departing.add(entry)
    for _ in range(3):
        with pytest.raises(KeyError, match="on purpose"):
            departing.notice_gone()
    assert len(departing) == 1
    del departing
    del entry  # which knows of no row any more
    assert tensor.numel()


def test_an_argument_that_is_neither_true_nor_false_is_an_error():
    class Neither:
        def __bool__(self):
            raise KeyError("on purpose")

    tensor, entry = saved(new_saver())
    with pytest.raises(KeyError, match="on purpose"):
        entry.gone(wait=Neither())
    view, storage = native.capture(tensor), native.StorageRef(tensor)
    with pytest.raises(KeyError, match="on purpose"):
        view.rebuild(storage, shares_counter=Neither())


def test_entries_that_die_while_others_are_looked_at():
    """A ticket that is asked runs code of Python's, which may drop any entry."""
    saver, departing = new_saver(), native.Departing()
    entries: list[Entry] = []

    class Drops(Ticket):
        def done(self):
            entries.clear()
            gc.collect()
            return True

    kept = []
    for index in range(6):
        tensor, entry = saved(saver)
        kept.append(tensor)
        entries.append(entry)
        entry.leave(Way(), native.StorageRef(torch.empty(8)), Drops() if index == 2 else Ticket())
        departing.add(entry)
    del entry
    departing.notice_gone()
    assert len(departing) == 0


# --- the swap way ---


class Lane:
    """A lane of Python's."""

    def __init__(self, error=None):
        self.error, self.lane = error, native.WorkerLane(workers=0)

    def send(self, storage, block):
        if self.error is not None:
            raise self.error("no such stream")
        return self.lane.send(storage, block)

    def fetch(self, block):
        if self.error is not None:
            raise self.error("no such stream")
        return self.lane.fetch(block)


@pytest.mark.parametrize("of_python", [False, True], ids=["native", "python"])
def test_a_swap_way_sends_and_brings(of_python):
    pool = memswap.HostPool(device=CPU, budget="1MiB", slab="1MiB")
    lane = Lane()
    way = SwapWay(lane if of_python else lane.lane, pool)
    tensor = torch.arange(1000)
    block, departure = way.send(native.StorageRef(tensor), None)
    departure.wait()
    storage, arrival = way.bring(block)
    arrival.wait()
    again = native.capture(tensor).rebuild(storage, False)
    assert torch.equal(again, tensor)
    assert way.send(native.StorageRef(torch.empty(1 << 21, dtype=torch.uint8))) is None
    assert "budget" in way.why_refused()
    with pytest.raises(TypeError, match="expected a StorageRef"):
        way.send(tensor)
    with pytest.raises((TypeError, RuntimeError)):
        way.bring(tensor)


def test_a_send_that_raises_takes_no_memory_and_leaves_the_entry_as_it_was():
    pool = memswap.HostPool(device=CPU, budget="1MiB", slab="1MiB")
    saver = new_saver(pool)
    way = SwapWay(Lane(KeyError), pool)
    tensor, entry = saved(saver)
    for _ in range(3):
        with pytest.raises(KeyError, match="no such stream"):
            entry.swap(way, native.StorageRef(tensor))
    assert entry.state is State.RESIDENT and entry.away is None
    assert pool.statistics().in_use_bytes == 0
    with pytest.raises(TypeError, match="SwapWay"):
        entry.swap(Way(), native.StorageRef(tensor))


def test_a_way_without_room_changes_nothing():
    pool = memswap.HostPool(device=CPU, budget=0)
    saver = new_saver(pool)
    tensor, entry = saved(saver)
    assert (
        entry.swap(SwapWay(native.WorkerLane(workers=0), pool), native.StorageRef(tensor)) is False
    )
    assert (entry.state, entry.away, saver.ledger.moved_storages) == (State.RESIDENT, None, 0)


# --- visits and handles ---


def test_a_visit_needs_a_saver_and_packs_tensors():
    with pytest.raises(TypeError, match="expected a Saver"):
        Visit(object(), "")
    with pytest.raises(TypeError, match=r"needs a torch\.Tensor"):
        Visit(new_saver(), "").pack(object())


def test_every_kind_of_handle_is_unpacked():
    tensor = torch.ones(3)
    assert unpack(Passed(tensor, lambda packed: packed)) is tensor
    saver = new_saver()
    handle = Visit(saver, "").pack(computed(3))
    assert isinstance(handle, Moved)
    assert torch.equal(unpack(handle), computed(3))
    with pytest.raises(AttributeError):
        unpack(object())


def test_bytes_that_are_lost_are_an_error_in_words():
    saver = new_saver()
    route = saver.route(CPU)

    class Cut:
        def wait(self):
            raise native.TransferError("the disk is gone")

        def done(self):
            return True

        failed = synchronize = abandon = done

    class Loses(Lane):
        def fetch(self, block):
            return self.lane.fetch(block)[0], Cut()

    route.__dict__["swap"] = SwapWay(Loses(), route.pool)
    handle = Visit(saver, "").pack(computed(100))
    handle.entry.departure.wait()
    with pytest.raises(memswap.TransferError, match=r"cannot be brought back: the disk is gone"):
        unpack(handle)


def test_a_thousand_steps_leave_no_object_and_no_reference_behind():
    saver = new_saver()

    def step():
        with saver.lock:
            saver.begin_passage()
        visit = Visit(saver, "")
        handles = [visit.pack(torch.ones(50, requires_grad=True) * n) for n in range(4)]
        for n in (3, 1, 2, 0):
            assert unpack(handles[n])[0] == n
        del handles[0]  # the others are dropped with the list

    for _ in range(20):
        step()
    gc.collect()
    watched = (saver, saver.ledger, saver.lock, Entry, Moved, native.SavedView, native.StorageRef)
    before = len(gc.get_objects()), [sys.getrefcount(one) for one in watched]
    for _ in range(1000):
        step()
    gc.collect()
    assert len(gc.get_objects()) <= before[0] + 20
    now = [sys.getrefcount(one) for one in watched]
    assert all(abs(one - other) <= 8 for one, other in zip(now, before[1], strict=True)), (
        before[1],
        now,
    )
    assert saver.ledger.known_storages == 0 and len(saver.departing) == 0


def test_a_saver_in_a_circle_is_collected():
    saver = new_saver()
    visit = Visit(saver, "")
    handle = visit.pack(torch.ones(100))
    saver.director = saver.passage.course = [saver, visit, handle]
    visit.outer = (handle, visit)
    saver.director = None
    ledger = saver.ledger
    del saver, visit, handle
    gc.collect()
    assert (ledger.known_storages, ledger.resident_bytes, ledger.away_bytes) == (0, 0, 0)


def test_threads_that_save_and_demand_through_one_saver():
    saver = new_saver()
    wrong: list[object] = []

    def work(number: int) -> None:
        try:
            visit = Visit(saver, "")
            for turn in range(60):
                values = [number * 1000 + turn * 10 + n for n in range(5)]
                handles = [visit.pack(torch.full((64,), value)) for value in values]
                while handles:
                    value = values.pop()
                    if not bool((unpack(handles.pop()) == value).all()):
                        wrong.append(value)
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong
    assert saver.ledger.known_storages == 0 and len(saver.departing) == 0


def test_what_native_code_reads_cannot_be_deleted():
    saver = new_saver()
    _, entry = saved(saver)
    visit = Visit(saver, "")
    for owner, name in (
        *((saver, name) for name in ("passage", "director", "persistent", "backward")),
        *((entry, name) for name in ("storage", "away", "way", "departure", "arrival", "order")),
        *((visit, name) for name in ("unit", "action", "group", "outer", "waiting")),
        (saver.passage, "course"),
    ):
        with pytest.raises(TypeError, match=f"{name}.* cannot be deleted"):
            delattr(owner, name)
        getattr(owner, name)
    with pytest.raises(AttributeError):
        del saver.nothing_of_that_name
    with visit.saver.lock:
        visit.enter()
        loss = (computed(100) * 2).sum()
        visit.leave()
    loss.backward()
