"""Other systems' call patterns train to the same bits as memswap's own."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from helpers import (
    EVERYTHING,
    assert_nothing_left,
    assert_pool_empty,
    assert_same_gradients,
    flush_autograd,
    new_input,
    new_stack,
    random,
    same_bits,
    train_step,
)
from torch import nn

import memswap
from memswap.compat import hyper_parallel, mindspeed

pytestmark = pytest.mark.every_action("swap")


@pytest.fixture(autouse=True)
def _manager_of_the_process() -> Any:
    """It is one for the process: each test leaves it as it was."""
    yield
    hyper_parallel.SwapManager().remove()


def manager_with(pool: Any) -> hyper_parallel.SwapManager:
    manager = hyper_parallel.SwapManager()
    manager.remove()
    manager.configure(EVERYTHING, pool=pool)
    return manager


def trained(device: torch.device, use: Any, steps: int = 3) -> list[torch.Tensor]:
    """Parameters after a few steps of SGD, with `use(model)` around them."""
    model = new_stack(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with use(model):
        for step in range(steps):
            train_step(model, lambda step=step: model(new_input(device, seed=step)))
            optimizer.step()
    flush_autograd(device)
    return [parameter.detach() for parameter in model.parameters()]


@contextlib.contextmanager
def swap_contexts(model: nn.Module, pool: Any, prefetch: bool = True) -> Any:
    """As MindSpeed's users wrap forwards by hand."""
    handler = mindspeed.AsyncSwapHandler(pool=pool)
    forwards = [layer.forward for layer in model.layers]
    for layer in model.layers:
        context = mindspeed.TensorSwapContext("layers.*", None, prefetch, handler=handler)

        def forward(*args: Any, context=context, plain=layer.forward) -> Any:
            with context:
                return plain(*args)

        layer.forward = forward
    yield handler
    for layer, forward in zip(model.layers, forwards, strict=True):
        layer.forward = forward
    assert handler.stats().moved_storages > 0
    assert_nothing_left(handler.stats())


@contextlib.contextmanager
def linked_layers(model: nn.Module, pool: Any) -> Any:
    """As HyperParallel's users chain layers."""
    manager = manager_with(pool)
    for layer in model.layers:
        assert hyper_parallel.swap_wrapper(layer) is layer
    for first, second in zip(model.layers, model.layers[1:], strict=False):
        manager.set_forward_prefetch_layer(first, second)
        manager.set_forward_prefetch_layer(first, second)  # again: nothing changes
    yield manager
    assert manager.stats().moved_storages > 0
    assert_nothing_left(manager.stats())
    manager.remove()


@contextlib.contextmanager
def own(model: nn.Module, pool: Any) -> Any:
    with memswap.chain(model.layers, EVERYTHING, pool=pool) as chain:
        yield chain


@contextlib.contextmanager
def swapped_modules(model: nn.Module, pool: Any) -> Any:
    for number, layer in enumerate(model.layers):
        policy = None if number else lambda t: hyper_parallel.ActivationPolicy(t.dim() > 1)
        assert hyper_parallel.swap_wrapper(layer, policy, pool=pool) is layer
    yield
    assert pool.statistics().peak_bytes > 0, "nothing was swapped"


@contextlib.contextmanager
def checkpointed_modules(model: nn.Module, pool: Any) -> Any:
    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        swap = op is torch.ops.aten.gelu.default
        return hyper_parallel.CheckpointPolicy["MUST_SWAP" if swap else "PREFER_RECOMPUTE"]

    names = list(model.state_dict())
    for layer in model.layers:
        options = {"swap_inputs": True, "pool": pool, "min_bytes": 1}
        hyper_parallel.checkpoint_wrapper(layer, policy, **options)
    assert list(model.state_dict()) == names, "wrapping renamed something"
    yield
    assert pool.statistics().peak_bytes > 0, "nothing was swapped"


@contextlib.contextmanager
def plan(model: nn.Module, pool: Any) -> Any:
    swap = mindspeed.swap_activation_modules(model, ["layers.{*}"], pool=pool)
    yield swap
    assert swap.stats().moved_storages > 0
    swap.remove()


def test_every_call_pattern_trains_to_the_same_bits(device, new_pool):
    expected = trained(device, lambda model: contextlib.nullcontext())
    ways = {
        "memswap": own,
        "MindSpeed contexts": swap_contexts,
        "MindSpeed contexts without prefetch": lambda m, p: swap_contexts(m, p, prefetch=False),
        "MindSpeed plan": plan,
        "HyperParallel layers": linked_layers,
        "HyperParallel swap_wrapper": swapped_modules,
        "HyperParallel checkpoint_wrapper": checkpointed_modules,
    }
    for name, way in ways.items():
        pool = new_pool()
        found = trained(device, lambda model, way=way, pool=pool: way(model, pool))
        for number, (ours, plain) in enumerate(zip(found, expected, strict=True)):
            assert same_bits(ours, plain), f"{name}: parameter {number} differs"
        assert_pool_empty(pool)


def test_a_chain_has_no_stall_once_backward_runs(device, new_pool):
    """Only the layer at the turn stays; each other one was asked for before it was needed."""
    model, x = new_stack(device, depth=4), new_input(device)
    with linked_layers(model, new_pool()) as manager:
        train_step(model, lambda: model(x))
        assert manager.stats().stalls == 0


# --- MindSpeed: one tensor after another ---------------------------------------------------------


@pytest.mark.one_schedule
def test_a_handler_serves_saved_tensor_hooks_of_ones_own(device, new_pool):
    model, x = new_stack(device), new_input(device)
    expected = train_step(model, lambda: model(x))
    handler = mindspeed.AsyncSwapHandler(pool=new_pool())

    def hooks(layer: int) -> Any:
        return torch.autograd.graph.saved_tensors_hooks(
            lambda t: handler.swap_out_cur_and_release_prev(t.detach(), layer, 3),
            handler.wait_cur_and_prefetch_next,
        )

    def loss() -> torch.Tensor:
        y = model.enter(x)
        for index, layer in enumerate(model.layers):
            with hooks(index):
                y = layer(y)
        return y.square().mean()

    for _ in range(2):
        assert_same_gradients(train_step(model, loss), expected)
    assert handler.stats().moved_storages > 0
    flush_autograd(device)
    assert not handler.exist((0, 0)), "a tensor of a graph that is gone is kept"


@pytest.mark.cpu_only
def test_without_an_accelerator_a_handler_has_no_streams(device, new_pool):
    with pytest.raises(NotImplementedError, match="this process has no accelerator"):
        _ = mindspeed.AsyncSwapHandler(pool=new_pool()).d2h_stream


@pytest.mark.one_schedule
def test_layers_that_saved_nothing_have_no_keys_and_break_nothing(device, new_pool):
    keys = mindspeed.TensorKeyManager()
    assert keys.get_key(0) == ((0, 0), False)
    assert keys.get_key(0) == ((0, 1), False)
    assert keys.get_key(2) == ((2, 0), True), "layer 1 saved nothing"
    assert keys.get_prefetch_keys(2, 0) == []
    assert keys.get_key(3) == ((3, 0), True)
    assert keys.get_key(3) == ((3, 1), False)
    assert keys.get_prefetch_keys(3, 0) + keys.get_prefetch_keys(3, 1) == [(2, 0)]
    assert keys.get_key(0) == ((0, 0), False), "a new forward begins"
    handler = mindspeed.AsyncSwapHandler(pool=new_pool())
    handler.release_device_tensor(7)
    handler.prefetch_tensors(7, 0)


@pytest.mark.one_schedule
def test_what_is_valid_for_swap(device):
    weight = nn.Parameter(torch.ones(4, 4, device=device))
    valid = mindspeed.is_valid_for_swap
    assert not valid(weight) and not valid(weight.t())
    assert not valid(torch.ones(0, device=device))
    tensor = torch.ones(4, device=device)
    assert valid(tensor) and valid(tensor, lambda t: True)
    assert not valid(tensor, lambda t: False)


@pytest.mark.one_schedule
def test_a_context_has_its_own_check(device, new_pool):
    handler = mindspeed.AsyncSwapHandler(pool=new_pool())
    yes = mindspeed.TensorSwapContext("a.*", lambda t: True, handler=handler)
    no = mindspeed.TensorSwapContext("b.*", lambda t: False, handler=handler)
    assert (yes.layer_idx, no.layer_idx, yes.layer_nums) == (0, 0, 1)
    more = mindspeed.TensorSwapContext("a.*", handler=handler)
    assert (more.layer_idx, yes.layer_nums) == (1, 2)
    x = random(device, 100).requires_grad_()
    with no:
        first = (x * 2).sin().sum()
    assert handler.stats().moved_storages == 0
    with yes, no:  # nested
        second = (x * 3).sin().sum()
    with more:
        third = (x * 4).sin().sum()
    (first + second + third).backward()


@pytest.mark.accelerator
@pytest.mark.one_schedule
def test_a_handler_names_its_streams(device, new_pool):
    handler = mindspeed.AsyncSwapHandler(pool=new_pool())
    assert handler.d2h_stream != handler.h2d_stream, "there before the first swap"
    swapped = handler.swap_out_cur_and_release_prev(random(device, 100), 0, 2)
    assert swapped.current_location is mindspeed.TensorLocation.HOST
    assert handler.d2h_stream != handler.h2d_stream
    swapped.wait_d2h_finished(handler.d2h_stream, True)
    swapped.async_h2d(handler.h2d_stream, True)
    assert swapped.current_location is mindspeed.TensorLocation.DEVICE
    assert same_bits(swapped.device_tensor, random(device, 100))


# --- HyperParallel: tensors, storages, groups ----------------------------------------------------


def test_a_swap_tensor_goes_through_its_states(device, new_pool):
    tensor = hyper_parallel.SwapTensor(random(device, 50))
    states = [tensor.state]
    for call in (tensor.async_offload, tensor.wait_offload, tensor.async_load, tensor.wait_load):
        call()
        states.append(tensor.state)
    assert states == ["device", "d2h", "host", "h2d", "device"]
    assert same_bits(tensor.get_val(), random(device, 50))
    with pytest.warns(UserWarning, match="found the state 'device', expected 'host'"):
        tensor.async_load()
    other = hyper_parallel.SwapTensor({"no": "tensor"})
    other.async_offload()
    assert other.state == "non_tensor" and other.get_val() == {"no": "tensor"}


def test_groups_by_name_move_their_storages(device, new_pool):
    pool = new_pool()
    manager = manager_with(pool)
    with pytest.raises(RuntimeError, match="Group layer0 does not exist"):
        manager.launch_offload("layer0")
    storages = []
    for microbatch in range(2):
        storage = hyper_parallel.Storage()
        for n in range(3):
            value = hyper_parallel.SwapTensor(random(device, 40, seed=10 * microbatch + n))
            storage.swap_storage["op"].append((value, "and more"))
        storages.append(storage)
    manager.add_storage("layer0", storages[0])
    for call in (manager.wait_offload, manager.launch_load, manager.wait_load):
        with pytest.raises(memswap.GroupError, match=r"'layer0'.*first"):
            call("layer0")
    manager.launch_offload("layer0")
    manager.wait_offload("layer0")
    manager.add_storage("layer0", storages[1])
    manager.launch_offload("layer0")
    manager.wait_offload("layer0")
    assert manager.stats().moved_storages == 6, "a microbatch was sent again with the next"
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    manager.launch_load("layer0")
    assert manager.stats().returned_storages == 3, "all microbatches were loaded at once"
    manager.wait_load("layer0")
    manager.launch_load("layer0")
    manager.wait_load("layer0")
    for microbatch, storage in enumerate(storages):
        for n, value in enumerate(storage.tensors()):
            assert value.state == "device"
            assert same_bits(value.get_val(), random(device, 40, seed=10 * microbatch + n))
    del storage, value, storages
    assert_nothing_left(manager.stats())
    assert_pool_empty(pool)


def test_a_value_that_is_asked_for_early_is_brought_back(device, new_pool):
    manager = manager_with(new_pool())
    storage = hyper_parallel.Storage()
    storage.swap_storage["op"].append(hyper_parallel.SwapTensor(random(device, 40)))
    manager.add_storage("g", storage)
    manager.launch_offload("g")
    (value,) = storage.tensors()
    assert same_bits(value.get_val(), random(device, 40))
    assert value.state == "device"
    manager.wait_offload("g")
    manager.launch_load("g")
    manager.wait_load("g")
    assert same_bits(value.get_val(), random(device, 40))


@pytest.mark.one_schedule
def test_links_in_any_order_are_one_schedule(device):
    manager = manager_with(None)
    manager.set_current_group_name("a")
    assert manager.get_current_group_name() == "a"
    layers = [nn.Linear(2, 2, device=device) for _ in range(5)]
    manager.set_forward_prefetch_layer(layers[1], layers[2])
    manager.set_forward_prefetch_layer(layers[0], layers[1])  # in any order
    manager.set_forward_prefetch_layer(layers[3], layers[4])
    manager.set_forward_prefetch_layer(layers[2], layers[3])  # joins the two
    with pytest.raises(TypeError, match="expected two layers"):
        manager.set_forward_prefetch_layer(layers[0], "next")
    with pytest.raises(RuntimeError, match=r"found 5 group\(s\) already"):
        manager.configure(EVERYTHING)
    layers[0](torch.ones(1, 2, device=device))
    assert manager.get_current_group_name() == "swap_group_2"
    manager.remove()
    assert manager.get_current_group_name() == ""
    assert not hasattr(layers[0], "_swap_group_name") and not layers[0]._forward_hooks
