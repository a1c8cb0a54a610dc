"""Groups: small storages travel together, and what happens when a transfer fails."""

from __future__ import annotations

import os

import pytest
import torch
from group_helpers import assert_released, collected, sines
from helpers import (
    EVERYTHING,
    assert_same_gradients,
    descriptor_under,
    files_no_longer_than,
    random,
    same_bits,
)

import memswap
from memswap._native import native
from memswap.engine import transfers

pytestmark = pytest.mark.every_action

SWAP = pytest.mark.every_action("swap")  # counts what the raw bytes do


@SWAP
def test_small_storages_take_one_block_and_large_ones_their_own(device, new_pool):
    pool = new_pool()
    group = memswap.Group("bucket", EVERYTHING, pool=pool)
    x = random(device, 100).requires_grad_()
    small_bytes = group._groups.engine.batch_limits.small_bytes
    large = random(device, small_bytes // 4 + 1).requires_grad_()
    with group as batch:
        loss = sines(x, 20) + (large * 2).sin().sum()
    batch.launch_offload()
    assert pool.statistics().blocks == 2, "twenty small storages and a large one: two copies"
    assert group.stats().moved_storages == 21
    batch.wait_offload()
    batch.launch_load()
    loss.backward()
    for one in (x, large):
        again = one.detach().clone().requires_grad_()
        (sines(again, 20) if one is x else (again * 2).sin().sum()).backward()
        assert_same_gradients([one.grad], [again.grad])
    del loss
    assert_released(group, pool, device)


@SWAP
def test_a_bucket_is_never_longer_than_it_may_be(device, new_pool):
    pool = new_pool()
    group = memswap.Group("buckets", EVERYTHING, pool=pool)
    group._groups.engine.batch_limits.bucket_bytes = 4 * 400
    x = random(device, 100).requires_grad_()
    with group as batch:
        loss = sines(x, 10)
    batch.launch_offload()
    assert pool.statistics().blocks == 3, "ten storages, four to a bucket"
    loss.backward()


def test_views_and_the_rest_of_their_storage_travel_together(device, new_pool):
    """A slice, its whole and a transpose are one storage: one copy, and all of it comes back."""
    pool = new_pool()
    group = memswap.Group("views", EVERYTHING, pool=pool)
    x = random(device, 3, 5).requires_grad_()

    def loss() -> torch.Tensor:
        whole = random(device, 8, 5, seed=1)
        return (x * whole[2:5]).sum() + (x.t() @ whole[:3]).sum() + (whole * whole.sum()).sum() * 0

    loss().backward()
    expected, x.grad = x.grad, None
    with group as batch:
        out = loss()
    batch.launch_offload()
    batch.wait_offload()
    batch.launch_load()
    out.backward()
    assert_same_gradients([x.grad], [expected])
    del out
    assert_released(group, pool, device)


@SWAP
def test_an_edit_of_what_came_back_does_not_reach_the_next_reader(device, new_pool):
    """A bucket's memory lives as long as any of its tensors: what was written there is not read
    again."""
    group = memswap.Group("edited later", EVERYTHING, pool=new_pool())
    added = [group.add(random(device, 40, seed=n)) for n in range(2)]
    group.launch_offload()
    group.wait_offload()
    group.launch_load()
    group.wait_load()
    other = added[1].tensor()
    added[0].tensor().add_(1)
    assert same_bits(added[0].tensor(), random(device, 40)), "another reader's edit was seen"
    assert same_bits(other, random(device, 40, seed=1))


@SWAP
@pytest.mark.filterwarnings("ignore:memswap. a storage")
def test_a_pool_without_room_leaves_the_group_where_it_is(device, new_pool):
    pool = new_pool(budget="1MiB")
    group = memswap.Group("full", EVERYTHING, pool=pool)
    x = random(device, 150_000).requires_grad_()  # 600 kB each
    with group as batch:
        loss = sines(x, 4)
    batch.launch_offload()
    batch.wait_offload()
    stats = group.stats()
    assert stats.kept["pool"].tensors >= 2, "nobody was told that the pool is full"
    batch.launch_load()
    batch.wait_load()
    loss.backward()
    again = x.detach().clone().requires_grad_()
    sines(again, 4).backward()
    assert_same_gradients([x.grad], [again.grad])


# --- when a transfer fails ------------------------------------------------------------------------


@SWAP
@pytest.mark.cpu_only
@pytest.mark.parametrize("together", [True, False])
def test_a_send_that_fails_keeps_the_bytes(device, tmp_path, together):
    pool = memswap.DiskPool(tmp_path, budget="16MiB", extent="1MiB")
    pool.reserve("1MiB")  # space is set aside, and then the disk fails
    group = memswap.Group("broken disk", EVERYTHING, pool=pool)
    if not together:
        group._groups.engine.batch_limits.small_bytes = 0
    x = random(device, 4096).requires_grad_()
    with pytest.warns(UserWarning, match="stays where it is"):
        with files_no_longer_than(0):
            with group as batch:
                loss = sines(x)
            batch.launch_offload()
            batch.wait_offload()
        batch.launch_load()
        batch.wait_load()
        loss.backward()
    again = x.detach().clone().requires_grad_()
    sines(again).backward()
    assert_same_gradients([x.grad], [again.grad])
    assert group.stats().kept["pool"].tensors == 4
    del loss
    assert_released(group, pool, device)


@SWAP
@pytest.mark.parametrize("together", [True, False])
def test_a_launch_that_raises_takes_no_memory_and_loses_nothing(
    device, new_pool, monkeypatch, together
):
    pool = new_pool()
    group = memswap.Group("raises", EVERYTHING, pool=pool)
    if not together:
        group._groups.engine.batch_limits.small_bytes = 0

    class Broken(native.LaneAround):
        def __init__(self, lane):
            super().__init__(lane)
            self.lane = lane

        def send(self, storage, block):
            raise RuntimeError("no such stream")

        def __getattr__(self, name):
            return getattr(self.lane, name)

    opened = transfers.open_lane
    with monkeypatch.context() as broken:
        broken.setattr(transfers, "open_lane", lambda *a, **k: Broken(opened(*a, **k)))
        batch, loss = collected(group, device)
        with pytest.raises(RuntimeError, match="no such stream"):
            batch.launch_offload()
    with pytest.raises(memswap.GroupError, match="nothing was launched"):
        batch.wait_offload()
    loss.backward()
    del loss
    assert_released(group, pool, device)


@SWAP
@pytest.mark.cpu_only
def test_bytes_that_vanished_are_an_error_that_names_the_group(device, tmp_path):
    pool = memswap.DiskPool(tmp_path, budget="16MiB", extent="1MiB")
    group = memswap.Group("vanished", EVERYTHING, pool=pool)
    batch, loss = collected(group, device)
    batch.launch_offload()
    batch.wait_offload()
    os.truncate(f"/proc/self/fd/{descriptor_under(tmp_path)}", 0)
    batch.launch_load()
    with pytest.raises(memswap.TransferError, match=r"'vanished'.*cannot be brought back"):
        batch.wait_load()
    with pytest.raises(memswap.TransferError, match="cannot be brought back"):
        loss.backward()
