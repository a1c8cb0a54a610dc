"""memswap.compat.mindspeed: the same model through its names and through memswap's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import (
    assert_nothing_left,
    assert_same_gradients,
    flush_autograd,
    gradients,
    look,
    new_input,
    new_stack,
    random,
)

import memswap
from memswap import Action, Policy, Windows
from memswap.compat import mindspeed
from memswap.compat.mindspeed import (
    CompressHook,
    ContextState,
    GlobalContext,
    GlobalContextConfig,
    LayerActivationManager,
    SimulationA3,
    TensorState,
)
from memswap.planning import cost_model

pytestmark = [pytest.mark.one_schedule, pytest.mark.usefixtures("every_tensor_is_encoded")]


def adapt(model: Any, ctx: GlobalContext, chosen: tuple[int, ...], step: list[int]) -> None:
    """What MindSpeed's adaptor does to the layers that were chosen by number."""
    for number, layer in enumerate(model.layers, start=1):
        if number not in chosen:
            continue

        def wrapped(
            x: torch.Tensor, forward: Any = layer.forward, uuid: int = number
        ) -> torch.Tensor:
            ctx.statistic = step[0] <= 3 or step[0] % 100 == 0
            key = (uuid, ctx.get_absolute_order(step[0] == 0))
            ctx.pack_start(key)
            with CompressHook(key, ctx):
                result = forward(x)
            result.register_hook(lambda gradient: ctx.unpack_start(key))
            return result

        layer.forward = wrapped


def train(model: Any, x: torch.Tensor, step: list[int], steps: int = 5) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step[0] in range(steps):
        optimizer.zero_grad()
        for microbatch in x.chunk(2):
            model(microbatch).backward()
        optimizer.step()
    return [*gradients(model), *(parameter.detach().clone() for parameter in model.parameters())]


def test_training_is_the_same_through_both_names_and_without(device) -> None:
    x, step = new_input(device, batch=4), [0]
    plain = train(new_stack(device), x, step)

    model = new_stack(device)
    ctx = GlobalContext(
        GlobalContextConfig(filter_funcs=[lambda t: t.numel() >= 64], async_funcs=["matmul"])
    )
    ctx.engine.policy = Policy(action=Action.ENCODE, min_bytes=1, fn=ctx.engine.policy.fn)
    adapt(model, ctx, mindspeed.layer_numbers("0", len(model.layers)), step)
    assert_same_gradients(train(model, x, step), plain)
    assert ctx.context_state is ContextState.BACKWARD
    theirs = ctx.stats()
    assert theirs.encoded_storages > 0 and theirs.kept["policy"].tensors > 0
    del model
    flush_autograd(device)
    ctx.engine.settle()
    assert_nothing_left(ctx.stats())

    model = new_stack(device)
    policy = Policy(
        min_bytes=1,
        fn=lambda tensor, info: Action.ENCODE if tensor.numel() >= 64 else Action.KEEP,
    )
    with memswap.manage(model.layers, policy, windows=Windows()) as manager:
        assert_same_gradients(train(model, x, step), plain)
        ours = manager.stats()
    assert ours.encoded_storages > 0
    if device.type == "cpu":  # where no window decides what leaves
        assert ours.offered_tensors == theirs.offered_tensors


def test_only_chosen_layers_are_compressed(device) -> None:
    model, x, step = new_stack(device), new_input(device), [0]
    ctx = GlobalContext(GlobalContextConfig())
    adapt(model, ctx, mindspeed.layer_numbers("2", 3), step)
    train(model, x, step, steps=2)
    assert {uuid for uuid, _ in ctx.layer_activation_managers} == {2}


def test_calls_get_the_same_number_in_every_step() -> None:
    ctx = GlobalContext(GlobalContextConfig())
    first = [ctx.get_absolute_order(True) for _ in range(4)]
    later = [ctx.get_absolute_order(False) for _ in range(8)]
    assert first == [1, 2, 3, 4] and later == [1, 2, 3, 4, 1, 2, 3, 4]


def test_all_filters_must_accept() -> None:
    ctx = GlobalContext(
        GlobalContextConfig(
            filter_funcs=[lambda t: t.dtype != torch.float32, lambda t: t.numel() > 3]
        )
    )
    assert ctx.filters(torch.ones(4, dtype=torch.bfloat16))
    assert not ctx.filters(torch.ones(4))
    assert not ctx.filters(torch.ones(3, dtype=torch.bfloat16))
    assert GlobalContext(GlobalContextConfig()).filters(torch.ones(1))


@pytest.mark.accelerator
def test_by_hand_a_plan_is_packed_and_unpacked_around_an_operator(device) -> None:
    """What MindSpeed's own replacements of torch.matmul call."""
    ctx = GlobalContext(GlobalContextConfig())
    ctx.engine = Windows(leftovers="keep").engine(
        Policy(action=Action.ENCODE, min_bytes=1), None, 0
    )
    key = ("layer", 1)
    ctx.pack_start(key)
    numel = 64 * 64
    packed = [ctx.push(key, random(device, 64, 64, seed=seed)) for seed in range(3)]
    layer = ctx.layer_activation_managers[key]

    assert layer.plan(2 * numel, TensorState.NORMAL) == [packed[0].entry.reference], "fewer than"
    choices = layer.plan(2.5 * numel, TensorState.NORMAL)
    assert len(choices) == 2 and not layer.plan(2.5 * numel, TensorState.COMPRESS)
    layer.plan(2.5 * numel, TensorState.NORMAL)
    layer.pack(ctx.share_memorys, ctx.statistic)
    layer.pack_done()
    assert ctx.stats().moved_storages == 2
    ctx.engine._transfers.settle()
    assert ctx.stats().freed_bytes == 2 * numel * 4

    choices = layer.plan(numel + 1, TensorState.COMPRESS)
    assert len(choices) == 1
    layer.unpack(choices)
    layer.unpack_done()
    assert ctx.stats().returned_storages == 1
    for seed, handle in enumerate(packed):
        assert look(ctx.pop(key, handle)) == look(random(device, 64, 64, seed=seed))
    assert ctx.stats().returned_storages == 2, "the third had never left"


def test_a_manager_of_its_own_round_trips(device) -> None:
    layer = LayerActivationManager(("layer", 1), vice_stream=None)
    layer.push_start()
    packed = layer.push(random(device, 256, 256))
    layer.plan(1 << 30, TensorState.NORMAL)
    layer.pack()
    layer.pack_done()
    layer.pop_start()
    layer.unpack(layer.plan(1 << 30, TensorState.COMPRESS))
    layer.unpack_done()
    assert look(layer.pop(packed)) == look(random(device, 256, 256))


class Group(torch.distributed.ProcessGroup):
    def __init__(self, ranks: int) -> None:
        super().__init__(0, ranks)


def test_times_are_the_cost_models() -> None:
    ctx = GlobalContext(GlobalContextConfig())
    a, b = (torch.ones(size, dtype=torch.bfloat16) for size in ((512, 4096), (4096, 1024)))
    right = cost_model.A2.matmul_s(a.shape, b.shape)
    for found in (
        ctx.estimate_time("matmul", a, b),
        ctx.estimate_time("matmul", a, other=b),
        ctx.estimate_time("matmul", other=b, input=a),
    ):
        assert found == right > 0
    ctx.simulation = SimulationA3()
    whole, part = torch.ones(8, 64), torch.ones(1, 64)
    right = cost_model.A3.all_gather_s(whole.nbytes, 8)
    assert ctx.estimate_time("allgather", whole, part, Group(8)) == right > 0
    assert ctx.estimate_time("allgather", input=part, output=whole, group=Group(8)) == right
    right = cost_model.A3.all_to_all_s(whole.nbytes, 2)
    assert ctx.estimate_time("all2all", whole, input=whole, group=Group(2), async_op=True) == right
    assert right > 0, "two ranks are not in that table"
    assert ctx.estimate_time("all2all", whole, whole) == 0.0, "no group: one rank"
    with pytest.raises(ValueError, match="'reducescatter'"):
        ctx.estimate_time("reducescatter", a)
    with pytest.raises(ValueError, match="1 tensor"):
        ctx.estimate_time("matmul", a)
    with pytest.raises(ValueError, match="meet"):
        ctx.estimate_time("matmul", a, a)


@pytest.mark.parametrize(
    ("spec", "expected"), [("0", (1, 2, 3, 4)), ("1-2,4", (1, 2, 4)), ("3", (3,))]
)
def test_layers_are_numbered_as_in_megatron(spec, expected) -> None:
    assert mindspeed.layer_numbers(spec, 4) == expected


@pytest.mark.parametrize("spec", ["5", "0-2", "3-9"])
def test_a_layer_that_is_not_there_is_an_error(spec) -> None:
    with pytest.raises(IndexError, match="numbers from 1 to 4"):
        mindspeed.layer_numbers(spec, 4)


def test_what_is_no_filter_is_an_error() -> None:
    with pytest.raises(TypeError, match="fn\\(tensor\\)"):
        GlobalContextConfig(filter_funcs=["grad_fn"])  # type: ignore[list-item]
