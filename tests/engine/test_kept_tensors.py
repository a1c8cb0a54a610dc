"""What stays because moving it would gain nothing: too small, still held, or needed at once."""

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


def test_small_tensors_stay_and_are_counted(device, new_pool):
    pool = new_pool()
    engine = memswap.saved_tensors(memswap.Policy(min_bytes=100), pool=pool)
    x = torch.zeros(1, device=device, requires_grad=True)
    with engine:
        y = x * random(device, 24).exp() * random(device, 25).exp()[:24]  # 96 and 100 bytes
    stats = engine.stats()
    assert stats.moved_bytes == 100, "a storage of min_bytes moves, a smaller one stays"
    assert stats.kept["small"].tensors == 1
    assert stats.kept["small"].bytes == 96
    y.sum().backward()
    del y
    assert_released(engine, pool)


def test_tensor_that_the_user_holds_is_unharmed_and_not_counted_as_freed(device, new_pool):
    pool = new_pool()
    engine = memswap.saved_tensors(EVERYTHING, pool=pool, prefetch_bytes=0)
    x = random(device, 64).requires_grad_()
    for step in range(3):
        with engine:
            held = x * 2
            loss = held.sin().sum()
        let_sends_end(engine, device)
        assert same_bits(held, x * 2), "the user's tensor changed under memswap"
        loss.backward()
        assert same_bits(held, x * 2), "the user's tensor changed during backward"
        stats = engine.stats()
        assert stats.freed_bytes == 0, f"step {step}: counts as freed what the user still holds"
        assert stats.returned_storages == 0, "what never went away came back"
    assert same_bits(x.grad, (x * 2).detach().cos() * 2 * 3)
    del held, loss
    assert_released(engine, pool)


def test_what_never_gets_free_is_not_sent_again(device, new_pool):
    pool = new_pool()
    engine = memswap.saved_tensors(EVERYTHING, pool=pool, prefetch_bytes=0)
    x = random(device, 64).requires_grad_()
    moved = []
    for _ in range(4):
        engine.reset_stats()
        with engine:
            held = x * 2
            loss = held.sin().exp().sum()  # exp's result is free to go
        let_sends_end(engine, device)
        loss.backward()
        moved.append(engine.stats().moved_storages)
    assert moved == [2, 1, 1, 1], f"per step {moved}: a tensor the user holds is sent every time"
    assert engine.stats().kept["never freed"].tensors == 1
    del held, loss
    assert_released(engine, pool)


def test_what_is_freed_again_moves_again(device, new_pool):
    """Learning is not for ever: `never freed` must be confirmed."""
    pool = new_pool()
    engine = memswap.saved_tensors(EVERYTHING, pool=pool, prefetch_bytes=0)
    x = random(device, 64).requires_grad_()

    def step(hold):
        engine.reset_stats()
        with engine:
            held = x * 2
            loss = held.sin().sum()
        if not hold:
            held = None
        let_sends_end(engine, device)
        loss.backward()
        return engine.stats().moved_storages

    assert [step(True), step(True)] == [1, 0]
    later = [step(False) for _ in range(40)]
    assert any(later), "a storage once held by the user stays on the device for ever"
    assert_released(engine, pool)


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
        engine = memswap.saved_tensors(EVERYTHING, pool=pool)
        manager = None if swap_all else memswap.manage(model.layers, EVERYTHING, pool=pool)

        def loss():
            if manager is not None:
                return model(x)
            with engine:
                return model(x)

        for _ in range(3):
            assert_same_gradients(train_step(model, loss), expected)
        if manager is not None:
            manager.remove()
        stats = (manager or engine).stats()
        assert stats.freed_bytes <= stats.moved_bytes
        assert_released(manager or engine, pool)


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
    engine = memswap.saved_tensors(EVERYTHING, pool=new_pool(), prefetch_bytes=0)
    before = allocated()
    with engine:
        loss = forward()
    stats = let_sends_end(engine, device)
    now = allocated() - before
    assert stats.freed_bytes == 6 * 4096 * 4, "a saved activation that nobody holds did not leave"
    assert plain - now == 6 * each, f"six activations left, the device got {plain - now} bytes back"
    loss.backward()


def test_needed_at_once_is_learnt_by_order_not_by_name(device, new_pool):
    """The layers that run last stay, although they come first in the list."""
    torch.manual_seed(0)
    layers = {name: nn.Linear(64, 64) for name in "dcba"}
    layers = {name: layer.to(device) for name, layer in layers.items()}
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
    del out
    assert_released(manager, pool)
