"""Graphs in all their lives: kept, run twice, interleaved, nested, dropped."""

from __future__ import annotations

import gc

import pytest
import torch
from helpers import (
    EVERYTHING,
    assert_released,
    assert_same_gradients,
    collect,
    gradients,
    let_sends_end,
    new_input,
    new_stack,
    plain_gradients,
    random,
    same_bits,
    train_step,
)
from torch import nn

import memswap

pytestmark = pytest.mark.every_action


def test_three_steps_with_changing_inputs(device, new_training):
    training = new_training()
    for step in range(3):
        x = new_input(device, seed=step)
        found = train_step(training.model, lambda: training.loss(x))
        assert_same_gradients(found, plain_gradients(device, x))
    stats = training.stats()
    assert stats.moved_storages > 0 and stats.returned_storages >= 0
    training.assert_released()


def test_retained_graph_gives_the_same_gradients_every_time(device, new_training):
    training, x = new_training(), new_input(device)
    expected = plain_gradients(device, x)
    loss = training.loss(x)
    for number in range(3):
        training.model.zero_grad(set_to_none=True)
        loss.backward(retain_graph=number < 2)
        assert_same_gradients(gradients(training.model), expected)
    del loss
    training.assert_released()


@pytest.mark.every_action("swap")  # it counts blocks of the pool
def test_retained_graph_holds_its_saves_away_between_backwards(device, new_pool):
    """Between two backwards of a retained graph the device does not hold what it saved."""
    pool = new_pool()
    engine = memswap.saved_tensors(EVERYTHING, pool=pool)
    x = random(device, 64).requires_grad_()
    with engine:
        loss = (x * 2).sin().exp().sum()
    let_sends_end(engine, device)
    loss.backward(retain_graph=True)
    between = engine.stats()
    assert between.away_bytes == 2 * 64 * 4, "a retained graph's saves are gone"
    assert between.resident_bytes == 0, "a retained graph's saves stayed on the device"
    x.grad = None
    loss.backward()
    assert same_bits(x.grad, plain_exp_sin(x))
    del loss
    assert_released(engine, pool)


def plain_exp_sin(x):
    leaf = x.detach().clone().requires_grad_()
    (leaf * 2).sin().exp().sum().backward()
    return leaf.grad


def test_second_backward_without_retain_graph_is_autograds_error(device, new_training):
    training, x = new_training(), new_input(device)
    loss = training.loss(x)
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    del loss
    collect()
    training.assert_released()


def test_backward_of_a_part_then_of_the_rest(device, new_pool):
    pool = new_pool()
    engine = memswap.saved_tensors(EVERYTHING, pool=pool)
    x = random(device, 32).requires_grad_()

    def run():
        h = (x * 2).sin()
        one, other = h.exp().sum(), (h.cos() * 3).sum()
        return h, one, other

    def derive(one, other):
        (first,) = torch.autograd.grad(one, [x], retain_graph=True)
        (second,) = torch.autograd.grad(other, [x])
        return [first, second]

    _, one, other = run()
    expected = derive(one, other)
    with engine:
        _, one, other = run()
    let_sends_end(engine, device)
    assert_same_gradients(derive(one, other), expected)
    del one, other
    assert_released(engine, pool)


def test_gradients_with_respect_to_activations(device, new_pool):
    pool = new_pool()
    engine = memswap.saved_tensors(EVERYTHING, pool=pool)
    x = random(device, 16).requires_grad_()

    def run():
        h = x.sin()
        h.retain_grad()
        h.register_hook(lambda g: g * 2)
        (h * h).exp().sum().backward()
        return [h.grad, x.grad]

    expected = run()
    x.grad = None
    with engine:
        found = run()  # backward inside the block
    assert_same_gradients(found, expected)
    assert_released(engine, pool)


@pytest.mark.parametrize("inside", [True, False], ids=["inside the block", "after the block"])
def test_double_backward(device, new_pool, inside):
    pool = new_pool()
    engine = memswap.saved_tensors(EVERYTHING, pool=pool)
    x = random(device, 8, 8).requires_grad_()
    w = random(device, 8, 8, seed=1).requires_grad_()

    def second(loss):
        first = torch.autograd.grad(loss, [x, w], create_graph=True)
        penalty = sum(g.square().sum() for g in first)
        return [*(g.detach() for g in first), *torch.autograd.grad(penalty, [x, w])]

    def loss():
        return (x @ w).tanh().exp().sum()

    expected = second(loss())
    with engine:
        out = loss()
        found = second(out) if inside else None
    found = found or second(out)
    assert_same_gradients(found, expected)
    del out, found
    assert_released(engine, pool)


@pytest.mark.cpu_only
@pytest.mark.parametrize("check", ["gradcheck", "gradgradcheck"])
def test_numerical_derivatives_agree(device, new_pool, check):
    pool = new_pool()
    engine = memswap.saved_tensors(EVERYTHING, pool=pool)
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.LayerNorm(4), nn.Linear(4, 2)).double()

    def run(x, w):
        with engine:
            return torch.softmax(layer(x) @ w, -1).sin()

    x = random(device, 2, 3, dtype=torch.float64).requires_grad_()
    w = random(device, 2, 2, dtype=torch.float64, seed=1).requires_grad_()
    assert getattr(torch.autograd, check)(run, (x, w))
    assert engine.stats().moved_storages > 0
    assert_released(engine, pool)


def test_two_live_graphs_in_either_order(device, new_training):
    a, b = new_input(device, seed=1), new_input(device, seed=2)
    expected = {"ab": plain_gradients(device, a, b), "ba": plain_gradients(device, b, a)}
    training = new_training()
    for _ in range(2):
        for order in ("ab", "ba"):
            training.model.zero_grad(set_to_none=True)
            losses = {"a": training.loss(a), "b": training.loss(b)}
            for name in order:
                losses.pop(name).backward()
            assert_same_gradients(gradients(training.model), expected[order])
    training.assert_released()


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_microbatches_in_1f1b_order(device, new_training, depth):
    """A pipeline stage: `depth` forwards ahead, then one forward and one backward in turn."""
    inputs = [new_input(device, seed=n) for n in range(6)]
    training = new_training(depth=2)
    expected = plain_gradients(device, *inputs, depth=2)
    for _ in range(2):
        training.model.zero_grad(set_to_none=True)
        live = []
        for x in inputs:
            live.append(training.loss(x))
            if len(live) > depth:
                live.pop(0).backward()
        while live:
            live.pop(0).backward()
        assert_same_gradients(gradients(training.model), expected)
    training.assert_released()


def test_layers_of_two_microbatches_interleaved(device, new_pool):
    """Interleaved stages: layer 0 of a, layer 0 of b, layer 1 of a, ... and backward likewise."""
    layers = nn.ModuleList(
        nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(3)
    ).to(device)
    inputs = [random(device, 4, 8, seed=n) for n in range(2)]
    pool = new_pool()

    def step():
        layers.zero_grad(set_to_none=True)
        stages: list[list] = [[], []]
        for layer in layers:
            for n, x in enumerate(inputs):
                fresh = (stages[n][-1][1] if stages[n] else x).detach().requires_grad_()
                stages[n].append((fresh, layer(fresh)))
        grads = [torch.ones_like(x) for x in inputs]
        for _ in layers:
            for n in (0, 1):
                fresh, out = stages[n].pop()
                out.backward(grads[n])
                grads[n] = fresh.grad
        return gradients(layers)

    expected = step()
    manager = memswap.manage(layers, EVERYTHING, pool=pool)
    for _ in range(3):
        assert_same_gradients(step(), expected)
    assert_released(manager, pool)


def test_gradient_accumulation(device, new_training):
    inputs = [new_input(device, seed=n) for n in range(4)]
    training = new_training(depth=2)
    for _ in range(2):
        training.model.zero_grad(set_to_none=True)
        for x in inputs:
            training.loss(x).backward()
        expected = plain_gradients(device, *inputs, depth=2)
        assert_same_gradients(gradients(training.model), expected)
    training.assert_released()


@pytest.mark.every_action("swap")  # it counts blocks of the pool
def test_graph_dropped_without_backward_releases_everything_at_once(device, new_training):
    training, x = new_training(), new_input(device)
    gc.disable()  # what is released must not wait for the cycle collector
    try:
        loss = training.loss(x)
        assert training.pool.statistics().blocks > 0
        del loss
        training.assert_released()
    finally:
        gc.enable()
    assert_same_gradients(
        train_step(training.model, lambda: training.loss(x)), plain_gradients(device, x)
    )
    training.assert_released()


def test_half_of_a_graph_dropped(device, new_pool):
    pool = new_pool()
    engine = memswap.saved_tensors(EVERYTHING, pool=pool)
    x = random(device, 16).requires_grad_()
    with engine:
        h = (x * 2).sin()
        used, unused = h.exp().sum(), h.cos().tan().sum()  # an auxiliary loss that nobody wants
    for _ in range(2):
        let_sends_end(engine, device)
    del unused, h
    used.backward()
    assert same_bits(x.grad, plain_exp_sin(x))
    del used
    assert_released(engine, pool)


def test_backward_inside_a_forward(device, new_training):
    """An inner optimisation, as in meta learning, while the outer graph is alive."""
    training = new_training(depth=2)
    inner, outer = new_input(device, seed=1), new_input(device, seed=2)
    expected_inner = plain_gradients(device, inner, depth=2)
    expected_both = plain_gradients(device, inner, outer, depth=2)
    loss = training.loss(outer)
    training.loss(inner).backward()
    assert_same_gradients(gradients(training.model), expected_inner)
    loss.backward()
    assert_same_gradients(gradients(training.model), expected_both)
    del loss
    training.assert_released()


def test_forward_inside_a_backward(device, new_pool):
    """A custom Function whose backward runs a graph of its own (reentrant autograd)."""
    pool = new_pool()
    engine = memswap.saved_tensors(EVERYTHING, pool=pool)

    class Reentrant(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        def backward(ctx, gradient):
            (x,) = ctx.saved_tensors
            with torch.enable_grad(), engine:
                leaf = x.detach().requires_grad_()
                (inner,) = torch.autograd.grad((leaf * 1).sin().sum(), [leaf])
            return gradient * inner

    x = random(device, 16).requires_grad_()
    with engine:
        loss = Reentrant.apply(x * 2).exp().sum()
    let_sends_end(engine, device)
    loss.backward()
    assert same_bits(x.grad, plain_exp_sin(x))
    del loss
    assert_released(engine, pool)


def test_block_is_entered_again_while_it_is_open(device, new_pool):
    pool = new_pool()
    engine = memswap.saved_tensors(EVERYTHING, pool=pool)
    x = random(device, 16).requires_grad_()
    with engine:
        h = (x * 2).sin()
        with engine:
            loss = h.exp().sum()
        unrelated = h.detach().requires_grad_().sin()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    del unrelated, h
    loss.backward()
    assert same_bits(x.grad, plain_exp_sin(x))
    del loss
    assert_released(engine, pool)


def test_manager_removed_between_forward_and_backward(device, new_pool):
    model, x = new_stack(device), new_input(device)
    pool = new_pool()
    manager = memswap.manage(model.layers, EVERYTHING, pool=pool)
    loss = model(x)
    manager.remove()
    loss.backward()
    assert_same_gradients(gradients(model), plain_gradients(device, x))
    del loss
    assert_released(manager, pool)


def test_graph_outlives_everything_else(device, new_pool):
    """The engine, the pool and the model are dropped; the graph still has what it needs."""
    x = random(device, 16).requires_grad_()

    def forward():
        with memswap.saved_tensors(EVERYTHING, pool=new_pool()):
            return (x * 2).sin().exp().sum()

    loss = forward()
    gc.collect()
    loss.backward()
    assert same_bits(x.grad, plain_exp_sin(x))
