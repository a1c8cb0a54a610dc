"""What went wrong for users of other systems that swap by module or by group, and does not here.

Each test is named after what its user saw. Both doors that take those systems' place are tried: a
chain of layers, and modules found by a pattern.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import (
    EVERYTHING,
    assert_nothing_left,
    assert_pool_empty,
    assert_same_gradients,
    flush_autograd,
    gradients,
    new_input,
    new_stack,
    random,
    same_bits,
    train_step,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

import memswap
from memswap.engine import transfer
from memswap.engine.entry import Entry

pytestmark = pytest.mark.every_action("swap")


@pytest.fixture(params=["chain", "swap_modules"])
def door(request):
    """Puts memswap on all layers of a model."""

    def open_door(model: nn.Module, pool: Any, policy: memswap.Policy = EVERYTHING) -> Any:
        if request.param == "chain":
            return memswap.chain(model.layers, policy, pool=pool)
        return memswap.swap_modules(model, "layers.{*}", policy=policy, pool=pool)

    return open_door


def assert_released(swap: Any, pool: Any, device: torch.device) -> None:
    flush_autograd(device)
    assert_nothing_left(swap.stats())
    assert_pool_empty(pool)


def settle(swap: Any, device: torch.device) -> None:
    for managed in swap.towers.values() if hasattr(swap, "towers") else [swap]:
        managed._saver.settle()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


class Layered(nn.Module):
    """Layers one after another, made by hand."""

    def __init__(self, layers: list[nn.Module], device: torch.device) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers).to(device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


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


# --- by module pattern ---------------------------------------------------------------------------


def test_two_towers_do_not_take_each_others_tensors(device, new_pool):
    model, x = Towers(device), new_input(device)
    expected = train_step(model, lambda: model(x))
    pool = new_pool()
    swap = memswap.swap_modules(
        model, ["vision.layers.{*}", "text.layers.{*}"], policy=EVERYTHING, pool=pool
    )
    assert set(swap.towers) == {"vision.layers.*", "text.layers.*"}
    for _ in range(2):
        assert_same_gradients(train_step(model, lambda: model(x)), expected)
    for tower in swap.towers.values():
        assert tower.stats().moved_storages > 0
    assert_released(swap, pool, device)


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
        assert_released(swap, pool, device)


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
        assert_released(swap, pool, device)
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
    assert_released(swap, pool, device)


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
        assert_released(swap, pool, device)


@pytest.mark.one_schedule
def test_nothing_is_kept_from_step_to_step(device, new_pool, door):
    """Not the last layer's, not an evaluation's with gradients, nor a graph's without backward."""
    model, x = new_stack(device, depth=2), new_input(device)
    pool = new_pool()
    swap = door(model, pool)
    for _ in range(2):
        train_step(model, lambda: model(x))
        assert_released(swap, pool, device)
        unused = model(x)
        del unused
        settle(swap, device)
        assert_released(swap, pool, device)
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
    assert_released(swap, pool, device)


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

    class Odd(nn.Module):
        def forward(self, x):
            if what == "sparse":
                index = torch.arange(16, device=x.device).repeat(2, 1)
                eye = torch.sparse_coo_tensor(index, x[0, 0].detach(), (16, 16))
                return torch.sparse.mm(eye, x[0].t()).t()[None] + x
            return x * torch.ones(8, 16).to(x.device)

    model, x = Layered([Odd(), nn.Linear(16, 16)], device), new_input(device)
    expected = train_step(model, lambda: model(x))
    door(model, new_pool())
    assert_same_gradients(train_step(model, lambda: model(x)), expected)


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
    """Not every stored tensor of all layers is looked at when one layer's are released."""
    looks = 0

    def counted(look):
        def counting(*arguments: object, **options: object) -> bool:
            nonlocal looks
            looks += 1
            return look(*arguments, **options)

        return counting

    # Whoever goes through entries asks each for its state first.
    monkeypatch.setattr(Entry, "state", property(counted(Entry.state.__get__)))
    per_layer = {}
    for depth in (3, 9):
        model = new_stack(device, depth=depth)
        with memswap.chain(model.layers, EVERYTHING, pool=new_pool()):
            looks = 0
            train_step(model, lambda m=model: m(new_input(device)))
        per_layer[depth] = looks / (depth - 1)
    assert per_layer[9] < 1.5 * per_layer[3], f"looks per layer: {per_layer}"


# --- by group and chain ---------------------------------------------------------------------------


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
    opened = transfer.open_lane

    class Watched:
        def __init__(self, lane):
            self.lane = lane

        def send(self, storage, block):
            sizes.append(storage.nbytes)
            return self.lane.send(storage, block)

        def __getattr__(self, name):
            return getattr(self.lane, name)

    monkeypatch.setattr(transfer, "open_lane", lambda *a, **k: Watched(opened(*a, **k)))
    monkeypatch.setattr("memswap.engine.group.SMALL_BYTES", 0)  # each travels alone
    group = memswap.Group("order", EVERYTHING, pool=new_pool())
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
    assert_released(swap, pool, device)


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
    assert_released(swap, pool, device)
