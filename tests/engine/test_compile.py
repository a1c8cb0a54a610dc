"""torch.compile of managed layers, of a whole function, and of a model with managed layers."""

from __future__ import annotations

import pytest
import torch
from helpers import (
    EVERYTHING,
    assert_released,
    assert_same_gradients,
    new_input,
    new_stack,
    train_step,
)

import memswap


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.cpu_only
@pytest.mark.parametrize("when", ["before manage", "after manage", "module.compile"])
def test_layers_compiled_one_by_one(device, new_pool, fresh_dynamo, when):
    def compiled(swapped):
        model = new_stack(device, depth=2)
        manager = None
        if when == "before manage":
            for index, layer in enumerate(model.layers):
                model.layers[index] = torch.compile(layer, backend="aot_eager")
        if when == "module.compile":
            for layer in model.layers:
                layer.compile(backend="aot_eager")
        if swapped:
            manager = memswap.manage(model.layers, EVERYTHING, pool=pool)
        if when == "after manage":
            for index, layer in enumerate(model.layers):
                model.layers[index] = torch.compile(layer, backend="aot_eager")
        return model, manager

    pool = new_pool()
    x = new_input(device)
    plain, _ = compiled(False)
    expected = train_step(plain, lambda: plain(x))
    torch._dynamo.reset()
    model, manager = compiled(True)
    for _ in range(3):
        assert_same_gradients(train_step(model, lambda: model(x)), expected)
    assert manager.stats().moved_storages > 0, "nothing of a compiled layer was moved"
    assert_released(manager, pool)


@pytest.mark.cpu_only
@pytest.mark.parametrize("where", ["with block inside", "with block outside"])
def test_whole_function_compiled(device, new_pool, fresh_dynamo, where):
    model, x = new_stack(device, depth=2), new_input(device)
    pool = new_pool()
    plain = torch.compile(model, backend="aot_eager")
    expected = train_step(model, lambda: plain(x))
    torch._dynamo.reset()
    engine = memswap.saved_tensors(EVERYTHING, pool=pool)

    if where == "with block inside":

        @torch.compile(backend="aot_eager")
        def loss():
            with engine:
                return model(x)

    else:
        compiled = torch.compile(model, backend="aot_eager")

        def loss():
            with engine:
                return compiled(x)

    for _ in range(3):
        assert_same_gradients(train_step(model, loss), expected)
    if where == "with block outside":
        assert engine.stats().moved_storages > 0
    assert_released(engine, pool)


@pytest.mark.cpu_only
@pytest.mark.parametrize("how", ["torch.compile", "model.compile", "layers"])
def test_a_graph_that_hooks_divide_is_told(device, new_pool, fresh_dynamo, recwarn, how):
    """Fused in another way, gradients have other last bits; not with layers compiled alone."""
    model, x = new_stack(device, depth=2), new_input(device)
    given = model
    if how == "torch.compile":
        given = torch.compile(model, backend="aot_eager")
    elif how == "model.compile":
        model.compile(backend="aot_eager")
    else:
        for layer in model.layers:
            layer.compile(backend="aot_eager")
    with memswap.manage(given, EVERYTHING, pool=new_pool()) as manager:
        given(x).backward()
        assert manager.stats().moved_storages > 0
    told = [one for one in recwarn if "divide its graph" in str(one.message)]
    assert len(told) == (how != "layers")
    assert all(one.filename == __file__ for one in told), "the warning points elsewhere"


@pytest.mark.cpu_only
def test_compiled_model_whose_layers_are_managed(device, new_pool, fresh_dynamo):
    model, x = new_stack(device, depth=2), new_input(device)
    pool = new_pool()
    plain = torch.compile(model, backend="aot_eager")
    expected = train_step(model, lambda: plain(x))
    torch._dynamo.reset()
    manager = memswap.manage(model.layers, EVERYTHING, pool=pool)
    compiled = torch.compile(model, backend="aot_eager")
    for _ in range(3):
        assert_same_gradients(train_step(model, lambda: compiled(x)), expected)
    assert_released(manager, pool)
