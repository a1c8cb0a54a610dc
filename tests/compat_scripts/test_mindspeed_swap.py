"""MindSpeed's tensor swap (``TensorSwapContext`` and its handler), as its users write it."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers import (
    assert_nothing_left,
    assert_same_gradients,
    new_input,
    new_stack,
    random,
    same_bits,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

from memswap.compat.mindspeed import (
    AsyncSwapHandler,
    SwapTensor,
    TensorLocation,
    TensorSwapContext,
    swap_activation_modules,
)
from swap_scripts import assert_a_graph_is_run_twice, train, watched

TAG = "model.layers.*"


@pytest.fixture(autouse=True)
def _begin_anew() -> Iterator[None]:
    """The handler is the process's: each script finds it, and leaves it, without contexts."""
    gc.collect()
    assert not TensorSwapContext.context_map, "contexts of another script are alive"
    yield
    AsyncSwapHandler().set_custom_check_fn(None)
    AsyncSwapHandler()._own_engine = None  # which whoever asked for its streams keeps


def swapped(layer: nn.Module, tag: str = TAG, **options: Any) -> TensorSwapContext:
    """A layer's forward with a context around it, as `swap_activation_modules` wraps it there."""
    context = TensorSwapContext(tag, **options)
    plain = layer.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with context:
            return plain(*args, **kwargs)

    layer.forward = forward
    return context


def stats() -> Any:
    return AsyncSwapHandler().stats()


def test_contexts_with_a_common_tag_swap_every_layer_but_the_last(device) -> None:
    expected = train(new_stack(device, depth=4), device)
    model = new_stack(device, depth=4)
    contexts = [swapped(layer) for layer in model.layers]
    assert [context.layer_idx for context in contexts] == [0, 1, 2, 3]
    assert [context.layer_nums for context in contexts] == [4, 4, 4, 4]
    assert all(context.swap_handler is AsyncSwapHandler() for context in contexts)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same_gradients(train(model, device), expected)
    assert stats().moved_storages >= 3 * 3 * 5, "three layers, three steps, several tensors each"
    assert stats().stalls == 0, "something was not on its way before backward needed it"
    assert_nothing_left(stats())


def test_layers_leave_and_return_in_that_systems_order(device, monkeypatch) -> None:
    model = new_stack(device, depth=4)
    contexts = [swapped(layer, "l") for layer in model.layers]
    events = watched(monkeypatch)
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda *_: events.append("forward"))
    loss = model(new_input(device))
    events.append("backward")
    loss.backward()
    assert events == [
        *("forward", "send l[0]"),
        *("forward", "send l[1]", "sent l[0]"),
        *("forward", "send l[2]", "sent l[1]"),
        *("forward", "sent l[2]"),  # the last layer stays
        *("backward", "bring l[2]", "bring l[1]", "bring l[0]"),
    ]
    assert stats().stalls == 0
    del contexts


def test_microbatches_in_flight_do_not_meet(device) -> None:
    expected = train(new_stack(device, depth=4), device, microbatches=3)
    model = new_stack(device, depth=4)
    contexts = [swapped(layer) for layer in model.layers]
    assert_same_gradients(train(model, device, microbatches=3), expected)
    assert stats().moved_storages > 0
    assert stats().stalls == 0
    assert_nothing_left(stats())
    del contexts


def test_two_models_with_one_tag_are_two_towers(device) -> None:
    """There the second model's layers are numbered on, and the first one's last layer is lost."""
    models = [new_stack(device, depth=3, seed=seed) for seed in (1, 2)]
    expected = [train(new_stack(device, depth=3, seed=seed), device) for seed in (1, 2)]
    contexts = [swapped(layer) for model in models for layer in model.layers]
    for model, plain in zip(models, expected, strict=True):
        assert_same_gradients(train(model, device), plain)
    stalls = stats().stalls
    moved = stats().moved_storages
    for model in models:
        train(model, device)
    assert stats().moved_storages - moved >= 2 * 3 * 2 * 5, "some layers are not swapped any more"
    assert stats().stalls == stalls, "the towers' last layers have been seen, and are to stay"
    del contexts


def test_a_forward_that_ended_early_is_forgotten(device) -> None:
    """Backward has begun in the second layer once. Afterwards that layer leaves again."""
    model = new_stack(device, depth=4)
    contexts = [swapped(layer) for layer in model.layers]

    def moved_by_a_step() -> int:
        before = stats().moved_storages
        train(model, device, steps=1)
        return stats().moved_storages - before

    every_layer_but_the_last = moved_by_a_step()
    for _ in range(2):
        x = model.enter(new_input(device))
        model.layers[1](model.layers[0](x)).square().mean().backward()
    moved_by_a_step()
    stalls = stats().stalls
    assert moved_by_a_step() == every_layer_but_the_last
    assert stats().stalls == stalls
    del contexts, x


def test_contexts_made_in_another_order_than_the_forwards(device) -> None:
    expected = train(new_stack(device, depth=4), device)
    model = new_stack(device, depth=4)
    contexts = [swapped(layer) for layer in reversed(model.layers)]
    assert_same_gradients(train(model, device), expected)
    stalls, moved = stats().stalls, stats().moved_storages
    train(model, device, steps=1)
    assert stats().stalls == stalls
    assert stats().moved_storages - moved >= 3 * 5
    del contexts


def test_a_second_training_begins_anew(device) -> None:
    expected = train(new_stack(device), device)
    for _ in range(2):
        model = new_stack(device)
        contexts = [swapped(layer) for layer in model.layers]
        assert [context.layer_idx for context in contexts] == [0, 1, 2], "layers of a gone model"
        assert TensorSwapContext.context_map[TAG] == 2
        assert_same_gradients(train(model, device), expected)
        assert stats().moved_storages > 0
        assert stats().stalls == 0
        assert_nothing_left(stats())
        del model, contexts
        gc.collect()
        assert TensorSwapContext.context_map[TAG] == -1
        assert stats().moved_storages == 0, "the engine of a training that is over is kept"


def test_a_graph_is_run_twice(device) -> None:
    plain, model = new_stack(device), new_stack(device)
    contexts = [swapped(layer) for layer in model.layers]
    assert_a_graph_is_run_twice(plain, model, device, stats)
    del contexts


def test_evaluations_between_steps_change_nothing(device) -> None:
    expected = train(new_stack(device), device)
    model = new_stack(device)
    contexts = [swapped(layer) for layer in model.layers]

    def evaluate() -> None:
        with torch.no_grad():
            model(new_input(device))
        model(new_input(device))  # with gradients enabled, and no backward

    assert_same_gradients(train(model, device, after_step=evaluate), expected)
    assert stats().stalls == 0
    assert_nothing_left(stats())
    del contexts


def test_contexts_around_recomputed_layers_swap_their_inputs(device) -> None:
    def recompute(model: nn.Module) -> None:
        for layer in model.layers:
            plain = layer.forward
            layer.forward = lambda x, plain=plain: checkpoint(plain, x, use_reentrant=False)

    plain_model = new_stack(device, depth=4)
    recompute(plain_model)
    expected = train(plain_model, device)
    model = new_stack(device, depth=4)
    recompute(model)
    contexts = [swapped(layer) for layer in model.layers]
    assert_same_gradients(train(model, device), expected)
    assert stats().moved_storages == 3 * 3, "the inputs of three layers in three steps"
    assert stats().stalls == 0
    del contexts


def test_a_check_of_the_layers_input_as_that_system_sets_it(device) -> None:
    expected = train(new_stack(device), device)
    model = new_stack(device)
    contexts = []
    for layer in model.layers:
        context = TensorSwapContext(TAG)
        contexts.append(context)
        plain = layer.forward

        def forward(hidden: torch.Tensor, plain=plain, context=context) -> torch.Tensor:
            context.set_custom_check_fn(lambda t: t.data_ptr() == hidden.data_ptr())
            with context:
                return plain(hidden)

        layer.forward = forward
    assert_same_gradients(train(model, device), expected)
    assert stats().moved_storages == 2 * 3, "the inputs of two layers in three steps"


def test_without_prefetch_every_layer_is_brought_back_when_it_is_needed(device) -> None:
    expected = train(new_stack(device), device)
    model = new_stack(device)
    contexts = [swapped(layer, prefetch=False) for layer in model.layers]
    assert_same_gradients(train(model, device), expected)
    assert stats().moved_storages >= 2 * 3 * 5
    assert stats().stalls == 2 * 3, "there, the first tensor of each layer waits for its bytes"
    del contexts


# --- what can never swap ---------------------------------------------------------------------


def told_at(found: Any) -> list[tuple[str, str]]:
    return [(one.filename, str(one.message)) for one in found]


@pytest.mark.one_schedule
def test_a_tag_for_each_layer_warns_once_at_the_users_line(device) -> None:
    model = new_stack(device)
    contexts = [swapped(layer, f"model.layers.{n}") for n, layer in enumerate(model.layers)]
    AsyncSwapHandler()._told.swaps_nothing = False
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        train(model, device)
    ((filename, message),) = told_at(found)
    assert filename == __file__, "it points somewhere else than at the user's call"
    assert "is the only one with its tag" in message and '"model.layers.*"' in message
    assert stats().moved_storages == 0
    del contexts


@pytest.mark.one_schedule
def test_a_context_for_each_forward_warns_once_at_the_users_line(device) -> None:
    model = new_stack(device)
    for layer in model.layers:
        plain = layer.forward

        def forward(hidden: torch.Tensor, plain=plain) -> torch.Tensor:
            with TensorSwapContext(TAG):
                return plain(hidden)

        layer.forward = forward
    AsyncSwapHandler()._told.swaps_nothing = False
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        train(model, device)
    ((filename, message),) = told_at(found)
    assert filename == __file__
    assert "made for one forward and dropped" in message and "keep them" in message


# --- one tensor after another ----------------------------------------------------------------


def test_hooks_of_ones_own_on_the_handler(device) -> None:
    expected = train(new_stack(device), device)
    model = new_stack(device)
    handler = AsyncSwapHandler()
    for index, layer in enumerate(model.layers):
        plain = layer.forward

        def forward(hidden: torch.Tensor, plain=plain, index=index) -> torch.Tensor:
            pack = lambda t: handler.swap_out_cur_and_release_prev(t.detach(), index, 3)  # noqa: E731
            unpack = handler.wait_cur_and_prefetch_next
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                return plain(hidden)

        layer.forward = forward
    engine = handler.engine  # held, or it would end with the last graph
    assert_same_gradients(train(model, device), expected)
    assert engine.stats().moved_storages > 0
    assert not handler.key_to_swap_tensor, "a tensor of a graph that is gone is kept"
    assert_nothing_left(engine.stats())


def test_the_handlers_books(device) -> None:
    handler = AsyncSwapHandler()
    assert handler is AsyncSwapHandler()
    handler.get_swap_key(1)
    assert handler.get_swap_key(0) == ((0, 0), False), "a lower layer begins another forward"
    swapped_out = handler.swap_out_cur_and_release_prev(random(device, 64), 0, 2)
    assert isinstance(swapped_out, SwapTensor) and swapped_out.key == (0, 1)
    assert handler.exist((0, 1)) and handler.key_to_swap_tensor[0, 1] is swapped_out
    assert swapped_out.current_location is TensorLocation.HOST
    handler.release_device_tensor(0)
    restored = handler.wait_cur_and_prefetch_next(swapped_out)
    assert same_bits(restored, random(device, 64))
    del swapped_out
    assert not handler.exist((0, 1))


def test_a_swap_tensor_by_itself(device) -> None:
    tensor = random(device, 8, 8)
    swap = SwapTensor(tensor[2:4], (3, 1))
    assert (swap.key, tuple(swap.size), swap.storage_size) == ((3, 1), (2, 8), 64)
    assert swap.is_slice_tensor
    assert swap.current_location is TensorLocation.DEVICE
    stream = None if device.type == "cpu" else AsyncSwapHandler().d2h_stream
    swap.wait_d2h_finished(stream, True)  # nothing was sent: nothing happens
    swap.async_h2d(stream, True)
    del tensor
    swap.async_d2h(stream)
    swap.wait_d2h_finished(stream, True)
    assert swap.current_location is TensorLocation.HOST
    assert swap.host_tensor.device.type == "cpu"
    assert same_bits(swap.host_tensor, random(device, 8, 8)[2:4])
    assert swap.current_location is TensorLocation.HOST, "a look at the host's copy brought it back"
    swap.async_h2d(stream, True, None)
    assert swap.current_location is TensorLocation.DEVICE
    swap.h2d_event.wait()
    swap.h2d_event.synchronize()
    assert swap.h2d_event.query()
    assert same_bits(swap.device_tensor, random(device, 8, 8)[2:4])


@pytest.mark.accelerator
@pytest.mark.one_schedule
def test_the_streams_are_there_before_the_first_swap(device) -> None:
    handler = AsyncSwapHandler()
    send, bring = handler.d2h_stream, handler.h2d_stream
    assert send != bring
    swapped_out = handler.swap_out_cur_and_release_prev(random(device, 64), 0, 2)
    assert (handler.d2h_stream, handler.h2d_stream) == (send, bring)
    assert same_bits(handler.wait_cur_and_prefetch_next(swapped_out), random(device, 64))


@pytest.mark.one_schedule
def test_contexts_and_handlers_that_models_hold_are_copied_with_them(device) -> None:
    model = new_stack(device)
    for layer in model.layers:
        layer.context = TensorSwapContext(TAG)
    copied = copy.deepcopy(model)
    assert [layer.context.layer_idx for layer in copied.layers] == [3, 4, 5]
    assert copy.deepcopy(AsyncSwapHandler()) is AsyncSwapHandler()
    assert pickle.loads(pickle.dumps(AsyncSwapHandler())) is AsyncSwapHandler()
    assert pickle.loads(pickle.dumps(model.layers[0].context)).module_tag == TAG


@pytest.mark.one_schedule
def test_the_map_of_contexts(device) -> None:
    numbers = TensorSwapContext.context_map
    assert numbers[TAG] == -1
    first = [TensorSwapContext(TAG) for _ in range(3)]
    assert numbers[TAG] == 2 and list(numbers) == [TAG]
    with pytest.raises(ValueError, match=r"found 2 as its last layer; expected -1"):
        numbers[TAG] = 7
    numbers[TAG] = -1
    second = [TensorSwapContext(TAG) for _ in range(2)]
    assert [one.layer_idx for one in second] == [0, 1]
    assert [one.layer_nums for one in first + second] == [3, 3, 3, 2, 2]
    numbers.clear()
    assert TensorSwapContext(TAG).layer_idx == 0


@pytest.mark.one_schedule
def test_the_first_check_of_the_processs_handler_counts(device) -> None:
    def check(tensor: torch.Tensor) -> bool:
        return tensor.dim() == 3

    assert AsyncSwapHandler(check).custom_check_fn is check
    AsyncSwapHandler()._told_check = False
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        assert AsyncSwapHandler(lambda t: True).custom_check_fn is check
        AsyncSwapHandler(lambda t: True)
    ((filename, message),) = told_at(found)
    assert filename == __file__ and "set_custom_check_fn" in message


# --- by the modules' names -------------------------------------------------------------------


def test_a_plan_of_names_swaps_the_layers_inputs_under_recompute(device) -> None:
    expected = train(new_stack(device, depth=4), device)
    model = new_stack(device, depth=4)
    swap = swap_activation_modules(model, ["layers.{*}"])
    for layer in model.layers:
        plain = layer.forward
        layer.forward = lambda x, plain=plain: checkpoint(plain, x, use_reentrant=False)
    assert_same_gradients(train(model, device), expected)
    assert swap.stats().moved_storages > 0
    swap.remove()
