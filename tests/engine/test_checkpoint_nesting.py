"""Checkpointed regions in one another, in torch's own and in managed layers, and those in them."""

from __future__ import annotations

import pytest
from checkpoint_helpers import (
    LEAVE,
    MATMULS,
    CheckpointPolicy,
    checkpointing,
    gradients_of,
    policy_of,
)
from helpers import (
    EVERYTHING,
    assert_released,
    assert_same_gradients,
    new_input,
    new_stack,
    random,
    train_step,
)
from torch.utils import checkpoint as torch_checkpoint

import memswap


@pytest.mark.every_action("swap", "encode")
@pytest.mark.parametrize("outer", [None, "MUST_SAVE", "leaves"])
def test_regions_in_regions(device, new_pool, outer, _action):
    model, x, pool = new_stack(device), new_input(device), new_pool()
    expected = train_step(model, lambda: model(x))
    around = {None: None, "MUST_SAVE": CheckpointPolicy.MUST_SAVE, "leaves": LEAVE[_action]}[outer]
    ours = checkpointing(pool, around, swap_inputs=True)
    policy = policy_of(LEAVE[_action])

    def inner(layer, h):
        return memswap.checkpoint(layer, h, policy_fn=policy)

    def both(first, second, h):
        return inner(second, inner(first, h))

    def loss():
        h = model.enter(x)
        h = ours.checkpoint(both, model.layers[0], model.layers[1], h)
        return ours.checkpoint(inner, model.layers[2], h).square().mean()

    for _ in range(2):
        assert_same_gradients(train_step(model, loss), expected)
    # An engine of the inner regions' own would not have this pool, nor this object's statistics.
    inner_saves = 3 * 4
    assert ours.stats().offered_tensors > inner_saves
    assert_released(ours, pool)


def test_torchs_checkpoint_inside_and_around(device, new_pool):
    model, x, pool = new_stack(device), new_input(device), new_pool()
    expected = train_step(model, lambda: model(x))
    ours = checkpointing(pool, CheckpointPolicy.MUST_SWAP)

    def theirs(fn, *args):
        context_fn = lambda: torch_checkpoint.create_selective_checkpoint_contexts(list(MATMULS))  # noqa: E731
        return torch_checkpoint.checkpoint(fn, *args, use_reentrant=False, context_fn=context_fn)

    def loss():
        h = theirs(ours.checkpoint, model.layers[0], model.enter(x))
        h = ours.checkpoint(theirs, model.layers[1], h)
        return theirs(model.layers[2], h).square().mean()

    for _ in range(2):
        assert_same_gradients(train_step(model, loss), expected)
    assert_released(ours, pool)


def test_inside_a_managed_layer_it_is_the_managers_engine(device, new_pool, way, new_training):
    plain = new_stack(device)
    x = new_input(device)
    expected = train_step(plain, lambda: plain(x))
    training = new_training(policy=EVERYTHING)
    ours = memswap.checkpoint_module(
        training.model.layers, policy_of(CheckpointPolicy.MUST_SWAP), swap_inputs=True
    )
    for _ in range(3):
        found = train_step(training.model, lambda: training.loss(x))
        assert_same_gradients(found, expected)
    assert ours.stats().offered_tensors == 0, "an engine of its own inside a managed layer"
    assert training.stats().moved_storages >= 3 * 3 * 4
    training.assert_released()


def test_a_pool_that_is_given_is_used_inside_a_block(device, new_pool):
    block_pool, pool = new_pool(), new_pool()
    engine = memswap.saved_tensors(memswap.Policy(action=memswap.Action.KEEP), pool=block_pool)
    ours = checkpointing(pool, CheckpointPolicy.MUST_SWAP)
    x = random(device, 16, 16).requires_grad_()
    with engine:
        out = ours.checkpoint(lambda x: (x @ x).sin(), x)
    assert ours.stats().moved_storages == 1 and pool.statistics().blocks == 1
    out.sum().backward()
    del out
    assert_released(ours, pool)


def test_block_inside_a_region_steps_aside(device, new_pool):
    pool = new_pool()
    engine = memswap.saved_tensors(EVERYTHING, pool=pool)
    x = random(device, 16, 16).requires_grad_()

    def fn(x):
        with engine:
            return (x @ x).sin().exp()

    memswap.checkpoint(fn, x).sum().backward()
    assert_same_gradients([x.grad], gradients_of(lambda x: (x @ x).sin().exp(), x))
    assert engine.stats().offered_tensors == 0
