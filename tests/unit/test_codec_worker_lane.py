"""WorkerCodecLane: the CPU as device. Exact memory, tickets, and failures that lose nothing."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import memswap
from memswap._native import native

pytestmark = pytest.mark.cpu_only

BF16, DENSE, RAW = 1, 0, 4


def new_pool(budget: str = "256MiB") -> memswap.HostPool:
    return memswap.HostPool(budget=budget, slab="1MiB", device="cpu")


def values(seed: int, elements: int = 50_000) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(elements, generator=generator).bfloat16()


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


class Machine:
    def __init__(self, workers: int = 2, budget: str = "256MiB", bound: int = 0) -> None:
        self.pool, self.outputs = new_pool(budget), new_pool()
        self.lane = native.WorkerCodecLane(workers, self.pool.native, self.outputs.native, bound)

    def encode(self, tensor: torch.Tensor, var_capacity: int | None = None) -> tuple[Any, Any]:
        encoding = self.lane.encode(native.StorageRef(tensor), (BF16, DENSE, var_capacity))
        assert encoding is not None, self.lane.last_refusal
        return encoding  # type: ignore[no-any-return]

    def decode(self, encoded: Any, like: torch.Tensor) -> torch.Tensor:
        storage, arrival = self.lane.decode(encoded)
        arrival.wait()
        assert storage.nbytes == like.nbytes
        view = native.capture(like)
        return view.rebuild(storage, False) if view is not None else torch.empty_like(like)


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("elements", [0, 1, 1024, 50_000])
def test_a_storage_comes_back_bit_for_bit(workers: int, elements: int) -> None:
    machine = Machine(workers)
    tensor = values(0, elements)
    encoded, _ = machine.encode(tensor)
    assert same(machine.decode(encoded, tensor), tensor)
    assert same(machine.decode(encoded, tensor), tensor), "the second time"


def test_after_the_encode_the_pool_holds_the_frame_and_nothing_more() -> None:
    machine = Machine()
    tensors = [values(seed) for seed in range(8)]
    encodings = [machine.encode(tensor) for tensor in tensors]
    for _, ticket in encodings:
        ticket.wait()
    held = sum(encoded.nbytes for encoded, _ in encodings)
    reports = [encoded.report() for encoded, _ in encodings]
    assert held == sum(report.frame_nbytes for report in reports)
    now = machine.pool.statistics()
    assert now.in_use_bytes == held and now.blocks == 8
    assert now.waste_bytes < 8 * 512 and now.pending == 0
    assert now.in_use_bytes + now.waste_bytes + now.free_bytes == now.reserved_bytes
    del encodings, ticket, _
    assert machine.pool.statistics().in_use_bytes == 0
    assert machine.pool.statistics().free_bytes == machine.pool.statistics().reserved_bytes


def test_a_watch_tells_what_was_found_when_the_frame_is_gone() -> None:
    machine = Machine()
    encoded, ticket = machine.encode(values(0))
    watch = encoded.watch()
    ticket.wait()
    expected = encoded.report().var_used
    del encoded, ticket
    assert machine.pool.statistics().in_use_bytes == 0
    assert watch.report().var_used == expected > 0


def test_who_waits_for_work_that_no_worker_has_begun_does_it_on_torchs_threads() -> None:
    """The same bits, whether one thread or all of torch's do it."""
    tensor = values(0, 500_000)
    threads = torch.get_num_threads()
    frames = []
    try:
        for count in (1, 2, 4):
            torch.set_num_threads(count)
            machine = Machine(workers=0)
            encoded, ticket = machine.encode(tensor)
            assert not ticket.done(), "nobody has waited yet"
            ticket.wait()
            frames.append(encoded.report().var_used)
            assert same(machine.decode(encoded, tensor), tensor)
    finally:
        torch.set_num_threads(threads)
    assert len(set(frames)) == 1


@pytest.mark.parametrize("workers", [0, 1])
def test_a_decode_that_nobody_waits_for_any_more_keeps_nothing(workers: int) -> None:
    """Without workers it stayed in the queue, with its frame and its output."""
    machine = Machine(workers)
    encoded, sent = machine.encode(values(0))
    sent.wait()
    storage, arrival = machine.lane.decode(encoded)
    arrival.abandon()
    del encoded, sent, storage
    if workers == 0:
        with pytest.raises(native.TransferError, match="nobody was to wait"):
            arrival.synchronize()
    else:
        machine.lane.stop()  # it may have begun
    assert machine.pool.statistics().in_use_bytes == 0
    assert machine.outputs.statistics().in_use_bytes == 0


def test_what_is_encoded_is_let_go_of_and_outputs_use_memory_again() -> None:
    machine = Machine()
    tensor = values(0)
    view, storage = native.capture(tensor), native.StorageRef(tensor)
    identity = native.WeakStorage(storage)
    encoded, ticket = machine.lane.encode(storage, (BF16, DENSE, None))
    del storage
    kept = tensor.clone()
    del tensor
    ticket.wait()
    assert identity.expired() and machine.lane.leaving_bytes() == 0
    for _ in range(10):
        back, arrival = machine.lane.decode(encoded)
        arrival.wait()
        assert same(view.rebuild(back, False), kept)
        del back, arrival
    now = machine.outputs.statistics()
    assert now.slabs_acquired == 1 and now.in_use_bytes == 0


def test_a_decoded_storage_is_like_any_other() -> None:
    machine = Machine()
    tensor = values(0)
    encoded, _ = machine.encode(tensor)
    back = machine.decode(encoded, tensor)
    storage = back.untyped_storage()
    assert storage.nbytes() == tensor.nbytes
    storage.resize_(2 * tensor.nbytes)
    assert same(back, tensor), "resizing keeps the bytes"
    assert machine.outputs.statistics().in_use_bytes == 0, "torch has moved it to its own memory"
    storage.resize_(0)
    another = machine.decode(encoded, tensor).share_memory_()
    assert same(another, tensor)


def test_where_the_pool_of_outputs_is_full_the_system_has_memory() -> None:
    pool = new_pool()
    lane = native.WorkerCodecLane(1, pool.native, new_pool("64KiB").native)
    tensor = values(0)
    encoded, _ = lane.encode(native.StorageRef(tensor), (BF16, DENSE, None))
    storage, arrival = lane.decode(encoded)
    arrival.wait()
    assert same(native.capture(tensor).rebuild(storage, False), tensor)


def test_a_full_pool_refuses_and_nothing_is_started() -> None:
    machine = Machine(budget="64KiB")
    tensor = values(0)
    assert machine.lane.encode(native.StorageRef(tensor), (BF16, DENSE, None)) is None
    assert "the budget of 65536 bytes is spent" in machine.lane.last_refusal
    assert machine.lane.leaving_bytes() == 0


def test_what_cannot_be_encoded_so_is_refused_in_words() -> None:
    machine = Machine()
    storage = native.StorageRef(torch.zeros(7, dtype=torch.uint8))
    assert machine.lane.encode(storage, (BF16, DENSE, None)) is None
    assert "no aligned array of elements of 2 bytes" in machine.lane.last_refusal
    assert machine.lane.encode(storage, (14, DENSE, None)) is None
    assert "dtype 14 and layout 0" in machine.lane.last_refusal


def test_an_encode_that_does_not_fit_gives_the_original_back() -> None:
    machine = Machine()
    tensor = values(0)
    storage = native.StorageRef(tensor)
    key = storage.key
    encoded, ticket = machine.lane.encode(storage, (BF16, DENSE, 3))
    with pytest.raises(native.TransferError, match="did not fit a frame with room for 3 units"):
        ticket.wait()
    assert ticket.done() and ticket.failed()
    assert ticket.storage().key == key, "the original is not lost"
    assert encoded.report() is None and encoded.nbytes == 0
    assert machine.pool.statistics().in_use_bytes == 0
    _, arrival = machine.lane.decode(encoded)
    with pytest.raises(native.TransferError, match="never encoded; the encode had failed"):
        arrival.wait()


def test_a_guess_that_was_enough_takes_less_memory_meanwhile() -> None:
    machine = Machine()
    tensor = values(0)
    first, ticket = machine.encode(tensor)
    ticket.wait()
    used = first.report().var_used
    del first, ticket
    peak = machine.pool.statistics().peak_bytes
    again, ticket = machine.encode(tensor, var_capacity=used)
    ticket.wait()
    assert again.report().var_used == used
    assert machine.pool.statistics().peak_bytes == peak
    assert same(machine.decode(again, tensor), tensor)


# ---------------------------------------------------------------- to a file
def test_a_frame_goes_to_a_file_and_comes_back(tmp_path: Path) -> None:
    machine, disk = Machine(), memswap.DiskPool(tmp_path, budget="16MiB")
    tensor = values(0)
    encoded, ticket = machine.lane.encode_to(
        native.StorageRef(tensor), (BF16, DENSE, None), None, disk.native
    )
    ticket.wait()
    assert encoded.swapped and encoded.nbytes == encoded.report().frame_nbytes
    assert disk.statistics().in_use_bytes == encoded.nbytes
    assert machine.pool.statistics().in_use_bytes == 0
    assert same(machine.decode(encoded, tensor), tensor)
    del encoded, ticket
    assert disk.statistics().in_use_bytes == 0


def test_a_full_file_gives_the_original_back(tmp_path: Path) -> None:
    machine, disk = Machine(), memswap.DiskPool(tmp_path, budget="8KiB", extent="4KiB")
    storage = native.StorageRef(values(0))
    _, ticket = machine.lane.encode_to(storage, (BF16, DENSE, None), None, disk.native)
    with pytest.raises(native.TransferError, match="no room for a frame"):
        ticket.wait()
    assert ticket.failed() and ticket.storage() is not None
    assert machine.pool.statistics().in_use_bytes == 0


# ---------------------------------------------------------------- bounds, threads, lifetimes
def test_originals_that_leave_are_bounded() -> None:
    machine = Machine(workers=1, bound=2 * 100_000)
    for seed in range(10):
        machine.encode(values(seed))
        assert machine.lane.leaving_bytes() <= 2 * 100_000
    machine.lane.settle()
    assert machine.lane.leaving_bytes() == 0


def test_everything_may_be_dropped_in_any_order() -> None:
    for order in range(6):
        machine = Machine(workers=order % 3)
        tensor = values(order)
        encoded, ticket = machine.encode(tensor)
        storage, arrival = machine.lane.decode(encoded)
        if order == 0:
            del encoded, ticket, storage, arrival
        elif order == 1:
            del machine, encoded, ticket
            arrival.wait()
            assert same(native.capture(tensor).rebuild(storage, False), tensor)
        elif order == 2:
            del arrival, storage
            ticket.wait()
        elif order == 3:
            machine.lane.stop()
            arrival.wait()
            assert same(native.capture(tensor).rebuild(storage, False), tensor)
        elif order == 4:
            pool = machine.pool
            del machine.lane, encoded, ticket, storage, arrival
            assert pool.statistics().in_use_bytes == 0
        else:
            del tensor, ticket, machine, storage
            arrival.wait()
    gc.collect()


def test_threads_share_a_lane() -> None:
    machine = Machine(workers=2, bound=300_000)
    wrong: list[int] = []

    def work(first: int) -> None:
        for seed in range(first, first + 15):
            tensor = values(seed, 20_000 + seed)
            encoded, _ = machine.encode(tensor)
            if not same(machine.decode(encoded, tensor), tensor):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(100 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert machine.pool.statistics().in_use_bytes == 0


def test_a_device_has_at_most_one_codec() -> None:
    assert native.codec_name(torch.device("cpu")) is not None
    assert native.codec_name(torch.device("meta")) is None
    capsule = native.codec_capsule(torch.device("cpu"))
    native.register_codec("cpu", capsule)  # the same once more changes nothing
    with pytest.raises((ValueError, TypeError)):
        native.register_codec("cpu", object())
