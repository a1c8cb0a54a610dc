"""Graphs of checkpointed regions: run twice, in parts, differentiated twice, several in flight."""

from __future__ import annotations

import pytest
import torch
from checkpoint_helpers import (
    LEAVE,
    CheckpointPolicy,
    checkpointing,
    forward,
    gradients_of,
)
from helpers import (
    assert_released,
    assert_same_gradients,
    collect,
    gradients,
    new_input,
    new_stack,
    random,
)

import memswap


@pytest.mark.every_action("swap", "encode")
def test_second_backward_finds_everything_again(device, new_pool, _action):
    """torch's selective checkpoint refuses here: it hands out what it saved only once."""
    pool = new_pool()
    ours = checkpointing(pool, LEAVE[_action], swap_inputs=memswap.Action(_action))
    x, w = random(device, 16, 16), random(device, 16, 16, seed=1)
    leaf = x.clone().requires_grad_()

    def fn(x):
        return ((x @ w).sin() @ w).sin()

    (expected,) = gradients_of(fn, x)
    out = ours.checkpoint(fn, leaf * 1).sum()
    for again in (True, True, False):
        leaf.grad = None
        out.backward(retain_graph=again)
        assert_same_gradients([leaf.grad], [expected])
    del out
    assert_released(ours, pool)


@pytest.mark.parametrize("decision", ["MUST_SAVE", "MUST_SWAP"])
def test_two_losses_that_use_parts_of_one_region(device, new_pool, decision):
    """Two backward passes without retain_graph; each recomputes the region for its part."""
    pool = new_pool()
    ours = checkpointing(pool, CheckpointPolicy[decision])
    x, w = random(device, 16, 16), random(device, 16, 16, seed=1)
    leaf = x.clone().requires_grad_()

    def fn(x, y):
        return (x @ w).sin().exp(), (y @ w).cos().exp()

    a, b = ours.checkpoint(fn, leaf, leaf)
    a.sum().backward()
    b.sum().backward()
    assert_same_gradients([leaf.grad], gradients_of(lambda x: sum(fn(x, x)), x))
    del a, b
    assert_released(ours, pool, moved=decision == "MUST_SWAP")


@pytest.mark.every_action("swap", "encode")
def test_double_backward(device, new_pool, _action):
    pool = new_pool()
    ours = checkpointing(pool, LEAVE[_action])
    raw = random(device, 8, 8), random(device, 8, 8, seed=1)

    def run(call):
        x, w = (one.clone().requires_grad_() for one in raw)
        out = call(lambda x, w: ((x @ w).sin() @ w).sin(), x, w).sum()
        (gradient,) = torch.autograd.grad(out, x, create_graph=True)
        gradient.square().sum().backward()
        return [x.grad, w.grad]

    assert_same_gradients(run(ours.checkpoint), run(lambda fn, *args: fn(*args)))
    collect()
    assert_released(ours, pool)


@pytest.mark.parametrize("order", ["first in first out", "last in first out", "one ahead"])
def test_several_microbatches_in_flight(device, new_pool, order):
    model, pool = new_stack(device), new_pool()
    inputs = [new_input(device, seed=seed) for seed in range(3)]

    def accumulate():
        for x in inputs:
            model(x).backward()
        return gradients(model)

    model.zero_grad(set_to_none=True)
    if order == "last in first out":
        inputs.reverse()
    expected = [gradient.clone() for gradient in accumulate()]
    if order == "last in first out":
        inputs.reverse()
    ours = checkpointing(pool, CheckpointPolicy.MUST_SWAP, swap_inputs=True)
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        if order == "one ahead":
            losses = [forward(model, ours.checkpoint, inputs[0])]
            for x in inputs[1:]:
                losses.append(forward(model, ours.checkpoint, x))
                losses.pop(0).backward()
            losses.pop().backward()
        else:
            losses = [forward(model, ours.checkpoint, x) for x in inputs]
            while losses:
                losses.pop(0 if order.startswith("first") else -1).backward()
        assert_same_gradients(gradients(model), expected)
    assert_released(ours, pool)
