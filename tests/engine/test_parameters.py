"""Parameters and buffers never move, by whatever name or view autograd saves them."""

from __future__ import annotations

import pytest
import torch
from helpers import (
    EVERYTHING,
    assert_released,
    assert_same_gradients,
    gradients,
    let_sends_end,
    new_input,
    new_stack,
    random,
    same_bits,
    train_step,
)
from torch import nn

import memswap


def moved_under(device, pool, layers, forward, steps=2, **options):
    """Trains with and without; the gradients must agree. The statistics of a managed run."""
    modules = nn.ModuleList(layers)
    expected = train_step(modules, forward)
    manager = memswap.manage(modules, EVERYTHING, pool=pool, prefetch_bytes=0, **options)
    for _ in range(steps):
        found = train_step(modules, forward)
        assert_same_gradients(found, expected)
    stats = manager.stats()
    manager.remove()
    assert_released(manager, pool)
    return stats


def storage_bytes(*tensors):
    return sum(t.untyped_storage().nbytes() for t in tensors)


def test_weight_of_a_linear_layer_is_never_moved(device, new_pool):
    layer = nn.Linear(8, 8, bias=False).to(device)
    pool = new_pool()

    def loss():
        x = random(device, 4, 8).requires_grad_()  # so that backward needs weight.t() as well
        return layer(x * 2).sin().sum()

    stats = moved_under(device, pool, [layer], loss)
    assert stats.kept["parameter"].tensors >= 2, "weight.t() was not recognised as the weight"
    assert stats.moved_bytes == 2 * 4 * 8 * 4, "something besides the activation moved"


@pytest.mark.parametrize(
    "view",
    {
        "transposed": lambda w: w.t(),
        "detached": lambda w: w.detach(),
        "data": lambda w: w.data,
        "slice": lambda w: w[:4],
        "view of a view": lambda w: w.t()[2:].unsqueeze(0)[0],
        "of detach": lambda w: w.detach().t(),
    }.items(),
    ids=lambda v: v[0],
)
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_no_view_of_a_managed_parameter_moves(device, new_pool, view, frozen):
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(random(device, 8, 8), requires_grad=not frozen)

        def forward(self, x):
            return x.sum() * view[1](self.weight)

    layer = Layer()
    pool = new_pool()
    manager = memswap.manage(layer, EVERYTHING, pool=pool)
    x = random(device, 3).requires_grad_()
    (layer(x).square().sum()).backward()
    stats = manager.stats()
    assert "parameter" in stats.kept, f"{view[0]}: no parameter was noticed"
    # x.sum() is the other factor of the product: it moves only where the weight is trained
    assert stats.moved_bytes <= 4, f"{view[0]} of a parameter was moved as if it were an activation"
    assert_released(manager, pool, moved=stats.moved_bytes > 0)


def test_buffers_of_batch_norm_are_never_moved(device, new_pool):
    torch.manual_seed(0)
    layer = nn.BatchNorm1d(6).to(device).eval()  # eval: backward needs the running statistics
    pool = new_pool()

    def loss():
        return layer(random(device, 5, 6).requires_grad_() * 2).square().sum()

    stats = moved_under(device, pool, [layer], loss)
    buffers = storage_bytes(layer.running_mean)
    assert stats.kept["parameter"].tensors >= 2 * 3, "weight, running mean and variance stay"
    assert stats.kept["parameter"].bytes >= 2 * 3 * buffers


def test_batch_norm_in_training_updates_its_buffers(device, new_pool):
    def model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2)).to(
            device
        )

    plain, ours = model(), model()
    pool = new_pool()
    manager = memswap.manage(ours, EVERYTHING, pool=pool)
    for step in range(3):
        x = random(device, 5, 6, seed=step)
        expected = train_step(plain, lambda: plain(x).square().sum())
        assert_same_gradients(train_step(ours, lambda: ours(x).square().sum()), expected)
    for name, buffer in plain.named_buffers():
        assert same_bits(buffer, ours.get_buffer(name)), f"buffer {name} differs"
    assert_released(manager, pool)


def test_low_rank_adapters_over_frozen_weights(device, new_pool):
    class Adapted(nn.Module):
        def __init__(self):
            super().__init__()
            self.frozen = nn.Linear(8, 8).requires_grad_(False)
            self.a, self.b = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

        def forward(self, x):
            return torch.tanh(self.frozen(x) + self.b(self.a(x)))

    torch.manual_seed(0)
    layers = [Adapted().to(device) for _ in range(3)]
    pool = new_pool()

    def loss():
        x = random(device, 4, 8)
        for layer in layers:
            x = layer(x)
        return x.square().sum()

    stats = moved_under(device, pool, layers, loss)
    activation = 4 * 8 * 4
    low = 4 * 2 * 4
    # Layer by layer: the input (the last one's output), what lies between a and b, tanh's output.
    assert stats.moved_bytes <= 2 * (4 * activation + 3 * low), "a frozen weight moved"
    assert stats.kept["parameter"].tensors > 0


def test_frozen_weight_is_recognised_without_a_manager(device, new_pool):
    pool = new_pool()
    engine = memswap.saved_tensors(EVERYTHING, pool=pool)
    frozen = nn.Linear(8, 8, bias=False).to(device).requires_grad_(False)
    x = random(device, 4, 8).requires_grad_()
    with engine:
        loss = frozen(x).sum()
    loss.backward()
    assert engine.stats().moved_storages == 0, "a frozen weight was moved"
    assert engine.stats().kept["parameter"].tensors == 1
    del loss
    assert_released(engine, pool, moved=False)


def test_activations_of_frozen_first_layers_move_although_they_need_no_gradient(device, new_pool):
    torch.manual_seed(0)
    frozen = nn.Linear(8, 8).to(device).requires_grad_(False)
    head = nn.Linear(8, 3).to(device)
    pool = new_pool()
    engine = memswap.saved_tensors(EVERYTHING, pool=pool)
    x = random(device, 4, 8)

    def loss():
        return head(frozen(x).relu()).square().sum()

    expected = train_step(head, loss)
    with engine:
        out = loss()
    let_sends_end(engine, device)
    assert engine.stats().freed_bytes >= 4 * 8 * 4, "the head's input, without grad, did not leave"
    out.backward()
    # the gradients that `expected` was made of are in .grad as well
    assert_same_gradients(gradients(head), [None if e is None else e + e for e in expected])
    del out
    assert_released(engine, pool)


def test_tied_weights_stay(device, new_pool):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(11, 8)
            self.head = nn.Linear(8, 11, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, tokens):
            return self.head(self.embed(tokens).tanh())

    torch.manual_seed(0)
    model = Tied().to(device)
    tokens = random(device, 2, 5, dtype=torch.int64) % 11
    pool = new_pool()
    stats = moved_under(device, pool, [model], lambda: model(tokens).square().sum())
    weight = storage_bytes(model.embed.weight)
    assert stats.kept["parameter"].bytes >= 2 * weight
    per_step = stats.moved_bytes // 2
    logits, hidden, ids = 2 * 5 * 11 * 4, 2 * 5 * 8 * 4, 2 * 5 * 8
    assert per_step <= logits + hidden + ids, "the tied weight moved"


def test_parametrized_module(device, new_pool):
    torch.manual_seed(0)
    layer = nn.Linear(6, 6)
    nn.utils.parametrizations.weight_norm(layer)
    layer.to(device)
    x = random(device, 4, 6)
    stats = moved_under(device, new_pool(), [layer], lambda: layer(x).square().sum())
    assert stats.moved_storages > 0, "the computed weight is an activation and may move"
    assert stats.kept["parameter"].tensors > 0, "the parameters behind it stay"


def test_parameters_replaced_after_manage_are_still_recognised(device, new_pool):
    torch.manual_seed(0)
    layer = nn.Linear(8, 8, bias=False).to(device)
    layer.weight.requires_grad_(False)
    pool = new_pool()
    manager = memswap.manage(layer, EVERYTHING, pool=pool)
    layer.register_buffer("table", random(device, 8, 8, seed=3))
    layer.weight = nn.Parameter(random(device, 8, 8, seed=4), requires_grad=False)
    x = random(device, 4, 8).requires_grad_()
    layer.register_forward_hook(lambda m, args, out: out * m.table[0])
    layer(x).sum().backward()
    assert manager.stats().moved_storages == 0, "a new parameter or buffer was moved"
    assert_released(manager, pool, moved=False)


def test_weights_cast_by_autocast_work(device, new_pool):
    model, x = new_stack(device), new_input(device)
    pool = new_pool()

    def loss():
        with torch.autocast(device.type, dtype=torch.bfloat16):
            return model(x)

    expected = train_step(model, loss)
    manager = memswap.manage(model.layers, EVERYTHING, pool=pool)
    for _ in range(3):
        assert_same_gradients(train_step(model, loss), expected)
    assert manager.stats().moved_storages > 0
    assert_released(manager, pool)


class Listed(nn.Module):
    """Has its weights in lists, where torch's registry does not see them, and yields them itself.

    As wrappers do that keep what they wrap out of `state_dict`.
    """

    def __init__(self, device):
        super().__init__()
        self.trained = [nn.Parameter(random(device, 8, 8, seed=1))]
        self.frozen = [nn.Parameter(random(device, 8, 8, seed=2), requires_grad=False)]
        self.constant = [random(device, 8, 8, seed=3)]

    def parameters(self, recurse=True):
        yield from (*self.trained, *self.frozen)

    def forward(self, x):
        for weight in (*self.trained, *self.frozen, *self.constant):
            x = torch.tanh(x @ weight.t())
        return x


def test_weights_that_no_registry_knows_stay(device, new_pool):
    """Those that are parameters from the first step on, others once it is seen that they stay."""
    layer, pool = Listed(device), new_pool()

    def loss():
        return layer(random(device, 4, 8).requires_grad_() * 2).square().sum()

    expected = train_step(layer, loss)
    manager = memswap.manage(layer, EVERYTHING, pool=pool, prefetch_bytes=0)
    assert_same_gradients(train_step(layer, loss), expected)
    assert manager.stats().kept["parameter"].tensors == 2, "a weight of the module's own moved"
    for _ in range(3):
        manager.reset_stats()
        assert_same_gradients(train_step(layer, loss), expected)
    assert manager.stats().kept["parameter"].tensors == 2
    if device.type == "cpu":  # elsewhere it depends on whether a send has ended by its demand
        assert "never freed" in manager.stats().kept, "what a module holds leaves in every step"
    assert_released(manager, pool)
