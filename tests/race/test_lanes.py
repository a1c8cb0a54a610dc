"""StreamLane by itself: whole storages away and back, and what its tickets promise."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from helpers import same_bits
from race_workloads import DEVICE, new_bytes, new_lane, new_pool, on_host, run_apart, send_stream

from memswap._native import native
from simdev import _C, counters, mutations


class Away:
    """A tensor that was sent: its view, its block and its ticket. The tensor itself is gone."""

    def __init__(self, lane: Any, pool: Any, tensors: list[torch.Tensor]) -> None:
        tensor = tensors.pop()
        self.lane = lane
        self.view = native.capture(tensor)
        self.block = pool.native.allocate(self.view.storage_nbytes)
        storage = native.StorageRef(tensor)
        self.identity = native.WeakStorage(storage)
        self.ticket = lane.send(storage, self.block)

    @property
    def freed(self) -> bool:
        return self.identity.expired()

    def back(self) -> torch.Tensor:
        storage, arrival = self.lane.fetch(self.block)
        arrival.wait()
        return self.view.rebuild(storage, False)


def on_lazy_machine(request: pytest.FixtureRequest) -> bool:
    return "lazy" in request.node.name


# ---------------------------------------------------------------- whole storages
@pytest.mark.parametrize("chunk_bytes", [512, 1000, 1 << 20])
@pytest.mark.parametrize("nbytes", [1, 511, 4097, 70_001])
def test_a_storage_of_any_size_comes_back_bit_for_bit(nbytes: int, chunk_bytes: int) -> None:
    lane, pool = new_lane(chunk_bytes=chunk_bytes), new_pool()
    expected = new_bytes(nbytes).cpu()
    away = Away(lane, pool, [new_bytes(nbytes)])
    away.ticket.wait()
    assert away.freed, "the ticket was waited for and still holds the device memory"
    assert same_bits(away.back().cpu(), expected), f"{nbytes} bytes in chunks of {chunk_bytes}"


def test_the_whole_storage_moves_and_every_view_of_it_can_be_rebuilt() -> None:
    lane, pool = new_lane(chunk_bytes=512), new_pool()
    base = torch.arange(2000, dtype=torch.float32).to(DEVICE)
    views = [base[3:1500:7], base.view(40, 50).t(), base[10:20].expand(4, 10), base[1999:]]
    expected = on_host(views)
    captured = [native.capture(view) for view in views]
    block = pool.native.allocate(8000)
    ticket = lane.send(native.StorageRef(base), block)
    del base, views
    ticket.wait()
    storage, arrival = lane.fetch(block)
    arrival.wait()
    for view, right in zip(captured, expected, strict=True):
        assert same_bits(view.rebuild(storage, False).cpu(), right)


def test_chunk_bytes_is_the_longest_single_copy() -> None:
    def tasks_of_sending(chunk_bytes: int) -> int:
        lane, pool = new_lane(chunk_bytes=chunk_bytes), new_pool()
        tensor, block = new_bytes(4097), pool.native.allocate(4097)
        torch.accelerator.synchronize()
        before = counters.tasks()[0]
        ticket = lane.send(native.StorageRef(tensor), block)
        tasks = counters.tasks()[0] - before
        ticket.wait()
        return tasks

    assert tasks_of_sending(512) - tasks_of_sending(1 << 20) == 8, "4097 bytes are 9 chunks of 512"


def test_a_block_can_be_fetched_again_and_again_into_storages_of_their_own() -> None:
    lane, pool = new_lane(), new_pool()
    expected = new_bytes(4097).cpu()
    away = Away(lane, pool, [new_bytes(4097)])
    away.ticket.wait()
    copies = [away.back() for _ in range(20)]
    assert len({copy.data_ptr() for copy in copies}) == 20, "two fetches share memory"
    copies[0].zero_()
    assert all(same_bits(copy.cpu(), expected) for copy in copies[1:])
    assert len(away.block.uses()) <= 22, "a block collects tickets for ever"


def test_two_sends_of_one_storage_do_not_disturb_each_other() -> None:
    lane, pool = new_lane(), new_pool()
    tensor = new_bytes(4097)
    expected = tensor.cpu()
    first, second = Away(lane, pool, [tensor]), Away(lane, pool, [tensor])
    first.ticket.wait()
    del tensor
    assert not first.freed, "the second send still owns the storage"
    second.ticket.wait()
    assert first.freed
    assert same_bits(first.back().cpu(), expected) and same_bits(second.back().cpu(), expected)


def test_a_storage_that_somebody_holds_is_neither_freed_nor_changed() -> None:
    lane, pool = new_lane(), new_pool()
    held = new_bytes(4097)
    expected = held.cpu()
    away = Away(lane, pool, [held])
    away.ticket.wait()
    lane.settle()
    assert not away.freed and same_bits(held.cpu(), expected)
    held.add_(1)
    assert same_bits(away.back().cpu(), expected), "an edit after the send reached the away form"


# ---------------------------------------------------------------- tickets
def test_wait_lets_go_of_the_storage_and_may_be_called_again() -> None:
    lane, pool = new_lane(), new_pool()
    away = Away(lane, pool, [new_bytes(4097)])
    assert lane.leaving_bytes() == 4097 and not away.freed
    for _ in range(3):
        away.ticket.wait()
    assert lane.leaving_bytes() == 0 and away.freed and not away.ticket.failed()


def test_done_never_blocks_and_answers_for_the_copy_itself(
    request: pytest.FixtureRequest,
) -> None:
    lane, pool = new_lane(), new_pool()
    counters.reset()
    away = Away(lane, pool, [new_bytes(4097)])
    synced = counters.host_syncs()
    done = away.ticket.done()
    assert counters.host_syncs() == synced, "done() blocked the host"
    if on_lazy_machine(request):
        assert not done and not away.freed, "nothing has run, and the ticket says it is done"
    away.ticket.synchronize()
    assert away.ticket.done() and away.freed


def test_synchronize_blocks_until_the_bytes_are_in_the_block() -> None:
    lane, pool = new_lane(chunk_bytes=512), new_pool()
    expected = new_bytes(4097).cpu()
    away = Away(lane, pool, [new_bytes(4097)])
    away.ticket.synchronize()
    found = torch.empty(4097, dtype=torch.uint8)
    away.block.read(found)
    assert same_bits(found, expected)


@pytest.mark.parametrize("how", ["abandon", "drop"])
def test_a_ticket_that_nobody_waits_for_lets_go_in_order(how: str) -> None:
    lane, pool = new_lane(), new_pool()
    expected = new_bytes(4097).cpu()
    away = Away(lane, pool, [new_bytes(4097)])
    if how == "abandon":
        away.ticket.abandon()
    del away.ticket
    if how == "drop":  # the lane still lists the send
        lane.settle()
    assert away.freed
    scratch = [new_bytes(4097, seed=9) for _ in range(3)]  # takes the memory that was freed
    assert same_bits(away.back().cpu(), expected)
    del scratch


def test_a_fetch_that_nobody_waits_for_frees_its_storage_in_order() -> None:
    lane, pool = new_lane(), new_pool()
    away = Away(lane, pool, [new_bytes(4097)])
    away.ticket.wait()
    storage, arrival = lane.fetch(away.block)
    identity = native.WeakStorage(storage)
    del storage
    assert not identity.expired(), "the ticket does not keep the storage alive"
    del arrival, away
    gc.collect()
    again = new_bytes(4097, seed=5)
    assert same_bits(again.cpu(), new_bytes(4097, seed=5).cpu())


def test_the_block_alone_keeps_an_unwaited_fetch_in_order_until_the_pool_goes() -> None:
    """Uses of a block are tickets too: the last of them must not free memory under a copy."""
    lane, pool = new_lane(), new_pool()
    away = Away(lane, pool, [new_bytes(70_001)])
    away.ticket.wait()
    lane.fetch(away.block)
    del away, pool, lane


def test_tickets_outlive_their_lane_and_blocks_their_pool() -> None:
    lane, pool = new_lane(), new_pool()
    expected = new_bytes(4097).cpu()
    away = Away(lane, pool, [new_bytes(4097)])
    storage, arrival = lane.fetch(away.block)
    del lane, pool, away.lane
    gc.collect()
    arrival.wait()
    assert same_bits(away.view.rebuild(storage, False).cpu(), expected)
    away.ticket.wait()
    assert away.freed


def test_every_stream_that_waits_for_a_fetch_comes_after_it() -> None:
    lane, pool = new_lane(), new_pool()
    expected = new_bytes(70_001).cpu()
    away = Away(lane, pool, [new_bytes(70_001)])
    away.ticket.wait()
    storage, arrival = lane.fetch(away.block)
    found = []
    for _ in range(3):
        stream = torch.Stream(device=DEVICE)
        with stream:
            arrival.wait()
            found += on_host([away.view.rebuild(storage, False).clone()])
    assert all(same_bits(copy, expected) for copy in found)


# ---------------------------------------------------------------- what leaves at once
def test_settle_orders_everything_after_the_sends_and_frees_their_memory() -> None:
    lane, pool = new_lane(), new_pool()
    parts = [Away(lane, pool, [new_bytes(n)]) for n in (1, 511, 4097)]
    lane.settle()
    assert lane.leaving_bytes() == 0 and all(part.freed for part in parts)
    parts[0].ticket.wait()  # and waiting afterwards is harmless


def test_no_more_bytes_leave_at_once_than_the_bound_allows() -> None:
    lane, pool = new_lane(max_leaving_bytes=10_000), new_pool()
    expected = [new_bytes(4000, seed=i).cpu() for i in range(8)]
    parts = []
    for i in range(8):
        parts.append(Away(lane, pool, [new_bytes(4000, seed=i)]))
        assert lane.leaving_bytes() <= 10_000, "sends own more device memory than allowed"
    lane.set_max_leaving_bytes(4000)
    parts.append(Away(lane, pool, [new_bytes(4000, seed=99)]))
    assert lane.leaving_bytes() <= 4000
    for part, right in zip(parts[:8], expected, strict=True):
        assert same_bits(part.back().cpu(), right)


def test_a_storage_beyond_the_bound_leaves_alone() -> None:
    lane, pool = new_lane(max_leaving_bytes=1000), new_pool()
    small = Away(lane, pool, [new_bytes(900)])
    large = Away(lane, pool, [new_bytes(4097)])
    assert small.freed and lane.leaving_bytes() in (0, 4097)
    large.ticket.wait()
    assert large.freed


def test_only_a_bound_makes_compute_wait_for_a_send(request: pytest.FixtureRequest) -> None:
    for bound in (0, 10_000):
        lane, pool = new_lane(max_leaving_bytes=bound), new_pool()
        compute = torch.accelerator.current_stream()
        # Counts the waits. What they order is only memory, which nobody reads again here.
        with mutations.drop_waits(waiter=compute, source=send_stream(lane)) as waits:
            parts = [Away(lane, pool, [new_bytes(4000)]) for _ in range(20)]
            counted = waits.hits
            torch.accelerator.synchronize()
        if bound == 0:
            assert counted == 0, "compute waited although nothing bounds what leaves"
        elif on_lazy_machine(request):
            assert counted > 0, "the bound was never reached: the other half says nothing"
            request.getfixturevalue("_laboratory").forgive()
        del parts


# ---------------------------------------------------------------- blocks
def test_a_block_passes_from_lane_to_lane_behind_its_tickets() -> None:
    """Two lanes on two streams share a pool that has room for one storage."""
    pool = new_pool(budget=4096, slab=4096)
    streams = [torch.Stream(device=DEVICE) for _ in range(2)]
    lanes = [new_lane(), new_lane()]
    found: list[list[torch.Tensor]] = [[], []]
    expected: list[list[torch.Tensor]] = [[], []]
    sources = [[new_bytes(4001, seed=10 * i + m) for m in range(2)] for i in range(4)]
    for i in range(4):
        for m in range(2):
            expected[m].append(sources[i][m].cpu())
    for i in range(4):
        for m in range(2):
            with streams[m]:
                tensors = [sources[i][m].clone()]
                away = Away(lanes[m], pool, tensors)
                away.ticket.wait()
                found[m].append(away.back().clone())
                del away
    assert pool.native.statistics()["slabs_acquired"] == 1
    for m in (1, 0):
        with streams[m]:
            for ours, right in zip(on_host(found[m]), expected[m], strict=True):
                assert same_bits(ours, right), "a block was used before its previous owner's copies"
        found[m].clear()


def test_a_dropped_block_is_gated_by_its_tickets(request: pytest.FixtureRequest) -> None:
    lane, pool = new_lane(), new_pool(budget=8192, slab=8192)
    away = Away(lane, pool, [new_bytes(4001)])
    away.ticket.wait()
    del away
    statistics = pool.native.statistics()
    assert statistics["blocks"] == 0
    if on_lazy_machine(request):
        assert statistics["pending"] == 1, "a block went back while a copy still writes to it"
    torch.accelerator.synchronize()
    again = [pool.native.allocate(4001) for _ in range(2)]
    assert all(again), "a range whose copies have ended was not handed out again"


# ---------------------------------------------------------------- refusals
def test_a_block_of_another_size_is_refused() -> None:
    lane, pool = new_lane(), new_pool()
    tensor = new_bytes(4097)
    with pytest.raises(ValueError, match="expected 4097 bytes, found 4096"):
        lane.send(native.StorageRef(tensor), pool.native.allocate(4096))


def test_a_block_that_is_no_memory_is_refused(tmp_path: Any) -> None:
    import memswap

    lane, pool = new_lane(), memswap.DiskPool(tmp_path, budget="1MiB", extent="64KiB")
    with pytest.raises(RuntimeError, match="not in host memory"):
        lane.send(native.StorageRef(new_bytes(4096)), pool.native.allocate(4096))


@pytest.mark.one_schedule
@pytest.mark.own_laboratory
def test_a_block_that_is_no_memory_cannot_be_fetched(tmp_path: Any) -> None:
    """In a process of its own: it would be a null address."""
    program = f"""
import torch, simdev, memswap
from memswap._native import native
device = torch.device(simdev.NAME, 0)
lane = native.StreamLane(device, max_leaving_bytes=0, chunk_bytes=1 << 20)
pool = memswap.DiskPool({str(tmp_path)!r}, budget="1MiB", extent="64KiB")
try:
    lane.fetch(pool.native.allocate(4096))
except RuntimeError as error:
    print("refused:", error)
"""
    ended = run_apart(program)
    assert ended.returncode == 0, f"the process died: {ended.returncode}\n{ended.stderr[-500:]}"
    assert "refused:" in ended.stdout and "host memory" in ended.stdout


def test_a_storage_of_another_device_is_refused() -> None:
    if _C.device_count < 2:
        pytest.skip("needs two devices")
    lane, pool = new_lane(), new_pool()
    elsewhere = torch.ones(16, device=torch.device(DEVICE.type, 1))
    with pytest.raises(RuntimeError, match="this lane serves"):
        lane.send(native.StorageRef(elsewhere), pool.native.allocate(64))


def test_a_lane_for_host_memory_or_without_chunks_is_refused() -> None:
    with pytest.raises(RuntimeError, match="chunk_bytes must be positive"):
        new_lane(chunk_bytes=0)
    with pytest.raises(RuntimeError, match="stream"):
        new_lane(device=torch.device("cpu"))
