"""Memory that users give and take away by themselves: weights' `.data`, slices of data sets."""

from __future__ import annotations

import contextlib
import warnings

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
)
from torch import nn
from torch.nn import functional as F

import memswap
from memswap._native import native


@pytest.mark.parametrize("kind", ["parameter", "frozen parameter", "leaf"])
def test_weight_that_gets_other_memory_before_backward(device, new_pool, kind):
    """Autograd keeps a weight itself, not its memory: sharding by `.data` builds on that."""

    def gradient(region):
        weight = random(device, 4, 4, 3)
        if kind != "leaf":
            weight = nn.Parameter(weight, requires_grad=kind == "parameter")
        else:
            weight.requires_grad_()
        x = random(device, 2, 4, 9).requires_grad_()
        with region:
            loss = F.conv1d(x * 1, weight).sum()
        weight.data = random(device, 4, 4, 3, seed=5)
        return torch.autograd.grad(loss, [x])

    expected = gradient(contextlib.nullcontext())
    pool = new_pool()
    engine = memswap.saved_tensors(EVERYTHING, pool=pool)
    assert_same_gradients(gradient(engine), expected)
    assert_released(engine, pool)


@pytest.mark.every_action
@pytest.mark.parametrize("outer", ["nothing", "another engine", "the one that moves", "hooks"])
def test_memory_that_an_operator_fills_after_it_was_saved(device, new_pool, outer):
    """Autograd saves rrelu's noise before it is drawn, and no version counter tells of it."""

    def gradients(*regions):
        torch.manual_seed(3)
        x = random(device, 8, 24).requires_grad_()
        with contextlib.ExitStack() as stack:
            for region in regions:
                stack.enter_context(region)
            y = F.rrelu(F.rrelu(x * 1, training=True).sin(), training=True)  # the last one as well
        y.sum().backward()
        return [x.grad]

    expected, pool = gradients(), new_pool()
    engine = memswap.saved_tensors(EVERYTHING, pool=pool)
    around = {
        "nothing": [],
        "another engine": [memswap.saved_tensors(EVERYTHING, pool=pool)],
        "the one that moves": [engine],
        "hooks": [torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda t: t)],
    }
    inner = memswap.saved_tensors() if outer == "the one that moves" else engine  # all is small
    assert_same_gradients(gradients(*around[outer], inner), expected)
    assert engine.stats().moved_storages >= 4, "noise does not leave"
    assert_released(engine, pool)


@pytest.mark.cpu_only  # beside a copy under way, such an edit is a race of the user's own
@pytest.mark.every_action
@pytest.mark.parametrize("door", ["saved_tensors", "manage"])
def test_batch_that_is_filled_again_while_a_graph_of_the_last_one_is_alive(device, new_pool, door):
    """numpy fills a buffer for each batch, and somebody keeps a loss without running backward."""
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)).to(device)
    pool = new_pool()
    values = [new_input(device, seed=seed) for seed in (5, 6)]

    def losses(region):
        buffer = torch.empty_like(values[0])
        for value in values:
            buffer.untyped_storage().copy_(value.untyped_storage())  # counts no edit
            with region:
                yield model(buffer).square().mean()

    def gradients(region):
        _kept, loss = losses(region)
        model.zero_grad()
        loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    expected = gradients(contextlib.nullcontext())
    if door == "saved_tensors":
        swap = memswap.saved_tensors(EVERYTHING, pool=pool)
        found = gradients(swap)
    else:
        swap = memswap.manage(model, EVERYTHING, pool=pool)
        found = gradients(contextlib.nullcontext())
    assert_same_gradients(found, expected)
    assert_released(swap, pool)


def test_weight_whose_data_is_taken_away_is_not_held(device, new_pool):
    engine = memswap.saved_tensors(EVERYTHING, pool=new_pool())
    weight = nn.Parameter(random(device, 4, 4, 3))
    gathered = weight.data
    x = random(device, 2, 4, 9).requires_grad_()
    with engine:
        loss = F.conv1d(x * 1, weight).sum()
    storage = native.WeakStorage(native.StorageRef(gathered))
    del gathered
    weight.data = torch.empty(0, device=device)
    assert storage.expired(), "the gathered weight is still in memory, held by what was saved"
    weight.data = random(device, 4, 4, 3)
    loss.backward()


def test_batch_that_is_a_slice_of_a_data_set_does_not_take_the_data_set_along(device, new_pool):
    pool = new_pool("16MiB")
    data = torch.zeros(64 << 20, dtype=torch.uint8, device=device).view(torch.float32).view(-1, 64)
    engine = memswap.saved_tensors(EVERYTHING, pool=pool)
    torch.manual_seed(0)
    layer = nn.Linear(64, 4).to(device)

    def gradients(region, batch):
        with region:
            loss = layer(batch).sin().sum()
        return torch.autograd.grad(loss, list(layer.parameters()))

    data[:8] = random(device, 8, 64)
    expected = gradients(contextlib.nullcontext(), data[:8].clone())
    assert_same_gradients(gradients(engine, data[:8]), expected)
    assert engine.stats().kept["part of data"].tensors == 1
    assert 0 < engine.stats().moved_bytes < 1 << 20, "the whole data set was moved for one batch"
    assert_released(engine, pool)


def filled_by_numpy(device):
    rows = random(device, 4, 64).numpy()
    memory = rows * 0
    tensor = torch.from_numpy(memory)
    for i in range(4):
        memory[i] = rows[i]
        yield tensor[i]


def filled_through_data(device):
    rows = random(device, 4, 64)
    tensor = torch.zeros(4, 64, device=device)
    for i in range(4):
        tensor.data[i] = rows[i]  # as a collective or a kernel of the user's own would
        yield tensor[i].detach()


def filled_through_numpy(device):
    rows = random(device, 64, 4)
    tensor = torch.zeros(64, 4, device=device)
    for i in reversed(range(4)):
        tensor.numpy()[:, i] = rows[:, i].numpy()
        yield tensor[:, i]


@pytest.mark.every_action
@pytest.mark.cpu_only  # no accelerator may read a storage that is being edited
@pytest.mark.parametrize("fill", [filled_by_numpy, filled_through_data, filled_through_numpy])
def test_memory_filled_part_after_part_by_what_counts_nothing(device, new_pool, fill):
    def gradients(region):
        w = random(device, 64, seed=2).requires_grad_()
        with region:
            loss = sum((w * part).sum() for part in fill(device))
        if region is engine:
            let_sends_end(engine, device)
        return torch.autograd.grad(loss, [w])

    pool = new_pool()
    engine = memswap.saved_tensors(EVERYTHING, pool=pool)
    expected = gradients(contextlib.nullcontext())
    assert_same_gradients(gradients(engine), expected)
    assert engine.stats().kept["edited in parts"].tensors == 3
    assert_released(engine, pool)


def test_parts_of_an_activation_move_with_the_part_that_was_saved_first(device, new_pool):
    engine = memswap.saved_tensors(EVERYTHING, pool=new_pool())
    w = random(device, 64).requires_grad_()
    with engine:
        first, second = (w * 2).view(2, 32)
        loss = first.sin().sum() + second.cos().sum()
    del first, second
    assert engine.stats().moved_storages == 1 and not engine.stats().kept
    loss.backward()


def test_slice_of_a_large_activation_moves_with_it(device, new_pool):
    engine = memswap.saved_tensors(EVERYTHING, pool=new_pool())
    w = torch.ones((), device=device, requires_grad=True)
    computed = torch.zeros(16 << 20, device=device) * w
    with engine:
        loss = computed[:64].sin().sum()
    del computed
    assert engine.stats().moved_bytes == 64 << 20
    loss.backward()


# --- modules that run without being seen ----------------------------------------------------------


def unseen_steps(layers, run, steps):
    for _ in range(steps):
        run(layers).sum().backward()


def direct(layers):
    x = torch.ones(4, 8, device=next(layers.parameters()).device)
    for layer in layers:
        x = layer.forward(x)
    return x


@pytest.mark.one_schedule
def test_modules_that_train_unseen_are_told_loudly_and_once(device, new_pool):
    layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2)).to(device)
    with memswap.manage(layers, EVERYTHING, pool=new_pool()):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            unseen_steps(layers, direct, 1)  # its forward may have been before
        with pytest.warns(UserWarning, match="no hook has seen one of them run") as told:
            unseen_steps(layers, direct, 3)
    assert len(told) == 1
    assert not any(parameter._post_accumulate_grad_hooks for parameter in layers.parameters())


@pytest.mark.cpu_only
def test_layers_of_a_model_that_is_compiled_as_a_whole_are_told(device, new_pool):
    torch._dynamo.reset()
    model = new_stack(device)
    compiled, x = torch.compile(model, backend="eager"), new_input(device)
    compiled(x).backward()
    with (
        memswap.manage(model.layers, EVERYTHING, pool=new_pool()),
        pytest.warns(UserWarning, match="compile the layers one by one"),
    ):
        for _ in range(2):
            compiled(x).backward()
    torch._dynamo.reset()
    for layer in model.layers:
        layer.compile(backend="eager")
    with memswap.manage(model, EVERYTHING, pool=new_pool()) as manager:  # as the warning says
        model(x).backward()
        assert manager.stats().moved_storages > 0


@pytest.mark.one_schedule
def test_modules_that_are_seen_are_not_watched_any_more(device, new_pool):
    layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(device)
    x = torch.ones(4, 8, device=device)
    before = layers(x).sum()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with memswap.manage(layers, EVERYTHING, pool=new_pool()):
            before.backward()
            for _ in range(3):
                layers(x).sum().backward()
            assert not any(p._post_accumulate_grad_hooks for p in layers.parameters())


class MadeAgain(nn.Module):
    """A norm whose output is freed as soon as it was used, and computed again in backward."""

    def __init__(self, width, held):
        super().__init__()
        self.norm, self.held = nn.LayerNorm(width), held

    def forward(self, x):
        made = [self.norm(x)]
        out = made[0].cos()
        memory = made[0].untyped_storage()
        nbytes = memory.nbytes()
        memory.resize_(0)

        def make_again(_):
            output = made[0] if self.held else made.pop()
            with torch.no_grad():
                again = self.norm(x)
            output.untyped_storage().resize_(nbytes)
            output.untyped_storage().copy_(again.untyped_storage())

        out.register_hook(make_again)
        return out


@pytest.mark.every_action
@pytest.mark.parametrize("held", [True, False], ids=["held", "dropped"])
@pytest.mark.parametrize("door", ["saved_tensors", "manage", "chain", "windows"])
def test_output_whose_memory_is_taken_away_until_backward(
    device, new_pool, door, held, _laboratory
):
    """Large enough on a CPU that the memory goes while a worker has not read it yet.

    An accelerator reads what others have by then, as the detector sees, and the bytes are not used.
    """
    if _laboratory is not None and _laboratory.schedule.check == "throw":
        pytest.skip("the race would be an error of resize_()")
    rows, width = (512, 1024) if device.type == "cpu" else (8, 16)
    torch.manual_seed(0)
    model = nn.Sequential(*(MadeAgain(width, held) for _ in range(3))).to(device)
    x = random(device, rows, width)

    def gradients(region):
        model.zero_grad()
        with region:
            loss = model(x).sum()
        loss.backward()
        return [p.grad for p in model.parameters()]

    expected, pool = gradients(contextlib.nullcontext()), new_pool()
    region = contextlib.nullcontext()
    if door == "saved_tensors":
        swap = region = memswap.saved_tensors(EVERYTHING, pool=pool)
    elif door == "chain":
        swap = memswap.chain(list(model), EVERYTHING, pool=pool)
    else:
        windows = memswap.Windows() if door == "windows" else None
        swap = memswap.manage(list(model), EVERYTHING, pool=pool, windows=windows)
    for _ in range(2):
        assert_same_gradients(gradients(region), expected)
    if door == "chain":
        assert swap.stats().kept["resized"].tensors > 0
    assert_released(swap, pool)
    if _laboratory is not None:
        assert all("stream race: 'free'" in report for report in _laboratory.forgive())
