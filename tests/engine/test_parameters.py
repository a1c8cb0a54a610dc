"""What must not move, does not: parameters, buffers, and what somebody still needs."""

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
    assert_released(manager, pool)


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
    saver = memswap.saved_tensors(EVERYTHING, pool=pool)
    frozen = nn.Linear(8, 8, bias=False).to(device).requires_grad_(False)
    x = random(device, 4, 8).requires_grad_()
    with saver:
        loss = frozen(x).sum()
    loss.backward()
    assert saver.stats().moved_storages == 0, "a frozen weight was moved"
    assert saver.stats().kept["parameter"].tensors == 1
    del loss
    assert_released(saver, pool)


def test_activations_of_frozen_first_layers_move_although_they_need_no_gradient(device, new_pool):
    torch.manual_seed(0)
    frozen = nn.Linear(8, 8).to(device).requires_grad_(False)
    head = nn.Linear(8, 3).to(device)
    pool = new_pool()
    saver = memswap.saved_tensors(EVERYTHING, pool=pool)
    x = random(device, 4, 8)

    def loss():
        return head(frozen(x).relu()).square().sum()

    expected = train_step(head, loss)
    with saver:
        out = loss()
    let_sends_end(saver, device)
    assert saver.stats().freed_bytes >= 4 * 8 * 4, "the head's input, without grad, did not leave"
    out.backward()
    # the gradients that `expected` was made of are in .grad as well
    assert_same_gradients(gradients(head), [None if e is None else e + e for e in expected])
    del out
    assert_released(saver, pool)


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
    assert_released(manager, pool)


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


def test_small_tensors_stay_and_are_counted(device, new_pool):
    pool = new_pool()
    saver = memswap.saved_tensors(memswap.Policy(min_bytes=100), pool=pool)
    x = torch.zeros(1, device=device, requires_grad=True)
    with saver:
        y = x * random(device, 24).exp() * random(device, 25).exp()[:24]  # 96 and 100 bytes
    stats = saver.stats()
    assert stats.moved_bytes == 100, "a storage of min_bytes moves, a smaller one stays"
    assert stats.kept["small"].tensors == 1
    assert stats.kept["small"].bytes == 96
    y.sum().backward()
    del y
    assert_released(saver, pool)


def test_tensor_that_the_user_holds_is_unharmed_and_not_counted_as_freed(device, new_pool):
    pool = new_pool()
    saver = memswap.saved_tensors(EVERYTHING, pool=pool, prefetch_bytes=0)
    x = random(device, 64).requires_grad_()
    for step in range(3):
        with saver:
            held = x * 2
            loss = held.sin().sum()
        let_sends_end(saver, device)
        assert same_bits(held, x * 2), "the user's tensor changed under memswap"
        loss.backward()
        assert same_bits(held, x * 2), "the user's tensor changed during backward"
        stats = saver.stats()
        assert stats.freed_bytes == 0, f"step {step}: counts as freed what the user still holds"
        assert stats.returned_storages == 0, "what never went away came back"
    assert same_bits(x.grad, (x * 2).detach().cos() * 2 * 3)
    del held, loss
    assert_released(saver, pool)


def test_what_never_gets_free_is_not_sent_again(device, new_pool):
    pool = new_pool()
    saver = memswap.saved_tensors(EVERYTHING, pool=pool, prefetch_bytes=0)
    x = random(device, 64).requires_grad_()
    moved = []
    for _ in range(4):
        saver.reset_stats()
        with saver:
            held = x * 2
            loss = held.sin().exp().sum()  # exp's result is free to go
        let_sends_end(saver, device)
        loss.backward()
        moved.append(saver.stats().moved_storages)
    assert moved == [2, 1, 1, 1], f"per step {moved}: a tensor the user holds is sent every time"
    assert saver.stats().kept["never freed"].tensors == 1
    del held, loss
    assert_released(saver, pool)


def test_what_is_freed_again_moves_again(device, new_pool):
    """Learning is not for ever: `never freed` must be confirmed."""
    pool = new_pool()
    saver = memswap.saved_tensors(EVERYTHING, pool=pool, prefetch_bytes=0)
    x = random(device, 64).requires_grad_()

    def step(hold):
        saver.reset_stats()
        with saver:
            held = x * 2
            loss = held.sin().sum()
        if not hold:
            held = None
        let_sends_end(saver, device)
        loss.backward()
        return saver.stats().moved_storages

    assert [step(True), step(True)] == [1, 0]
    later = [step(False) for _ in range(40)]
    assert any(later), "a storage once held by the user stays on the device for ever"
    assert_released(saver, pool)


def test_residual_stream_is_unharmed(device, new_pool):
    model, x = new_stack(device, depth=4), new_input(device)
    pool = new_pool()
    expected = train_step(model, lambda: model(x))
    manager = memswap.manage(model.layers, EVERYTHING, pool=pool, prefetch_bytes=0)
    for _ in range(3):
        assert_same_gradients(train_step(model, lambda: model(x)), expected)
    stats = manager.stats()
    assert stats.freed_bytes <= stats.moved_bytes
    assert_released(manager, pool)


def test_rope_tables_shared_by_all_layers_move_at_most_once(device, new_pool):
    class Rotary(nn.Module):
        def __init__(self):
            super().__init__()
            self.q = nn.Linear(8, 8)

        def forward(self, x, cos, sin):
            q = self.q(x)
            turned = torch.cat([-q[..., 4:], q[..., :4]], -1)
            return q * cos + turned * sin

    torch.manual_seed(0)
    layers = nn.ModuleList([Rotary() for _ in range(4)]).to(device)
    angles = random(device, 6, 8)
    held = []

    def loss():
        cos, sin = angles.cos(), angles.sin()  # held by the forward until all layers are through
        held[:] = [(cos, sin)]
        x = random(device, 6, 8, seed=1)
        for layer in layers:
            x = layer(x, cos, sin)
        return x.square().sum()

    pool = new_pool()
    expected = train_step(layers, loss)
    manager = memswap.manage(layers, EVERYTHING, pool=pool, prefetch_bytes=0)
    for step in range(3):
        manager.reset_stats()
        out = loss()
        stats = let_sends_end(manager, device)
        layers.zero_grad(set_to_none=True)
        out.backward()
        assert_same_gradients(gradients(layers), expected)
        cos, sin = held[0]
        assert same_bits(cos, angles.cos()) and same_bits(sin, angles.sin()), "the tables changed"
        table_bytes = 6 * 8 * 4
        assert stats.deduplicated_bytes >= 2 * 3 * table_bytes, "a table counts once per layer"
        if step:
            assert stats.kept["never freed"].tensors >= 2, "shared tables are sent every step"
    held.clear()
    del out, cos, sin
    assert_released(manager, pool)


def test_u_net_skips_are_unharmed(device, new_pool):
    class UNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(6)])

        def forward(self, x):
            skips = []
            for layer in self.layers[:3]:
                x = layer(x).tanh()
                skips.append(x)
            for layer in self.layers[3:]:
                x = layer(x + skips.pop().sin()).tanh()
            return x.square().sum()

    torch.manual_seed(0)
    model = UNet().to(device)
    x = random(device, 4, 8)
    pool = new_pool()
    expected = train_step(model, lambda: model(x))
    for swap_all in (False, True):
        saver = memswap.saved_tensors(EVERYTHING, pool=pool)
        manager = None if swap_all else memswap.manage(model.layers, EVERYTHING, pool=pool)

        def loss():
            if manager is not None:
                return model(x)
            with saver:
                return model(x)

        for _ in range(3):
            assert_same_gradients(train_step(model, loss), expected)
        if manager is not None:
            manager.remove()
        stats = (manager or saver).stats()
        assert stats.freed_bytes <= stats.moved_bytes
        assert_released(manager or saver, pool)


def test_freed_bytes_are_what_the_device_got_back(device, new_pool):
    """TransformerEngine's identity: what is allocated and what is away add up."""
    if device.type == "cpu":
        pytest.skip("the CPU allocator does not tell what is allocated")
    allocated = torch.get_device_module(device).memory_allocated
    x = random(device, 4096).requires_grad_()

    def forward():
        y = x
        for _ in range(6):
            y = (y * 1.5).sin()
        return y.sum()

    before = allocated()
    one = torch.empty_like(x)
    each = allocated() - before  # an allocator may add something of its own
    loss = forward()
    torch.accelerator.synchronize()
    plain = allocated() - before - each
    del loss, one
    saver = memswap.saved_tensors(EVERYTHING, pool=new_pool(), prefetch_bytes=0)
    before = allocated()
    with saver:
        loss = forward()
    stats = let_sends_end(saver, device)
    now = allocated() - before
    assert stats.freed_bytes == 6 * 4096 * 4, "a saved activation that nobody holds did not leave"
    assert plain - now == 6 * each, f"six activations left, the device got {plain - now} bytes back"
    loss.backward()


def test_needed_at_once_is_learnt_by_order_not_by_name(device, new_pool):
    """The layers that run last stay, although they come first in the list."""
    torch.manual_seed(0)
    layers = {name: nn.Linear(64, 64) for name in "dcba"}
    layers = {name: layer.to(device) for name, layer in layers.items()}
    kept: dict[str, int] = {}
    calls: list[str] = []

    def note(tensor, info):
        calls.append(info.unit)
        return memswap.Action.SWAP

    def loss():
        x = random(device, 32, 64).requires_grad_()
        for name in "abcd":
            x = layers[name](x * 1.0).tanh()
        return x.sum()

    pool = new_pool()
    policy = memswap.Policy(min_bytes=1, fn=note)
    one = 32 * 64 * 4
    manager = memswap.manage(layers, policy, pool=pool, prefetch_bytes=one)
    loss().backward()
    first = manager.stats()
    assert "needed at once" not in first.kept, "nothing was known in the first step"
    assert first.moved_storages == 4
    manager.reset_stats()
    out = loss()
    stats = let_sends_end(manager, device)
    assert stats.kept["needed at once"].tensors == 1, "what backward wants at once was sent away"
    assert stats.moved_storages == 3
    assert calls[4:] == ["a", "b", "c", "d"]
    out.backward()
    after = manager.stats()
    assert after.returned_storages <= 3
    del out, kept
    assert_released(manager, pool)
