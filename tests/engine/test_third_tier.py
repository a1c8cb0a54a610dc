"""A DiskPool behind an accelerator, and behind a HostPool: the same bits, and nothing is lost."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import pytest
import torch
from disk_faults import READS, WRITES
from group_helpers import assert_released, leaf_and_gradient, make_calls, sines
from helpers import (
    EVERYTHING,
    assert_pool_empty,
    assert_same_gradients,
    collect,
    files_no_longer_than,
    flush_autograd,
    gradients,
    new_input,
    new_stack,
    plain_gradients,
    random,
    same_bits,
)
from optimizer_helpers import (
    ROOM,
    assert_same,
    loss_of,
    maker,
    manage,
    new_model,
    plain_training,
    state_bits,
    train,
)

import memswap
from memswap._native import native
from memswap.engine import lane as lanes
from memswap.engine.lane import open_staged_lane

pytestmark = pytest.mark.accelerator


@pytest.fixture(autouse=True)
def _small_staging(monkeypatch):
    """The lane's pinned memory is made in small slabs, and is full after some storages."""
    monkeypatch.setattr(lanes, "STAGING_BYTES", 64 << 10)

    def host_pool(budget: Any = None, **options: Any) -> memswap.HostPool:
        return memswap.HostPool("64MiB", **options | {"slab": "1MiB"})

    monkeypatch.setattr(lanes, "HostPool", host_pool)


def staged_lane(opened: Iterable[Any]) -> Any:
    """The lane between the accelerator and the file.

    A CPU's lane is there as well where something is saved in host memory, as CUDA's attention does
    with its seed.
    """
    (lane,) = (one.lane for one in opened if isinstance(one.lane, native.StagedLane))
    return lane


@pytest.fixture
def new_disk(tmp_path):
    return lambda: memswap.DiskPool(tmp_path, budget="64MiB", extent="1MiB")


@pytest.fixture
def new_overflowing(device, new_disk):
    """A HostPool that is soon full, and a file behind it."""
    return lambda: memswap.HostPool(
        budget="64KiB", slab="64KiB", device=device, overflow=new_disk()
    )


@pytest.fixture(params=["new_disk", "new_overflowing"])
def new_pool(request):
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("action", ["swap", "encode_swap"])
def test_gradients_by_way_of_a_file(device, new_pool, action, every_tensor_is_encoded):
    pool = new_pool()
    policy = memswap.Policy(action=memswap.Action(action), min_bytes=1)
    model = new_stack(device)
    with memswap.manage(model.layers, policy, pool=pool) as manager:
        for step in range(3):
            model.zero_grad(set_to_none=True)
            x = new_input(device, seed=step)
            model(x).backward()
            assert_same_gradients(gradients(model), plain_gradients(device, x))
        assert manager.stats().moved_storages > 0
    flush_autograd(device)
    assert_pool_empty(pool)


@pytest.mark.parametrize("room", [ROOM, 1])
@pytest.mark.parametrize("form", ["single", "foreach"])
def test_optimizer_state_by_way_of_a_file(device, new_pool, form, room):
    pool = new_pool()
    make, plain = maker("AdamW", form), plain_training(device, "AdamW", form)
    assert_same(train(device, make, pool, managed=True, room=room), plain)
    gc.collect()
    assert_pool_empty(pool)


def test_a_full_host_pool_overflows_into_the_file(device, new_overflowing):
    overflowing = new_overflowing()
    tensors = [random(device, 4096, seed=seed) for seed in range(12)]  # 16 KiB each
    assert all([memswap.swap_out(tensor, overflowing) for tensor in tensors])
    assert overflowing.statistics().in_use_bytes == 64 << 10
    assert overflowing.overflow.statistics().in_use_bytes == 128 << 10
    for seed, tensor in enumerate(tensors):
        memswap.swap_in(tensor)
        assert same_bits(tensor, random(device, 4096, seed=seed))
    assert_pool_empty(overflowing)
    assert_pool_empty(overflowing.overflow)


def test_a_tensor_in_a_file_comes_back_as_it_was(device, new_disk):
    """Also on another stream, and after the write has ended."""
    disk = new_disk()
    stream = torch.Stream(device=device)
    for round_number in range(4):
        tensor = random(device, 3000, seed=round_number)
        assert memswap.swap_out(tensor, disk)
        if round_number % 2:
            disk.lanes[device].finish_writes()
            assert disk.lanes[device].staged_bytes() == 0, "pinned memory is kept"
        churn = torch.full((3000,), 7.0, device=device)
        if round_number > 1:
            stream.wait_stream(torch.accelerator.current_stream())
            with stream:
                memswap.swap_in(tensor)
                assert same_bits(tensor, random(device, 3000, seed=round_number))
        else:
            memswap.swap_in(tensor)
            assert same_bits(tensor, random(device, 3000, seed=round_number))
        del churn
    torch.accelerator.synchronize()


def test_a_storage_longer_than_the_staging_memory_goes_alone(device, new_disk):
    disk = new_disk()
    tensor = random(device, 40_000)
    assert memswap.swap_out(tensor, disk)
    memswap.swap_in(tensor)
    assert same_bits(tensor, random(device, 40_000))


@pytest.mark.parametrize("room", [ROOM, 1])
@pytest.mark.parametrize("fault", WRITES)
def test_a_disk_that_cannot_be_written_keeps_bytes_in_host_memory(
    device, new_disk, tmp_path, fault, room
):
    disk = new_disk()
    disk.reserve("1MiB")  # space is set aside, and then the disk fails
    # What stands in the file's place is not to be read; the first step has nothing to read.
    failing = 2 if fault in ("no byte", "short writes") else 0
    model = new_model(device)
    optimizer = maker("AdamW")(model.parameters())
    manage(optimizer, disk, room=room)
    reference = new_model(device)
    plain = maker("AdamW")(reference.parameters())
    with pytest.warns(UserWarning, match="could not take optimizer state"):
        for step in range(6):
            for one, other in ((optimizer, model), (plain, reference)):
                one.zero_grad()
                loss_of(other, device, step).backward()
            plain.step()
            if step == failing:
                with WRITES[fault](tmp_path):
                    optimizer.step()
                    state_bits(optimizer, model)
                    for lane in open_lanes(optimizer):
                        lane.finish_writes()
            else:
                optimizer.step()
    assert_same(state_bits(optimizer, model), state_bits(plain, reference))
    del optimizer
    gc.collect()
    assert_pool_empty(disk)


@pytest.mark.parametrize("fault", WRITES)
def test_a_disk_that_cannot_take_activations_is_told_and_nothing_is_lost(
    device, new_disk, tmp_path, fault
):
    disk = new_disk()
    disk.reserve("1MiB")
    model, x = new_stack(device), new_input(device)
    plain = plain_gradients(device, x, x)
    with memswap.manage(model.layers, EVERYTHING, pool=disk) as manager:
        with pytest.warns(UserWarning, match="could not take saved activations"):
            with WRITES[fault](tmp_path):
                loss = model(x)
                torch.accelerator.synchronize()
                staged_lane(manager._engine.open_transfers()).finish_writes()
                loss.backward()
                del loss
            model(x).backward()  # the next forward says it
        assert_same_gradients(gradients(model), plain)
    collect()
    flush_autograd(device)
    assert_pool_empty(disk)


@pytest.mark.own_form("a recipe writes nothing")
@pytest.mark.parametrize("fault", WRITES)
def test_a_disk_that_cannot_take_a_groups_tensors_is_told_with_the_next_batch(
    device, new_disk, tmp_path, fault
):
    disk = new_disk()
    disk.reserve("1MiB")
    group = memswap.Group("block", EVERYTHING, pool=disk)
    x, expected = leaf_and_gradient(device)
    batch, loss = collected_of(group, x)
    with WRITES[fault](tmp_path):
        make_calls(batch, "ow")
        lane = group._groups.lane()
        lane.finish_writes()
    make_calls(batch, "lW")
    loss.backward()
    assert same_bits(x.grad, expected)
    with pytest.warns(UserWarning, match="could not take saved activations"):
        collected_of(group, x)
    assert_released(group, disk, device)


def collected_of(group: memswap.Group, x: torch.Tensor) -> tuple[Any, torch.Tensor]:
    with group as batch:
        loss = sines(x)
    return batch, loss


@pytest.mark.parametrize("fault", WRITES)
def test_a_disk_that_cannot_take_single_tensors_is_told_with_the_next_one(
    device, new_disk, tmp_path, fault
):
    disk = new_disk()
    disk.reserve("1MiB")
    first, second = random(device, 3000, seed=1), random(device, 3000, seed=2)
    with WRITES[fault](tmp_path):
        assert memswap.swap_out(first, disk)
        disk.lanes[device].finish_writes()
    with pytest.warns(UserWarning, match="swap_out: a file could not take tensors"):
        assert memswap.swap_out(second, disk)
    for seed, tensor in enumerate((first, second), start=1):
        memswap.swap_in(tensor)
        assert same_bits(tensor, random(device, 3000, seed=seed))


def test_bytes_written_to_a_file_are_counted_and_told(device, new_disk):
    disk = new_disk()
    model = new_model(device)
    optimizer = maker("AdamW")(model.parameters())
    manager = manage(optimizer, disk)
    written = []
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, device, step).backward()
        optimizer.step()
        for lane in open_lanes(optimizer):
            lane.finish_writes()
        written.append(disk.statistics().written_bytes)
    state = manager.statistics().away_bytes
    assert [after - before for before, after in pairwise(written)] == [state] * 3, (
        "a step writes all of the state once"
    )
    report = manager.report()
    assert "written to the file" in report and "a day" in report
    assert new_host_pool_statistics(device).written_bytes == 0


def new_host_pool_statistics(device: Any) -> memswap.engine.pools.PoolStatistics:
    pool = memswap.HostPool(budget="1MiB", slab="64KiB", device=device)
    model = new_model(device)
    optimizer = maker("AdamW")(model.parameters())
    manage(optimizer, pool)
    loss_of(model, device, 0).backward()
    optimizer.step()
    return pool.statistics()


def open_lanes(optimizer: Any) -> list[Any]:
    mover = vars(optimizer)["_memswap_managed"]._mover
    return [one.lane for one in mover._transfers.all()]


@pytest.mark.own_form("a recipe leaves without a pool")
def test_a_disk_without_space_to_set_aside_is_told_and_tensors_stay(device, new_disk):
    """Before anything is written: whatever was to leave is where it was."""
    disk = new_disk()
    model, x = new_stack(device), new_input(device)
    plain = plain_gradients(device, x)
    with memswap.manage(model.layers, EVERYTHING, pool=disk) as manager:
        with pytest.warns(UserWarning, match="could not get a slab"), files_no_longer_than(0):
            model(x).backward()
        assert manager.stats().moved_storages == 0
        assert_same_gradients(gradients(model), plain)
        model.zero_grad(set_to_none=True)
        disk.trim()  # the disk has space again: ask it now, and not in a second
        model(x).backward()
        assert manager.stats().moved_storages > 0
        assert_same_gradients(gradients(model), plain)
    flush_autograd(device)
    assert_pool_empty(disk)


def test_what_activations_write_is_told_for_the_drives_sake(device, new_disk):
    disk = new_disk()
    model = new_stack(device)
    with memswap.manage(model.layers, EVERYTHING, pool=disk) as manager:
        for step in range(3):
            model(new_input(device, seed=step)).backward()
            staged_lane(manager._engine.open_transfers()).finish_writes()
        written, report = disk.statistics().written_bytes, manager.report()
    assert written > 0
    a_forward = memswap.engine.units.format_bytes(written / 2)  # two have ended
    assert f"disk: {a_forward} written to the file a forward" in report
    assert "a day at this rate" in report


@pytest.mark.parametrize("fault", READS)
def test_a_disk_that_cannot_be_read_is_an_error_and_the_state_can_be_asked_for_again(
    device, new_disk, tmp_path, fault
):
    disk = new_disk()
    model = new_model(device)
    optimizer = maker("AdamW")(model.parameters())
    manage(optimizer, disk)
    loss_of(model, device, 0).backward()
    optimizer.step()
    expected = state_bits(optimizer, model)
    for lane in open_lanes(optimizer):
        lane.finish_writes()
        assert lane.staged_bytes() == 0
    with READS[fault](tmp_path):
        with pytest.raises(memswap.TransferError, match="cannot be read back"):
            optimizer.state_dict()
    collect()
    assert_same(state_bits(optimizer, model), expected)


@pytest.mark.parametrize("fault", READS)
def test_gradients_are_refused_where_the_file_cannot_be_read(device, new_disk, tmp_path, fault):
    disk = new_disk()
    model = new_stack(device, depth=1)
    saved = memswap.saved_tensors(EVERYTHING, pool=disk, prefetch_bytes=0)
    with saved:
        loss = model(new_input(device))
    saved._engine.settle()
    staged_lane(saved._engine._transfers.all()).finish_writes()
    with READS[fault](tmp_path):
        with pytest.raises(memswap.TransferError):
            loss.backward()
    del loss
    collect()
    flush_autograd(device)


def test_without_pinned_memory_bytes_go_by_way_of_pageable_memory(device, new_disk):
    disk = new_disk()
    if device.type == "cuda":
        pytest.skip("needs a driver that refuses: --device sim")
    from simdev import faults

    with faults.pinned_budget(0):
        tensors = [random(device, 3000, seed=seed) for seed in range(3)]
        assert all([memswap.swap_out(tensor, disk) for tensor in tensors])
        for seed, tensor in enumerate(tensors):
            memswap.swap_in(tensor)
            assert same_bits(tensor, random(device, 3000, seed=seed))


def test_what_is_dropped_on_its_way_leaves_nothing(device, new_disk):
    disk = new_disk()
    lane = open_staged_lane(device)
    for seed in range(6):
        tensor = random(device, 2000, seed=seed)
        block = disk.native.allocate(8000)
        departure = lane.send(native.StorageRef(tensor), block)
        if seed % 3 == 1:
            lane.finish_writes()
        if seed % 2:
            fetched = lane.fetch(block)
            del fetched
        del departure, block, tensor
    lane.settle()
    lane.finish_writes()
    assert_pool_empty(disk)
    assert lane.staged_bytes() == 0


def test_an_overflow_that_is_no_disk_pool_is_an_error(device):
    with pytest.raises(TypeError, match=r"expected a memswap\.DiskPool"):
        memswap.HostPool(budget="1MiB", device=device, overflow=3)
