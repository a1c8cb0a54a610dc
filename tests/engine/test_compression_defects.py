"""What goes wrong for users of MindSpeed's activation compression, one test each.

The numbers are those of a list of eighteen defects of that system. Most tests run through both
doors: `manage` with windows, and the names of `memswap.compat.mindspeed`.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compression_doors import ENCODE, Door, Region
from helpers import (
    Remember,
    assert_nothing_left,
    assert_same_gradients,
    flush_autograd,
    let_sends_end,
    look,
    new_input,
    new_stack,
    nothing_measured,
    random,
    same_bits,
    train_step,
)
from torch import nn

import memswap
from memswap import Windows
from memswap._native import native
from memswap.compat.mindspeed import CompressHook, GlobalContext, GlobalContextConfig, SimulationA3

nbytes = 64 * 1024 * 2


@pytest.fixture(autouse=True)
def _encoded(request: pytest.FixtureRequest) -> None:
    """Every tensor, unless the test says otherwise."""
    if "as_it_shrinks" not in request.fixturenames:
        request.getfixturevalue("every_tensor_is_encoded")


@pytest.fixture
def as_it_shrinks() -> None:
    """Whether a tensor is encoded is left to what its frame was like."""


@pytest.fixture(params=["manage", "mindspeed"])
def open_door(request: pytest.FixtureRequest) -> Callable[[Any], Door]:
    def make(layers: Any) -> Door:
        door = Door(request.param, layers)
        request.addfinalizer(door.remove)
        return door

    return make


@pytest.fixture
def region(device: torch.device) -> Region:
    return Region(device)


@pytest.mark.one_schedule
def test_01_a_layers_own_weights_are_freed(device, open_door) -> None:
    """nn.Linear saves `weight.t()`, which is no nn.Parameter and fills its storage."""
    model, x = new_stack(device), new_input(device)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    door = open_door(model.layers)
    for _ in range(2):
        loss = model(x)
        door.engine.open_window(1.0)
        for parameter, right in zip(model.parameters(), before, strict=True):
            assert parameter.untyped_storage().nbytes() > 0
            assert same_bits(parameter, right)
        loss.backward()
    assert door.stats().kept["parameter"].tensors > 0


@pytest.mark.parametrize("together", [True, False])
def test_02_two_views_of_one_storage_are_encoded_twice(region, device, together) -> None:
    """In one batch for nothing; in two, the second encodes what the first has emptied."""
    views = (lambda t: (t, t.view(4, -1), t.t()))(random(device, 64, 64))
    outs = [region.save(*views)] if together else [region.save(view) for view in views]
    del views
    region.ctx.engine.open_window(1.0)
    stats = region.settled()
    assert (stats.moved_storages, stats.deduplicated_tensors) == (1, 2)
    for out in outs:
        out.sum().backward()
    right = random(device, 64, 64)
    assert region.seen == [look(right), look(right.view(4, -1)), look(right.t())]


@pytest.mark.one_schedule
def test_03_a_forward_without_a_backward_leaks(device, open_door) -> None:
    """A hook that returns the tensor makes a cycle that not even gc finds."""

    class Output(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.exp()  # saves what it returns

    door = open_door(nn.ModuleList([Output()]))
    gc.disable()
    try:
        made = door.layers[0](torch.zeros(64, 64, device=device, requires_grad=True)) * 2
        made.grad_fn.metadata["witness"] = witness = nn.Identity()
        alive = weakref.ref(witness)
        del made, witness
        assert alive() is None, "only a collection of cycles could free the graph"
    finally:
        gc.enable()
    flush_autograd(device)
    assert_nothing_left(let_sends_end(door, device))


@pytest.mark.one_schedule
def test_04_an_in_place_edit_after_saving_gives_wrong_gradients_silently(region, device) -> None:
    mine = random(device, 64, 64)
    out = region.save(mine)
    mine.mul_(2)
    with pytest.raises(memswap.InplaceEditError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.accelerator
def test_05_a_model_on_another_stream_than_the_default_one_races(device, open_door) -> None:
    model, x = new_stack(device), new_input(device)
    plain = train_step(model, lambda: model(x))
    open_door(model.layers)
    side = torch.Stream(device=device)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        for _ in range(2):
            found = train_step(model, lambda: model(x))
        assert_same_gradients(found, plain)
        del found
    torch.accelerator.synchronize(device)


def test_06_what_later_layers_still_read_is_destroyed(device, open_door) -> None:
    """Skip connections, reused keys and values, auxiliary losses: freed under the next layer."""

    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = [x]
            for layer in self.layers:
                hidden.append(layer(hidden[-1]).tanh())
            return (hidden[1] * hidden[-1]).sum() + sum(h.square().mean() for h in hidden)

    torch.manual_seed(0)
    model, x = Reader().to(device), new_input(device)
    plain = train_step(model, lambda: model(x))
    open_door(model.layers)
    for _ in range(3):
        assert_same_gradients(train_step(model, lambda: model(x)), plain)


@pytest.mark.one_schedule
def test_07_a_saved_tensor_that_backward_skips_fails_the_next_forward(device, open_door) -> None:
    model, x = new_stack(device), new_input(device)
    plain = train_step(model, lambda: model(x))
    door = open_door(model.layers)
    skipped = model(x)  # a step that a loss scaler skips
    unused = model.layers[0](model.enter(x))  # a branch that no loss reaches
    assert_same_gradients(train_step(model, lambda: model(x)), plain)
    del skipped, unused
    flush_autograd(device)
    assert_nothing_left(let_sends_end(door, device))


def test_08_an_evaluation_or_another_number_of_microbatches_crashes_or_mixes_layers_up(
    device, open_door
) -> None:
    model, x = new_stack(device), new_input(device)
    plain = train_step(model, lambda: model(x))
    open_door(model.layers)
    for microbatches in (1, 3, 2):
        with torch.no_grad():
            model(x)
        losses = [model(x) for _ in range(microbatches)]
        for loss in losses:
            model.zero_grad(set_to_none=True)
            loss.backward()
            assert_same_gradients([p.grad for p in model.parameters()], plain)
    # An early exit: the last layer is not called.
    y = model.enter(x)
    for layer in model.layers[:-1]:
        y = layer(y)
    y.sum().backward()


@pytest.mark.one_schedule
@pytest.mark.accelerator
def test_09_products_that_autograd_launches_itself_hide_nothing(device, open_door) -> None:
    """F.linear, `@`, bmm and attention never pass through a Python `torch.matmul`."""
    model, x = new_stack(device), new_input(device)
    door = open_door(model.layers)
    for _ in range(3):
        train_step(model, lambda: model(x))
        torch.accelerator.synchronize(device)
    before = door.windows().windows
    loss = model(x)
    forward = door.windows().windows - before
    loss.backward()
    backward = door.windows().windows - before - forward
    assert forward == backward > 0, "as many windows in backward as in forward"


@pytest.mark.one_schedule
def test_10_every_matmul_of_the_process_pays_and_nobody_takes_the_wrapper_off(
    device, open_door
) -> None:
    functions = (torch.matmul, torch.Tensor.matmul, nn.functional.linear, torch.bmm)
    door = open_door(new_stack(device).layers)
    other, x = new_stack(device, seed=1), new_input(device)
    train_step(other, lambda: other(x))
    torch.matmul(x, x.transpose(1, 2))
    assert door.windows().windows == 0
    assert functions == (torch.matmul, torch.Tensor.matmul, nn.functional.linear, torch.bmm)
    with pytest.raises(ValueError, match=r"'matmull'.*matmul, allgather, all2all"):
        GlobalContextConfig(async_funcs=["matmul", "matmull"])


@pytest.mark.one_schedule
def test_11_calls_by_keyword_crash_before_the_operator(device, open_door) -> None:
    class Keywords(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.eye(16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.matmul(input=x, other=self.weight)

    door = open_door(nn.ModuleList([Keywords().to(device)]))
    x = new_input(device).requires_grad_()
    door.layers[0](x).sum().backward()
    ctx = GlobalContext(GlobalContextConfig())
    a, b = torch.ones(2, 3), torch.ones(3, 4)
    assert ctx.estimate_time("matmul", other=b, input=a) == ctx.estimate_time("matmul", a, b) > 0
    with pytest.raises(ValueError, match=r"0 tensor\(s\)"):
        ctx.estimate_time("all2all", async_op=True)


@pytest.mark.one_schedule
def test_12_an_operator_inside_an_operator_crashes(device, open_door) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.eye(16))
            self.inner = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with memswap.window(seconds=1.0), memswap.window(seconds=1.0):
                return self.inner(x @ self.weight)

    torch.manual_seed(0)
    layer, x = Outer().to(device), new_input(device)
    plain = train_step(layer, lambda: layer(x).sum())
    open_door(nn.ModuleList([layer]))
    for _ in range(2):
        assert_same_gradients(train_step(layer, lambda: layer(x).sum()), plain)


@pytest.mark.one_schedule
@pytest.mark.parametrize("seconds", [0.0, 1e30])
def test_13_a_rate_of_zero_or_an_exaggerated_estimate_divides_by_zero_or_stalls(
    device, seconds
) -> None:
    """That the wait is no longer than the encode is in tests/race/test_window_times.py."""
    ranks = torch.distributed.ProcessGroup(0, 2)
    ctx = GlobalContext(GlobalContextConfig(), SimulationA3())  # nobody measured two ranks on it
    assert ctx.estimate_time("all2all", torch.ones(8), torch.ones(8), group=ranks) > 0
    model, x = new_stack(device), new_input(device)
    plain = train_step(model, lambda: model(x))
    windows = Windows(seconds=lambda op, shapes: seconds)
    with nothing_measured(), memswap.manage(model.layers, ENCODE, windows=windows):
        for _ in range(2):
            assert_same_gradients(train_step(model, lambda: model(x)), plain)


@pytest.mark.one_schedule
def test_14_every_new_shape_takes_host_memory_for_ever(device, open_door) -> None:
    model = new_stack(device)
    door = open_door(model.layers)
    held = []
    for step in range(6):
        x = new_input(device, batch=1 + step % 3)
        train_step(model, lambda x=x: model(x))
        flush_autograd(device)
        assert_nothing_left(let_sends_end(door, device))
        lane = door.engine._transfers.all()[0].codec_lane
        if hasattr(lane, "arena_statistics"):
            held.append(lane.arena_statistics()["reserved_bytes"])
    assert len(set(held[3:])) <= 1, f"the arena grows with every shape: {held}"


@pytest.mark.one_schedule
@pytest.mark.cpu_only
def test_15_every_encode_clears_its_buffers_first(region, device) -> None:
    """On the compute stream, three quarters of the tensor's bytes."""
    made = random(device, 64, 64)
    x = torch.zeros(4, device=device, requires_grad=True)
    with CompressHook("layer", region.ctx), torch.profiler.profile() as profile:
        out = Remember.apply(x, [], made)
    names = {event.name for event in profile.events()}
    del out
    assert "aten::clone" in names, "the profile saw nothing"
    assert not names & {"aten::zero_", "aten::zeros", "aten::fill_"}
    assert region.ctx.stats().encoded_storages == 1


@pytest.mark.one_schedule
@pytest.mark.filterwarnings("ignore:memswap")
def test_16_a_device_without_the_codec_or_with_recomputation_fails_in_the_middle(
    device, open_door, monkeypatch
) -> None:
    model, x = new_stack(device), new_input(device)
    plain = train_step(model, lambda: model(x))

    def recomputed() -> torch.Tensor:
        y = model.enter(x)
        for layer in model.layers:
            y = torch.utils.checkpoint.checkpoint(layer, y, use_reentrant=False)
        return y.square().mean()

    open_door(model.layers)
    assert_same_gradients(train_step(model, recomputed), plain)
    monkeypatch.setattr(native, "codec_name", lambda device: None)
    other = new_stack(device)
    without = open_door(other.layers)
    assert_same_gradients(train_step(other, lambda: other(x)), plain)
    assert without.stats().kept["no codec"].tensors > 0


@pytest.mark.one_schedule
@pytest.mark.usefixtures("as_it_shrinks")
def test_17_incompressible_tensors_pay_as_much_and_float16_spills(region, device) -> None:
    """Every buffer is made for one ratio, whatever the data."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(-(2**15), 2**15, (64, 1024), generator=generator, dtype=torch.int16)

    def step(make: Callable[[], list[torch.Tensor]]) -> memswap.types.Stats:
        region.ctx.pack_start("layer")
        out = region.save(*make())  # as arguments, Python 3.10 would hold them for the caller
        region.ctx.engine.open_window(1.0)
        stats = region.settled()
        out.sum().backward()
        del out
        flush_autograd(device)
        region.ctx.engine.reset_stats()
        return stats

    normal = random(device, 64, 1024)
    for _ in range(2):
        stats = step(
            lambda: [noise.view(torch.bfloat16).clone().to(device), normal.to(torch.bfloat16)]
        )
    assert stats.kept["does not shrink"].bytes == nbytes, "noise stays as it is"
    assert stats.encoded_storages == 1 and stats.ratio > 1.4


@pytest.mark.one_schedule
@pytest.mark.usefixtures("as_it_shrinks")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [31, 33])
def test_18_float32_and_small_or_odd_tensors_are_never_compressed(
    region, device, dtype, rows
) -> None:
    """Nothing below 32768 elements, or that is no multiple of 64; and leftovers are lost."""
    made = (random(device, rows, 1001) > 0).to(dtype)
    out = region.save(made)
    right = look(made)
    del made
    region.ctx.end_forward()  # no window was opened
    stats = region.settled()
    assert stats.encoded_storages == 1 and stats.ratio > 1
    out.sum().backward()
    assert region.seen == [right]


@pytest.mark.one_schedule
def test_statistics_are_refreshed_in_every_step_and_by_the_encoder_itself(region, device) -> None:
    """No counter of iterations: each report tells the next encode, and none is ever waited for."""
    transfers_of = region.ctx.engine._transfers.to
    nbytes = 2 * 64 * 1024
    shares = []
    for step in range(4):
        zeros = step >= 2
        made = random(device, 64, 1024).to(torch.bfloat16) * (0.0 if zeros else 1.0)
        region.ctx.pack_start("layer")
        out = region.save(made)
        del made
        region.ctx.end_forward()
        region.settled()
        out.sum().backward()
        del out
        used, *_ = transfers_of(device).expectations.sizes(("layer", 0, nbytes, torch.bfloat16))
        shares.append(used / nbytes)
    assert shares[1] > 0.5 > shares[3], f"shares by step: {shares}"
