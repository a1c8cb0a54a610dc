"""Windows: encodes that wait for an operator to run beside, and what may come between."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import (
    Remember,
    assert_nothing_left,
    assert_same_gradients,
    collect,
    flush_autograd,
    let_sends_end,
    look,
    new_input,
    new_stack,
    random,
    train_step,
)
from torch import nn

import memswap
from memswap import Action, Policy, Windows
from memswap.engine import expectations, transfer
from memswap.engine.saver import Visit
from memswap.engine.windowed import WindowedSaver

ENCODE = Policy(action=Action.ENCODE, min_bytes=1)
ENCODE_SWAP = Policy(action=Action.ENCODE_SWAP, min_bytes=1)
KEPT_WAITING = Windows(leftovers="keep")


@pytest.fixture(autouse=True)
def _every_tensor_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensors of these models are shorter than their frames."""
    monkeypatch.setattr(expectations, "WORTH", float("inf"))


@pytest.fixture
def managed(request: pytest.FixtureRequest) -> Callable[..., memswap.Manager]:
    """Makes a manager that is removed at the end."""

    def make(layers: Any, policy: Policy = ENCODE, **options: Any) -> memswap.Manager:
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


def waiting(manager: memswap.Manager) -> int:
    return manager.window_stats().pending_bytes


# ---------------------------------------------------------------- training
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
    manager = managed(model.layers, windows=Windows(seconds=lambda op, shapes: seconds))
    manager._saver.observer = None  # nothing is measured
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


@pytest.mark.one_schedule
@pytest.mark.accelerator
def test_a_layer_is_encoded_under_the_operators_of_the_next(device, managed) -> None:
    model, x = new_stack(device), new_input(device)
    manager = managed(model.layers)
    train_step(model, lambda: model(x))
    started: list[tuple[str, str]] = []
    running = ""
    saver, start = manager._saver, manager._saver.start

    def watched(pending: Any) -> Any:
        started.append((pending.expectation.key.unit, running))
        return start(pending)

    saver.start = watched
    for name, layer in model.layers.named_children():

        def enter(module: Any, args: Any, name: str = name) -> None:
            nonlocal running
            running = name

        layer.register_forward_pre_hook(enter)
    train_step(model, lambda: model(x))
    del saver.start
    assert ("0", "1") in started and ("1", "2") in started


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


# ---------------------------------------------------------------- the life of what waits
SIDE = 64
NBYTES = SIDE * SIDE * 4


class Region:
    """A `with` block whose saved tensors wait for windows: what a managed layer is inside."""

    def __init__(self, device: torch.device, **options: Any) -> None:
        self.saver = Windows(leftovers="keep", **options).saver(ENCODE, None, 0)
        self.device = device
        self.seen: list[Any] = []
        self.visits: list[Visit] = []

    def __enter__(self) -> Region:
        self.visits.append(Visit(self.saver, ""))
        self.visits[-1].enter()
        return self

    def __exit__(self, *_: object) -> None:
        self.visits.pop().leave()

    def save(self, seed: int = 0, times: int = 1) -> torch.Tensor:
        """The output of an operator that saves a tensor which nobody else holds."""
        x = torch.zeros(4, device=self.device, requires_grad=True)
        made = random(self.device, SIDE, SIDE, seed=seed)
        return Remember.apply(x, self.seen, *times * [made])

    def expect(self, *seeds: int) -> None:
        assert self.seen == [look(random(self.device, SIDE, SIDE, seed=seed)) for seed in seeds]

    @property
    def waiting(self) -> int:
        return self.saver.window_stats().pending_bytes

    def settled(self) -> memswap.Stats:
        """The statistics when all that was started has ended."""
        let_sends_end(self, self.device)
        return self.saver.stats()

    # What `let_sends_end` asks for.
    @property
    def _saver(self) -> WindowedSaver:
        return self.saver

    def stats(self) -> memswap.Stats:
        return self.saver.stats()


@pytest.fixture
def region(device: torch.device) -> Region:
    return Region(device)


@pytest.mark.accelerator
def test_nothing_leaves_before_a_window_and_then_it_is_really_freed(region) -> None:
    with region:
        out = region.save()
    assert region.waiting == NBYTES and region.saver.stats().moved_storages == 0
    region.saver.open_window(1.0)
    assert region.waiting == 0
    assert region.settled().freed_bytes == NBYTES
    out.sum().backward()
    region.expect(0)


@pytest.mark.accelerator
def test_what_is_demanded_while_it_waits_stays_for_every_backward(region) -> None:
    with region:
        out = region.save()
    out.sum().backward(retain_graph=True)
    region.saver.open_window(1.0)
    out.sum().backward()
    region.expect(0, 0)
    stats = region.saver.window_stats()
    assert (stats.kept_storages, stats.encoded_bytes, stats.pending_bytes) == (1, 0, 0)


@pytest.mark.accelerator
def test_a_retained_graph_decodes_again(region) -> None:
    with region:
        out = region.save()
    region.saver.open_window(1.0)
    region.saver._routes.settle()
    out.sum().backward(retain_graph=True)
    out.sum().backward()
    region.expect(0, 0)
    assert region.saver.stats().returned_storages >= 1


@pytest.mark.accelerator
def test_a_storage_that_is_saved_again_while_it_waits_is_encoded_once_and_freed(region) -> None:
    with region:
        out = region.save(times=3)
    assert region.waiting == NBYTES
    region.saver.open_window(1.0)
    stats = region.settled()
    assert stats.deduplicated_tensors == 2 and stats.moved_storages == 1
    assert stats.freed_bytes == NBYTES, "a second save held the storage"
    out.sum().backward()
    region.expect(0, 0, 0)


@pytest.mark.accelerator
@pytest.mark.parametrize("opened", [False, True])
def test_a_dropped_graph_leaves_nothing_waiting(region, device, opened) -> None:
    with region:
        out = region.save()
    if opened:
        region.saver.open_window(1.0)
    del out
    collect()
    flush_autograd(device)
    region.saver.open_window(1.0)
    assert region.waiting == 0
    assert_nothing_left(region.settled())


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
    manager._saver.open_window(1.0)
    assert waiting(manager) == 0
    assert_nothing_left(let_sends_end(manager, device))


@pytest.mark.accelerator
@pytest.mark.parametrize("opened", [False, True])
def test_an_edit_of_what_waits_is_the_error_that_autograd_raises(region, device, opened) -> None:
    x = torch.zeros(4, device=device, requires_grad=True)
    made = random(device, SIDE, SIDE)
    with region:
        out = Remember.apply(x, region.seen, made)
    made.add_(1)
    if opened:
        region.saver.open_window(1.0)
    with pytest.raises(memswap.InplaceEditError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.accelerator
def test_somebody_elses_tensor_is_never_emptied(region, device) -> None:
    x = torch.zeros(4, device=device, requires_grad=True)
    mine = random(device, SIDE, SIDE)
    with region:
        out = Remember.apply(x, region.seen, mine)
    region.saver.open_window(1.0)
    region.settled()
    assert look(mine) == look(random(device, SIDE, SIDE))
    out.sum().backward()
    region.expect(0)


@pytest.mark.accelerator
def test_leftovers_of_one_microbatch_are_taken_by_windows_of_the_next(region) -> None:
    with region:
        first = region.save(seed=1)
    region.saver.begin_passage()
    with region:
        second = region.save(seed=2)
    region.saver.open_window(1.0)
    assert region.saver.window_stats().encoded_in_windows == 2
    first.sum().backward()
    second.sum().backward()
    region.expect(1, 2)


@pytest.mark.accelerator
def test_one_microbatch_in_backward_does_not_keep_the_others(region) -> None:
    with region:
        first = region.save(seed=1)
    region.saver.begin_passage()
    with region:
        second = region.save(seed=2)
    first.sum().backward()
    region.saver.open_window(1.0)
    stats = region.saver.window_stats()
    assert (stats.kept_storages, stats.encoded_in_windows) == (1, 1)
    second.sum().backward()
    region.expect(1, 2)


@pytest.mark.accelerator
def test_on_another_stream_nothing_of_this_one_starts(region, device) -> None:
    side = torch.Stream(device=device)
    with region:
        out = region.save()
    with side:
        region.saver.open_window(1.0)
    assert region.waiting == NBYTES
    region.saver.open_window(1.0)
    assert region.waiting == 0
    out.sum().backward()
    region.expect(0)


@pytest.mark.one_schedule
@pytest.mark.accelerator
@pytest.mark.filterwarnings("ignore:memswap. a storage")
def test_where_there_is_no_room_when_a_window_opens_the_storage_stays(region, monkeypatch) -> None:
    with region:
        out = region.save()
    monkeypatch.setattr(transfer.EncodeWay, "send", lambda *_: None)
    region.saver.open_window(1.0)
    stats = region.saver.stats()
    assert stats.moved_storages == 0 and stats.kept["codec room"].tensors == 1
    assert region.saver.window_stats().kept_storages == 1
    out.sum().backward()
    region.expect(0)


@pytest.mark.one_schedule
@pytest.mark.accelerator
def test_no_more_waits_than_the_bound(device) -> None:
    region = Region(device, max_pending_bytes=2 * NBYTES)
    with region:
        outs = [region.save(seed=seed) for seed in range(4)]
    assert region.waiting == 2 * NBYTES
    assert region.saver.window_stats().started_at_bound == 2
    for out in outs:
        out.sum().backward()
    region.expect(0, 1, 2, 3)


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
    manager._saver.observer = None  # windows without a duration: all is left over
    ends: list[int] = []
    end = manager._saver.end_forward
    manager._saver.end_forward = lambda: (ends.append(waiting(manager)), end())
    for _ in range(3):
        assert_same_gradients(train_step(model, thrice), plain)
    del manager._saver.end_forward
    assert len(ends) == 3, "once in each forward"
    assert ends[1] == ends[2] > ends[0], "at first it took the first call for the last"
    assert waiting(manager) == 0


# ---------------------------------------------------------------- explicit windows
@pytest.mark.accelerator
def test_a_collective_opens_a_window_explicitly(region) -> None:
    with region:
        out = region.save()
        with memswap.window(seconds=1.0):
            assert region.waiting == 0
    out.sum().backward()
    region.expect(0)


@pytest.mark.one_schedule
@pytest.mark.accelerator
def test_operators_inside_an_explicit_window_open_none(region) -> None:
    with region:
        outs = [region.save(1)]
        with memswap.window(seconds=1.0):
            outs.append(region.save(2))
            region.saver.open_window(1.0)
            assert region.waiting == NBYTES
        region.saver.open_window(1.0)
    assert region.waiting == 0
    sum(out.sum() for out in outs).backward()


@pytest.mark.accelerator
def test_a_window_made_in_forward_opens_again_in_backward(region) -> None:
    class Exchange(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.window = memswap.window(seconds=1.0)
            with ctx.window:
                return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            with ctx.window:
                return gradient.clone()

    with region:
        out = Exchange.apply(region.save())
    out.sum().backward()
    assert region.saver.window_stats().windows == 2
    region.expect(0)


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
def test_outside_of_managed_layers_a_window_does_nothing() -> None:
    with memswap.window(seconds=1.0), memswap.saved_tensors(), memswap.window(name="a"):
        pass


@pytest.mark.one_schedule
@pytest.mark.parametrize("wrong", [{}, {"seconds": -1.0}, {"seconds": float("nan")}])
def test_a_window_of_no_time_is_an_error(wrong) -> None:
    with pytest.raises(ValueError, match="window"):
        memswap.window(**wrong)


# ---------------------------------------------------------------- modules
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


@pytest.mark.one_schedule
def test_statistics_of_windows_start_anew(region) -> None:
    region.saver.open_window(1.0)
    assert region.saver.window_stats().windows == 1
    region.saver.reset_stats()
    assert region.saver.window_stats() == memswap.WindowStats()


# ---------------------------------------------------------------- choosing layers
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
