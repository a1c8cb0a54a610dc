"""MindSpeed's activation compression (``--compress-activation``), as its users write it."""

from __future__ import annotations

import functools
import gc
import uuid
import weakref
from typing import Any

import pytest
import torch
from helpers import assert_nothing_left, assert_same_gradients, flush_autograd, gradients
from torch import nn

from memswap.compat import mindspeed
from memswap.compat.mindspeed import (
    CompressHook,
    GlobalContext,
    GlobalContextConfig,
    SimulationA2,
    SimulationA3,
    TensorState,
    infer_matmul_shape,
)
from ranks import Rank, distributed

pytestmark = pytest.mark.usefixtures("every_tensor_is_encoded")

WIDTH, LENGTH = 128, 128


class TransformerLayer(nn.Module):
    """A layer as Megatron has it: numbered from 1, and its output is a tuple."""

    def __init__(self, layer_number: int) -> None:
        super().__init__()
        self.layer_number = layer_number
        self.input_layernorm = nn.LayerNorm(WIDTH)
        self.linear_qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.linear_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.pre_mlp_layernorm = nn.LayerNorm(WIDTH)
        self.linear_fc1 = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.linear_fc2 = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, hidden_states: torch.Tensor, attention_mask: Any = None) -> Any:
        q, k, v = self.linear_qkv(self.input_layernorm(hidden_states)).chunk(3, dim=-1)
        scores = torch.matmul(q, k.transpose(-1, -2)) / WIDTH**0.5
        hidden_states = hidden_states + self.linear_proj(torch.matmul(scores.softmax(-1), v))
        inner = nn.functional.gelu(self.linear_fc1(self.pre_mlp_layernorm(hidden_states)))
        return hidden_states + self.linear_fc2(inner), None


class TransformerBlock(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(TransformerLayer(number + 1) for number in range(depth))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden_states, _ = layer(hidden_states)
        return hidden_states.float().square().mean()


class Arguments:
    """What Megatron calls ``args``."""

    curr_iteration = 0
    compress_activation_ctx: GlobalContext | None = None


def filter_func(tensor: torch.Tensor) -> bool:
    return tensor.grad_fn is not None and tensor.numel() >= 32768 and tensor.storage_offset() == 0


def compressed(forward: Any, args: Arguments) -> Any:
    """The wrapper that a feature manager puts around ``TransformerLayer.forward``."""
    layer_uuid = uuid.uuid1()

    @functools.wraps(forward)
    def wrapper(*inputs: Any, **options: Any) -> Any:
        if args.compress_activation_ctx is None:
            config = GlobalContextConfig(0, 0, [filter_func], ["matmul", "allgather", "all2all"])
            args.compress_activation_ctx = GlobalContext(config)
        ctx = args.compress_activation_ctx
        ctx.statistic = args.curr_iteration <= 3 or args.curr_iteration % 100 == 0
        order_layer_uuid = (layer_uuid, ctx.get_absolute_order(args.curr_iteration == 0))
        ctx.pack_start(order_layer_uuid)
        with CompressHook(order_layer_uuid, ctx):
            result = forward(*inputs, **options)
        result[0].register_hook(lambda gradient: ctx.unpack_start(order_layer_uuid))
        return result

    return wrapper


def new_model(device: torch.device, depth: int = 4) -> TransformerBlock:
    torch.manual_seed(0)
    return TransformerBlock(depth).to(device, torch.bfloat16)


def microbatches(device: torch.device, step: int, count: int = 2) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    batch = torch.randn(count, 2, LENGTH, WIDTH, generator=generator)
    return list(batch.to(device, torch.bfloat16))


def pretrain(model: TransformerBlock, device: torch.device, args: Arguments) -> list[Any]:
    """A few steps of two microbatches each; the gradients of every step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for args.curr_iteration in range(3):
        optimizer.zero_grad()
        for batch in microbatches(device, args.curr_iteration):
            model(batch).backward()
        found += gradients(model)
        optimizer.step()
    return found


def test_layers_wrapped_as_by_the_feature_manager_train_to_the_same_bits(device) -> None:
    expected = pretrain(new_model(device), device, Arguments())
    model, args = new_model(device), Arguments()
    for layer in model.layers:
        layer.forward = compressed(layer.forward, args)
    assert_same_gradients(pretrain(model, device, args), expected)
    ctx = args.compress_activation_ctx
    assert ctx is not None and ctx.stats().encoded_storages > 0, "nothing was compressed"
    assert ctx.stats().freed_bytes > 0, "what was compressed freed nothing"
    if device.type != "cpu":  # where nothing runs beside anything else
        ahead = ctx.stats()
        assert ahead.stalls * 4 <= ahead.returned_storages, "decodes were not ahead of their use"
    del model
    flush_autograd(device)
    ctx.engine.settle()
    assert_nothing_left(ctx.stats())


def select(model: TransformerBlock, args: Arguments, spec: str) -> None:
    """``--compress-activation SPEC``."""
    numbers = mindspeed.layer_numbers(spec, len(model.layers))
    for layer in model.layers:
        if layer.layer_number in numbers:
            layer.forward = compressed(layer.forward, args)


@pytest.mark.parametrize("spec", ["0", "1-2,4", "3"])
def test_selected_layers_with_microbatches_in_flight(device, spec) -> None:
    """1F1B's warm-up: the second forward runs before the first backward, every step anew."""

    def train(model: TransformerBlock, args: Arguments) -> list[Any]:
        found = []
        for args.curr_iteration in range(3):
            model.zero_grad()
            first, second, third = microbatches(device, args.curr_iteration, 3)
            losses = [model(first), model(second)]
            losses.pop(0).backward()
            losses.append(model(third))
            for loss in losses:
                loss.backward()
            found += gradients(model)
        return found

    expected = train(new_model(device), Arguments())
    model, args = new_model(device), Arguments()
    select(model, args, spec)
    assert_same_gradients(train(model, args), expected)
    ctx = args.compress_activation_ctx
    assert ctx is not None and ctx.stats().encoded_storages > 0, "nothing was compressed"
    # Three microbatches a step: each call of a layer has a key of its own, the same in every step.
    orders = {order for _, order in ctx.layer_activation_managers}
    calls = 3 * len(mindspeed.layer_numbers(spec, 4))
    assert orders == set(range(1, calls + 1))


def test_tokens_of_experts_may_vary(device) -> None:
    """There, variable buffers have the average size, and too many tokens are an error."""

    def train(model: TransformerBlock, ctx: GlobalContext | None) -> list[Any]:
        found = []
        for step, length in enumerate((64, 256, 96, 320, 64)):
            model.zero_grad()
            generator = torch.Generator().manual_seed(step)
            hidden = torch.randn(2, length, WIDTH, generator=generator).to(device, torch.bfloat16)
            for number, layer in enumerate(model.layers):
                if ctx is None:
                    hidden, _ = layer(hidden)
                    continue
                key = (number, ctx.get_absolute_order(step == 0))
                ctx.pack_start(key)
                with CompressHook(key, ctx):
                    hidden, _ = layer(hidden)
                hidden.register_hook(lambda gradient, key=key: ctx.unpack_start(key))
            hidden.float().square().mean().backward()
            found += gradients(model)
        return found

    expected = train(new_model(device), None)
    ctx = GlobalContext(
        GlobalContextConfig(moe_average_token_nums=128, num_experts=8, filter_funcs=[filter_func])
    )
    assert_same_gradients(train(new_model(device), ctx), expected)
    assert ctx.stats().encoded_storages > 0


@pytest.mark.accelerator
@pytest.mark.one_schedule
def test_a_layer_is_encoded_under_the_next_one_and_decoded_under_that_ones_backward(device) -> None:
    if device.type not in ("sim", "npu"):
        pytest.skip("virtual time is the simulator's")
    from simdev import virtual_time

    side, depth = 256, 12
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(side, side, bias=False) for _ in range(depth))
    layers = layers.to(device, torch.bfloat16)
    batch = torch.randn(side, side).to(device, torch.bfloat16)
    ctx = GlobalContext(GlobalContextConfig(filter_funcs=[lambda tensor: tensor.numel() >= 32768]))
    everything, forward, backward = 1 << 40, {}, {}

    def away(number: int) -> int:
        manager = ctx.manager((number, number + 1))
        return len(manager.plan(everything, TensorState.COMPRESS))

    def began(number: int, key: Any) -> None:
        before = [away(other) for other in range(depth)]
        ctx.unpack_start(key)
        backward[number] = before, [away(other) for other in range(depth)]

    machine = {"host_us": 0.05, "launch_us": 0.2, "hbm_gb_per_s": 10.0, "matrix_gb_per_s": 1.0}
    with virtual_time(queries_wait=False, **machine):
        for step in range(5):
            layers.zero_grad()
            hidden = batch
            for number, layer in enumerate(layers):
                key = (number, ctx.get_absolute_order(step == 0))
                before = away(number - 1) if number else 0
                ctx.pack_start(key)
                forward[number] = before, away(number - 1) if number else 0
                with CompressHook(key, ctx):
                    hidden = nn.functional.silu(layer(hidden)).tanh()
                hidden.register_hook(lambda gradient, n=number, key=key: began(n, key))
            hidden.float().sum().backward()
            torch.accelerator.synchronize()
    for number in range(1, depth - 3):  # the last layers stay: backward needs them at once
        waited, under = forward[number]
        assert waited < under, f"layer {number - 1} was not encoded under layer {number}"
    for number in range(2, depth - 2):  # what layer 0 saved first is the batch, which stays
        before, after = backward[number]
        assert after[number] == 0, f"layer {number} was not decoded before its backward began"
        assert after[number - 1] == 0, f"layer {number - 1} was not on its way under layer {number}"
        assert after[number - 2] > 0, f"layer {number - 2} was decoded as early as the one after it"
        assert after[: number - 2] == before[: number - 2], "decodes began earlier than there"


# --- hooks of one's own ---------------------------------------------------------------------------


class CountingHook(CompressHook):
    """Overrides both hooks, and leaves the work to those of the system."""

    packed = unpacked = 0

    def pack_hook(self, tensor: torch.Tensor) -> Any:
        CountingHook.packed += 1
        return super().pack_hook(tensor)

    def unpack_hook(self, packed: Any) -> torch.Tensor:
        CountingHook.unpacked += 1
        return super().unpack_hook(packed)


class KeepingHook(CompressHook):
    """As that system's own hooks do: the tensor itself stays the packed value."""

    def pack_hook(self, tensor: torch.Tensor) -> Any:
        self.ctx.push(self.order_layer_uuid, tensor)
        return tensor

    def unpack_hook(self, packed: Any) -> torch.Tensor:
        self.ctx.pop(self.order_layer_uuid, packed)
        return packed


def step_through(hook: type[CompressHook], model: TransformerBlock, batch: torch.Tensor) -> Any:
    """One forward and backward with a hook around every layer; its context and gradients."""
    ctx = GlobalContext(GlobalContextConfig(filter_funcs=[filter_func]))
    hidden = batch
    for number, layer in enumerate(model.layers):
        ctx.pack_start((number, 1))
        with hook((number, 1), ctx):
            hidden, _ = layer(hidden)
        hidden.register_hook(lambda gradient, key=(number, 1): ctx.unpack_start(key))
    hidden.float().square().mean().backward()
    return ctx, gradients(model)


def test_hooks_that_a_subclass_overrides_are_those_that_autograd_calls(device) -> None:
    model, (batch, _) = new_model(device), microbatches(device, 0)
    model(batch).backward()
    expected = gradients(model)
    model.zero_grad()
    CountingHook.packed = CountingHook.unpacked = 0
    ctx, found = step_through(CountingHook, model, batch)
    assert_same_gradients(found, expected)
    assert issubclass(CompressHook, torch.autograd.graph.saved_tensors_hooks)
    offered = ctx.stats().offered_tensors
    assert CountingHook.packed == offered > 0, "a hook was overridden and not called"
    assert 0 < CountingHook.unpacked <= CountingHook.packed
    assert ctx.stats().encoded_storages > 0


def test_a_hook_that_keeps_the_tensor_itself_is_told_once_what_to_return(device) -> None:
    model, (batch, _) = new_model(device), microbatches(device, 0)
    model(batch).backward()
    expected = gradients(model)
    model.zero_grad()
    with pytest.warns(UserWarning, match="return ctx.push") as told:
        _, found = step_through(KeepingHook, model, batch)
    assert_same_gradients(found, expected)
    told = [one for one in told if "pop(key" in str(one.message)]
    assert len(told) == 1 and told[0].filename == __file__, "not once, or not at the user's line"


class KeepingAlone(CompressHook):
    """Overrides the one hook, so that the system's own unpack hook gets the tensor."""

    def pack_hook(self, tensor: torch.Tensor) -> Any:
        self.ctx.push(self.order_layer_uuid, tensor)
        return tensor


def test_a_tensor_that_our_own_hook_gets_is_told_at_the_users_line(device) -> None:
    model, (batch, _) = new_model(device), microbatches(device, 0)
    with pytest.warns(UserWarning, match="return ctx.push") as told:
        step_through(KeepingAlone, model, batch)
    told = [one for one in told if "pop(key" in str(one.message)]
    if device.type == "cpu":  # elsewhere backward runs on a thread that has no line of the user's
        assert [one.filename for one in told] == [__file__]


@pytest.mark.one_schedule
def test_a_context_that_is_dropped_takes_its_engine_with_it(device) -> None:
    model, (batch, _) = new_model(device), microbatches(device, 0)
    gc.collect()
    gc.disable()
    try:
        ctx, _ = step_through(CompressHook, model, batch)
        flush_autograd(device)
        engine = weakref.ref(ctx.engine)
        del ctx
        assert engine() is None, "only a collection of cycles could free its pool and its lanes"
    finally:
        gc.enable()


def test_hooks_may_be_entered_by_hand_and_push_and_pop_are_theirs(device) -> None:
    ctx = GlobalContext(GlobalContextConfig())
    hook = CompressHook(("layer", 1), ctx)
    ctx.pack_start(("layer", 1))
    x = torch.randn(256, 128, device=device)
    packed = hook.pack_hook(x)
    assert torch.equal(hook.unpack_hook(packed).cpu(), x.cpu())
    with pytest.raises(TypeError, match=r"found str, expected what push\(\) returned"):
        ctx.pop(("layer", 1), "tensor")


# --- async_funcs ----------------------------------------------------------------------------------


class MatmulLayer(nn.Module):
    """Products by torch.matmul, forward and backward, as Megatron's linear layers have them."""

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, weight)
            return torch.matmul(x, weight.t())

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            x, weight = ctx.saved_tensors
            return gradient.matmul(weight), torch.matmul(gradient.t(), x)

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(256, 256) / 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.silu(self.Product.apply(x, self.weight)).tanh()


def matmul_steps(device: torch.device, async_funcs: list[str] | None, depth: int = 6) -> Any:
    """Steps of layers under one context (None: plain); it, the gradients, windows of a step."""
    torch.manual_seed(0)
    layers = nn.ModuleList(MatmulLayer() for _ in range(depth)).to(device, torch.bfloat16)
    batch = torch.randn(128, 256).to(device, torch.bfloat16)
    ctx = None
    if async_funcs is not None:
        ctx = GlobalContext(GlobalContextConfig(async_funcs=async_funcs))
    windows = 0
    for step in range(5):
        layers.zero_grad()
        hidden = batch
        before = ctx.window_stats().windows if ctx is not None else 0
        for number, layer in enumerate(layers):
            if ctx is None:
                hidden = layer(hidden)
                continue
            key = (number, ctx.get_absolute_order(step == 0))
            ctx.pack_start(key)
            with CompressHook(key, ctx):
                hidden = layer(hidden)
            hidden.register_hook(lambda gradient, key=key: ctx.unpack_start(key))
        hidden.float().sum().backward()
        windows = ctx.window_stats().windows - before if ctx is not None else 0
        if device.type != "cpu":
            torch.accelerator.synchronize()
    return ctx, gradients(layers), windows


def test_functions_that_are_named_are_windows_and_are_as_they_were_when_the_context_is_gone(
    device,
) -> None:
    functions = torch.matmul, torch.Tensor.matmul
    _, expected, _ = matmul_steps(device, None)
    ctx, found, windows = matmul_steps(device, ["matmul"])
    assert_same_gradients(found, expected)
    assert ctx.stats().encoded_storages > 0
    if device.type != "cpu":
        assert windows == 3 * 6, "a product forward and two backward are a window each"
        assert ctx.stats().stalls <= 5, (
            "a decode was not ahead of its use, beside each step's first"
        )
    assert torch.matmul is not functions[0], "nothing was wrapped"
    assert torch.matmul.__name__ == "matmul" and torch.matmul.__wrapped__ is functions[0]
    del ctx
    gc.collect()
    assert (torch.matmul, torch.Tensor.matmul) == functions, "left behind when the context went"


@pytest.mark.accelerator
@pytest.mark.one_schedule
def test_without_names_a_layer_is_one_window_each_way_and_nothing_is_replaced(device) -> None:
    matmul = torch.matmul
    ctx, _, windows = matmul_steps(device, [])
    assert windows == 2 * 6 and torch.matmul is matmul
    assert ctx.stats().encoded_storages > 0


def test_two_contexts_take_turns_and_what_others_compute_is_left_alone(device) -> None:
    matmul = torch.matmul
    a = torch.randn(64, 64, device=device)
    first = GlobalContext(GlobalContextConfig(async_funcs=["matmul", "all2all"]))
    second = GlobalContext(GlobalContextConfig(async_funcs=["matmul"]))
    expected = matmul(a, a)
    assert torch.equal(torch.matmul(input=a, other=a).cpu(), expected.cpu()), "by keyword"
    assert torch.equal(a.matmul(a).cpu(), expected.cpu())
    with pytest.raises(RuntimeError, match=r"shape|size"):
        torch.matmul(a, a[:3])
    del first
    gc.collect()
    assert torch.matmul is not matmul, "the other context still wants it"
    assert second.engine.in_window is False
    del second
    gc.collect()
    assert torch.matmul is matmul


@pytest.mark.accelerator
@pytest.mark.one_schedule
def test_collectives_are_windows_unless_they_are_asynchronous_themselves(
    device, monkeypatch
) -> None:
    calls: list[Any] = []
    contexts: list[GlobalContext] = []

    def exchange(output: Any, input: Any, *sizes: Any, group: Any = None, async_op: Any = False):
        calls.append(contexts[0].engine.in_window)
        return "work" if async_op or True in sizes else None

    monkeypatch.setattr(torch.distributed, "all_to_all_single", exchange)
    contexts.append(GlobalContext(GlobalContextConfig(async_funcs=["all2all", "allgather"])))
    x, y = torch.ones(8, 8, device=device), torch.empty(8, 8, device=device)
    dist = torch.distributed
    assert dist.all_to_all_single(y, x) is None
    assert dist.all_to_all_single(output=y, input=x, group=None) is None
    assert calls == [True, True] and contexts[0].window_stats().windows == 2
    assert dist.all_to_all_single(y, x, async_op=True) == "work", "another answer than the caller's"
    assert dist.all_to_all_single(y, x, None, None, None, True) == "work"
    assert calls == [True, True, False, False], "what is asynchronous anyway is no window"
    contexts.clear()
    gc.collect()
    assert dist.all_to_all_single is exchange, "the function is not as it was"


class Exchange(torch.autograd.Function):
    """Tokens to experts and their gradients back, as Megatron's all-to-all has it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        received = torch.empty_like(x)
        torch.distributed.all_to_all_single(received, x.contiguous(), group=None)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        returned = torch.empty_like(gradient)
        torch.distributed.all_to_all_single(returned, gradient.contiguous(), group=None)
        return returned


@distributed(2)
def test_experts_on_two_ranks_train_to_the_same_bits(rank: Rank) -> None:
    def train(ctx: GlobalContext | None) -> list[Any]:
        torch.manual_seed(1 + rank.rank)
        layers = nn.ModuleList(MatmulLayer() for _ in range(3))
        for step in range(2):
            hidden = torch.randn(128, 256, generator=torch.Generator().manual_seed(step))
            for number, layer in enumerate(layers):
                key = (number, step)
                if ctx is None:
                    hidden = Exchange.apply(layer(Exchange.apply(hidden)))
                    continue
                ctx.pack_start(key)
                with CompressHook(key, ctx):
                    hidden = Exchange.apply(layer(Exchange.apply(hidden)))
                hidden.register_hook(lambda gradient, key=key: ctx.unpack_start(key))
            hidden.square().mean().backward()
        return gradients(layers)

    exchange = torch.distributed.all_to_all_single
    expected = train(None)
    ctx = GlobalContext(GlobalContextConfig(async_funcs=["matmul", "allgather", "all2all"]))
    assert torch.distributed.all_to_all_single is not exchange
    assert_same_gradients(train(ctx), expected)
    assert ctx.stats().encoded_storages > 0, "nothing was compressed"


@pytest.mark.cpu_only
@pytest.mark.filterwarnings("ignore:.torch.jit.trace:DeprecationWarning")
def test_a_graph_that_is_traced_has_torchs_own_functions() -> None:
    ctx = GlobalContext(GlobalContextConfig(async_funcs=["matmul"]))
    a = torch.randn(8, 8)

    @torch.compile(backend="eager", fullgraph=True)
    def product(x: torch.Tensor) -> torch.Tensor:
        return torch.matmul(x, x).matmul(x)

    assert torch.equal(product(a), a @ a @ a)
    assert torch.jit.trace(lambda x: torch.matmul(x, x), (a,))(a).equal(a @ a)
    assert ctx.window_stats().windows == 0
    torch._dynamo.reset()


# --- by hand, and the names -----------------------------------------------------------------------


@pytest.mark.accelerator
@pytest.mark.one_schedule
@pytest.mark.parametrize("given", ["list", "pairs", "mapping", "pool", "part"])
def test_what_is_planned_is_packed_as_it_is_given(device, given) -> None:
    ctx = GlobalContext(GlobalContextConfig())
    key = ("layer", 1)
    ctx.pack_start(key)
    packed = [ctx.push(key, torch.randn(256, 128, device=device)) for _ in range(3)]
    layer = ctx.layer_activation_managers[key]
    choices = layer.plan(1 << 30)  # by default of those that are not compressed
    assert len(choices) == 3
    shares = {
        "list": choices,
        "pairs": [(choice, object()) for choice in choices],
        "mapping": dict.fromkeys(choices),
        "pool": ctx.share_memorys,
        "part": choices[:1],
    }[given]
    layer.pack(shares)
    layer.pack_done()
    expected = 1 if given == "part" else 3
    assert ctx.stats().moved_storages == expected, "other tensors were encoded than were given"
    assert len(layer.plan(1 << 30, TensorState.COMPRESS)) == expected
    with pytest.raises(TypeError, match="expected what plan"):
        layer.pack(["first"])
    del packed


def test_simulations_cost_what_they_did() -> None:
    a, b = torch.ones(512, 4096, dtype=torch.bfloat16), torch.ones(4096, 1024, dtype=torch.bfloat16)
    simulation = SimulationA2()
    seconds = simulation.time_cost("matmul", a, b)
    assert seconds == 2 * 512 * 4096 * 1024 / 280e12
    assert GlobalContext(GlobalContextConfig()).estimate_time("matmul", a, b) == seconds
    assert simulation.encode_max_numel(1e-3) == int(100 * 2**30 * 1e-3 / 2)
    assert simulation.decode_max_numel(1e-3) == int(111 * 2**30 * 1e-3 / 2)
    assert SimulationA3().time_cost("matmul", a, b) == seconds
    assert infer_matmul_shape((7, 1, 3, 4), (5, 4, 2)) == (7, 5, 3, 2)
    with pytest.raises(ValueError, match="meet"):
        infer_matmul_shape((3, 4), (3, 4))


@pytest.mark.parametrize(
    "name", ["TensorManager", "ShareMemory", "ListNode", "ActivationCompress", "CompressTensor"]
)
def test_names_that_cannot_mean_the_same_say_what_to_write(name) -> None:
    with pytest.raises(NotImplementedError, match=name):
        getattr(mindspeed, name)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        mindspeed.Nothing  # noqa: B018
