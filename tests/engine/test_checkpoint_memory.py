"""Memory of checkpointed regions: what leaves is gone, comes back, and leaves nothing behind."""

from __future__ import annotations

import contextlib

import pytest
import torch
from checkpoint_helpers import (
    LEAVE,
    CheckpointPolicy,
    checkpointing,
    forward,
    gradients_of,
)
from helpers import (
    assert_released,
    assert_same_gradients,
    collect,
    let_sends_end,
    new_input,
    new_stack,
    random,
    train_step,
)

import memswap


@pytest.mark.every_action("swap", "encode")
def test_what_left_is_gone_until_backward(device, new_pool, _action):
    pool = new_pool()
    ours = checkpointing(pool, LEAVE[_action])
    x, w = random(device, 64, 64), random(device, 64, 64, seed=1)
    leaf = x.clone().requires_grad_()

    def fn(x):
        return ((x @ w).sin() @ w).sin().sum()

    expected = gradients_of(fn, x)
    out = ours.checkpoint(fn, leaf)
    stats = let_sends_end(ours, device)
    assert stats.freed_bytes == stats.moved_bytes == 2 * 64 * 64 * 4
    out.backward()
    assert_same_gradients([leaf.grad], expected)
    assert ours.stats().returned_storages == 2
    assert_released(ours, pool)


def test_an_output_that_others_hold_is_not_freed_under_them(device, new_pool):
    """The region's own output is what the policy sends away; the caller reads it throughout."""
    pool = new_pool()
    ours = checkpointing(pool, CheckpointPolicy.MUST_SWAP)
    x = random(device, 16, 16).requires_grad_()
    expected = (x @ x).detach().clone()
    for _ in range(3):
        out = ours.checkpoint(lambda x: x.sin().asin() * 0 + x @ x, x)
        kept = ours.checkpoint(lambda x: x @ x, x)
        let_sends_end(ours, device)
        assert torch.equal(kept, expected), "a swapped output was freed under its holder"
        (out.sum() + kept.sum()).backward()
        assert torch.equal(kept, expected)
    del out, kept
    assert_released(ours, pool)


def test_one_storage_moves_once_however_often_it_is_saved(device, new_pool):
    """A region's output is saved by its policy and, as the next region's input, by that one."""
    pool = new_pool()
    ours = checkpointing(pool, CheckpointPolicy.MUST_SWAP, swap_inputs=True, prefetch_bytes=0)
    x, w = random(device, 16, 16), random(device, 16, 16, seed=1)
    leaf = x.clone().requires_grad_()

    def fn(x):
        return x.sin() @ w

    h = ours.checkpoint(fn, leaf * 1)
    out = ours.checkpoint(fn, h).sum()
    del h
    stats = ours.stats()
    assert stats.moved_storages == 3 and stats.deduplicated_tensors == 1
    out.backward()
    assert_same_gradients([leaf.grad], gradients_of(lambda x: fn(fn(x * 1)), x))
    del out
    assert_released(ours, pool)


@pytest.mark.one_schedule
@pytest.mark.parametrize("ending", ["dropped", "error in forward", "error in backward", "no_grad"])
def test_nothing_is_left_behind(device, new_pool, ending):
    pool = new_pool()
    ours = checkpointing(pool, CheckpointPolicy.MUST_SWAP, swap_inputs=True)
    x = random(device, 16, 16).requires_grad_()

    class Refuse(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise ValueError("backward says no")

    def fn(x):
        h = (x @ x).sin()
        if ending == "error in forward":
            raise ValueError("forward says no")
        return Refuse.apply(h.exp()) if ending == "error in backward" else h

    expects = pytest.raises(ValueError, match="says no")
    with expects if "error" in ending else contextlib.nullcontext():
        with torch.no_grad() if ending == "no_grad" else contextlib.nullcontext():
            out = ours.checkpoint(fn, x * 1)
            if ending == "error in backward":
                out.sum().backward()
    if torch.__version__ < "2.13":  # torch's own hooks stay until the exception is dropped
        expects = None
        collect()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None, "hooks are left"
    assert torch._C._len_torch_dispatch_stack() == 0, "a mode is left"
    out = expects = None
    collect()
    assert_released(ours, pool, moved=ending != "no_grad")


@pytest.mark.one_schedule
def test_eval_passes_between_steps_change_nothing(device, new_pool):
    model, x, pool = new_stack(device), new_input(device), new_pool()
    expected = train_step(model, lambda: model(x))
    ours = checkpointing(pool, CheckpointPolicy.MUST_SWAP, swap_inputs=True)
    for _ in range(3):
        with torch.no_grad():
            forward(model, ours.checkpoint, x)
        with torch.inference_mode():
            forward(model, ours.checkpoint, x)
        forward(model, ours.checkpoint, x)  # with gradients, never used
        found = train_step(model, lambda: forward(model, ours.checkpoint, x))
        assert_same_gradients(found, expected)
    # Three layers with an input and four matrix products, or six where attention is decomposed.
    assert len(ours._engine.iteration.sizes) <= 3 * 7, "forwards without a backward pile up"
    assert_released(ours, pool)


# --- inputs -----------------------------------------------------------------------------------


@pytest.mark.every_action("swap", "encode")
def test_inputs_leave_whether_positional_nested_or_by_name(device, new_pool, _action):
    pool = new_pool()
    action = memswap.Action(_action)
    ours = memswap.Checkpointing(swap_inputs=action, pool=pool, min_bytes=1, prefetch_bytes=0)
    raw = [random(device, 32, seed=seed) for seed in range(4)]

    def fn(a, pair, *, last, scale):
        return (a * pair[0]).sin() * (pair[1]["b"] * last).cos() * scale

    def run(call):
        leaves = [one.clone().requires_grad_() for one in raw]
        a, b, c, d = (leaf * 1 for leaf in leaves)
        out = call(fn, a, (b, {"b": c}), last=d, scale=2.0).sum()
        del a, b, c, d
        let_sends_end(ours, device)
        out.backward()
        return [leaf.grad for leaf in leaves]

    found = run(ours.checkpoint)
    assert ours.stats().moved_storages == 4
    assert ours.stats().freed_bytes == 4 * 32 * 4, "an input was held beside its away form"
    assert_same_gradients(found, run(lambda fn, *args, **kwargs: fn(*args, **kwargs)))
    assert_released(ours, pool)


def test_parameters_among_the_inputs_stay(device, new_pool):
    pool = new_pool()
    ours = memswap.Checkpointing(swap_inputs=True, pool=pool, min_bytes=1)
    weight = torch.nn.Parameter(random(device, 8, 8))
    frozen = torch.nn.Parameter(random(device, 8, 8, seed=1), requires_grad=False)
    ours.checkpoint(lambda a, b, c: (a @ b @ c).sin(), weight, frozen, weight.t()).sum().backward()
    assert ours.stats().moved_storages == 0 and ours.stats().kept["parameter"].tensors == 3


def test_an_input_edited_before_backward_is_noticed(device, new_pool):
    ours = memswap.Checkpointing(swap_inputs=True, pool=new_pool(), min_bytes=1)
    x = random(device, 8).requires_grad_()
    h = x * 1
    out = ours.checkpoint(lambda h: h.sin().exp(), h)
    let_sends_end(ours, device)
    h.detach().add_(1)
    with pytest.raises(memswap.InplaceEditError, match="modified by an inplace"):
        out.sum().backward()


# --- order of return ------------------------------------------------------------------------------


def test_prefetch_follows_the_regions_from_the_first_backward_on(device, new_pool):
    """Regions come back last to first, each in the order of its forward: one stall to begin with.

    With the order of ordinary saved tensors, each region's first demand would find nothing.
    """
    pool = new_pool()
    ours = checkpointing(pool, CheckpointPolicy.MUST_SWAP, prefetch_bytes="1MiB")
    x, w = random(device, 16, 16).requires_grad_(), random(device, 16, 16, seed=1)

    def fn(x):
        return (((x @ w).sin() @ w).sin() @ w).sin()

    h = x
    for _ in range(4):
        h = ours.checkpoint(fn, h)
    out = h.sum()
    del h
    let_sends_end(ours, device)
    out.backward()
    assert ours.stats().returned_storages == 12
    assert ours.stats().stalls == 1
    del out
    assert_released(ours, pool)
