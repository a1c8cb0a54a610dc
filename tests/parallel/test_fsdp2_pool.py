"""FSDP2 with memswap's buffers trains as FSDP2 does."""

from __future__ import annotations

import pytest
import torch

from memswap.parallel import PooledAllGather, pool_all_gathers
from ranks import Rank, distributed
from sharding import assert_same, fully_sharded, make_net, train


@distributed(2)
@pytest.mark.parametrize(("slots", "prefetch"), [(1, False), (2, True)])
def test_fully_shard_trains_the_same_in_pooled_buffers(
    rank: Rank, slots: int, prefetch: bool
) -> None:
    start = make_net(torch.float32, layers=4)
    plain, pooled = fully_sharded(rank, start), fully_sharded(rank, start)
    if prefetch:
        for one, after in zip(pooled.layers, list(pooled.layers)[1:], strict=False):
            one.set_modules_to_forward_prefetch([after])
        pooled._set_unshard_async_op(True)
    pool = pool_all_gathers(pooled, slots)
    train(pooled, rank)
    train(plain, rank)
    assert_same(pooled, plain, rank, bitwise=True)
    # Not one for each of the 27 gathers. How many depends on gloo's threads, which may hold a
    # buffer a moment longer than the gather takes; with slots to spare that matters less.
    assert pool.allocations < 27, "no buffer was ever used again"


def test_a_buffer_in_use_is_not_given_away() -> None:
    pool = PooledAllGather(1)
    cpu = torch.device("cpu")
    first = pool.allocate((4,), dtype=torch.float32, device=cpu)
    part = first[2:]
    second = pool.allocate((4,), dtype=torch.float32, device=cpu)
    assert second.data_ptr() != first.data_ptr()
    address = first.data_ptr()
    del first
    assert pool.allocate((4,), dtype=torch.float32, device=cpu).data_ptr() != address
    del part
    assert pool.allocate((2,), dtype=torch.int64, device=cpu).data_ptr() == address


def test_looking_at_a_buffers_storage_does_not_occupy_it() -> None:
    pool = PooledAllGather(1)
    for _ in range(2):
        one = pool.allocate((4,), dtype=torch.float32, device=torch.device("cpu"))
        one.untyped_storage()
        del one
    assert pool.allocations == 1


def test_a_larger_gather_takes_the_place_of_a_small_buffer() -> None:
    pool = PooledAllGather(2)
    cpu = torch.device("cpu")
    held = [pool.allocate((4,), dtype=torch.float32, device=cpu) for _ in range(2)]
    address = held[0].data_ptr()
    del held[1]  # the second is free: another one of the same contents stands before it
    large = pool.allocate((16,), dtype=torch.float32, device=cpu)
    assert large.shape == (16,)
    place = large.data_ptr()
    del large
    assert pool.allocate((16,), dtype=torch.float32, device=cpu).data_ptr() == place
    del held
    assert pool.allocate((4,), dtype=torch.float32, device=cpu).data_ptr() in (address, place)
    assert pool.allocations == 3


def test_a_model_without_fully_shard_is_refused() -> None:
    with pytest.raises(ValueError, match="no FSDP2 module; call"):
        pool_all_gathers(torch.nn.Linear(2, 2))
