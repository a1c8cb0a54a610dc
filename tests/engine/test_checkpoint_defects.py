"""Defects of an earlier system for swapped checkpoints, and what its later versions repaired.

Each test is named after what went wrong there, as its user saw it.
"""

from __future__ import annotations

import threading

import pytest
import torch
from checkpoint_helpers import CheckpointPolicy, aten, gradients_of, policy_of
from helpers import (
    assert_released,
    assert_same_gradients,
    let_sends_end,
    new_input,
    new_stack,
    random,
    train_step,
)

import memswap

SWAP = policy_of(CheckpointPolicy.MUST_SWAP)


def checkpointing(pool, policy=SWAP, **options):
    return memswap.Checkpointing(policy, pool=pool, min_bytes=1, **options)


# --- offloading what the forward still needs ------------------------------------------------------


def test_a_layer_output_that_aliases_a_swapped_tensor_loses_its_storage(device, new_pool):
    """The residual, the layer's output and a view of it all lie on what the policy sends away."""
    pool, w = new_pool(), random(device, 16, 16, seed=1)
    ours = checkpointing(pool, swap_inputs=True, prefetch_bytes=0)

    def layer(h):
        out = h @ w
        return out, out.view(-1), out[4:]

    def run(call, x):
        h, seen = x * 1, []
        for _ in range(3):
            h, flat, part = call(layer, h)
            if call is not plain:
                let_sends_end(ours, device)
            seen += [h.detach().clone(), flat.detach().clone(), part.detach().clone()]
            h = h.sin() + part.sum() + flat.mean()
        return h.sum(), seen

    def plain(fn, *args):
        return fn(*args)

    x = random(device, 16, 16)
    leaf, reference = x.clone().requires_grad_(), x.clone().requires_grad_()
    loss, seen = run(ours.checkpoint, leaf)
    expected_loss, expected = run(plain, reference)
    loss.backward()
    expected_loss.backward()
    assert_same_gradients([leaf.grad, *seen], [reference.grad, *expected])
    del loss
    assert_released(ours, pool)


def test_the_next_layer_recomputes_from_a_storage_that_is_still_loading(device, new_pool):
    """The input of a region is the swapped output of the one before: one entry, ordered for both.

    The reload was ordered with the producer's group only, and the consumer did not wait for it.
    """
    pool, w = new_pool(), random(device, 32, 32, seed=1)
    ours = checkpointing(pool, swap_inputs=True, prefetch_bytes="1MiB")
    leaf = random(device, 32, 32).requires_grad_()
    expected = gradients_of(lambda x: ((x @ w) @ w) @ w, leaf)
    for _ in range(3):
        h = leaf * 1
        for _ in range(3):
            h = ours.checkpoint(lambda h: h @ w, h)
        out = h.sum()
        del h
        let_sends_end(ours, device)
        leaf.grad = None
        out.backward()
        assert_same_gradients([leaf.grad], expected)
    del out
    assert_released(ours, pool)


def test_storage_of_inputs_that_all_layers_share_is_freed(device, new_pool):
    """Rotary tables, made once and given to every layer: whoever holds them keeps them."""
    pool, model = new_pool(), new_stack(device, depth=3)
    tables = random(device, 2, 8, 16, seed=5), random(device, 2, 8, 16, seed=6)
    copies = [table.clone() for table in tables]
    ours = checkpointing(pool, swap_inputs=True)
    x = new_input(device)

    def rotated(layer, h, cos, sin):
        return layer(h * cos + h.flip(-1) * sin)

    def loss(call):
        h = x
        for layer in model.layers:
            h = call(rotated, layer, h, *tables)
        return h.square().mean()

    expected = train_step(model, lambda: loss(lambda fn, *args: fn(*args)))
    for _ in range(3):
        assert_same_gradients(train_step(model, lambda: loss(ours.checkpoint)), expected)
        for table, copy in zip(tables, copies, strict=True):
            assert torch.equal(table, copy)
    assert_released(ours, pool)


# --- microbatches, order, groups ------------------------------------------------------------------


def test_loading_one_microbatch_loads_all_of_them(device, new_pool):
    pool, w = new_pool(), random(device, 16, 16, seed=1)
    ours = checkpointing(pool, prefetch_bytes=1024)  # one matrix
    raw = [random(device, 16, 16, seed=seed) for seed in range(4)]
    leaves = [one.clone().requires_grad_() for one in raw]

    def fn(x):
        return ((x @ w).sin() @ w).sin()

    losses = [ours.checkpoint(fn, leaf).sum() for leaf in leaves]
    let_sends_end(ours, device)
    losses.pop().backward()
    assert ours.stats().returned_storages <= 3, "more came back than this microbatch and the window"
    while losses:
        losses.pop().backward()
    for leaf, one in zip(leaves, raw, strict=True):
        assert_same_gradients([leaf.grad], gradients_of(fn, one))
    assert_released(ours, pool)


def test_without_a_configured_group_tensors_never_leave(device, new_pool):
    """Nor is pinned memory taken for what stays. A free function needs no group, no manager."""
    pool, x = new_pool(), random(device, 16, 16).requires_grad_()
    out = memswap.checkpoint(lambda x: (x @ x).sin(), x, policy_fn=SWAP, pool=pool, min_bytes=1)
    assert pool.statistics().blocks == 1, "what the policy swaps did not leave"
    out.sum().backward()
    unused = new_pool()
    memswap.checkpoint(lambda x: (x @ x).sin(), x, policy_fn=[aten.mm.default], pool=unused)
    assert unused.statistics().reserved_bytes == 0, "memory was taken for what stays"


def test_many_tensors_leave_and_return_in_an_arbitrary_order(device, new_pool):
    """With a window of three of twelve matrices: one stall in the first backward, then none."""
    pool, w = new_pool(), random(device, 16, 16, seed=1)
    ours = checkpointing(pool, prefetch_bytes=3 * 16 * 16 * 4)
    x = random(device, 16, 16)

    def fn(x):
        for _ in range(6):
            x = (x @ w).sin()
        return x

    expected = gradients_of(lambda x: fn(fn(x)), x)
    for step in range(3):
        ours.reset_stats()
        leaf = x.clone().requires_grad_()
        out = ours.checkpoint(fn, ours.checkpoint(fn, leaf)).sum()
        let_sends_end(ours, device)
        out.backward()
        assert_same_gradients([leaf.grad], expected)
        stats = ours.stats()
        assert stats.moved_storages == (9 if step else 12)
        assert stats.stalls == (0 if step else 1), "what came next was not what had been fetched"
    del out
    assert_released(ours, pool)


def test_the_last_layer_is_sent_away_only_to_come_back_at_once(device, new_pool):
    """From the second step on, what backward needs first stays, and counts as such."""
    model, x, pool = new_stack(device), new_input(device), new_pool()
    ours = memswap.checkpoint_module(model.layers, SWAP, pool=pool, min_bytes=1)
    for _ in range(2):
        train_step(model, lambda: model(x))
    assert ours.stats().kept["needed at once"].tensors > 0
    assert ours.stats().moved_storages > ours.stats().kept["needed at once"].tensors
    assert_released(ours, pool)


@pytest.mark.one_schedule
def test_two_threads_share_the_current_group(device, new_pool):
    """Two models at once, nested regions, one Checkpointing each: nobody meets the other's."""
    pools, found = [new_pool(), new_pool()], {}
    seeds = range(2)
    # Made here: threads would draw from one generator.
    models = [new_stack(device, depth=2, seed=seed) for seed in seeds]
    inputs = [new_input(device, seed=seed) for seed in seeds]

    def run(seed, call=None):
        model, x = models[seed], inputs[seed]
        for _ in range(3):
            model.zero_grad(set_to_none=True)
            h = model.enter(x)
            for layer in model.layers:
                h = layer(h) if call is None else call(nested, layer, h)
            h.square().mean().backward()
        return [p.grad.clone() for p in model.parameters()]

    def nested(layer, h):
        return memswap.checkpoint(layer, h, policy_fn=SWAP)

    expected = [run(seed) for seed in seeds]
    every = [checkpointing(pool) for pool in pools]

    def train(seed):
        found[seed] = run(seed, every[seed].checkpoint)

    threads = [threading.Thread(target=train, args=(seed,)) for seed in seeds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for seed in seeds:
        assert_same_gradients(found[seed], expected[seed])
        assert_released(every[seed], pools[seed])


@pytest.mark.accelerator
@pytest.mark.one_schedule
def test_memory_of_a_failed_copy_is_never_given_back(device):
    """Pinning fails now and then: what finds no memory stays, and nothing leaks."""
    if device.type == "cuda":
        pytest.skip("faults are injected on the simulated accelerator")
    from simdev import faults

    model, x = new_stack(device), new_input(device)
    expected = train_step(model, lambda: model(x))
    pool = memswap.HostPool(budget="64MiB", slab="4KiB", device=device, pageable=False)
    ours = memswap.checkpoint_module(model.layers, SWAP, pool=pool, min_bytes=1)
    with faults.fail_pinned(n=2, after=1), pytest.warns(UserWarning, match="memswap"):
        for _ in range(2):
            assert_same_gradients(train_step(model, lambda: model(x)), expected)
    assert ours.stats().kept["pool"].tensors > 0 and ours.stats().moved_storages > 0
    assert_released(ours, pool)


# --- a second look --------------------------------------------------------------------------------


def test_a_second_unpack_finds_an_empty_list(device, new_pool):
    """retain_graph, twice over, with an operator that several calls share."""
    pool, w = new_pool(), random(device, 8, 8, seed=1)
    ours = checkpointing(pool)
    leaf = random(device, 8, 8).requires_grad_()
    out = ours.checkpoint(lambda x: ((x @ w).sin() @ w).sin() @ w, leaf).sin().sum()
    out.backward(retain_graph=True)
    first, leaf.grad = leaf.grad, None
    out.backward()
    assert_same_gradients([leaf.grad], [first])
    del out
    assert_released(ours, pool)


def test_tensors_that_are_never_unpacked_keep_their_pinned_memory(device, new_pool):
    """Early stop, or a branch that no loss uses: backward never asks for them."""
    pool, w = new_pool(), random(device, 16, 16, seed=1)
    ours = checkpointing(pool)
    leaf = random(device, 16, 16).requires_grad_()

    def fn(x):
        used = (x @ w).sin()
        return used, (used @ w).cos() @ w

    for _ in range(3):
        used, unused = ours.checkpoint(fn, leaf)
        used.sum().backward()
        del used, unused
        assert_released(ours, pool)


@pytest.mark.parametrize("how", ["an output without grad", "autograd.grad on an inner tensor"])
def test_backward_that_bypasses_module_hooks_finds_tensors_on_the_host(device, new_pool, how):
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.side = torch.nn.Linear(16, 16).to(device), []

        def forward(self, x):
            h = self.inner(x).sin()
            self.side.append(h)
            return h.detach()

    pool, layer = new_pool(), Layer()
    ours = memswap.checkpoint_module(layer, SWAP, pool=pool, min_bytes=1, prefetch_bytes=0)
    x = random(device, 16, 16)
    expected = gradients_of(lambda x: layer.inner(x).sin(), x)
    leaf = x.clone().requires_grad_()
    assert not layer(leaf).requires_grad
    let_sends_end(ours, device)
    if how.startswith("an output"):
        layer.side[0].sum().backward()
        gradient = leaf.grad
    else:
        (gradient,) = torch.autograd.grad(layer.side[0].sum(), leaf)
    layer.side.clear()
    assert_same_gradients([gradient], expected)
    assert ours.stats().returned_storages == 1
    assert_released(ours, pool)


# --- shared storages, small tensors ---------------------------------------------------------------


def test_two_views_of_one_storage_are_swapped_twice_and_restored_wrongly(device, new_pool):
    pool = new_pool()
    ours = checkpointing(pool, None, swap_inputs=True, prefetch_bytes=0)
    raw = random(device, 32, 16)

    def fn(a, b, c):
        return (a * b).sin() * c.cos()

    def run(call):
        leaf = raw.clone().requires_grad_()
        base = leaf * 1
        out = call(fn, base[:16], base[16:], base.t()[:, :16].t()).sum()
        del base
        let_sends_end(ours, device)
        out.backward()
        return [leaf.grad]

    assert_same_gradients(run(ours.checkpoint), run(lambda fn, *args: fn(*args)))
    assert ours.stats().moved_storages == 1 and ours.stats().returned_storages == 1
    assert_released(ours, pool)


def test_every_tiny_tensor_gets_a_copy_and_pinned_memory_of_its_own(device, new_pool):
    pool, x = new_pool(), random(device, 8, 8).requires_grad_()
    ours = memswap.Checkpointing(
        lambda *_, **__: CheckpointPolicy.MUST_SWAP, swap_inputs=True, pool=pool
    )
    ours.checkpoint(lambda x: (x * 2).sin().exp().sum(-1), x * 1).sum().backward()
    assert ours.stats().moved_storages == 0 and ours.stats().kept["small"].tensors >= 4
    assert pool.statistics().reserved_bytes == 0


# --- what later versions repaired -----------------------------------------------------------------


def test_an_in_place_edit_of_a_swapped_output_gives_wrong_gradients(device, new_pool):
    pool, x = new_pool(), random(device, 8, 8).requires_grad_()
    ours = checkpointing(pool, policy_of(CheckpointPolicy.MUST_SWAP, [aten.exp.default]))
    h = ours.checkpoint(lambda x: x.exp(), x)
    let_sends_end(ours, device)
    with torch.no_grad():
        h.zero_()
    with pytest.raises(memswap.InplaceEditError, match=r"aten\.exp\.default"):
        h.sum().backward()


def test_a_swapped_output_raises_the_version_when_it_comes_back(device, new_pool):
    """Then a tensor that somebody saved earlier looks edited, and an innocent backward fails."""
    pool, x = new_pool(), random(device, 8, 8).requires_grad_()
    ours = checkpointing(pool)
    h = ours.checkpoint(lambda x: x @ x, x)
    version = h._version
    outside = h.exp()
    let_sends_end(ours, device)
    outside.sum().backward()
    assert h._version == version


def test_a_pool_without_room_fails_the_step(device, new_pool):
    """What finds no room stays; the step goes on, and the statistics tell."""
    model, x, pool = new_stack(device), new_input(device), new_pool(4096)
    expected = train_step(model, lambda: model(x))
    ours = memswap.checkpoint_module(
        model.layers, SWAP, swap_inputs=True, pool=pool, min_bytes=1, prefetch_bytes=0
    )
    with pytest.warns(UserWarning, match="stays on"):
        for _ in range(2):
            assert_same_gradients(train_step(model, lambda: model(x)), expected)
    assert ours.stats().kept["pool"].tensors > 0
    assert_released(ours, pool)


def test_a_frozen_layer_is_skipped_wrongly_or_fails(device, new_pool):
    model, x, pool = new_stack(device), new_input(device), new_pool()
    for parameter in model.layers[1].parameters():
        parameter.requires_grad_(False)
    expected = train_step(model, lambda: model(x))
    ours = memswap.checkpoint_module(model.layers, SWAP, swap_inputs=True, pool=pool, min_bytes=1)
    for _ in range(2):
        assert_same_gradients(train_step(model, lambda: model(x)), expected)
    assert_released(ours, pool)


@pytest.mark.cpu_only
def test_wrapping_a_layer_breaks_load_state_dict_with_assign(device):
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    memswap.checkpoint_module(model)
    source = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model.load_state_dict(source.state_dict(), assign=True)
    x = torch.randn(2, 4, requires_grad=True)
    assert torch.equal(model(x), source(x))
    assert all(name.split(".")[0].isdigit() for name in model.state_dict())


@pytest.mark.cpu_only
def test_backward_hooks_make_outputs_views_that_cannot_be_edited_in_place(device):
    layer = torch.nn.Linear(4, 4)
    memswap.checkpoint_module(layer, SWAP, swap_inputs=True, min_bytes=1 << 20)
    out = layer(torch.randn(2, 4, requires_grad=True))
    assert not out._is_view()
    out.add_(1).sum().backward()


@pytest.mark.cpu_only
def test_a_plain_callable_cannot_be_checkpointed(device, new_pool):
    ours, x = checkpointing(new_pool()), random(device, 8, 8)
    weight = random(device, 8, 8, seed=1)

    class Callable:
        def __call__(self, x):
            return (x @ weight).sin()

    leaf = x.clone().requires_grad_()
    ours.checkpoint(Callable(), leaf).sum().backward()
    assert_same_gradients([leaf.grad], gradients_of(Callable(), x))
