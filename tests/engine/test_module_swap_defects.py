"""What went wrong for users of other systems that swap by module pattern, and does not here.

Each test is named after what its user saw.
"""

from __future__ import annotations

from typing import Any

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

import memswap
from memswap._native import native

pytestmark = pytest.mark.every_action("swap")


def settle(swap: Any, device: torch.device) -> None:
    for engine in swap._engines.values():
        engine.settle()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


class Towers(nn.Module):
    """Two towers of different depth, one after the other."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.vision = new_stack(device, depth=3, seed=2)
        self.text = new_stack(device, depth=2, seed=3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.vision.layers:
            x = layer(x)
        for layer in self.text.layers:
            x = layer(x)
        return x.square().mean()


def test_two_towers_do_not_take_each_others_tensors(device, new_pool):
    model, x = Towers(device), new_input(device)
    expected = train_step(model, lambda: model(x))
    pool = new_pool()
    swap = memswap.swap_modules(
        model, ["vision.layers.{*}", "text.layers.{*}"], policy=EVERYTHING, pool=pool
    )
    assert set(swap.schedule.towers) == {"vision.layers.*", "text.layers.*"}
    for _ in range(2):
        assert_same_gradients(train_step(model, lambda: model(x)), expected)
    for tower in swap.schedule.towers.values():
        assert tower.stats().moved_storages > 0
    assert_released(swap, pool)


def test_a_second_model_with_the_same_names_does_not_disturb_the_first(device, new_pool, door):
    models = [new_stack(device, depth=2, seed=seed) for seed in range(2)]
    x = new_input(device)
    expected = [train_step(model, lambda m=model: m(x)) for model in models]
    pools = new_pool(), new_pool()
    swaps = [door(model, pool) for model, pool in zip(models, pools, strict=True)]
    for _ in range(2):
        losses = [model(x) for model in models]
        for model, loss in zip(models, losses, strict=True):
            model.zero_grad(set_to_none=True)
            loss.backward()
        for model, wanted in zip(models, expected, strict=True):
            assert_same_gradients(gradients(model), wanted)
        del losses, loss
    for swap, pool in zip(swaps, pools, strict=True):
        assert_released(swap, pool)


@pytest.mark.one_schedule
def test_swapping_a_model_again_starts_anew(device, new_pool, door):
    model, x = new_stack(device), new_input(device)
    expected = train_step(model, lambda: model(x))
    for _ in range(2):
        pool = new_pool()
        swap = door(model, pool)
        assert_same_gradients(train_step(model, lambda: model(x)), expected)
        assert swap.stats().moved_storages > 0
        swap.remove()
        assert_released(swap, pool)
    before = swap.stats().offered_tensors
    assert_same_gradients(train_step(model, lambda: model(x)), expected)
    assert swap.stats().offered_tensors == before, "hooks stayed behind"


@pytest.mark.one_schedule
def test_a_layer_that_saves_nothing_does_not_break_its_neighbours(device, new_pool, door):
    model = Layered([nn.Linear(16, 16), nn.Identity(), nn.Linear(16, 16), nn.GELU()], device)
    x = new_input(device)
    expected = train_step(model, lambda: model(x))
    pool = new_pool()
    swap = door(model, pool)
    for _ in range(2):
        assert_same_gradients(train_step(model, lambda: model(x)), expected)
    assert_released(swap, pool)


def test_microbatches_in_flight_keep_their_own_tensors(device, new_pool, door):
    """Gradient accumulation and one-forward-one-backward: a later forward overwrites nothing."""
    model = new_stack(device, depth=2)
    inputs = [new_input(device, seed=n) for n in range(5)]
    for order in ("F F F B B B", "F F B F B B"):
        waiting: list[torch.Tensor] = []
        wanted = []
        for number, action in enumerate(order.split()):
            if action == "F":
                waiting.append(model(inputs[number % 5]))
            else:
                waiting.pop(0).backward()
        expected, found = gradients(model), None
        model.zero_grad(set_to_none=True)
        pool = new_pool()
        swap = door(model, pool)
        for number, action in enumerate(order.split()):
            if action == "F":
                wanted.append(model(inputs[number % 5]))
            else:
                wanted.pop(0).backward()
        found = gradients(model)
        model.zero_grad(set_to_none=True)
        swap.remove()
        assert_same_gradients(found, expected)
        assert_released(swap, pool)


@pytest.mark.one_schedule
def test_nothing_is_kept_from_step_to_step(device, new_pool, door):
    """Not the last layer's, not an evaluation's with gradients, nor a graph's without backward."""
    model, x = new_stack(device, depth=2), new_input(device)
    pool = new_pool()
    swap = door(model, pool)
    for _ in range(2):
        train_step(model, lambda: model(x))
        assert_released(swap, pool)
        unused = model(x)
        del unused
        settle(swap, device)
        assert_released(swap, pool)
        with torch.no_grad():
            model(x)


def test_a_slice_does_not_cost_the_rest_of_its_storage(device, new_pool, door):
    class Slices(nn.Module):
        def forward(self, x):
            whole = x * 2
            self.whole = whole.detach()  # somebody else still looks at all of it
            return torch.cat([whole[:, :2].sin(), whole[:, 2:].cos()], 1)

    model, x = Layered([Slices(), nn.Linear(16, 16)], device), new_input(device)
    x.requires_grad_()
    expected = train_step(model, lambda: model(x))
    swap = door(model, new_pool())
    found = train_step(model, lambda: model(x))
    assert_same_gradients(found, expected)
    assert same_bits(model.layers[0].whole, x.detach() * 2), "bytes outside the slice were lost"
    assert swap.stats().moved_storages > 0


@pytest.mark.one_schedule
def test_a_storage_saved_twice_is_copied_once(device, new_pool, door):
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.linear = nn.LayerNorm(16), nn.Linear(16, 16)

        def forward(self, x):
            x = x * 1.5
            return x.sin() + self.linear(self.norm(x)) + x.square()  # x is saved three times

    model, x = Layered([Residual(), nn.Identity()], device), new_input(device).requires_grad_()
    expected = train_step(model, lambda: model(x))
    swap = door(model, new_pool())
    assert_same_gradients(train_step(model, lambda: model(x)), expected)
    stats = swap.stats()
    assert stats.deduplicated_tensors == 2
    assert stats.moved_storages == 4, "x, the mean and deviation of the norm, and its result"


@pytest.mark.one_schedule
def test_a_module_called_with_no_input_at_all_is_no_error(device, new_pool):
    """`hidden_states=None`, keywords alone, or nothing: only what is there can be swapped."""

    class Optional(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(16, device=device))

        def forward(self, hidden_states=None, *, other=None):
            x = self.weight * 2 if hidden_states is None else hidden_states * self.weight
            return (x * x) if other is None else x * other

    layers = nn.ModuleList([Optional(), Optional()])
    x = random(device, 16)

    def loss() -> torch.Tensor:
        y = layers[0](None) + layers[0]() + layers[0](other=x)
        return layers[1](hidden_states=y).sum()

    loss().backward()
    expected = [p.grad for p in layers.parameters()]
    for parameter in layers.parameters():
        parameter.grad = None
    memswap.swap_modules(
        nn.ModuleDict({"layers": layers}),
        "layers.*",
        only_input=True,
        policy=EVERYTHING,
        pool=new_pool(),
    )
    loss().backward()
    assert_same_gradients([p.grad for p in layers.parameters()], expected)


@pytest.mark.one_schedule
def test_each_swap_has_its_own_check_and_pool(device, new_pool):
    """Arguments of a second call count, and belong to it alone."""
    models, x = [new_stack(device, seed=s) for s in range(2)], new_input(device)
    pools = new_pool(), new_pool()
    seen: list[list[int]] = [[], []]
    swaps = [
        memswap.swap_modules(
            models[n],
            "layers.{*}",
            check=lambda tensor, n=n: seen[n].append(tensor.dim()) or n == 0,
            policy=EVERYTHING,
            pool=pools[n],
        )
        for n in range(2)
    ]
    for model in models:
        train_step(model, lambda m=model: m(x))
    assert seen[0] and seen[1]
    assert swaps[0].stats().moved_storages > 0
    assert swaps[1].stats().moved_storages == 0, "the first model's check decided"


@pytest.mark.one_schedule
def test_an_output_that_an_operator_saves_does_not_leak(device, new_pool, door):
    model, x = Layered([nn.Sigmoid(), nn.Tanh(), nn.Identity()], device), new_input(device)
    x.requires_grad_()
    pool = new_pool()
    swap = door(model, pool)
    for _ in range(3):
        loss = model(x)
        del loss
        settle(swap, device)
    assert_released(swap, pool)


@pytest.mark.one_schedule
def test_an_edit_in_place_is_not_silently_a_wrong_gradient(device, new_pool, door):
    class Edits(nn.Module):
        def forward(self, x):
            y = x * 2
            z = y.sin()
            settle(swap, device)  # a send may read what is edited, and nobody will see those bytes
            with torch.no_grad():
                y.add_(1)
            return z

    model, x = Layered([Edits(), nn.Identity(), nn.Identity()], device), new_input(device)
    swap = door(model, new_pool())
    loss = model(x.requires_grad_())
    with pytest.raises(memswap.InplaceEditError, match="modified by an inplace"):
        loss.backward()


@pytest.mark.one_schedule
@pytest.mark.parametrize("what", ["sparse", "host"])
def test_what_is_no_plain_tensor_of_the_device_stays(device, new_pool, door, what):
    if what == "sparse" and device.type not in ("cpu", "cuda"):
        pytest.skip("the simulated device has no sparse tensors")
    if what == "host" and device.type == "cpu":
        pytest.skip("a CPU's own tensors are in host memory")

    class Odd(nn.Module):
        def forward(self, x):
            if what == "sparse":
                index = torch.arange(16, device=x.device).repeat(2, 1)
                eye = torch.sparse_coo_tensor(index, x[0, 0].detach(), (16, 16))
                return torch.sparse.mm(eye, x[0].t()).t()[None] + x
            return x * torch.full((), 1.5)  # where the factor is saved, it is a host tensor

    model, x = Layered([Odd(), nn.Linear(16, 16)], device), new_input(device).requires_grad_()
    expected = train_step(model, lambda: model(x))
    swap = door(model, new_pool())
    assert_same_gradients(train_step(model, lambda: model(x)), expected)
    reason = "not a plain tensor" if what == "sparse" else "host memory beside an accelerator"
    assert swap.stats().kept[reason].tensors == 1


def test_a_return_reads_what_the_send_wrote(device, new_pool, door):
    """Loaded right behind the offload, under every schedule: never bytes of before."""
    model = Layered([nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16)], device)
    pool = new_pool()
    swap = door(model, pool)
    for step in range(4):
        x = new_input(device, seed=step)
        found = train_step(model, lambda: model(x))
        swap.remove()
        assert_same_gradients(found, train_step(model, lambda: model(x)))
        swap = door(model, pool)


@pytest.mark.one_schedule
def test_host_memory_is_taken_once_and_used_again(device, new_pool, door):
    model, x = new_stack(device), new_input(device)
    pool = new_pool()
    swap = door(model, pool)
    train_step(model, lambda: model(x))
    taken = pool.statistics().slabs_acquired
    for _ in range(3):
        train_step(model, lambda: model(x))
    assert pool.statistics().slabs_acquired == taken, "host memory is pinned anew in each step"
    assert swap.stats().moved_storages > 0


@pytest.mark.one_schedule
@pytest.mark.filterwarnings("ignore:memswap. a storage")
def test_host_memory_has_a_limit_that_costs_device_memory_and_no_crash(device, new_pool, door):
    model = Layered([nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 512), nn.Identity()], device)
    x = random(device, 512, 512)
    expected = train_step(model, lambda: model(x))
    pool = new_pool(budget="1MiB")
    swap = door(model, pool)
    assert_same_gradients(train_step(model, lambda: model(x)), expected)
    assert pool.statistics().reserved_bytes <= 1 << 20
    assert swap.stats().kept["pool"].tensors > 0, "nobody was told that there was no room"


@pytest.mark.one_schedule
def test_the_work_of_a_release_does_not_grow_with_the_depth_of_the_model(
    device, new_pool, monkeypatch
):
    """A layer's turn looks at its own batch and those next to it, not at all that is stored."""
    looked_at = 0

    def counted(call):
        def counting(batch: native.Batch, *arguments: int) -> None:
            nonlocal looked_at
            looked_at += batch.nbytes  # each call goes through all storages of its batch
            call(batch, *arguments)

        return counting

    for name in ("launch_offload", "wait_offload", "launch_load", "wait_load"):
        monkeypatch.setattr(native.Batch, name, counted(getattr(native.Batch, name)))
    per_layer = {}
    for depth in (3, 9):
        model = new_stack(device, depth=depth)
        with memswap.chain(model.layers, EVERYTHING, pool=new_pool()):
            looked_at = 0
            train_step(model, lambda m=model: m(new_input(device)))
        per_layer[depth] = looked_at / (depth - 1)
    assert 0 < per_layer[9] < 1.5 * per_layer[3], f"bytes looked at per layer: {per_layer}"
