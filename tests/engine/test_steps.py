"""Steps after one another: failures, evaluation, other layers, other sizes, a thousand of them."""

from __future__ import annotations

import gc
import itertools

import pytest
import torch
from helpers import (
    EVERYTHING,
    Training,
    assert_pool_empty,
    assert_released,
    assert_same_gradients,
    collect,
    gradients,
    new_input,
    new_stack,
    plain_gradients,
    random,
    same_bits,
    train_step,
)
from torch import nn

import memswap

pytestmark = pytest.mark.every_action


class Breaks(nn.Module):
    """The identity; raises in forward or in backward when told to."""

    where = ""

    def forward(self, x):
        if self.where == "forward":
            raise ValueError("broken on purpose")
        if self.where == "backward":
            return Broken.apply(x)
        if self.where == "hook":
            x = x * 1
            x.register_hook(Breaks.throw)
        return x

    @staticmethod
    def throw(_):
        raise ValueError("broken on purpose")


class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        raise ValueError("broken on purpose")


@pytest.mark.parametrize("where", ["forward", "backward", "hook"])
def test_exception_leaves_nothing_behind_and_training_goes_on(device, new_pool, way, where):
    model, x = new_stack(device), new_input(device)
    breaks = Breaks()
    model.layers.insert(1, breaks)
    expected = train_step(model, lambda: model(x))
    training = Training(way, model, new_pool())
    for _ in range(2):
        breaks.where = where
        try:
            training.loss(x).backward()
        except ValueError as error:
            assert "broken on purpose" in str(error)
        else:
            pytest.fail("the user's exception was swallowed")
        breaks.where = ""
        collect()
        training.assert_released()
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None, (
            "the exception left memswap's hooks installed"
        )
        assert_same_gradients(train_step(model, lambda: training.loss(x)), expected)
    training.assert_released()


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode", "eval", "enable_grad, dropped"])
def test_passes_without_backward_between_steps(device, new_training, mode):
    training, x = new_training(), new_input(device)
    expected = plain_gradients(device, x)
    value = new_stack(device)(x).detach()
    for _ in range(3):
        assert_same_gradients(train_step(training.model, lambda: training.loss(x)), expected)
        before = training.stats().moved_storages
        if mode == "no_grad":
            with torch.no_grad():
                out = training.loss(x)
        elif mode == "inference_mode":
            with torch.inference_mode():
                out = training.loss(x)
        else:
            training.model.eval()
            out = training.loss(x)
            training.model.train()
        if mode in ("no_grad", "inference_mode"):
            assert training.stats().moved_storages == before, f"{mode}: something was saved"
        assert same_bits(out, value), f"the loss differs under {mode}"
        del out
    training.assert_released()


def test_inputs_made_in_inference_mode_are_harmless(device, new_training):
    training = new_training()
    with torch.inference_mode():
        frozen = new_input(device)
    x = frozen.clone()
    expected = plain_gradients(device, x)
    assert_same_gradients(train_step(training.model, lambda: training.loss(x)), expected)
    training.assert_released()


class Route(nn.Module):
    """Runs its layers in whatever order it is told."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
        self.order: tuple[int, ...] = (0, 1, 2, 3)

    def forward(self, x):
        for index in self.order:
            x = self.layers[index](x).tanh()
        return x.square().sum()


def test_layers_called_twice_skipped_and_in_another_order(device, new_pool, way):
    torch.manual_seed(0)
    model = Route().to(device)
    x = random(device, 4, 8)
    orders = [(0, 1, 2, 3), (0, 0, 1, 1, 2, 3), (2, 3), (3, 2, 1, 0), (0, 1, 2, 3), (1,), (0, 3, 0)]
    expected = {}
    for order in orders:
        model.order = order
        expected[order] = train_step(model, lambda: model(x))
    training = Training(way, model, new_pool())
    for order in [*orders, *orders]:
        model.order = order
        found = train_step(model, lambda: training.loss(x))
        assert_same_gradients(found, expected[order])
    training.assert_released()


def test_changing_batch_sizes(device, new_training):
    training = new_training(depth=2)
    for step, batch in enumerate([2, 5, 1, 2, 7, 2]):
        x = new_input(device, seed=step, batch=batch)
        found = train_step(training.model, lambda: training.loss(x))
        assert_same_gradients(found, plain_gradients(device, x, depth=2))
        training.assert_released()


def test_abandoned_graphs_and_steps_in_any_order(device, new_training):
    """Short random walks through what a training program can do with its graphs."""
    inputs = [new_input(device, seed=n) for n in range(3)]
    expected = [plain_gradients(device, x, depth=2) for x in inputs]
    training = new_training(depth=2)
    generator = torch.Generator().manual_seed(7)
    live: list[tuple[int, torch.Tensor]] = []
    for _ in range(20):
        choice = int(torch.randint(4, (), generator=generator))
        if choice <= 1 and len(live) < 3:
            index = int(torch.randint(3, (), generator=generator))
            live.append((index, training.loss(inputs[index])))
        elif choice == 2 and live:
            live.pop(0)  # dropped without backward
        elif live:
            index, loss = live.pop(int(torch.randint(len(live), (), generator=generator)))
            training.model.zero_grad(set_to_none=True)
            loss.backward()
            del loss
            assert_same_gradients(gradients(training.model), expected[index])
    live.clear()
    training.assert_released()


@pytest.mark.one_schedule
def test_a_thousand_steps_leave_nothing_behind(device, new_pool, way):
    torch.manual_seed(0)

    class Small(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])

        def forward(self, x):
            for layer in self.layers:
                x = layer(x).tanh()
            return x.sum()

    model = Small().to(device)
    training = Training(way, model, new_pool())
    inputs = [random(device, batch, 8) for batch in (3, 4, 5)]
    steps = itertools.count()

    def run(times):
        for _ in range(times):
            step = next(steps)
            loss = training.loss(inputs[step % 3])
            if step % 7:
                loss.backward()
            del loss  # every seventh graph is dropped
            model.zero_grad(set_to_none=True)

    run(100)
    gc.collect()
    objects, reserved = len(gc.get_objects()), training.pool.statistics().reserved_bytes
    slabs = training.pool.statistics().slabs_acquired
    run(900)
    gc.collect()
    now = training.pool.statistics()
    assert len(gc.get_objects()) <= objects + 50, (
        f"{len(gc.get_objects()) - objects} Python objects more after 900 steps"
    )
    assert now.reserved_bytes == reserved, "the pool grew in a steady state"
    assert now.slabs_acquired == slabs, "memory was taken from the system in a steady state"
    engine = training.swap._engine
    assert len(engine.departing) <= 16, "bookkeeping of dead storages grows"
    assert engine.ledger.known_storages <= 16, "dead storages are still known"
    training.assert_released()
    assert engine.ledger.known_storages == 0, "storages are known that no graph holds any more"
    assert_pool_empty(training.pool)


def test_interrupted_forward_leaves_no_hooks_once_its_unit_runs_again(device, new_pool):
    """PyTorch runs no forward hook after Ctrl-C, so the unit keeps its hooks at first."""
    model = new_stack(device)
    x = new_input(device)
    expected = train_step(model, lambda: model(x))
    pool = new_pool()
    manager = memswap.manage(model.layers, EVERYTHING, pool=pool)

    def interrupt(module, args):
        raise KeyboardInterrupt

    handle = model.layers[1].down.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(x)
    handle.remove()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is not None, (
        "PyTorch cleans up by itself now: Manager need not"
    )
    assert_same_gradients(train_step(model, lambda: model(x)), expected)
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None, (
        "hooks of an interrupted forward are still installed"
    )
    assert_same_gradients(train_step(model, lambda: model(x)), expected)
    model.zero_grad(set_to_none=True)
    assert_released(manager, pool)


def test_manager_removed_after_an_interrupt_leaves_no_hooks(device, new_pool):
    model = new_stack(device)
    manager = memswap.manage(model.layers, EVERYTHING, pool=new_pool())

    def interrupt(module, args):
        raise KeyboardInterrupt

    handle = model.layers[1].down.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(new_input(device))
    handle.remove()
    manager.remove()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None, (
        "whatever is trained next in this thread would be swapped"
    )
