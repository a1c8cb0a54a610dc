"""The rest of torch: autocast, functional transforms, custom Functions, copies, modes."""

from __future__ import annotations

import copy
import importlib
import pickle

import pytest
import torch
from helpers import (
    EVERYTHING,
    Training,
    assert_released,
    assert_same_gradients,
    assert_the_same_within,
    gradients,
    let_sends_end,
    new_input,
    new_stack,
    random,
    same_bits,
    train_step,
)
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import memswap
from memswap.schedules import towers

# --- mixed precision -----------------------------------------------------------------------------


def test_autocast_bf16(device, new_training):
    training, x = new_training(), new_input(device)

    reference = new_stack(device)

    def reference_loss():
        with torch.autocast(device.type, dtype=torch.bfloat16):
            return reference(x)

    def loss():
        with torch.autocast(device.type, dtype=torch.bfloat16):
            return training.loss(x)

    expected = train_step(reference, reference_loss)
    for _ in range(3):
        assert_same_gradients(train_step(training.model, loss), expected)
    assert training.stats().moved_storages > 0
    training.assert_released()


def test_grad_scaler_sees_the_same_overflow_and_takes_the_same_steps(device, new_pool, way):
    def train(swapped):
        model = new_stack(device)
        training = Training(way, model, new_pool()) if swapped else None
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        # "cpu" whatever the device: only the arithmetic of the scaler matters here
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126, enabled=device.type == "cpu")
        scales = []
        for step in range(3):
            x = new_input(device, seed=step)
            optimizer.zero_grad(set_to_none=True)
            loss = training.loss(x) if training else model(x)
            scaler.scale(loss).backward()
            del loss
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        if training:
            training.assert_released()
        return scales, [p.detach() for p in model.parameters()]

    (scales, parameters), (plain_scales, plain) = train(True), train(False)
    assert scales == plain_scales, "the scaler saw other overflows"
    assert all(map(same_bits, parameters, plain)), "parameters differ after scaled steps"


# --- torch.func and functional calls -------------------------------------------------------------


def test_func_grad_over_a_managed_module(device, new_pool):
    model, x = new_stack(device), new_input(device)
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters):
        return torch.func.functional_call(model, parameters, (x,))

    expected = torch.func.grad(loss)(parameters)
    manager = memswap.manage(model.layers, EVERYTHING, pool=new_pool())
    found = torch.func.grad(loss)(parameters)
    assert_same_gradients(found.values(), expected.values())
    manager.remove()


def test_func_grad_between_steps_of_swapped_modules(device, new_pool, monkeypatch):
    """Nothing is saved there, and nothing that a forward begins with is measured there either."""
    monkeypatch.setattr(towers, "remembered", lambda *place: None)
    model, x = new_stack(device, depth=2), new_input(device)
    expected = torch.func.grad(model)(x)
    with memswap.swap_modules(model, "layers.{*}", policy=EVERYTHING, pool=new_pool("1MiB")):
        for _ in range(2):
            train_step(model, lambda: model(x))
        for _ in range(2):
            assert_same_gradients([torch.func.grad(model)(x)], [expected])


def test_functional_call_with_other_parameters_trains_those(device, new_pool):
    model, x = new_stack(device), new_input(device)
    other = {n: (p.detach() * 0.5).requires_grad_() for n, p in model.named_parameters()}
    pool = new_pool()

    def step():
        loss = torch.func.functional_call(model, other, (x,))
        return torch.autograd.grad(loss, list(other.values()))

    expected = step()
    manager = memswap.manage(model.layers, EVERYTHING, pool=pool)
    assert_same_gradients(step(), expected)
    assert manager.stats().moved_storages > 0
    manager.remove()
    assert_released(manager, pool)


def test_vmap_inside_the_block(device, new_pool):
    pool = new_pool()
    engine = memswap.saved_tensors(EVERYTHING, pool=pool)
    w = random(device, 5, 5).requires_grad_()
    x = random(device, 7, 5)

    def loss():
        return torch.vmap(lambda row: (w @ row).sin().exp().sum())(x).sum()

    assert_the_same_within(engine, pool, w, loss, device=device)


def test_forward_mode_derivatives_pass_through(device, new_pool):
    import torch.autograd.forward_ad as forward_ad

    engine = memswap.saved_tensors(EVERYTHING, pool=new_pool())
    x, tangent = random(device, 6), random(device, 6, seed=1)
    with forward_ad.dual_level(), engine:
        dual = forward_ad.make_dual(x.clone().requires_grad_(), tangent)
        out = (dual * 2).sin()
        derivative = forward_ad.unpack_dual(out).tangent
        assert same_bits(derivative, (x * 2).cos() * (tangent * 2))
        (gradient,) = torch.autograd.grad(out.sum(), [dual])
    assert same_bits(gradient, (x * 2).cos() * 2)


# --- custom autograd Functions -------------------------------------------------------------------


class Everything(torch.autograd.Function):
    """Saves an input, an intermediate and an output, and keeps one tensor as an attribute."""

    @staticmethod
    def forward(ctx, x, y):
        between = x.exp()
        out = between * y
        ctx.save_for_backward(x, between, out, None)
        ctx.kept = y * 1
        return out

    @staticmethod
    def backward(ctx, gradient):
        x, between, out, nothing = ctx.saved_tensors
        assert nothing is None, "a saved None came back as something else"
        return gradient * between * ctx.kept + 0 * x, gradient * between + 0 * out


class Dirty(torch.autograd.Function):
    """Edits its input and saves it afterwards, as it may with mark_dirty."""

    @staticmethod
    def forward(ctx, x):
        x.mul_(2)
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * 2 * x.detach().sign().abs()


@pytest.mark.parametrize("name", ["saves all kinds", "mark_dirty"])
def test_custom_function(device, new_pool, name):
    pool = new_pool()
    engine = memswap.saved_tensors(EVERYTHING, pool=pool)
    x = random(device, 9).requires_grad_()

    def loss():
        h = x * 3
        out = Everything.apply(h, h.sin()) if name == "saves all kinds" else Dirty.apply(h)
        return out.square().sum()

    assert_the_same_within(engine, pool, x, loss, steps=2, device=device)
    assert engine.stats().moved_storages > 0


def test_saved_tensors_of_a_custom_function_have_their_graph_again(device, new_pool):
    """Inputs come back as inputs: a backward that differentiates through them finds x."""
    engine = memswap.saved_tensors(EVERYTHING, pool=new_pool())
    found = []

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, gradient):
            (x,) = ctx.saved_tensors
            found.append((x.requires_grad, x.grad_fn is not None))
            return gradient * 2 * x

    x = random(device, 4).requires_grad_()
    with engine:
        h = x * 1
        y = Square.apply(h).sum()
    del h
    let_sends_end(engine, device)
    (first,) = torch.autograd.grad(y, [x], create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), [x])
    assert found == [(True, True)], "what came back lost its place in the graph"
    assert same_bits(second, torch.full_like(x, 2))


# --- copies of a managed model -------------------------------------------------------------------


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copy_of_a_managed_model_is_not_managed_and_works(device, new_pool, how):
    model, x = new_stack(device), new_input(device)
    pool = new_pool()
    expected = train_step(model, lambda: model(x))
    manager = memswap.manage(model.layers, EVERYTHING, pool=pool)
    model.zero_grad(set_to_none=True)
    if how == "deepcopy":
        twin = copy.deepcopy(model)
    else:
        host = pickle.loads(pickle.dumps(model.cpu()))
        model.to(device)
        twin = host.to(device)
    assert_same_gradients(train_step(twin, lambda: twin(x)), expected)
    assert manager.stats().offered_tensors == 0, "the copy's tensors went through the manager"
    assert_same_gradients(train_step(model, lambda: model(x)), expected)
    assert manager.stats().moved_storages > 0, "the original is managed no more"
    assert_released(manager, pool)


def test_deepcopy_while_a_graph_is_alive(device, new_pool):
    model, x = new_stack(device), new_input(device)
    expected = train_step(model, lambda: model(x))
    model.zero_grad(set_to_none=True)
    pool = new_pool()
    manager = memswap.manage(model.layers, EVERYTHING, pool=pool)
    loss = model(x)
    copy.deepcopy(model)  # an exponential moving average would do this
    loss.backward()
    assert_same_gradients(gradients(model), expected)
    del loss
    assert_released(manager, pool)


def test_state_dict_and_parameter_names_are_untouched(device, new_pool):
    model = new_stack(device)
    before = list(model.state_dict()), [type(m) for m in model.modules()]
    manager = memswap.manage(model.layers, EVERYTHING, pool=new_pool())
    assert (list(model.state_dict()), [type(m) for m in model.modules()]) == before
    manager.remove()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules()), (
        "remove() left hooks behind"
    )


def test_anomaly_mode(device, new_training):
    training, x = new_training(), new_input(device)
    expected = train_step(new := new_stack(device), lambda: new(x))
    with torch.autograd.detect_anomaly(check_nan=False):
        found = train_step(training.model, lambda: training.loss(x))
    assert_same_gradients(found, expected)
    training.assert_released()


def test_the_profiler_shows_each_layer_by_its_name(device, new_pool):
    model, x = new_stack(device, depth=2), new_input(device)
    expected = train_step(model, lambda: model(x))
    pool = new_pool()
    manager = memswap.manage(model, EVERYTHING, pool=pool)
    train_step(model, lambda: model(x))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        found = train_step(model, lambda: model(x))
        with pytest.raises(RuntimeError, match="normalized_shape"):
            model.layers[1](x[..., :-1])
    assert_same_gradients(found, expected)
    ranges = [one.key for one in profile.events() if one.key.startswith("memswap::")]
    assert sorted(ranges) == ["memswap::layers.0", "memswap::layers.1", "memswap::layers.1"]
    train_step(model, lambda: model(x))
    manager.remove()
    assert_released(manager, pool)


@pytest.mark.cpu_only
def test_torch_jit_traces_what_it_would_without_recipes(device):
    """Recipes hear of operators, which is no reason to show layers to a profiler."""
    model, x = new_stack(device), new_input(device)
    policy = memswap.Policy(action=memswap.Action.RECOMPUTE, min_bytes=1)
    with memswap.manage(model, policy) as manager:
        for _ in range(4):
            train_step(model, lambda: model(x))
        assert manager.stats().recipe_runs > 0, "without recipes this shows nothing"
        traced = torch.jit.trace(model, x)
    assert "profiler::" not in str(traced.inlined_graph)


class Names(TorchDispatchMode):
    """The operators that are called."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


def test_dispatch_modes_do_not_see_what_is_measured(device, tmp_path, monkeypatch):
    """Under FakeTensorMode there would be nothing to measure."""
    measured = []

    def measure(device, folder):
        measured.append(type(torch.ones(1)))
        return memswap.Rates("a machine", 1e9, 1e9, 5e8, 5e8, 2e9, 3e9)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(importlib.import_module("memswap.planning.profile"), "measure", measure)
    with FakeTensorMode(), Names() as names:
        memswap.profile("cpu", refresh=True)
    assert measured == [torch.Tensor] and not names.seen


def test_dispatch_modes_do_not_see_the_transfers(device, new_training):
    """A FLOP counter, or any TorchDispatchMode, must not count or replace memswap's copies."""
    training, x = new_training(), new_input(device)
    model = new_stack(device)
    with Names() as plain:
        train_step(model, lambda: model(x))
    with Names() as ours:
        train_step(training.model, lambda: training.loss(x))
    extra = sorted(set(ours.seen) - set(plain.seen) - {"aten.detach.default"})
    assert not extra, f"operators of memswap's own were seen: {extra}"
    assert ours.seen.count("aten.copy_.default") == plain.seen.count("aten.copy_.default")
    training.assert_released()


@pytest.mark.few_schedules
def test_gradients_that_make_fx_traces_are_those_of_any_input(device, new_pool):
    """They were computed with the activations of the traced call, which were constants in there."""
    model, x = new_stack(device), new_input(device)
    other = random(device, *x.shape, seed=2)
    parameters = list(model.parameters())

    def step(x):
        return torch.autograd.grad(model(x), parameters)

    expected = step(other)
    pool = new_pool()
    manager = memswap.manage(model.layers, EVERYTHING, pool=pool)
    engine = memswap.saved_tensors(EVERYTHING, pool=pool)
    step(x)
    with engine:
        traced = make_fx(step)(x)
    assert engine.stats().kept["traced"].tensors > 0
    assert manager.stats().kept["traced"].tensors > 0
    assert_same_gradients(traced(other), expected)
    manager.remove()
    assert_released(manager, pool)


def test_numbers_computed_under_both_doors_at_once(device, new_pool):
    """saved_tensors around a managed model: each storage goes to one of them."""
    model, x = new_stack(device), new_input(device)
    expected = train_step(model, lambda: model(x))
    pool = new_pool()
    manager = memswap.manage(model.layers, EVERYTHING, pool=pool)
    engine = memswap.saved_tensors(EVERYTHING, pool=pool)

    def loss():
        with engine:
            return model(x)

    for _ in range(2):
        assert_same_gradients(train_step(model, loss), expected)
    assert engine.stats().moved_storages > 0 and manager.stats().moved_storages > 0
    assert_released(engine, pool)
    assert_released(manager, pool)


def test_a_line_for_a_progress_bar_says_what_was_done(device, new_pool):
    model, x = new_stack(device, depth=2), new_input(device)
    with memswap.manage(model, EVERYTHING, pool=new_pool()) as manager:
        before = manager.line()
        train_step(model, lambda: model(x))
        assert before.startswith("memswap: 0 B moved, peak 0 B here")
        assert manager.line() != before and "\n" not in manager.line()
