"""Saved-tensor hooks in hooks: the user's own, save_on_cpu's, and those of several engines."""

from __future__ import annotations

import contextlib

import pytest
import torch
from helpers import (
    EVERYTHING,
    assert_released,
    assert_same_gradients,
    let_sends_end,
    new_input,
    new_stack,
    random,
    train_step,
)
from subclasses import Pair

import memswap


class Recorder(torch.autograd.graph.saved_tensors_hooks):
    """Hooks of the user's own, outside ours: what they packed and unpacked, by shape."""

    def __init__(self):
        self.packed: list[tuple[int, ...]] = []
        self.unpacked: list[tuple[int, ...]] = []

        def pack(tensor):
            self.packed.append(tuple(tensor.shape))
            return ("theirs", tensor.detach().clone())

        def unpack(packed):
            assert packed[0] == "theirs", "the outer unpack hook got what it had not packed"
            self.unpacked.append(tuple(packed[1].shape))
            return packed[1]

        super().__init__(pack, unpack)


def test_what_stays_reaches_the_hooks_outside(device, new_pool):
    """Parameters, small tensors and what the policy keeps go to the pair installed before."""
    pool = new_pool()
    engine = memswap.saved_tensors(memswap.Policy(min_bytes=64 * 4), pool=pool)
    weight = random(device, 8, 8).requires_grad_()
    x = random(device, 8, 8, seed=1)

    def loss():
        h = (x * 2) @ weight  # saves x * 2 (moves)
        s = h.sum(0) * weight[0].exp()  # small ones
        return (h * weight).sum() + s.sum()  # saves h (moves) and the weight (stays)

    loss().backward()
    expected, weight.grad = weight.grad, None
    recorder = Recorder()
    with recorder, engine:
        out = loss()
    let_sends_end(engine, device)
    out.backward()
    assert_same_gradients([weight.grad], [expected])
    assert (8, 8) in recorder.packed, "the parameter did not reach the outer hooks"
    assert (8,) in recorder.packed, "a small tensor did not reach the outer hooks"
    assert sorted(recorder.packed) == sorted(recorder.unpacked), "outer packs and unpacks differ"
    stats = engine.stats()
    kept = sum(count.tensors for count in stats.kept.values())
    assert len(recorder.packed) == kept, "the outer hooks see exactly what memswap keeps"
    assert stats.moved_storages == 2
    del out
    assert_released(engine, pool)


def test_what_moves_does_not_reach_the_hooks_outside(device, new_pool):
    engine = memswap.saved_tensors(EVERYTHING, pool=new_pool())
    recorder = Recorder()
    x = random(device, 8).requires_grad_()
    with recorder, engine:
        loss = (x * 2).sin().exp().sum()
    assert recorder.packed == [], "a moved tensor was packed by both pairs of hooks"
    loss.backward()


def test_hooks_inside_ours_win(device, new_pool):
    engine = memswap.saved_tensors(EVERYTHING, pool=new_pool())
    recorder = Recorder()
    x = random(device, 8).requires_grad_()
    with engine:
        h = (x * 2).sin()
        with recorder:
            h = h.exp()
        loss = h.cos().sum()
    assert recorder.packed == [(8,)]
    assert engine.stats().offered_tensors == 2, "sin's input and exp's result, saved by cos"
    loss.backward()
    assert recorder.unpacked == [(8,)]


def test_inner_engine_passes_on_to_the_outer_one(device, new_pool):
    pools = new_pool(), new_pool()
    outer = memswap.saved_tensors(EVERYTHING, pool=pools[0])
    inner = memswap.saved_tensors(memswap.Policy(min_bytes=1000), pool=pools[1])
    small, large = random(device, 10).requires_grad_(), random(device, 1000).requires_grad_()

    def loss():
        return (small * 2).sin().sum() + (large * 2).sin().sum()

    loss().backward()
    expected = [small.grad, large.grad]
    small.grad = large.grad = None
    with outer, inner:
        out = loss()
    assert inner.stats().moved_bytes == 4000 and outer.stats().moved_bytes == 40
    let_sends_end(outer, device)
    let_sends_end(inner, device)
    out.backward()
    assert_same_gradients([small.grad, large.grad], expected)
    del out
    assert_released(outer, pools[0])
    assert_released(inner, pools[1])


def test_three_engines_deep(device, new_pool):
    engines = [
        memswap.saved_tensors(memswap.Policy(min_bytes=n), pool=new_pool()) for n in (1, 100, 1000)
    ]
    x = [random(device, n).requires_grad_() for n in (10, 50, 500)]
    with engines[0], engines[1], engines[2]:
        loss = sum((one * 2).sin().sum() for one in x)
    assert [s.stats().moved_bytes for s in engines] == [40, 200, 2000]
    loss.backward()
    for one in x:
        leaf = one.detach().clone().requires_grad_()
        (leaf * 2).sin().sum().backward()
        assert_same_gradients([one.grad], [leaf.grad])


def test_save_on_cpu_outside_takes_what_stays(device, new_pool):
    model, x = new_stack(device), new_input(device)
    expected = train_step(model, lambda: model(x))
    pool = new_pool()
    engine = memswap.saved_tensors(memswap.Policy(min_bytes=900), pool=pool)

    def loss():
        with torch.autograd.graph.save_on_cpu(), engine:
            return model(x)

    for _ in range(2):
        assert_same_gradients(train_step(model, loss), expected)
    assert engine.stats().moved_storages > 0 and "small" in engine.stats().kept
    assert_released(engine, pool)


def test_save_on_cpu_inside_wins(device, new_pool):
    model, x = new_stack(device), new_input(device)
    expected = train_step(model, lambda: model(x))
    pool = new_pool()
    engine = memswap.saved_tensors(EVERYTHING, pool=pool)

    def loss():
        with engine, torch.autograd.graph.save_on_cpu():
            return model(x)

    assert_same_gradients(train_step(model, loss), expected)
    assert engine.stats().offered_tensors == 0
    assert_released(engine, pool, moved=False)


def test_user_hooks_around_a_managed_model(device, new_pool):
    model, x = new_stack(device), new_input(device)
    expected = train_step(model, lambda: model(x))
    pool = new_pool()
    manager = memswap.manage(model.layers, EVERYTHING, pool=pool)
    for _ in range(2):
        recorder = Recorder()

        def loss():
            with recorder:
                return model(x)

        assert_same_gradients(train_step(model, loss), expected)
        assert sorted(recorder.packed) == sorted(recorder.unpacked)
        assert recorder.packed, "the parameters of managed layers go to the hooks outside"
    assert_released(manager, pool)


def test_outer_hook_that_raises_is_heard(device, new_pool):
    pool = new_pool()
    engine = memswap.saved_tensors(memswap.Policy(min_bytes=1 << 20), pool=pool)

    def refuse(_):
        raise ValueError("outer hook says no")

    x = random(device, 8).requires_grad_()
    with pytest.raises(ValueError, match="outer hook says no"):
        with torch.autograd.graph.saved_tensors_hooks(refuse, refuse), engine:
            (x * 2).sin()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert_released(engine, pool, moved=False)


def test_wrapper_subclass_under_hooks_outside(device, new_pool):
    engine = memswap.saved_tensors(EVERYTHING, pool=new_pool())
    packed = []

    def pack(tensor):
        packed.append(type(tensor))
        return tensor

    def run(context):
        x = Pair(random(device, 6), random(device, 6, seed=1)).requires_grad_()
        with context:
            y = (x * 2).sin()
        y.backward(Pair(torch.ones(6, device=device), torch.ones(6, device=device)))
        return [x.grad.a, x.grad.b]

    expected = run(contextlib.nullcontext())
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t))
        found = run(engine)
    assert_same_gradients(found, expected)
