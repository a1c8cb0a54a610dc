"""checkpoint_module: a module whose forward is a region, and nothing else about it is different."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import pickle
import weakref

import pytest
import torch
from checkpoint_helpers import LEAVE, CheckpointPolicy, policy_of
from helpers import (
    Block,
    assert_released,
    assert_same_gradients,
    new_input,
    new_stack,
    train_step,
)
from torch import nn

import memswap

SWAP = policy_of(CheckpointPolicy.MUST_SWAP)


@pytest.mark.every_action("swap", "encode")
def test_gradients_do_not_change(device, new_pool, _action):
    model, x, pool = new_stack(device), new_input(device), new_pool()
    expected = train_step(model, lambda: model(x))
    ours = memswap.checkpoint_module(
        model.layers,
        policy_of(LEAVE[_action]),
        swap_inputs=memswap.Action(_action),
        pool=pool,
        min_bytes=1,
    )
    for _ in range(3):
        assert_same_gradients(train_step(model, lambda: model(x)), expected)
    assert ours.stats().moved_storages > 0 and "moved" in ours.report()
    ours.reset_stats()
    ours.remove()
    assert_same_gradients(train_step(model, lambda: model(x)), expected)
    assert ours.stats().offered_tensors == 0, "a module that was given back is still checkpointed"
    assert_released(ours, pool, moved=False)


@pytest.mark.every_action("swap", "encode")
def test_an_input_that_is_passed_three_times_is_one_again(device, new_pool, _action):
    """Where its three are one tensor, attention has one projection instead of three."""
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.MultiheadAttention(16, 2, batch_first=True) for _ in range(2))
    layers.to(device)
    x = torch.randn(3, 5, 16).to(device)

    def loss():
        hidden = x
        for layer in layers:
            hidden, weights = layer(hidden, hidden, value=hidden)
        return hidden.square().sum() + weights.square().sum()

    expected = train_step(layers, loss)
    memswap.checkpoint_module(
        layers, swap_inputs=memswap.Action(_action), pool=new_pool(), min_bytes=1
    )
    assert_same_gradients(train_step(layers, loss), expected)


@pytest.mark.cpu_only
def test_state_dict_type_and_signature_are_the_modules_own(device):
    plain, model = new_stack(device), new_stack(device)
    memswap.checkpoint_module(model.layers, SWAP)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in model.named_modules()] == [
        name for name, _ in plain.named_modules()
    ]
    assert all(type(layer) is Block for layer in model.layers)
    assert repr(model) == repr(plain)
    model.load_state_dict(plain.state_dict(), strict=True, assign=True)
    found = inspect.signature(model.layers[0].forward)
    assert found == inspect.signature(plain.layers[0].forward)


@pytest.mark.cpu_only
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_a_copy_has_its_own_forward(device, new_pool, how):
    model, x = new_stack(device), new_input(device)
    ours = memswap.checkpoint_module(model.layers, SWAP, pool=new_pool(), min_bytes=1)
    if how == "deepcopy":
        twin = copy.deepcopy(model)
    elif how == "pickle":
        twin = pickle.loads(pickle.dumps(model))
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(1.5)
    fresh = new_stack(device)
    fresh.load_state_dict(twin.state_dict())
    expected = train_step(fresh, lambda: fresh(x))
    assert_same_gradients(train_step(twin, lambda: twin(x)), expected)
    assert ours.stats().offered_tensors == 0, "the copy runs through the original's regions"
    memswap.checkpoint_module(twin.layers, SWAP, min_bytes=1)
    assert_same_gradients(train_step(twin, lambda: twin(x)), expected)


@pytest.mark.cpu_only
def test_hooks_of_the_module_run_once(device, new_pool):
    layer, x = new_stack(device).layers[0], new_input(device)
    memswap.checkpoint_module(layer, SWAP, pool=new_pool(), min_bytes=1)
    seen = []
    layer.register_forward_pre_hook(lambda *_: seen.append("before"))
    layer.register_forward_hook(lambda *_: seen.append("after"))
    layer.register_full_backward_hook(lambda *_: seen.append("backward"))
    layer(x.requires_grad_()).sum().backward()
    assert seen == ["before", "after", "backward"]


@pytest.mark.cpu_only
def test_a_forward_that_somebody_else_replaced_is_kept(device):
    layer = nn.Linear(4, 4)
    layer.forward = lambda x: x * 3
    ours = memswap.checkpoint_module(layer)
    x = torch.ones(4, requires_grad=True)
    assert torch.equal(layer(x), x * 3)
    assert torch.equal(copy.deepcopy(layer)(x), x * 3)
    ours.remove()
    assert torch.equal(layer(x), x * 3) and not hasattr(layer.forward, "remove")


@pytest.mark.cpu_only
def test_a_module_is_checkpointed_once(device):
    layer = nn.Linear(4, 4)
    ours = memswap.checkpoint_module(layer)
    with pytest.raises(ValueError, match="checkpointed already"):
        memswap.checkpoint_module([layer])
    ours.remove()
    memswap.checkpoint_module([layer]).remove()
    ours.remove()  # again: nothing happens
    assert "forward" not in layer.__dict__
    with pytest.raises(TypeError, match="expected an nn"):
        memswap.checkpoint_module([torch.sin])


@pytest.mark.cpu_only
def test_a_module_that_is_dropped_goes_at_once(device):
    gc.disable()
    try:
        layer = nn.Linear(4, 4)
        ours = memswap.checkpoint_module(layer)
        del ours
        gone = weakref.ref(layer)
        del layer
        assert gone() is None, "the replaced forward keeps its module alive"
    finally:
        gc.enable()


@pytest.mark.cpu_only
def test_the_forward_follows_the_modules_type(device):
    """fully_shard gives a module a type of its own, made at run time."""
    layer = nn.Linear(4, 4, bias=False)
    memswap.checkpoint_module(layer)

    class Sharded(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    layer.__class__ = Sharded
    x = torch.ones(4, requires_grad=True)
    assert torch.equal(layer(x), x @ layer.weight.t() * 2)
