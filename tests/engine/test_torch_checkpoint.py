"""Together with torch.utils.checkpoint: blocks and managed layers around regions and in them."""

from __future__ import annotations

import contextlib
import functools
import inspect

import pytest
import torch
from helpers import (
    EVERYTHING,
    Training,
    assert_released,
    assert_same_gradients,
    gradients,
    let_sends_end,
    new_input,
    new_stack,
    random,
    train_step,
)
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import memswap


class Checkpointed(nn.Module):
    """A stack whose layers run inside checkpoints."""

    def __init__(self, model, reentrant, wrapped=False, **options):
        super().__init__()
        self.enter, self.reentrant, self.options = model.enter, reentrant, options
        self.layers = (
            nn.ModuleList([Wrapper(layer, reentrant) for layer in model.layers])
            if wrapped
            else model.layers
        )
        self.wrapped = wrapped

    def forward(self, x):
        x = self.enter(x)
        for layer in self.layers:
            if self.wrapped:
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.reentrant, **self.options)
        return x.square().mean()


class Wrapper(nn.Module):
    """CheckpointWrapper's way: a module around the layer, and the wrapper is what is managed."""

    def __init__(self, layer, reentrant):
        super().__init__()
        self.layer, self.reentrant = layer, reentrant

    def forward(self, x):
        return checkpoint(self.layer, x, use_reentrant=self.reentrant)


REENTRANT = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])


def region_inputs(model, x):
    """Bytes of the inputs of all regions."""
    return len(model.layers) * x.untyped_storage().nbytes()


@REENTRANT
def test_block_around_a_checkpointed_model_swaps_the_inputs_of_regions(device, new_pool, reentrant):
    model, x = Checkpointed(new_stack(device), reentrant), new_input(device)
    expected = train_step(model, lambda: model(x))
    training = Training("saved_tensors", model, new_pool())
    for _ in range(3):
        assert_same_gradients(train_step(model, lambda: training.loss(x)), expected)
    training.swap.reset_stats()
    out = training.loss(x)
    stats = training.stats()
    per_tensor = x.untyped_storage().nbytes()
    offered = stats.moved_storages + sum(c.tensors for c in stats.kept.values())
    assert offered >= 3, "the inputs of checkpointed regions were not offered"
    # x, three region inputs, the last one's output: nothing from inside the regions.
    assert stats.moved_bytes <= 5 * per_tensor, "what the region does not save was moved"
    out.backward()
    del out
    training.assert_released()


@REENTRANT
def test_backward_inside_the_block_recomputes_correctly(device, new_pool, reentrant):
    model, x = Checkpointed(new_stack(device), reentrant), new_input(device)
    expected = train_step(model, lambda: model(x))
    pool = new_pool()
    engine = memswap.saved_tensors(EVERYTHING, pool=pool)
    for _ in range(3):
        model.zero_grad(set_to_none=True)
        with engine:
            model(x).backward()
        assert_same_gradients(gradients(model), expected)
        assert_released(engine, pool)


@REENTRANT
def test_managed_layer_inside_a_checkpoint(device, new_pool, reentrant):
    model, x = Checkpointed(new_stack(device), reentrant), new_input(device)
    expected = train_step(model, lambda: model(x))
    pool = new_pool()
    manager = memswap.manage(model.layers, EVERYTHING, pool=pool)
    for _ in range(3):
        assert_same_gradients(train_step(model, lambda: model(x)), expected)
    assert_released(manager, pool, moved=False)  # a region saves its input, outside of the layer


@REENTRANT
def test_managed_wrapper_around_a_checkpoint_swaps_its_input(device, new_pool, reentrant):
    model, x = Checkpointed(new_stack(device), reentrant, wrapped=True), new_input(device)
    expected = train_step(model, lambda: model(x))
    pool = new_pool()
    manager = memswap.manage(model.layers, EVERYTHING, pool=pool, prefetch_bytes=0)
    for _ in range(3):
        assert_same_gradients(train_step(model, lambda: model(x)), expected)
    manager.reset_stats()
    out = model(x)
    stats = let_sends_end(manager, device)
    assert stats.moved_bytes == region_inputs(model, x), "a region saves its input, and only that"
    assert stats.freed_bytes == region_inputs(model, x), "the inputs stayed on the device"
    out.backward()
    del out
    assert_released(manager, pool)


@REENTRANT
def test_both_doors_and_a_checkpoint_between_them(device, new_pool, reentrant):
    model, x = Checkpointed(new_stack(device), reentrant), new_input(device)
    expected = train_step(model, lambda: model(x))
    pool = new_pool()
    manager = memswap.manage(model.layers, EVERYTHING, pool=pool)
    around = Training("saved_tensors", model, pool)
    for _ in range(3):
        assert_same_gradients(train_step(model, lambda: around.loss(x)), expected)
    around.assert_released()
    assert_released(manager, pool, moved=False)


@REENTRANT
def test_nested_checkpoints(device, new_pool, reentrant):
    stack, x = new_stack(device, depth=4), new_input(device)

    def half(layers, x):
        for layer in layers:
            x = checkpoint(layer, x, use_reentrant=reentrant)
        return x

    def forward():
        h = stack.enter(x)
        for layers in (stack.layers[:2], stack.layers[2:]):
            h = checkpoint(half, layers, h, use_reentrant=reentrant)
        return h.square().mean()

    expected = train_step(stack, forward)
    pool = new_pool()
    engine = memswap.saved_tensors(EVERYTHING, pool=pool)

    def loss():
        with engine:
            return forward()

    for _ in range(2):
        assert_same_gradients(train_step(stack, loss), expected)
    assert_released(engine, pool)


@REENTRANT
def test_block_opened_inside_the_checkpointed_function(device, new_pool, reentrant):
    stack, x = new_stack(device), new_input(device)
    pool = new_pool()
    engine = memswap.saved_tensors(EVERYTHING, pool=pool)

    def region(layer, x, swapped):
        with engine if swapped else contextlib.nullcontext():
            return layer(x)

    def forward(swapped):
        h = stack.enter(x)
        for layer in stack.layers:
            h = checkpoint(region, layer, h, swapped, use_reentrant=reentrant)
        return h.square().mean()

    expected = train_step(stack, lambda: forward(False))
    for _ in range(2):
        assert_same_gradients(train_step(stack, lambda: forward(True)), expected)
    assert_released(engine, pool, moved=False)


def test_checkpoint_with_dropout_recomputes_the_same(device, new_pool):
    layer = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Tanh()).to(device)
    x = random(device, 4, 8).requires_grad_()
    pool = new_pool()
    engine = memswap.saved_tensors(EVERYTHING, pool=pool)

    def loss(swapped):
        torch.manual_seed(3)
        with engine if swapped else contextlib.nullcontext():
            return checkpoint(layer, x * 2, use_reentrant=False).sum()

    expected = train_step(layer, lambda: loss(False))
    assert_same_gradients(train_step(layer, lambda: loss(True)), expected)
    assert_released(engine, pool)


def test_checkpoint_under_double_backward(device, new_pool):
    w = random(device, 8, 8).requires_grad_()
    x = random(device, 4, 8, seed=1).requires_grad_()

    def second(loss):
        (first,) = torch.autograd.grad(loss, [x], create_graph=True)
        return torch.autograd.grad(first.square().sum(), [x, w])

    def loss():
        return checkpoint(lambda x: (x @ w).tanh(), x * 2, use_reentrant=False).exp().sum()

    expected = second(loss())
    pool = new_pool()
    engine = memswap.saved_tensors(EVERYTHING, pool=pool)
    with engine:
        out = loss()
    assert_same_gradients(second(out), expected)
    del out
    assert_released(engine, pool)


def test_early_stop_leaves_nothing_behind(device, new_pool):
    """Recompute ends early, in the middle of the layer, when it has what backward needs."""
    model, x = Checkpointed(new_stack(device), reentrant=False), new_input(device)
    expected = train_step(model, lambda: model(x))
    pool = new_pool()
    manager = memswap.manage(model.layers, EVERYTHING, pool=pool)
    for early in (True, False, True):
        with torch.utils.checkpoint.set_checkpoint_early_stop(early):
            loss = model(x)
        model.zero_grad(set_to_none=True)
        loss.backward()
        assert_same_gradients(gradients(model), expected)
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None, (
            "an early stop left hooks installed"
        )
    del loss
    assert_released(manager, pool, moved=False)


def must_save_linears():
    """A `context_fn` of torch's selective checkpoints."""

    def policy(ctx, op, *args, **kwargs):
        matmuls = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if op in matmuls else CheckpointPolicy.PREFER_RECOMPUTE

    return functools.partial(create_selective_checkpoint_contexts, policy)


@pytest.mark.parametrize(
    "way", ["saved_tensors", "manage"], ids=["block outside", "layers managed"]
)
def test_selective_checkpointing(device, new_pool, way):
    context_fn = must_save_linears()
    model = Checkpointed(new_stack(device), reentrant=False, context_fn=context_fn)
    x = new_input(device)
    expected = train_step(model, lambda: model(x))
    training = Training(way, model, new_pool())
    for _ in range(3):
        assert_same_gradients(train_step(model, lambda: training.loss(x)), expected)
    training.assert_released(moved=way == "saved_tensors")


def test_selective_checkpointing_offers_its_cache_where_torch_has_the_option(device, new_pool):
    option = "respect_saved_tensors_hooks"
    if option not in inspect.signature(checkpoint).parameters:  # torch 2.15 has it
        pytest.skip(f"this torch has no {option}")

    options = {"context_fn": must_save_linears(), option: True}
    model = Checkpointed(new_stack(device), reentrant=False, **options)
    x = new_input(device)
    expected = train_step(model, lambda: model(x))
    training = Training("saved_tensors", model, new_pool(), prefetch_bytes=0)
    for _ in range(3):
        assert_same_gradients(train_step(model, lambda: training.loss(x)), expected)
    training.swap.reset_stats()
    out = training.loss(x)
    moved = training.stats().moved_bytes
    assert moved > 5 * x.untyped_storage().nbytes(), "what selective checkpointing saved stayed"
    out.backward()
    del out
    training.assert_released()
