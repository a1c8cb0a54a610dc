"""HyperParallel's swap manager, wrappers and checkpoint policies, as its users write them."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from helpers import (
    assert_nothing_left,
    assert_same_gradients,
    flush_autograd,
    gradients,
    new_input,
    new_stack,
    random,
    same_bits,
)
from torch import nn

from memswap.compat.hyper_parallel import (
    ActivationPolicy,
    CheckpointPolicy,
    Storage,
    SwapManager,
    SwapTensor,
    checkpoint,
    checkpoint_wrapper,
    swap,
    swap_wrapper,
)
from memswap.errors import InplaceEditError
from swap_scripts import assert_a_graph_is_run_twice, train, watched


@pytest.fixture(autouse=True)
def _begin_anew() -> Iterator[None]:
    """The manager is the process's: each script finds it, and leaves it, as it was made."""
    assert not SwapManager()._groups, "groups of another script are there"
    yield
    gc.collect()
    SwapManager().remove()


def linked(model: nn.Module) -> nn.Module:
    """The loop of that system's docstring."""
    for i in range(len(model.layers) - 1):
        SwapManager().set_forward_prefetch_layer(model.layers[i], model.layers[i + 1])
    return model


def wrapped(model: nn.Module, wrap: Callable[..., nn.Module], *args: Any, **options: Any) -> Any:
    """How its examples wrap layers."""
    for i, layer in enumerate(model.layers):
        model.layers[i] = wrap(layer, *args, **options)
    return model


def stats() -> Any:
    return SwapManager().stats()


def large(tensor: torch.Tensor) -> CheckpointPolicy:
    """A policy by size, as its examples have it."""
    swap = tensor.numel() >= 2 * 8 * 16 * 4
    return CheckpointPolicy.MUST_SWAP if swap else CheckpointPolicy.MUST_SAVE


def swap_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    products = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default}
    return CheckpointPolicy.MUST_SWAP if op in products else CheckpointPolicy.MUST_RECOMPUTE


@pytest.mark.one_schedule
def test_there_is_one_manager(device) -> None:
    assert SwapManager() is SwapManager()
    SwapManager().set_current_group_name("mine")
    assert SwapManager().get_current_group_name() == "mine"
    assert copy.deepcopy(SwapManager()) is SwapManager()


# --- layers that are wrapped and linked ------------------------------------------------------


def test_wrapped_and_linked_layers_train_to_the_same_bits(device) -> None:
    expected = train(new_stack(device, depth=4), device)
    model = linked(wrapped(new_stack(device, depth=4), swap_wrapper))
    names = [layer._swap_group_name for layer in model.layers]
    assert names == ["swap_group_0", "swap_group_1", "swap_group_2", "swap_group_3"]
    assert list(model.state_dict()) == list(new_stack(device, depth=4).state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same_gradients(train(model, device), expected)
    assert stats().moved_storages >= 3 * 3 * 5, "three layers, three steps, several tensors each"
    assert stats().stalls == 0, "something was not on its way before backward needed it"
    assert_nothing_left(stats())
    assert SwapManager().get_current_group_name() == "swap_group_3", "also outside of layers"


def test_groups_leave_and_return_in_that_systems_order(device, monkeypatch) -> None:
    model = linked(wrapped(new_stack(device, depth=4), swap_wrapper))
    events = watched(monkeypatch)
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda *_: events.append("forward"))
    loss = model(new_input(device))
    events.append("backward")
    loss.backward()
    assert [event.replace("swap_group_", "") for event in events] == [
        *("forward", "send 0"),
        *("forward", "send 1", "sent 0"),
        *("forward", "send 2", "sent 1"),
        *("forward", "sent 2"),  # the last layer stays
        *("backward", "bring 2", "bring 1", "bring 0"),
    ]


def test_a_policy_of_the_wrapper_has_the_last_word(device) -> None:
    expected = train(new_stack(device, depth=4), device)
    save = wrapped(new_stack(device, depth=4), swap_wrapper, lambda t: ActivationPolicy.SAVE)
    assert_same_gradients(train(linked(save), device), expected)
    assert stats().moved_storages == 0, "a chain moved what its layers' wrappers keep"
    SwapManager().remove()
    some = wrapped(new_stack(device, depth=4), swap_wrapper, policy_fn=large, group_swap=True)
    assert_same_gradients(train(linked(some), device), expected)
    assert 0 < stats().moved_storages <= 3 * 3 * 4
    assert stats().stalls == 0


def test_a_policy_that_says_something_else_is_refused(device) -> None:
    model = linked(wrapped(new_stack(device), swap_wrapper, lambda t: CheckpointPolicy.MUST_SAVE))
    model(new_input(device))
    model.layers[0].up = swap_wrapper(model.layers[0].up, lambda t: CheckpointPolicy.PREFER_SAVE)
    with pytest.raises(TypeError, match=r"expected ActivationPolicy\.SAVE or SWAP, or"):
        model(new_input(device))


def test_a_module_that_is_wrapped_twice_keeps_its_first_policy(device) -> None:
    """There, too, the inner wrapper's policy applies, and a warning says that regions overlap."""
    expected = train(new_stack(device), device)
    model = wrapped(new_stack(device), swap_wrapper, lambda t: CheckpointPolicy.MUST_SAVE)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        linked(wrapped(model, swap_wrapper))
    assert len(found) == 3
    assert found[0].filename == __file__ and "wrap each module once" in str(found[0].message)
    assert_same_gradients(train(model, device), expected)
    assert stats().moved_storages == 0


def test_microbatches_in_flight_do_not_meet(device) -> None:
    """There a group reloads those of all microbatches with the first backward."""
    expected = train(new_stack(device, depth=4), device, microbatches=3)
    model = linked(wrapped(new_stack(device, depth=4), swap_wrapper))
    assert_same_gradients(train(model, device, microbatches=3), expected)
    assert stats().moved_storages > 0
    assert stats().stalls == 0
    assert_nothing_left(stats())


def test_a_graph_is_run_twice(device) -> None:
    """There the second backward finds nothing to load."""
    plain, model = new_stack(device), linked(wrapped(new_stack(device), swap_wrapper))
    assert_a_graph_is_run_twice(plain, model, device, stats)


def test_evaluations_between_steps_change_nothing(device) -> None:
    expected = train(new_stack(device), device)
    model = linked(wrapped(new_stack(device), swap_wrapper))

    def evaluate() -> None:
        with torch.no_grad():
            model(new_input(device))
        model(new_input(device))

    assert_same_gradients(train(model, device, after_step=evaluate), expected)
    assert stats().stalls == 0
    assert_nothing_left(stats())


def test_a_second_training_leaves_nothing_of_the_first(device) -> None:
    expected = train(new_stack(device), device)
    for _ in range(2):
        model = linked(wrapped(new_stack(device), swap_wrapper))
        assert_same_gradients(train(model, device), expected)
        assert stats().moved_storages > 0
        assert len(SwapManager()._groups) == 3
        del model
        gc.collect()
        assert not SwapManager()._groups, "groups of layers that are gone are kept"
        assert stats().moved_storages == 0, "the engine of a training that is over is kept"


def test_links_that_are_repeated_or_skip_layers(device) -> None:
    """A stride of two, as prefetch distances are written, and every link twice."""
    expected = train(new_stack(device, depth=6), device)
    model = wrapped(new_stack(device, depth=6), swap_wrapper)
    hooks = len(model.layers[2]._forward_pre_hooks)
    for _ in range(2):
        for i in range(4):
            SwapManager().set_forward_prefetch_layer(model.layers[i], model.layers[i + 2])
    assert [layer._swap_group_name[-1] for layer in model.layers] == ["0", "2", "1", "3", "4", "5"]
    assert len(model.layers[2]._forward_pre_hooks) == hooks + 1, "hooks came twice"
    assert_same_gradients(train(model, device), expected)
    assert stats().stalls == 0
    assert stats().moved_storages >= 3 * 4 * 5, "all but the last of either chain leave"


def test_the_first_link_of_a_layer_counts(device, monkeypatch) -> None:
    model = wrapped(new_stack(device, depth=3), swap_wrapper)
    first, second, third = model.layers
    SwapManager().set_forward_prefetch_layer(first, third)
    SwapManager().set_forward_prefetch_layer(second, third)
    SwapManager().set_forward_prefetch_layer(first, second)
    events = watched(monkeypatch)
    model(new_input(device)).backward()
    assert [event.replace("swap_group_", "") for event in events] == [
        "send 0",  # first
        *("send 2", "sent 0"),  # second, whose own wait nobody asks for
        *("bring 0", "bring 2"),  # third brings the first; the second is late, as there
    ]


def test_a_copy_of_a_linked_layer_is_not_linked(device) -> None:
    model = linked(wrapped(new_stack(device), swap_wrapper))
    copied = copy.deepcopy(model)
    expected = train(new_stack(device), device)
    assert_same_gradients(train(copied, device), expected)
    assert stats().moved_storages == 0
    assert_same_gradients(train(model, device), expected)
    assert stats().moved_storages > 0


def test_layers_whose_outputs_nobody_uses_come_back_ahead(device) -> None:
    """There backward hooks of modules do not fire then, and asking for a value raises."""

    def step(model: nn.Module) -> list[Any]:
        hidden = []
        for layer in model.layers:
            layer.up.register_forward_hook(lambda module, args, output: hidden.append(output))
        for n, layer in enumerate(model.layers):
            layer(model.enter(new_input(device, seed=n)))
        sum(one.sin().mean() for one in hidden).backward()
        flush_autograd(device)
        return gradients(model)

    expected = step(new_stack(device, depth=4))
    model = linked(wrapped(new_stack(device, depth=4), swap_wrapper))
    assert_same_gradients(step(model), expected)
    assert stats().moved_storages > 0
    assert stats().stalls == 0


def test_a_forward_without_a_layer_does_not_bring_back_anothers(device, monkeypatch) -> None:
    model = linked(wrapped(new_stack(device, depth=3), swap_wrapper))
    first = model(new_input(device))
    x = model.enter(new_input(device))
    second = model.layers[2](model.layers[0](x)).square().mean()
    events = watched(monkeypatch)
    second.backward()
    assert events == ["bring swap_group_0"], "a layer of the other forward was brought back"
    first.backward()
    assert events[1:] == ["bring swap_group_1", "bring swap_group_0"]


def test_parts_of_layers_are_wrapped_and_linked(device) -> None:
    """As attention modules are, one by one."""
    expected = train(new_stack(device, depth=4), device)
    model = new_stack(device, depth=4)
    for layer in model.layers:
        layer.up = swap_wrapper(layer.up, policy_fn=large, group_swap=True)
    parts = [layer.up for layer in model.layers]
    for current_part, next_part in pairwise(parts):
        SwapManager().set_forward_prefetch_layer(current_part, next_part)
    assert_same_gradients(train(model, device), expected)
    assert stats().stalls == 0


@pytest.mark.one_schedule
def test_links_around_nothing_say_so_once_at_the_users_line(device) -> None:
    model = linked(new_stack(device))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        train(model, device)
    (told,) = found
    assert told.filename == __file__
    assert "schedules what is in the layers' groups, and nothing is" in str(told.message)
    assert stats().moved_storages == 0, "a chain is a schedule and collects nothing by itself"


def test_an_interrupted_forward_leaves_nothing_behind(device) -> None:
    expected = train(new_stack(device), device)
    model = linked(wrapped(new_stack(device), swap_wrapper))
    down = model.layers[1].down

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = down.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(new_input(device))
    handle.remove()
    assert_same_gradients(train(model, device), expected)
    assert stats().stalls == 0
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert not SwapManager()._running.calls


# --- checkpointed layers ---------------------------------------------------------------------


def test_checkpointed_and_linked_layers_swap_what_the_policy_names(device) -> None:
    expected = train(new_stack(device, depth=4), device)
    model = wrapped(
        new_stack(device, depth=4), checkpoint_wrapper, policy_fn=swap_products, swap_inputs=True
    )
    assert_same_gradients(train(linked(model), device), expected)
    assert stats().moved_storages >= 3 * 3 * 5, "four products and an input of each layer"
    assert stats().stalls == 0, "recomputation waited for what was not on its way"
    assert_nothing_left(stats())


def test_groups_of_checkpointed_layers_keep_that_systems_order(device, monkeypatch) -> None:
    model = wrapped(new_stack(device, depth=4), checkpoint_wrapper, policy_fn=swap_products)
    linked(model)
    events = watched(monkeypatch)
    model(new_input(device)).backward()
    assert [event.replace("swap_group_", "") for event in events] == [
        *("send 0", "send 1", "sent 0", "send 2", "sent 1", "sent 2"),
        *("bring 2", "bring 1", "bring 0"),
    ]


def test_wrappers_of_both_kinds_in_one_chain(device) -> None:
    expected = train(new_stack(device, depth=3), device)
    model = new_stack(device, depth=3)
    products = []

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        says = swap_products(ctx, op, *args, **kwargs)
        products.extend([op] if says is CheckpointPolicy.MUST_SWAP else [])
        return says

    model.layers[0] = checkpoint_wrapper(model.layers[0], policy_fn=policy)
    model.layers[1] = checkpoint_wrapper(model.layers[1])
    model.layers[2] = swap_wrapper(model.layers[2])
    assert_same_gradients(train(linked(model), device), expected)
    assert len(products) >= 3 * 4
    assert stats().moved_storages == len(products), "the first layer's; the last layer stays"
    assert stats().stalls == 0


def test_single_regions_in_a_linked_layer(device) -> None:
    expected = train(new_stack(device), device)
    model = linked(new_stack(device))
    for layer in model.layers:
        plain = layer.forward
        layer.forward = lambda x, plain=plain: checkpoint(
            plain, x, policy_fn=swap_products, swap_inputs=True, group_swap=True
        )
    assert_same_gradients(train(model, device), expected)
    assert stats().moved_storages >= 2 * 3 * 5
    assert stats().stalls == 0


def test_single_calls_that_are_swapped_in_a_linked_layer(device) -> None:
    expected = train(new_stack(device), device)
    model = linked(new_stack(device))
    for layer in model.layers:
        plain = layer.forward
        layer.forward = lambda x, plain=plain: swap(plain, x, policy_fn=large, group_swap=True)
    assert_same_gradients(train(model, device), expected)
    assert stats().moved_storages > 0
    assert stats().stalls == 0
    moved = stats().moved_storages
    swap(torch.sin, random(device, 8).requires_grad_()).sum().backward()
    assert stats().moved_storages == moved, "outside of layers, as there, nothing moves"


# --- functions -------------------------------------------------------------------------------


class SmallNet(nn.Module):
    """Its hidden activation is a plain function."""

    def __init__(self, wrap: Callable[..., Any]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 64), nn.Linear(64, 16)

        def hidden(x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.first(x)).sin()

        self.hidden = wrap(hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.hidden(x)).square().mean()


@pytest.mark.parametrize("wrap", [swap_wrapper, checkpoint_wrapper])
def test_functions_are_wrapped(device, wrap) -> None:
    def new(wrap: Callable[..., Any]) -> nn.Module:
        torch.manual_seed(0)
        return SmallNet(wrap).to(device)

    expected = train(new(lambda function: function), device)
    model = new(wrap)
    assert isinstance(model.hidden, nn.Module), "there, too, a wrapped function is a module"
    assert list(model.state_dict()) == list(new(lambda function: function).state_dict())
    assert_same_gradients(train(model, device), expected)


def test_wrapped_functions_are_linked(device) -> None:
    weights = [nn.Parameter(random(device, 16, 16, seed=n)) for n in range(4)]
    x = new_input(device)

    def step(wrap: Callable[..., Any], link: bool) -> list[torch.Tensor]:
        functions = [wrap(lambda x, w=w: torch.tanh(x @ w).sin()) for w in weights]
        if link:
            for one, other in pairwise(functions):
                SwapManager().set_forward_prefetch_layer(one, other)
        y = x
        for function in functions:
            y = function(y)
        return torch.autograd.grad(y.square().mean(), weights)

    expected = step(lambda function: function, link=False)
    assert_same_gradients(step(swap_wrapper, link=True), expected)
    assert stats().moved_storages >= 3 * 2
    assert stats().stalls == 0


@pytest.mark.one_schedule
def test_what_is_no_function_is_refused(device) -> None:
    for wrap in (swap_wrapper, checkpoint_wrapper):
        with pytest.raises(TypeError, match=r"found int, expected an nn.Module or a function"):
            wrap(3)


# --- storages by hand ------------------------------------------------------------------------


class KeepsByHand(torch.autograd.Function):
    """Puts what it needs for backward into the current group, and asks for it there."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, states: list[str]) -> torch.Tensor:
        storage = Storage()
        storage.swap_storage["square"].append((SwapTensor(x * 2), "and more"))
        SwapManager().add_storage(SwapManager().get_current_group_name(), storage)
        ctx.storage, ctx.states = storage, states
        return x.square()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        doubled, _ = ctx.storage.swap_storage["square"].pop(0)
        ctx.states.append(doubled.state)
        return gradient * doubled.get_val(), None


class ByHand(nn.Module):
    def __init__(self, states: list[str] | None) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.states = states

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        if self.states is None:
            return x * x.detach() * 2 - (x * x.detach() * 2).detach() + x.detach().square()
        return KeepsByHand.apply(x, self.states)


class Model(nn.Module):
    def __init__(self, states: list[str] | None, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ByHand(states) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x) / 8
        return x.square().mean()


def test_storages_of_the_current_group_travel_with_it(device) -> None:
    def new(states: list[str] | None) -> nn.Module:
        torch.manual_seed(0)
        return Model(states).to(device)

    alone: list[str] = []
    expected = train(new(alone), device)
    assert set(alone) == {"device"}, "without links nothing moves"
    SwapManager().remove()
    states: list[str] = []
    model = linked(new(states))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = train(model, device)
    assert_same_gradients(found, expected)
    assert stats().moved_storages == 3 * 3, "one tensor of three layers in three steps"
    assert stats().stalls == 0, "a storage was not on its way before backward asked for it"
    assert set(states) == {"device"}, "backward found a storage that was not waited for"
    assert_nothing_left(stats())


def test_a_schedule_of_ones_own_by_name(device) -> None:
    """As pipeline schedules drive it: a group for each microbatch, named before its forward."""
    expected = train(new_stack(device), device, steps=1, microbatches=2)
    model = wrapped(new_stack(device), swap_wrapper)
    manager = SwapManager()
    losses = []
    for n in range(2):
        manager.set_current_group_name(f"stage_0_micro_{n}")
        losses.append(model(new_input(device, seed=n)))
        manager.launch_offload(f"stage_0_micro_{n}")
        manager.wait_offload(f"stage_0_micro_{n}")
    manager.set_current_group_name("")
    for n in range(2):
        manager.launch_load(f"stage_0_micro_{n}")
        manager.wait_load(f"stage_0_micro_{n}")
        losses.pop(0).backward()
    assert_same_gradients(gradients(model), expected)
    assert stats().moved_storages >= 2 * 3 * 5
    assert stats().stalls == 0
    flush_autograd(device)
    assert_nothing_left(stats())


def test_a_swap_tensor_by_itself(device) -> None:
    value = random(device, 8, 8)
    swap = SwapTensor(value[2:4])
    assert (swap.ver, swap.size, swap.storage_size) == (0, 256, 256)
    assert swap.is_slice_tensor and swap.val_cpu is None and swap.val is not None
    storage = Storage()
    storage.swap_storage["op"].append(swap)
    SwapManager().add_storage("mine", storage)
    del value
    SwapManager().launch_offload("mine")
    SwapManager().wait_offload("mine")
    assert swap.state == "host"
    assert swap.val_cpu is not None and same_bits(swap.val_cpu, random(device, 8, 8)[2:4])
    assert swap.state == "host", "a look at the host's copy brought it back"
    SwapManager().launch_load("mine")
    assert swap.state == "h2d"
    assert swap.val_cpu is not None and same_bits(swap.val_cpu, random(device, 8, 8)[2:4])
    SwapManager().wait_load("mine")
    assert swap.state == "device" and swap.val_cpu is None
    assert same_bits(swap.val, random(device, 8, 8)[2:4])
    other = SwapTensor({"no": "tensor"}, "somewhere", group_swap=True)
    assert other.state == "non_tensor" and other.val == {"no": "tensor"}


def test_a_tensor_that_is_back_may_leave_again(device) -> None:
    value = random(device, 64)
    value.add_(1).sub_(1)  # not the first version
    expected = value.clone()
    storage = Storage()
    storage[0].append(SwapTensor(value, "somewhere"))
    (swap,) = next(iter(storage.values()))
    del value
    SwapManager().add_storage("mine", storage)
    for _ in range(2):
        SwapManager().launch_offload("mine")
        SwapManager().wait_offload("mine")
        assert swap.state == "host"
        SwapManager().launch_load("mine")
        SwapManager().wait_load("mine")
        assert same_bits(swap.val, expected)
    storage.clear()
    assert not list(storage.tensors())


def test_tensors_that_move_alone_share_an_engine(device) -> None:
    storage = Storage()
    swaps = [SwapTensor(random(device, 64, seed=n)) for n in range(3)]
    storage.swap_storage["op"].append(swaps[2])
    for one in (*swaps[:2], storage):
        getattr(one, "async_offload", storage.launch_offload)()
        one.wait_offload()
    assert len({id(one._engine) for one in (*swaps[:2], storage)}) == 1
    for one in (*swaps[:2], storage):
        getattr(one, "async_load", storage.launch_load)()
        one.wait_load()
    assert [one.state for one in swaps] == ["device"] * 3
    assert all(same_bits(one.val, random(device, 64, seed=n)) for n, one in enumerate(swaps))


@pytest.mark.one_schedule
def test_an_edit_before_the_offload_is_an_error_as_there(device) -> None:
    value = random(device, 8)
    storage = Storage()
    storage.swap_storage["op"].append(SwapTensor(value, "aten.add"))
    SwapManager().add_storage("mine", storage)
    value.add_(1)
    with pytest.raises(InplaceEditError, match=r"'aten.add'.*found version 1.*expected version 0"):
        SwapManager().launch_offload("mine")


@pytest.mark.one_schedule
def test_a_value_that_is_away_is_brought_back_and_that_is_said_once(device) -> None:
    SwapTensor._told_early = False
    storage = Storage()
    for n in range(2):
        storage.swap_storage["op"].append(SwapTensor(random(device, 8, seed=n)))
    SwapManager().add_storage("mine", storage)
    SwapManager().launch_offload("mine")
    SwapManager().wait_offload("mine")
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        values = [swap.get_val() for swap in storage.tensors()]
    assert all(same_bits(value, random(device, 8, seed=n)) for n, value in enumerate(values))
    (told,) = found
    assert told.filename == __file__ and "Call async_load() or launch_load()" in str(told.message)


@pytest.mark.one_schedule
@pytest.mark.parametrize("group", [False, True], ids=["alone", "in a group"])
def test_a_tensor_of_inference_mode_comes_back_and_leaves_again(device, group) -> None:
    with torch.inference_mode():
        tensor = random(device, 64, 64)
        expected, swapped = tensor.clone(), SwapTensor(tensor)
        del tensor
        for _ in range(2):
            if group:
                storage = Storage()
                storage["x"].append(swapped)
                storage.launch_offload()
                storage.wait_offload()
                storage.launch_load()
                storage.wait_load()
            else:
                swapped.async_offload()
                swapped.wait_offload()
                swapped.async_load()
                swapped.wait_load()
            assert same_bits(swapped.val, expected)
