"""One transfer per storage, whoever saved it and however large it is."""

from __future__ import annotations

import pytest
import torch
from helpers import (
    EVERYTHING,
    Remember,
    assert_released,
    assert_same_gradients,
    let_sends_end,
    look,
    random,
    round_trip,
)
from torch import nn

import memswap

pytestmark = pytest.mark.every_action


@pytest.mark.every_action("swap")  # it counts blocks of the pool
def test_one_transfer_however_many_operators_saved_the_storage(device, new_pool):
    pool = new_pool()
    engine = memswap.saved_tensors(EVERYTHING, pool=pool)
    x = random(device, 64).requires_grad_()

    def loss():
        h = x * 2  # saved by sin and cos, whose results are saved by their product
        return ((h.sin() * h.cos()) * h.detach().square()).sum()

    with engine:
        out = loss()
    stats = engine.stats()
    assert stats.offered_tensors > stats.moved_storages, "autograd saved h more than once"
    assert stats.moved_storages == 4, "h, sin, cos and the square: four storages"
    assert stats.moved_bytes == 4 * 64 * 4, "a storage was moved more than once, or in part"
    assert stats.deduplicated_tensors == stats.offered_tensors - 4
    assert pool.statistics().blocks == 4, "one block per storage"
    out.backward()
    found, x.grad = x.grad, None
    loss().backward()
    assert_same_gradients([found], [x.grad])
    assert engine.stats().returned_storages <= 4, "a storage came back more than once"
    del out
    assert_released(engine, pool)


def test_one_transfer_however_many_layers_saved_the_storage(device, new_pool):
    class Shared(nn.Module):
        def forward(self, x, shared):
            return x * shared

    layers = [Shared() for _ in range(4)]
    pool = new_pool()
    x = random(device, 32).requires_grad_()

    def forward():
        table, y = random(device, 32, seed=1).exp(), x
        for layer in layers:
            y = layer(y, table)
        return y.sum()

    manager = memswap.manage(layers, EVERYTHING, pool=pool)
    loss = forward()
    assert manager.stats().moved_storages == 1, "the table all layers share moved more than once"
    loss.backward()
    found, x.grad = x.grad, None
    manager.remove()
    forward().backward()
    assert_same_gradients([found], [x.grad])
    del loss
    assert_released(manager, pool)


def test_parts_edited_one_after_another_come_back_as_each_was_saved(device, new_pool):
    """unsafe_chunk's outputs share a storage, and each has a version counter of its own."""
    x = random(device, 12, 64).requires_grad_()

    def loss():
        parts = (x * 1).unsafe_chunk(3)
        return sum((part.tanh_() * (number + 1)).sum() for number, part in enumerate(parts))

    loss().backward()
    expected, x.grad = x.grad, None
    pool = new_pool()
    engine = memswap.saved_tensors(EVERYTHING, pool=pool)
    for _ in range(3):
        with engine:
            out = loss()
        out.backward()
        assert_same_gradients([x.grad], [expected])
        x.grad = None
        del out
    assert engine.stats().kept["edited in parts"].tensors == 3, "one storage in each step"
    assert engine.stats().deduplicated_tensors >= 3 * 2, "the storage was counted once per part"
    assert_released(engine, pool, moved=False)


@pytest.mark.cpu_only  # no accelerator may read a storage that is being edited
def test_edited_alias_is_not_taken_for_what_left_before(device, new_pool):
    x, w = random(device, 64), random(device, 64).requires_grad_()
    engine = memswap.saved_tensors(EVERYTHING, pool=new_pool())
    with engine:
        h = (x * 2).neg_()
        first = (w * h).sum()
        alias = h.data  # shares the storage, and counts its edits by itself
        loss = (w * alias.neg_()).sum()
    loss.backward()
    assert_same_gradients([w.grad], [x * 2])
    del first


@pytest.mark.cpu_only
@pytest.mark.parametrize("cell", [nn.LSTM, nn.GRU])
def test_recurrent_layers(device, new_pool, cell):
    torch.manual_seed(0)
    layer = cell(8, 16, 2, bidirectional=True)
    x = random(device, 5, 3, 8)
    wanted = list(layer.parameters())
    expected = torch.autograd.grad(layer(x)[0].square().sum(), wanted)
    engine = memswap.saved_tensors(EVERYTHING, pool=new_pool())
    with engine:
        loss = layer(x)[0].square().sum()
    assert_same_gradients(torch.autograd.grad(loss, wanted), expected)


def test_aliases_with_counters_of_their_own_move_once_if_nobody_edits_them(device, new_pool):
    x = random(device, 64)
    engine = memswap.saved_tensors(EVERYTHING, pool=new_pool())
    w = random(device, 64).requires_grad_()
    with engine:
        h = x * 2
        loss = (w * h).sum() + (w * h.data).sum()  # .data shares the storage, not the counter
    assert engine.stats().moved_storages == 1
    loss.backward()
    assert_same_gradients([w.grad], [x * 4])


def test_reused_address_is_not_the_same_storage(device, new_pool):
    pool = new_pool()
    engine = memswap.saved_tensors(EVERYTHING, pool=pool)
    seen: list = []
    out = torch.zeros(4, device=device, requires_grad=True)
    addresses = set()
    # On a CPU pieces so large that malloc maps each and unmaps it again: out of its heap glibc
    # gives aligned memory that is seldom where the last piece was. Each is of one value, so that
    # its frame is short and does not settle there either.
    elements, count = (9 << 20, 5) if device.type == "cpu" else (256, 40)
    contents = [torch.full((elements,), number + 0.5) for number in range(count)]
    with engine:
        for content in contents:
            made = torch.empty_like(content, device=device).copy_(content)
            addresses.add(made.data_ptr())
            out = Remember.apply(out, seen, made)
            del made
            let_sends_end(engine, device)  # the allocator hands the same memory out again
    assert len(addresses) < count, "no address was used twice: this test shows nothing"
    assert engine.stats().moved_storages == count, "a new storage was taken for one that is gone"
    out.backward(torch.ones_like(out))
    expected = [look(content.to(device)) for content in reversed(contents)]
    assert seen == expected, "backward got the bytes of another tensor"
    del out
    assert_released(engine, pool)


def small_slabs(device, tmp_path):
    """A pool whose slabs are 64 KiB and which holds 32 MiB."""
    if device.type == "cpu":
        return memswap.DiskPool(tmp_path, budget="32MiB", extent="64KiB")
    return memswap.HostPool(budget="32MiB", slab="64KiB", device=device)


def test_storage_far_larger_than_a_slab(device, tmp_path):
    pool = small_slabs(device, tmp_path)
    engine = memswap.saved_tensors(EVERYTHING, pool=pool)

    def make():
        return [random(device, 700_001, seed=1)[5:], random(device, 10, seed=2)]

    seen, expected = round_trip(engine, make, device)
    assert seen == expected, "a storage larger than a slab came back different"
    assert engine.stats().moved_storages == 2
    assert_released(engine, pool)


def test_lengths_that_no_alignment_divides(device, tmp_path):
    engine = memswap.saved_tensors(EVERYTHING, pool=small_slabs(device, tmp_path))
    lengths = [1, 3, 511, 512, 513, 4095, 4096, 4097, 65535, 65536, 65537]

    def make():
        return [random(device, n, seed=n, dtype=torch.int8) for n in lengths]

    seen, expected = round_trip(engine, make, device)
    assert seen == expected, "a byte at the end of a storage was lost, or its neighbour's was taken"
    assert engine.stats().moved_bytes == sum(lengths)


def test_small_view_of_a_large_storage_is_judged_by_the_storage(device, new_pool):
    policy = memswap.Policy(min_bytes=1000)
    engine = memswap.saved_tensors(policy, pool=new_pool())
    seen, expected = round_trip(
        engine, lambda: [random(device, 1000)[7:9], random(device, 10)], device
    )
    assert seen == expected
    stats = engine.stats()
    assert (stats.moved_storages, stats.moved_bytes) == (1, 4000)
    assert stats.kept["small"].tensors == 1
