"""Promises of the lane for storages in host memory, through memory and through a file."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from apart import run_warm

from memswap._native import native
from memswap.engine.pools import DiskPool, HostPool

MIB = 2**20
WORKERS = [0, 1, 2]


def bytes_tensor(nbytes: int, seed: int = 0) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=random)


def as_tensor(storage: Any, like: torch.Tensor) -> torch.Tensor:
    assert storage.nbytes == like.untyped_storage().nbytes()
    if storage.nbytes == 0:
        return torch.empty_like(like)
    return native.capture(like).rebuild(storage, shares_counter=False)


@pytest.fixture(params=["host", "disk"])
def pool(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    if request.param == "host":
        return HostPool("256MiB", "4MiB", device="cpu").native
    return DiskPool(tmp_path, "256MiB", "4MiB").native


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("nbytes", [0, 1, 511, 4097, 10 * MIB + 3])
def test_storages_come_back_bit_for_bit(pool: Any, workers: int, nbytes: int) -> None:
    lane = native.WorkerLane(workers=workers)
    data = bytes_tensor(nbytes)
    block = pool.allocate(nbytes)
    sent = lane.send(native.StorageRef(data), block)
    storage, fetched = lane.fetch(block)
    fetched.wait()
    assert torch.equal(as_tensor(storage, data), data)
    sent.wait()
    sent.wait()
    sent.synchronize()
    assert sent.done() and fetched.done()
    assert not sent.failed() and sent.storage() is None


@pytest.mark.parametrize("workers", WORKERS)
def test_a_range_is_not_overwritten_before_its_last_reader(workers: int, tmp_path: Path) -> None:
    # Room for few blocks only: later sends go to bytes that were just fetched.
    for pool in (HostPool(4 * MIB, MIB, device="cpu"), DiskPool(tmp_path, 4 * MIB, MIB)):
        lane = native.WorkerLane(workers=workers)
        data = [bytes_tensor(MIB + 1, seed) for seed in range(20)]
        back: list[Any] = []
        waited = 0
        for tensor in data:
            while (block := pool.native.allocate(tensor.nbytes)) is None:
                back[waited][1].wait()
                waited += 1
            lane.send(native.StorageRef(tensor), block)
            back.append(lane.fetch(block))
            del block
        for (storage, ticket), tensor in reversed(list(zip(back, data, strict=True))):
            ticket.wait()
            assert torch.equal(as_tensor(storage, tensor), tensor), "a block was reused too early"
        assert pool.statistics().peak_bytes < len(data) * MIB, "nothing was reused"


@pytest.mark.parametrize("workers", WORKERS)
def test_memory_can_be_had_at_once_after_a_wait(workers: int) -> None:
    pool = HostPool(MIB, MIB, device="cpu").native
    lane = native.WorkerLane(workers=workers)
    for _ in range(300):
        block = pool.allocate(MIB)
        assert block is not None, "the block of a transfer that has ended is still taken"
        ticket = lane.send(native.StorageRef(torch.empty(MIB, dtype=torch.uint8)), block)
        del block
        ticket.wait()


def test_a_pool_may_be_dropped_under_a_transfer(tmp_path: Path) -> None:
    for _ in range(50):
        pool = DiskPool(tmp_path, 8 * MIB, MIB).native
        lane = native.WorkerLane(workers=2)
        data = bytes_tensor(4000)
        block = pool.allocate(4000)
        del pool
        lane.send(native.StorageRef(data), block)
        storage, ticket = lane.fetch(block)
        del block
        ticket.wait()
        assert torch.equal(as_tensor(storage, data), data)


def test_a_wait_passes_the_queue() -> None:
    pool = HostPool("64MiB", "4MiB", device="cpu").native
    lane = native.WorkerLane(workers=0)
    data = bytes_tensor(1000)
    block = pool.allocate(1000)
    lane.send(native.StorageRef(data), block).wait()
    others = [
        lane.send(native.StorageRef(bytes_tensor(1000)), pool.allocate(1000)) for _ in range(5)
    ]
    storage, ticket = lane.fetch(block)
    ticket.wait()
    assert torch.equal(as_tensor(storage, data), data)
    assert not any(other.done() for other in others), "an urgent fetch stood behind sends"
    lane.settle()
    assert all(other.done() for other in others)


@pytest.mark.parametrize("workers", WORKERS)
def test_a_send_lets_go_of_its_storage_when_it_has_ended(workers: int) -> None:
    pool = HostPool("64MiB", "4MiB", device="cpu").native
    lane = native.WorkerLane(workers=workers)
    storage = native.StorageRef(bytes_tensor(MIB))
    weak = native.WeakStorage(storage)
    ticket = lane.send(storage, pool.allocate(MIB))
    del storage
    ticket.wait()
    assert weak.expired(), "the memory that was sent away is still held"
    assert lane.leaving_bytes() == 0


def test_sends_own_no_more_than_the_bound() -> None:
    pool = HostPool("64MiB", "4MiB", device="cpu").native
    lane = native.WorkerLane(workers=0, max_leaving_bytes=2 * MIB)
    tickets = []
    for _ in range(8):
        tickets.append(lane.send(native.StorageRef(bytes_tensor(MIB)), pool.allocate(MIB)))
        assert lane.leaving_bytes() <= 2 * MIB
    assert [ticket.done() for ticket in tickets] == [True] * 6 + [False] * 2
    alone = lane.send(native.StorageRef(bytes_tensor(3 * MIB)), pool.allocate(3 * MIB))
    assert lane.leaving_bytes() == 3 * MIB, "a storage longer than the bound goes alone"
    lane.set_max_leaving_bytes(0)
    lane.send(native.StorageRef(bytes_tensor(MIB)), pool.allocate(MIB))
    assert not alone.done()
    lane.settle()
    assert lane.leaving_bytes() == 0


def test_wrong_arguments_are_named() -> None:
    pool = HostPool("1MiB", "1MiB", device="cpu").native
    lane = native.WorkerLane()
    with pytest.raises(ValueError, match="expected 10 bytes, found 11"):
        lane.send(native.StorageRef(bytes_tensor(10)), pool.allocate(11))
    with pytest.raises(ValueError, match="found None"):
        lane.send(native.StorageRef(bytes_tensor(10)), None)
    with pytest.raises(ValueError, match="found None"):
        lane.fetch(None)
    with pytest.raises(ValueError, match="on meta"):
        lane.send(native.StorageRef(torch.empty(10, device="meta")), pool.allocate(40))


def test_a_failed_fetch_raises_at_every_wait(tmp_path: Path) -> None:
    pool = DiskPool(tmp_path, "1MiB", "1MiB").native
    lane = native.WorkerLane()
    block = pool.allocate(100_000)
    lane.send(native.StorageRef(bytes_tensor(100_000)), block).wait()
    for entry in Path("/proc/self/fd").iterdir():
        if entry.exists() and os.readlink(entry).startswith(str(tmp_path)):
            os.truncate(entry, 0)
    _, ticket = lane.fetch(block)
    for _ in range(2):
        with pytest.raises(native.TransferError, match="expected 100000 bytes from offset 0"):
            ticket.wait()
    with pytest.raises(native.TransferError):
        ticket.synchronize()
    assert ticket.done() and ticket.failed()
    assert ticket.storage() is None, "a fetch has no storage to give back"


def test_a_failed_send_keeps_the_storage(tmp_path: Path) -> None:
    # The disk is there when space is set aside, and gone when it is written: a lower limit stands
    # in for a failing disk.
    done = run_warm(
        """
import resource, sys, torch
from memswap._native import native
from memswap.engine.pools import DiskPool
pool = DiskPool(sys.argv[1], "4MiB", "2MiB").native
lane = native.WorkerLane(workers=1)
block = pool.allocate(1 << 20)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
data = torch.arange(1 << 20, dtype=torch.int64).to(torch.uint8)
kept = data.clone()
view = native.capture(data)
ticket = lane.send(native.StorageRef(data), block)
del data
try:
    ticket.wait()
except native.TransferError as error:
    print(error)
print(ticket.failed(), lane.leaving_bytes())
print(torch.equal(view.rebuild(ticket.storage(), shares_counter=False), kept))
_, fetched = lane.fetch(block)
try:
    fetched.wait()
except native.TransferError as error:
    print(error)
lane.settle()
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
""",
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    error, state, intact, refetch = done.stdout.strip().splitlines()
    assert "writing to the swap file" in error and "The source in memory is intact" in error
    assert state == "True 0"
    assert intact == "True", "the only copy of a tensor was lost"
    assert "never sent away; the send had failed" in refetch


def test_storages_that_need_python_to_die_do_not_block() -> None:
    # frombuffer's storage takes the GIL in its deleter, in the worker, while this thread waits.
    done = run_warm(
        """
import torch
from memswap._native import native
from memswap.engine.pools import HostPool
pool = HostPool("64MiB", "1MiB", device="cpu").native
lane = native.WorkerLane(workers=2, max_leaving_bytes=1 << 20)
for i in range(300):
    data = torch.frombuffer(bytearray(100_000), dtype=torch.uint8)
    ticket = lane.send(native.StorageRef(data), pool.allocate(100_000))
    del data
    if i % 3 == 0:
        ticket.wait()
    elif i % 7 == 0:
        lane.settle()
del lane
print("alive")
"""
    )
    assert done.stdout.strip() == "alive", done.stderr


def test_waiting_lets_other_threads_run() -> None:
    done = run_warm(
        """
import sys, threading, time, torch
from memswap._native import native
from memswap.engine.pools import HostPool
sys.setswitchinterval(1000)  # others run only where this thread lets go of the GIL
n = 200 << 20
pool = HostPool("1GiB", "256MiB", device="cpu").native
lane = native.WorkerLane(workers=1)
data = native.StorageRef(torch.ones(n, dtype=torch.uint8))
turns = 0
stop = threading.Event()
def count():
    global turns
    while not stop.is_set():
        turns += 1
        time.sleep(0)
thread = threading.Thread(target=count)
thread.start()
for _ in range(50):  # a worker may be done before anybody waits
    ticket = lane.send(data, pool.allocate(n))
    before = turns
    ticket.wait()
    if turns > before:
        break
print(turns > before)
stop.set()
thread.join()
"""
    )
    assert done.stdout.strip() == "True", done.stdout + done.stderr


def test_many_threads_use_one_lane(pool: Any) -> None:
    lane = native.WorkerLane(workers=2, max_leaving_bytes=MIB)
    wrong: list[int] = []

    def work(seed: int) -> None:
        for step in range(40):
            data = bytes_tensor(1 + (seed * 7919 + step * 104729) % 90_000, seed)
            block = pool.allocate(data.nbytes)
            sent = lane.send(native.StorageRef(data.clone()), block)
            storage, fetched = lane.fetch(block)
            if step % 2:
                sent.wait()
            fetched.wait()
            if not torch.equal(as_tensor(storage, data), data):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, f"threads {wrong} got other bytes back"
    lane.settle()
    assert lane.leaving_bytes() == 0


@pytest.mark.parametrize("keep", ["ticket", "pool, ticket, lane, block"])
def test_the_interpreter_ends_with_work_pending(keep: str, tmp_path: Path) -> None:
    done = run_warm(
        f"""
import sys, torch
from memswap._native import native
from memswap.engine.pools import DiskPool, HostPool
for pool in (HostPool("512MiB", device="cpu").native, DiskPool(sys.argv[1], "512MiB").native):
    lane = native.WorkerLane(workers=2)
    pool.reserve(128 << 20)
    for _ in range(30):
        block = pool.allocate(4 << 20)
        data = torch.frombuffer(bytearray(4 << 20), dtype=torch.uint8)
        ticket = lane.send(native.StorageRef(data), block)
        del data
import builtins
builtins.kept = ({keep})
for name in ("pool", "lane", "block", "ticket"):
    del globals()[name]
""",
        tmp_path,
    )
    assert done.returncode == 0, f"exit status {done.returncode}: {done.stderr}"
    assert done.stderr == ""


def test_a_forked_child_may_drop_what_it_inherits() -> None:
    done = run_warm(
        """
import os, torch
from memswap._native import native
from memswap.engine.pools import HostPool
pool = HostPool("64MiB", "1MiB", device="cpu").native
pool.reserve(2 << 20)
pool.wait_reserved()
lane = native.WorkerLane(workers=2)
block = pool.allocate(1000)
lane.send(native.StorageRef(torch.zeros(1000, dtype=torch.uint8)), block).wait()
child = os.fork()
if child == 0:
    del lane, block, pool
    raise SystemExit(0)  # the interpreter ends as ever, atexit handlers included
_, status = os.waitpid(child, 0)
storage, ticket = lane.fetch(block)
ticket.wait()
print(os.waitstatus_to_exitcode(status), storage.nbytes)
"""
    )
    assert done.stdout.strip() == "0 1000", done.stdout + done.stderr


def test_a_forked_child_neither_hangs_nor_takes_its_parents_memory() -> None:
    """Both would give the same range of the file to tensors of their own."""
    done = run_warm(
        """
import os, tempfile, torch, memswap
from torch import nn
torch.set_num_threads(1)  # libgomp's threads are not in the child either, and it waits for them
model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)])
x = torch.randn(512, 64)
pool = memswap.DiskPool(tempfile.gettempdir(), budget="64MiB")
manager = memswap.manage(model, memswap.Policy(action=memswap.Action.SWAP), pool=pool)
model(x).sum().backward()
expected = [p.grad.clone() for p in model.parameters()]
loss = model(x).sum()  # is on its way when the child begins
child = os.fork()
if child == 0:
    model.zero_grad()
    try:
        loss.backward()
    except memswap.TransferError as error:
        assert "forked" in str(error), error
    model.zero_grad()
    model(x).sum().backward()
    same = all(torch.equal(p.grad, e) for p, e in zip(model.parameters(), expected))
    assert same and "forked" in pool.statistics().last_refusal
    manager.remove()
    raise SystemExit(0)
_, status = os.waitpid(child, 0)
model.zero_grad()
loss.backward()
same = all(torch.equal(p.grad, e) for p, e in zip(model.parameters(), expected))
print(os.waitstatus_to_exitcode(status), same)
"""
    )
    assert done.stdout.strip() == "0 True", done.stdout + done.stderr


def test_a_lane_of_streams_says_that_a_cpu_has_none() -> None:
    with pytest.raises(RuntimeError, match="needs an accelerator with an index, found cpu"):
        native.StreamLane(torch.device("cpu"), max_leaving_bytes=0, chunk_bytes=1 << 20)
