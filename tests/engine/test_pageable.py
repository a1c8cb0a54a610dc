"""Host memory that cannot be pinned: training goes on with ordinary memory, and is told."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from group_helpers import assert_released, leaf_and_gradient, make_calls, sines
from helpers import (
    EVERYTHING,
    assert_pool_empty,
    assert_same_gradients,
    flush_autograd,
    gradients,
    new_input,
    new_stack,
    plain_gradients,
    random,
    same_bits,
)
from optimizer_helpers import assert_same, maker, plain_training, train

import memswap

pytestmark = pytest.mark.accelerator


@pytest.fixture
def faults(device: Any) -> Any:
    if device.type == "cuda":
        pytest.skip("needs a driver that refuses: --device sim")
    from simdev import faults

    return faults


@pytest.fixture(params=[0, 64 << 10], ids=["none", "some"])
def little_pinned(request, faults) -> Iterator[int]:
    """A driver that pins nothing more, or less than is asked for."""
    torch.accelerator.synchronize()
    with faults.pinned_budget(request.param):
        yield request.param


def new_pool(device: Any, **options: Any) -> memswap.HostPool:
    return memswap.HostPool(budget="64MiB", slab="64KiB", device=device, numa=None, **options)


def warned(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(one.message) for one in caught if "could be pinned" in str(one.message)]


def refusal(told: str) -> str:
    """Why no memory was pinned: the simulator's words, or that torch_npu gave nothing and said
    nothing."""
    for words in ("cannot pin", "the pinned allocator of npu:0 returned nothing"):
        if words in told:
            return words
    raise AssertionError(f"why no memory was pinned is missing: {told}")


@pytest.mark.parametrize("action", ["swap", "encode_swap"])
def test_gradients_by_way_of_ordinary_memory(
    device, little_pinned, action, every_tensor_is_encoded
):
    pool = new_pool(device)
    policy = memswap.Policy(action=memswap.Action(action), min_bytes=1)
    model = new_stack(device, depth=6)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with memswap.manage(model.layers, policy, pool=pool) as manager:
            for step in range(4):
                model.zero_grad(set_to_none=True)
                x = torch.cat([new_input(device, seed=step)] * 16)
                model(x).backward()
                assert_same_gradients(gradients(model), plain_gradients(device, x, depth=6))
            report = manager.report()
            moved = manager.stats().moved_storages
    flush_autograd(device)
    statistics = pool.statistics()
    assert moved > 0
    assert statistics.pageable_bytes > 0, "nothing went to memory that is not pinned"
    assert statistics.reserved_bytes - statistics.pageable_bytes <= little_pinned
    assert len(warned(caught)) == 1, "it is told once"
    why = refusal(warned(caught)[0])
    assert "not pinned, with slower copies" in report and why in report
    assert_pool_empty(pool)


@pytest.mark.parametrize("form", ["single", "foreach"])
def test_optimizer_state_by_way_of_ordinary_memory(device, faults, form):
    make, plain = maker("AdamW", form), plain_training(device, "AdamW", form)
    pool = new_pool(device)
    with faults.pinned_budget(0):
        with pytest.warns(UserWarning, match="manage_optimizer: no more host memory could be"):
            assert_same(train(device, make, pool, managed=True), plain)
    gc.collect()
    assert_pool_empty(pool)


@pytest.mark.own_form("a recipe leaves without a pool")
def test_groups_by_way_of_ordinary_memory(device, faults):
    """Told when the next batch begins."""
    pool = new_pool(device)
    group = memswap.Group("block", EVERYTHING, pool=pool)
    x, expected = leaf_and_gradient(device)
    with faults.pinned_budget(0):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(3):
                x.grad = None
                with group as batch:
                    loss = sines(x)
                make_calls(batch, "owlW")
                loss.backward()
                assert same_bits(x.grad, expected)
    assert len(warned(caught)) == 1, "it is told once"
    refusal(warned(caught)[0])
    del loss, batch
    assert_released(group, pool, device)


def test_single_tensors_by_way_of_ordinary_memory(device, faults):
    pool = new_pool(device)
    with faults.pinned_budget(0):
        tensors = [random(device, 3000, seed=seed) for seed in range(3)]
        with pytest.warns(UserWarning, match="swap_out: no more host memory could be pinned"):
            assert all([memswap.swap_out(tensor, pool) for tensor in tensors])
        churn = torch.full((9000,), 7.0, device=device)
        for seed, tensor in enumerate(tensors):
            memswap.swap_in(tensor)
            assert same_bits(tensor, random(device, 3000, seed=seed))
        del churn
    assert_pool_empty(pool)


def test_memory_is_pinned_again_where_it_can_be(device, faults):
    pool = new_pool(device)
    with faults.pinned_budget(0):
        assert pool.native.allocate(1000) is not None
    assert pool.trim() == pool.statistics().reserved_bytes + (64 << 10)
    block = pool.native.allocate(1000)
    assert block is not None
    assert pool.statistics().pageable_bytes == 0
    assert "not pinned" not in pool.describe()


@pytest.mark.own_form("a recipe leaves without a pool")
def test_a_pool_that_shall_not_be_pageable_refuses(device, faults):
    """Whatever was to leave stays where it is, and is counted."""
    pool = new_pool(device, pageable=False)
    model = new_stack(device)
    x = new_input(device)
    with faults.pinned_budget(0), memswap.manage(model.layers, EVERYTHING, pool=pool) as manager:
        with pytest.warns(UserWarning, match="cannot pin"):
            model(x).backward()
        assert manager.stats().moved_storages == 0
        assert_same_gradients(gradients(model), plain_gradients(device, x))
    assert pool.statistics().pageable_bytes == 0
    assert pool.statistics().refusals > 0


def test_what_is_pinned_is_said(device):
    pool = new_pool(device)
    model = new_stack(device)
    with memswap.manage(model.layers, EVERYTHING, pool=pool) as manager:
        model(new_input(device)).backward()
        report = manager.report()
    reserved = pool.statistics().reserved_bytes
    assert f"host memory: {memswap.engine.units.format_bytes(reserved)} of 64.0 MiB" in report
    assert "not pinned" not in report
