"""Tensors that a storage alone does not describe: subclasses, sparse, quantised, DTensor."""

from __future__ import annotations

import pytest
import torch
from helpers import (
    EVERYTHING,
    assert_released,
    assert_same_gradients,
    assert_the_same_within,
    let_sends_end,
    random,
    same_bits,
)
from subclasses import Opaque, Pair
from torch import nn

import memswap


def test_wrapper_subclass_moves_by_its_parts(device, new_pool):
    pool = new_pool()
    engine = memswap.saved_tensors(EVERYTHING, pool=pool)

    def run(swapped):
        x = Pair(random(device, 6), random(device, 6, seed=1)).requires_grad_()
        one = Pair(torch.ones(6, device=device), torch.ones(6, device=device))
        if swapped:
            with engine:
                y = (x * 2).sin()
            let_sends_end(engine, device)
        else:
            y = (x * 2).sin()
        y.backward(one)
        assert type(x.grad) is Pair
        return x.grad.a, x.grad.b

    assert_same_gradients(run(True), run(False))
    stats = engine.stats()
    assert stats.moved_storages == 2, "both parts of the subclass move"
    assert stats.freed_bytes == 2 * 6 * 4, "a part of the subclass was held on the device"
    assert stats.returned_storages == 2
    assert_released(engine, pool)


def test_wrapper_subclass_that_cannot_be_taken_apart_stays(device, new_pool):
    pool = new_pool()
    engine = memswap.saved_tensors(EVERYTHING, pool=pool)
    x = random(device, 6)

    def run(swapped):
        wrapped = Opaque(x * 1).requires_grad_()
        if swapped:
            with engine:
                y = (wrapped * 2).sin()
        else:
            y = (wrapped * 2).sin()
        y.backward(Opaque(torch.ones(6, device=device)))
        return [wrapped.grad.inner]

    assert_same_gradients(run(True), run(False))
    assert engine.stats().moved_storages == 0
    assert "not a plain tensor" in engine.stats().kept, "a subclass that stays must be counted"
    assert_released(engine, pool, moved=False)


def test_subclass_without_dispatch_gives_the_same_gradients(device, new_pool):
    class Tagged(torch.Tensor):
        pass

    engine = memswap.saved_tensors(EVERYTHING, pool=new_pool())
    x = random(device, 6).requires_grad_()

    def loss():
        return (x * 2).as_subclass(Tagged).sin().exp().as_subclass(torch.Tensor).sum()

    loss().backward()
    expected, x.grad = x.grad, None
    with engine:
        out = loss()
    let_sends_end(engine, device)
    out.backward()
    assert_same_gradients([x.grad], [expected])


@pytest.mark.cpu_only
@pytest.mark.parametrize("kind", ["sparse", "sparse csr", "nested"])
def test_tensors_that_are_not_strided_stay_and_work(device, new_pool, kind):
    pool = new_pool()
    engine = memswap.saved_tensors(EVERYTHING, pool=pool)
    w = random(device, 4, 3).requires_grad_()

    def loss():
        if kind.startswith("sparse"):
            dense = random(device, 5, 4) * (random(device, 5, 4, seed=1) > 0)
            sparse = dense.to_sparse_csr() if kind.endswith("csr") else dense.to_sparse()
            return torch.sparse.mm(sparse, w.sin()).square().sum()
        nested = torch.nested.as_nested_tensor([w[:2] * 2, w[1:] * 3])
        out = torch.nested.to_padded_tensor(nested.sin() * nested, 0.0)
        return out.square().sum()

    assert_the_same_within(engine, pool, w, loss, device=device)


@pytest.fixture
def jagged(device):
    """Rows of three samples, of which no two are equally long."""
    rows = [random(device, length, 8, seed=length) for length in (3, 5, 2)]
    return torch.nested.nested_tensor(rows, layout=torch.jagged)


@pytest.mark.cpu_only
def test_values_of_a_jagged_tensor_move_and_its_ragged_size_stays_the_same(
    device, new_pool, jagged
):
    pool = new_pool()
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3)).to(device)

    def loss():
        states = jagged
        for layer in layers:
            # What came back meets what never left, in backward too.
            states = layer(states).sin() * states + jagged
        return states.values().square().mean()

    def gradients(value):
        return torch.autograd.grad(value, list(layers.parameters()))

    expected = gradients(loss())
    engine = memswap.saved_tensors(EVERYTHING, pool=pool)
    with engine:
        value = loss()
    let_sends_end(engine, device)
    assert_same_gradients(gradients(value), expected)
    del value
    assert "not a plain tensor" not in engine.stats().kept
    assert engine.stats().freed_bytes >= 5 * 10 * 8 * 4, "values stayed on the device"
    assert_released(engine, pool)


@pytest.mark.cpu_only
@pytest.mark.parametrize("edited", ["the tensor", "its values"])
def test_a_jagged_tensor_that_was_edited_is_refused(device, new_pool, jagged, edited):
    engine = memswap.saved_tensors(EVERYTHING, pool=new_pool())
    layer = nn.Linear(8, 8).to(device)
    with engine:
        value = (layer(jagged) * jagged).values().sum()
    let_sends_end(engine, device)
    (jagged if edited == "the tensor" else jagged.values()).mul_(2)
    with pytest.raises(memswap.InplaceEditError, match="modified by an inplace operation"):
        value.backward()


@pytest.mark.cpu_only
@pytest.mark.filterwarnings("ignore")
def test_quantised_tensor_stays(device, new_pool):
    class Dequantise(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, q):
            ctx.save_for_backward(q)
            return x * q.dequantize()

        @staticmethod
        def backward(ctx, gradient):
            (q,) = ctx.saved_tensors
            return gradient * q.dequantize(), None

    engine = memswap.saved_tensors(EVERYTHING, pool=new_pool())
    x = random(device, 8).requires_grad_()
    with engine:
        q = torch.quantize_per_tensor(random(device, 8, seed=1), 0.1, 3, torch.quint8)
        y = Dequantise.apply(x, q)
    expected = q.dequantize()
    del q
    y.sum().backward()
    assert same_bits(x.grad, expected)
    assert engine.stats().kept["not a plain tensor"].tensors == 1


@pytest.fixture
def mesh(tmp_path):
    distributed = pytest.importorskip("torch.distributed")
    if not distributed.is_available():
        pytest.skip("this torch has no torch.distributed")
    from torch.distributed.device_mesh import init_device_mesh

    store = distributed.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        distributed.destroy_process_group()


@pytest.mark.cpu_only
def test_dtensor_moves_by_its_local_part(device, new_pool, mesh):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    pool = new_pool()
    engine = memswap.saved_tensors(EVERYTHING, pool=pool)
    x = distribute_tensor(random(device, 6, 4), mesh, [Shard(0)])
    w = distribute_tensor(random(device, 4, 4, seed=1), mesh, [Replicate()]).requires_grad_()

    def loss():
        return ((x @ w).sin().exp() * 2).sum()

    def gradient(out):
        w.grad = None
        out.backward()
        return w.grad.to_local(), w.grad.placements

    expected, placements = gradient(loss())
    with engine:
        out = loss()
    let_sends_end(engine, device)
    found = gradient(out)
    assert_same_gradients([found[0]], [expected])
    assert found[1] == placements, "the gradient of a DTensor has other placements"
    assert engine.stats().returned_storages > 0, "no local part of a DTensor went away and back"
    del out, found
    assert_released(engine, pool)


@pytest.mark.cpu_only
def test_dtensor_parameters_stay(device, new_pool, mesh):
    from torch.distributed.tensor import distribute_module

    layer = nn.Linear(4, 4, bias=False)
    distribute_module(layer, mesh)
    pool = new_pool()
    manager = memswap.manage(layer, EVERYTHING, pool=pool)
    from torch.distributed.tensor import Replicate, distribute_tensor

    x = distribute_tensor(random(device, 6, 4), mesh, [Replicate()]).requires_grad_()
    layer(x).sum().backward()
    assert manager.stats().moved_storages == 0, "a DTensor parameter or leaf input was moved"
    assert_released(manager, pool, moved=False)
