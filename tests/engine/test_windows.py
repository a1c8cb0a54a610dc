"""Windows: training, modules, and which layers and operators take part."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import (
    assert_nothing_left,
    assert_same_gradients,
    collect,
    flush_autograd,
    let_sends_end,
    new_input,
    new_stack,
    nothing_measured,
    train_step,
)
from torch import nn

import memswap
from memswap import Action, Policy, Windows

pytestmark = pytest.mark.usefixtures("every_tensor_is_encoded")

ENCODE = Policy(action=Action.ENCODE, min_bytes=1)


ENCODE_SWAP = Policy(action=Action.ENCODE_SWAP, min_bytes=1)


KEPT_WAITING = Windows(leftovers="keep")


@pytest.fixture
def managed(request: pytest.FixtureRequest) -> Callable[..., memswap.types.Manager]:
    """Makes a manager that is removed at the end."""

    def make(layers: Any, policy: Policy = ENCODE, **options: Any) -> memswap.types.Manager:
        options.setdefault("windows", Windows(seconds=lambda op, shapes: 1e-3))
        options.setdefault("prefetch_bytes", 0)
        manager = memswap.manage(layers, policy, **options)
        request.addfinalizer(manager.remove)
        return manager

    return make


@pytest.fixture
def ahead(device: torch.device) -> bool:
    """Whether the device's lanes work ahead of the host; on a CPU nothing waits for a window."""
    return device.type != "cpu"


def waiting(manager: memswap.types.Manager) -> int:
    return manager.window_stats().pending_bytes


@pytest.mark.parametrize("policy", [ENCODE, ENCODE_SWAP], ids=["encode", "both"])
@pytest.mark.parametrize("leftovers", ["start", "keep"])
def test_gradients_are_those_without_memswap_to_the_bit(
    device, new_pool, managed, ahead, policy, leftovers
) -> None:
    model, x = new_stack(device), new_input(device)
    plain = train_step(model, lambda: model(x))
    manager = managed(
        model.layers,
        policy,
        pool=new_pool() if policy is ENCODE_SWAP else None,
        windows=Windows(seconds=lambda op, shapes: 2e-7, leftovers=leftovers),
        prefetch_bytes="4KiB",
    )
    for _ in range(3):
        assert_same_gradients(train_step(model, lambda: model(x)), plain)
    stats, windows = manager.stats(), manager.window_stats()
    assert stats.encoded_storages > 0
    if ahead:
        assert windows.windows > 0 and windows.encoded_in_windows > 0
        assert windows.decoded_in_windows > 0
        assert (windows.started_at_end > 0) is (leftovers == "start")
    else:
        assert windows.encoded_in_windows == windows.pending_bytes == 0


@pytest.mark.one_schedule
@pytest.mark.parametrize("seconds", [0.0, 1e-9, 1e3])
def test_wrong_durations_cost_time_and_never_a_bit(device, managed, seconds) -> None:
    model, x = new_stack(device), new_input(device)
    plain = train_step(model, lambda: model(x))
    managed(model.layers, windows=Windows(seconds=lambda op, shapes: seconds))
    with nothing_measured():
        for _ in range(2):
            assert_same_gradients(train_step(model, lambda: model(x)), plain)


@pytest.mark.one_schedule
@pytest.mark.accelerator
def test_everything_that_moves_without_windows_moves_with_them(device, managed) -> None:
    model, x = new_stack(device), new_input(device)
    moved = []
    for windows in (None, Windows()):
        manager = managed(model.layers, windows=windows)
        for _ in range(3):
            train_step(model, lambda: model(x))
        manager.reset_stats()
        train_step(model, lambda: model(x))
        moved.append(manager.stats().moved_bytes)
        manager.remove()
    assert moved[0] == moved[1] > 0, "leftovers were lost"


@pytest.mark.cpu_only
@pytest.mark.usefixtures("every_tensor_is_encoded")
def test_on_a_cpu_nothing_is_decoded_or_kept_for_windows(device) -> None:
    """Whoever asks does the work there, so what is ahead of its use costs memory alone."""
    x, found = new_input(device), []
    for windows in (None, Windows()):
        model = new_stack(device, depth=6)
        policy = Policy(action=Action.ENCODE, min_bytes=1)
        with memswap.manage(model.layers, policy, windows=windows) as manager:
            for _ in range(3):
                manager.reset_stats()
                train_step(model, lambda model=model: model(x))
            stats = manager.stats()
        kept = sum(tensors.bytes for tensors in stats.kept.values())
        found.append((stats.peak_resident_bytes, stats.moved_bytes, kept))
    assert found[0] == found[1]


@pytest.mark.one_schedule
@pytest.mark.accelerator
def test_a_layer_is_encoded_under_the_operators_of_the_next(device, managed) -> None:
    model, x = new_stack(device), new_input(device)
    manager = managed(model.layers)
    train_step(model, lambda: model(x))
    waiting_at: dict[str, list[Any]] = {}  # a layer's begin: what waits then
    windows = manager._engine.windows

    def note(name: str) -> None:
        waiting_at[name] = [entry.reference for entry in windows.queue.pending]

    for name, layer in model.layers.named_children():
        layer.register_forward_pre_hook(lambda *_, name=name: note(name))
    model.layers[-1].register_forward_hook(lambda *_: note("end"))
    train_step(model, lambda: model(x))
    for name, following in (("1", "2"), ("2", "end")):
        assert waiting_at[name], f"nothing of the layer before waits when layer {name} begins"
        started = [one for one in waiting_at[name] if one not in waiting_at[following]]
        assert started, f"nothing started under the operators of layer {name}"


@pytest.mark.parametrize("recompute", ["torch", "memswap"])
def test_recomputed_layers_under_windows(device, managed, recompute) -> None:
    model, x = new_stack(device), new_input(device)
    plain = train_step(model, lambda: model(x))
    managed(model.layers, windows=Windows(seconds=lambda op, shapes: 1e-6))

    def recomputed() -> torch.Tensor:
        y = model.enter(x)
        for layer in model.layers:
            if recompute == "torch":
                y = torch.utils.checkpoint.checkpoint(layer, y, use_reentrant=False)
            else:
                y = memswap.checkpoint(layer, y)
        return y.square().mean()

    for _ in range(2):
        assert_same_gradients(train_step(model, recomputed), plain)


@pytest.mark.accelerator
def test_an_exception_in_forward_leaves_nothing_waiting(device, managed) -> None:
    model, x = new_stack(device), new_input(device)
    plain = train_step(model, lambda: model(x))
    manager = managed(model.layers, windows=KEPT_WAITING)
    fail = model.layers[1].down.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(x)
    fail.remove()
    collect()
    assert_same_gradients(train_step(model, lambda: model(x)), plain)
    flush_autograd(device)
    manager._engine.open_window(1.0)
    assert waiting(manager) == 0
    assert_nothing_left(let_sends_end(manager, device))


@pytest.mark.one_schedule
@pytest.mark.accelerator
def test_the_end_of_a_forward_is_the_last_unit_however_often_each_is_called(
    device, managed
) -> None:
    model, x = new_stack(device), new_input(device)

    def thrice() -> torch.Tensor:
        y = x
        for _ in range(3):
            y = model.layers[0](y)
        return y.square().mean()

    plain = train_step(model, thrice)
    manager = managed(model.layers[0], windows=Windows())
    ends: list[int] = []
    end = manager._engine.end_forward
    manager._engine.end_forward = lambda: (ends.append(waiting(manager)), end())
    with nothing_measured():  # all is left over
        for _ in range(3):
            assert_same_gradients(train_step(model, thrice), plain)
    del manager._engine.end_forward
    assert len(ends) == 3, "once in each forward"
    assert ends[1] == ends[2] > ends[0], "at first it took the first call for the last"
    assert waiting(manager) == 0


@pytest.mark.one_schedule
@pytest.mark.accelerator
def test_a_window_without_seconds_learns_them(device, managed) -> None:
    model, x = new_stack(device), new_input(device)
    manager = managed(model.layers, windows=Windows())
    seconds = []
    for _ in range(5):
        model.zero_grad(set_to_none=True)
        loss = model(x)
        before = manager.window_stats().window_s
        with manager.window(name="head"):
            loss = loss + x.square().sum()
        seconds.append(manager.window_stats().window_s - before)
        loss.backward()
        torch.accelerator.synchronize(device)
    assert seconds[0] == 0.0 and seconds[-1] > 0.0


@pytest.mark.one_schedule
def test_a_copied_or_pickled_module_opens_no_windows(device, managed) -> None:
    model, x = new_stack(device), new_input(device)
    manager = managed(model.layers)
    other = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    before = manager.window_stats().windows
    for one in other:
        one(x).backward()
    assert manager.window_stats().windows == before


@pytest.mark.one_schedule
def test_removing_a_manager_takes_every_hook_off(device, managed) -> None:
    model = new_stack(device)
    manager = managed(model.layers, windows=Windows(under=model.enter))
    assert any(module._forward_pre_hooks for module in model.modules())
    manager.remove()
    for module in model.modules():
        assert not module._forward_pre_hooks and not module._forward_hooks


@pytest.mark.one_schedule
def test_modules_that_are_not_managed_can_open_windows(device, managed) -> None:
    model, x = new_stack(device), new_input(device)
    managed(model.layers[:1], windows=Windows(under=(model.enter, model.layers[1])))
    count = sum(bool(module._forward_pre_hooks) for module in model.modules())
    assert count == 1 + 4 + 1 + 4, "a unit and its products, the entry, another layer's products"
    train_step(model, lambda: model(x))


@pytest.mark.cpu_only
def test_a_compiled_layer_is_one_window_and_its_operators_break_no_graph(device, managed) -> None:
    model, x = new_stack(device, depth=2), new_input(device)
    plain = train_step(model, lambda: model(x))
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    manager = managed(model.layers)
    for layer in model.layers:
        layer.compile(backend=backend)
    for _ in range(3):
        manager.reset_stats()
        found = train_step(model, lambda: model(x))
    assert_same_gradients(found, plain)
    assert len(graphs) <= 2, f"{len(graphs)} graphs for two layers"
    # Each layer opens one in forward and one in backward; nothing inside does.
    assert manager.window_stats().windows == 2 * len(model.layers)


@pytest.mark.cpu_only
def test_a_window_inside_a_compiled_layer_breaks_no_graph(device, managed) -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with memswap.window(seconds=1e-3):
                y = self.linear(x)
            return y.tanh()

    torch.manual_seed(0)
    layer, x = Layer().to(device), new_input(device)
    plain = train_step(layer, lambda: layer(x).sum())
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    managed(layer)
    layer.compile(backend=backend)
    for _ in range(2):
        assert_same_gradients(train_step(layer, lambda: layer(x).sum()), plain)
    assert len(graphs) == 1


LAYERS = nn.ModuleList(nn.Identity() for _ in range(9))


@pytest.mark.one_schedule
@pytest.mark.parametrize(
    ("spec", "expected"), [("0", "0"), ("1-4,7", "12347"), (" 2 , 3-3", "23"), ("0-1,1-2", "012")]
)
def test_layers_are_chosen_by_number_and_keep_their_names(spec, expected) -> None:
    chosen = memswap.select_layers(LAYERS, spec)
    assert "".join(chosen) == expected
    assert all(chosen[name] is LAYERS[int(name)] for name in chosen)
    assert list(memswap.select_layers(list(LAYERS), spec)) == list(chosen)


@pytest.mark.one_schedule
@pytest.mark.parametrize(
    ("spec", "error", "says"),
    [
        ("", ValueError, "''"),
        ("1,,2", ValueError, "''"),
        ("one", ValueError, "'one'"),
        ("1-", ValueError, "'1-'"),
        ("-1", ValueError, "'-1'"),
        ("4-1", ValueError, "write 1-4"),
        ("7-9", IndexError, "numbered 0 to 8"),
        (3, TypeError, "int"),
    ],
)
def test_what_names_no_layers_says_why(spec, error, says) -> None:
    with pytest.raises(error, match=says):
        memswap.select_layers(LAYERS, spec)


@pytest.mark.one_schedule
@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"under": "layers"}, TypeError),
        ({"operators": nn.Linear}, TypeError),
        ({"seconds": 1.0}, TypeError),
        ({"leftovers": "lose"}, ValueError),
        ({"max_pending_bytes": "many"}, ValueError),
    ],
)
def test_options_that_mean_nothing_are_errors(wrong, error) -> None:
    with pytest.raises(error):
        Windows(**wrong)
    with pytest.raises(TypeError, match="expected"):
        memswap.manage(LAYERS, windows=True)


@pytest.mark.cpu_only
@pytest.mark.filterwarnings("ignore:.*prototype:UserWarning")
def test_modules_of_nested_tensors_open_windows(managed):
    """A nested tensor of torch's strided layout has no shape that could be asked for."""
    layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
    rows = torch.randn(5, 4)

    def loss() -> torch.Tensor:
        nested = torch.nested.as_nested_tensor([rows[:2], rows[2:]])
        for layer in layers:
            nested = layer(nested)
        return torch.cat(list(nested.unbind())).square().sum()

    expected = train_step(layers, loss)
    managed(layers)
    assert_same_gradients(train_step(layers, loss), expected)
