"""What an engine keeps natively: its lock, entries, away forms, and a scope's calls."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time

import pytest
import torch
from helpers import descriptor_under

import memswap
from memswap._native import native
from memswap.engine import transfers
from memswap.engine.engine import Engine
from memswap.engine.handle import Passed, unpack
from memswap.engine.hook_scope import HookScope
from memswap.planning.policy import Policy

SWAP = Policy(action=memswap.Action.SWAP, min_bytes=1)
CPU = torch.device("cpu")


def new_engine(pool=None):
    return Engine(SWAP, pool or memswap.HostPool(device=CPU, budget="4MiB", slab="1MiB"), 0)


def saved(engine, elements=100):
    """A tensor and the entry of its storage, which leaves."""
    tensor = computed(elements)
    return tensor, HookScope(engine, "").pack(tensor).entry


def computed(elements):
    """What an operator of a graph made: it leaves at once."""
    return torch.ones(elements, requires_grad=True).exp()


# --- the lock ---


def test_a_thread_waits_for_the_lock_without_the_gil():
    lock = new_engine().lock
    order: list[str] = []
    thread = threading.Thread(target=lock.run, args=(order.append, "other"))

    def first():
        thread.start()
        time.sleep(0.02)  # it waits without the GIL, or this would never end
        order.append("first")

    lock.run(first)
    thread.join()
    assert order == ["first", "other"]


def test_the_lock_is_free_again_after_an_exception():
    lock = new_engine().lock
    with pytest.raises(KeyError):
        lock.run(lambda: {}["not there"])
    taken = []
    thread = threading.Thread(target=lock.run, args=(taken.append, 1))
    thread.start()
    thread.join(60)
    assert taken == [1]


def test_a_pack_that_raises_lets_go_of_the_lock():
    def raising(tensor, info):
        raise KeyError("on purpose")

    engine = Engine(Policy(min_bytes=1, fn=raising), None, 0)
    with pytest.raises(KeyError, match="on purpose"):
        HookScope(engine, "").pack(computed(10))
    thread = threading.Thread(target=engine.stats)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "the lock is still held"


# --- arguments ---


def test_an_argument_that_is_neither_true_nor_false_is_an_error():
    class Neither:
        def __bool__(self):
            raise KeyError("on purpose")

    tensor, entry = saved(new_engine())
    with pytest.raises(TypeError, match="incompatible function arguments"):
        entry.notice_gone(wait=Neither())
    view, storage = native.capture(tensor), native.StorageRef(tensor)
    with pytest.raises(TypeError, match="incompatible function arguments"):
        view.rebuild(storage, shares_counter=Neither())


# --- away forms ---


class Around(native.LaneAround):
    """A lane of Python's."""

    def __init__(self, error=None):
        self.error, self.lane = error, native.WorkerLane(workers=0)
        super().__init__(self.lane)

    def send(self, storage, block):
        if self.error is not None:
            raise self.error("no such stream")
        return self.lane.send(storage, block)

    def fetch(self, block):
        if self.error is not None:
            raise self.error("no such stream")
        return self.lane.fetch(block)


@pytest.mark.parametrize("of_python", [False, True], ids=["native", "python"])
def test_a_storage_goes_into_a_block_and_comes_back(of_python, monkeypatch):
    if of_python:
        monkeypatch.setattr(transfers, "open_lane", lambda device: Around())
    engine = new_engine()
    tensor = computed(1000)
    handle = HookScope(engine, "").pack(tensor)
    block = handle.entry.away
    assert isinstance(block, native.BlockForm)
    assert (block.device_nbytes, block.pool_nbytes) == (0, 4000)
    assert torch.equal(unpack(handle), tensor)


def test_what_is_sent_is_a_storage_and_what_has_no_room_says_so():
    engine = new_engine()
    sent_by = engine.transfers(CPU)
    key = ("unit", 0, 100, torch.uint8)
    for wrong in (torch.ones(3), None):
        with pytest.raises(TypeError, match="incompatible function arguments"):
            sent_by.send(native.Form.BLOCK, wrong, key)
    with pytest.raises(TypeError, match="incompatible function arguments"):
        sent_by.send(native.Form.BLOCK, native.StorageRef(torch.ones(3)), key[:3])
    refused = sent_by.send(native.Form.BLOCK, native.StorageRef(torch.empty(1 << 21)), key)
    assert refused.reason == "pool" and "budget" in refused.why


def test_a_send_that_raises_takes_no_memory_and_leaves_nothing_behind(monkeypatch):
    monkeypatch.setattr(transfers, "open_lane", lambda device: Around(KeyError))
    pool = memswap.HostPool(device=CPU, budget="1MiB", slab="1MiB")
    engine = new_engine(pool)
    for _ in range(3):
        with pytest.raises(KeyError, match="no such stream"):
            HookScope(engine, "").pack(computed(100))
    assert pool.statistics().in_use_bytes == 0
    assert engine.ledger.known_storages == 0


def test_references_to_one_entry_are_equal_and_keep_nothing_alive():
    _, entry = saved(new_engine())
    reference = entry.reference
    assert reference() is entry and reference == entry.reference
    assert len({reference, entry.reference}) == 1
    del entry
    assert reference() is None


def test_an_entry_keeps_what_it_counts_in():
    engine = new_engine()
    _, entry = saved(engine)
    ledger = engine.ledger
    del engine
    assert entry.engine.ledger is ledger
    del entry
    assert (ledger.known_storages, ledger.counters.resident_bytes) == (0, 0)


# --- scopes and handles ---


def test_a_scope_needs_a_engine_and_packs_tensors():
    with pytest.raises(TypeError, match=r"memswap\._C\.Engine"):
        HookScope(object(), "")
    with pytest.raises(TypeError, match=r"needs a torch\.Tensor"):
        HookScope(new_engine(), "").pack(object())


def test_every_kind_of_handle_is_unpacked():
    tensor = torch.ones(3)
    assert unpack(Passed(tensor, lambda packed: packed)) is tensor
    engine = new_engine()
    handle = HookScope(engine, "").pack(computed(3))
    assert isinstance(handle, native.Handle) and not handle.stays
    assert torch.equal(unpack(handle), computed(3))
    with pytest.raises(AttributeError):
        unpack(object())


def test_bytes_that_are_lost_are_an_error_in_words(tmp_path):
    engine = new_engine(memswap.DiskPool(tmp_path, budget="4MiB", extent="1MiB"))
    handle = HookScope(engine, "").pack(computed(1 << 14))
    handle.entry.departure.wait()
    os.truncate(f"/proc/self/fd/{descriptor_under(tmp_path)}", 0)
    with pytest.raises(memswap.TransferError, match=r"cannot be brought back: .*expected 65536"):
        unpack(handle)


def test_a_thousand_steps_leave_no_object_and_no_reference_behind():
    engine = new_engine()

    def step():
        engine.lock.run(engine.begin_iteration)
        scope = HookScope(engine, "")
        handles = [scope.pack(torch.ones(50, requires_grad=True) * n) for n in range(4)]
        for n in (3, 1, 2, 0):
            assert unpack(handles[n])[0] == n
        del handles[0]  # the others are dropped with the list

    for _ in range(20):
        step()
    gc.collect()
    watched = (
        engine,
        engine.ledger,
        engine.lock,
        native.Entry,
        native.Handle,
        native.SavedView,
        native.StorageRef,
    )
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
    assert engine.ledger.known_storages == 0 and len(engine.departing) == 0


def test_a_engine_in_a_circle_is_collected():
    engine = new_engine()
    scope = HookScope(engine, "")
    handle = scope.pack(torch.ones(100))
    engine.director = [engine, scope, handle]
    scope.outer = (handle, scope)
    ledger = engine.ledger
    del engine, scope, handle
    gc.collect()
    counters = ledger.counters
    assert (ledger.known_storages, counters.resident_bytes, counters.away_bytes) == (0, 0, 0)


def test_threads_that_save_and_demand_through_one_engine():
    engine = new_engine()
    wrong: list[object] = []

    def work(number: int) -> None:
        try:
            scope = HookScope(engine, "")
            for turn in range(60):
                values = [number * 1000 + turn * 10 + n for n in range(5)]
                handles = [scope.pack(torch.full((64,), value)) for value in values]
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
    assert engine.ledger.known_storages == 0 and len(engine.departing) == 0


def test_a_lock_that_a_thread_has_is_an_error_and_no_end_of_all_progress():
    engine = new_engine()
    scope = HookScope(engine, "")
    for takes_it in (engine.stats, lambda: scope.pack(computed(100))):
        with pytest.raises(RuntimeError, match="takes the lock of a memswap engine twice"):
            engine.lock.run(takes_it)
    assert engine.stats().moved_storages == 0
    assert not scope.pack(computed(100)).stays, "the lock was not given back"


def test_a_policy_s_function_may_ask_and_save_what_it_likes():
    """It is called without the engine's lock, which statistics and saves take."""
    known: list[int] = []

    def moves(tensor: torch.Tensor, info: memswap.TensorInfo) -> memswap.Action:
        known.append(engine.stats().moved_storages)
        if len(known) == 1:
            inner.append(scope.pack(tensor))  # that very tensor
            inner.append(scope.pack(computed(50)))
        return memswap.Action.SWAP

    engine = Engine(Policy(min_bytes=1, fn=moves), memswap.HostPool(device=CPU, budget="4MiB"), 0)
    scope, inner = HookScope(engine, ""), []
    handle = scope.pack(computed(100))
    assert known == [0, 0, 1]
    assert handle.entry is inner[0].entry, "one storage has two entries"
    for one in (handle, *inner):
        assert torch.equal(unpack(one), computed(one.view.storage_nbytes // 4))


def test_what_native_code_reads_cannot_be_deleted():
    engine = new_engine()
    _, entry = saved(engine)
    scope = HookScope(engine, "")
    for owner, name in (
        *((engine, name) for name in ("iteration", "planning", "recipes")),
        *((entry, name) for name in ("storage", "away", "departure", "arrival")),
        *((scope, name) for name in ("unit", "action", "group", "outer", "batch")),
    ):
        with pytest.raises((TypeError, AttributeError)):
            delattr(owner, name)
        getattr(owner, name)
    scope.enter()
    loss = (computed(100) * 2).sum()
    scope.leave()
    loss.backward()


def test_what_is_no_tensor_is_refused_by_the_native_save():
    engine = new_engine()
    with pytest.raises(TypeError, match="pack needs a"):
        HookScope(engine, "unit").pack(7)
    with pytest.raises(TypeError, match="incompatible function arguments"):
        native.kept_handle(7)
