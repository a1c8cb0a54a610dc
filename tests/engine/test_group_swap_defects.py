"""What went wrong for users of other systems that swap by group or by chain, and does not here.

Each test is named after what its user saw.
"""

from __future__ import annotations

import pytest
import torch
from helpers import (
    EVERYTHING,
    assert_released,
    assert_same_gradients,
    gradients,
    new_input,
    new_stack,
    random,
    same_bits,
    train_step,
)
from swap_helpers import Layered
from torch import nn
from torch.utils.checkpoint import checkpoint

import memswap
from memswap._native import native
from memswap.engine import transfers

pytestmark = pytest.mark.every_action("swap")


def test_inputs_that_all_layers_share_survive_their_offload(device, new_pool, door):
    """Rotary tables computed once: the first layer's offload must not empty them for the next."""

    class Rotary(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, pair):
            x, table = pair
            return self.linear(x * table.cos()) * table, table

    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Rotary() for _ in range(4)]).to(device)

        def forward(self, x):
            table = random(device, 8, 16, seed=5)
            for layer in self.layers:
                x, table = layer((x, table))
            return x.square().mean() + table.sum() * 0

    torch.manual_seed(0)
    model, x = Shared(), new_input(device)
    expected = train_step(model, lambda: model(x))
    swap = door(model, new_pool())
    for _ in range(3):
        assert_same_gradients(train_step(model, lambda: model(x)), expected)
    assert swap.stats().deduplicated_tensors >= 3, "the table is sent anew for each layer"


def test_a_layers_output_survives_its_own_offload(device, new_pool, door):
    class Exponent(nn.Module):
        def forward(self, x):
            return x.exp()  # saves its own output, which the next layer reads

    model, x = Layered([Exponent(), Exponent(), nn.Linear(16, 16)], device), new_input(device) * 0.1
    expected = train_step(model, lambda: model(x))
    kept: list[torch.Tensor] = []
    model.layers[0].register_forward_hook(lambda m, a, out: kept.append(out.detach()))
    x.requires_grad_()
    door(model, new_pool())
    assert_same_gradients(train_step(model, lambda: model(x)), expected)
    assert same_bits(kept[0], x.detach().exp()), "the output was emptied while the user held it"


def test_a_checkpointed_next_layer_reads_its_input_when_it_recomputes(device, new_pool, door):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(16, 16), nn.GELU())

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=False)

    model = Layered([nn.GELU(), Checkpointed(), Checkpointed(), nn.GELU()], device)
    x = new_input(device).requires_grad_()
    expected = train_step(model, lambda: model(x))
    swap = door(model, new_pool())
    for _ in range(2):
        assert_same_gradients(train_step(model, lambda: model(x)), expected)
    assert swap.stats().moved_storages > 0, "a checkpoint's inputs were not swapped"


@pytest.mark.one_schedule
def test_groups_that_nobody_moves_take_no_host_memory(device, new_pool):
    pool = new_pool()
    group = memswap.Group("", EVERYTHING, pool=pool)
    x = random(device, 100).requires_grad_()
    with group:
        loss = (x * 2).sin().sum()
    assert pool.statistics().reserved_bytes == 0, "host memory for what never leaves"
    loss.backward()


@pytest.mark.one_schedule
def test_launching_twice_before_waiting_loses_nothing(device, new_pool):
    group = memswap.Group("twice", EVERYTHING, pool=new_pool())
    x = random(device, 100).requires_grad_()
    with group:
        loss = (x * 2).sin().sum()
    group.launch_offload()
    group.launch_offload()
    group.wait_offload()
    group.launch_load()
    group.launch_load()
    group.wait_load()
    loss.backward()
    assert group.stats().moved_storages == group.stats().returned_storages == 1
    assert same_bits(x.grad, (random(device, 100) * 2).cos() * 2)


@pytest.mark.one_schedule
def test_copies_are_made_in_the_order_of_use(device, new_pool, monkeypatch):
    sizes: list[int] = []
    opened = transfers.open_lane

    class Watched(native.LaneAround):
        def __init__(self, lane):
            super().__init__(lane)
            self.lane = lane

        def send(self, storage, block):
            sizes.append(storage.nbytes)
            return self.lane.send(storage, block)

        def __getattr__(self, name):
            return getattr(self.lane, name)

    monkeypatch.setattr(transfers, "open_lane", lambda *a, **k: Watched(opened(*a, **k)))
    group = memswap.Group("order", EVERYTHING, pool=new_pool())
    group._groups.engine.batch_limits.small_bytes = 0  # each travels alone
    x = random(device, 4).requires_grad_()
    with group:
        loss = sum((x.repeat(n) * 2).sin().sum() for n in range(1, 12))
    group.launch_offload()
    assert sizes == [16 * n for n in range(1, 12)], "copies do not follow the order of saving"
    loss.backward()


def test_a_second_backward_finds_its_tensors(device, new_pool, door):
    model, x = new_stack(device), new_input(device)
    expected = train_step(model, lambda: model(x))
    pool = new_pool()
    swap = door(model, pool)
    loss = model(x)
    for turn in range(3):
        model.zero_grad(set_to_none=True)
        loss.backward(retain_graph=turn < 2)
        assert_same_gradients(gradients(model), expected)
    del loss
    assert_released(swap, pool)


@pytest.mark.parametrize("how", ["inner", "output without gradient"])
def test_backward_that_passes_by_a_layers_output_finds_its_tensors(device, new_pool, door, how):
    """`autograd.grad` on something inside a layer, or an output that carries no gradient."""
    inner: list[torch.Tensor] = []

    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x):
            y = self.linear(x).tanh()
            inner.append(y.square().sum())
            return y.detach() if how != "inner" else y

    torch.manual_seed(0)
    model, x = Layered([Keeps(), Keeps(), Keeps()], device), new_input(device)
    weights = [layer.linear.weight for layer in model.layers]

    def run() -> list[torch.Tensor]:
        inner.clear()
        model(x)
        return [torch.autograd.grad(inner[n], weights[n])[0] for n in (2, 1, 0)]

    expected = run()
    inner.clear()
    swap = door(model, new_pool())
    for _ in range(2):
        assert_same_gradients(run(), expected)
    inner.clear()
    assert swap.stats().moved_storages > 0


@pytest.mark.one_schedule
def test_layers_that_were_never_unpacked_keep_nothing(device, new_pool, door):
    class Branch(nn.Module):
        def forward(self, x):
            self.unused = (x * 3).exp()  # its graph dies with the next forward
            return (x * 2).sin()

    model, x = Layered([Branch(), Branch(), Branch()], device), new_input(device).requires_grad_()
    expected = train_step(model, lambda: model(x))
    pool = new_pool()
    swap = door(model, pool)
    for _ in range(3):
        assert_same_gradients(train_step(model, lambda: model(x)), expected)
    for layer in model.layers:
        del layer.unused
    assert_released(swap, pool)
