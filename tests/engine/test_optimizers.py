"""manage_optimizer: state is away between steps, and every step is the plain one, bit for bit."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import pickle
import time
import warnings
from typing import Any

import pytest
import torch
from helpers import (
    assert_pool_empty,
    files_no_longer_than,
    flush_autograd,
    same_bits,
)
from optimizer_helpers import (
    FORMS,
    ROOM,
    assert_same,
    loss_of,
    maker,
    manage,
    new_model,
    plain_training,
    state_bits,
    train,
)
from torch import nn

import memswap
from memswap.optimizers.managed import OptimizerStepError
from memswap.optimizers.state import StateMover, away_of, plain_tensors
from memswap.optimizers.step import StateStream, steps_in_parts

pytestmark = pytest.mark.filterwarnings("ignore:The foreach:UserWarning")


def away_bytes(optimizer: torch.optim.Optimizer) -> int:
    every = [one for value in optimizer.state.values() for one in plain_tensors(value)]
    return sum(away.nbytes for away in map(away_of, every) if away is not None)


@pytest.fixture(params=["swap", "encode", "encode_swap"])
def action(request: pytest.FixtureRequest, device: torch.device) -> memswap.Action:
    return memswap.Action(request.param)


@pytest.mark.parametrize(("name", "form"), FORMS)
def test_every_optimizer_steps_as_without(device, new_pool, schedule, pytestconfig, name, form):
    """Twenty steps; eight have the same edges, and are enough for schedules beside the lazy one."""
    if form == "fused" and device.type not in ("cpu", "cuda"):
        pytest.skip("torch has fused steps for CPU and CUDA")
    if (name, form, device.type) == ("Adagrad", "fused", "cuda"):
        pytest.skip("torch has a fused step of Adagrad for CPUs alone")
    all_steps = schedule is None or schedule.name == "lazy" or pytestconfig.getoption("--slow")
    steps = 20 if all_steps else 8
    make, plain = maker(name, form), plain_training(device, name, form, steps=steps)
    pool = new_pool()
    room = 3 * 200 if name == "Adafactor" else ROOM  # its state is a row and a column
    assert_same(train(device, make, pool, managed=True, room=room, steps=steps), plain)
    gc.collect()
    assert_pool_empty(pool)


def test_all_optimizers_of_torch_are_tried_or_known_to_need_all():
    kinds = [
        kind
        for kind in vars(torch.optim).values()
        if isinstance(kind, type)
        and issubclass(kind, torch.optim.Optimizer)
        and kind is not torch.optim.Optimizer
    ]
    tried = {name for name, _ in FORMS} | {"SparseAdam"}
    assert {kind.__name__ for kind in kinds} == tried | {"LBFGS"}
    assert {kind.__name__ for kind in kinds if steps_in_parts(kind)} == tried


def test_every_away_form(device, new_pool, action, every_tensor_is_encoded):
    make, plain = maker("AdamW", "foreach"), plain_training(device, "AdamW", "foreach")
    pool = new_pool()
    assert_same(train(device, make, pool, managed=True, action=action), plain)
    gc.collect()
    assert_pool_empty(pool)


def test_default_action_without_a_pool(device):
    """Frames on a CPU, of which those of very short tensors would not pay."""
    make, room = maker("AdamW"), 3 * 2 * 4 * 96 * 96
    plain = train(device, make, managed=False, steps=3, width=96)
    assert_same(train(device, make, managed=True, steps=3, width=96, room=room), plain)


def taken_by_a_step(device: Any, optimizer: Any) -> tuple[int, int]:
    """Bytes of the device that a step takes beyond what was there: at most, and when it is over."""
    module = torch.get_device_module(device)
    torch.accelerator.synchronize()
    before = module.memory_allocated()
    module.reset_peak_memory_stats()
    optimizer.step()
    torch.accelerator.synchronize()
    return module.max_memory_allocated() - before, module.memory_allocated() - before


def test_state_of_a_step_takes_no_more_than_its_room(device, new_pool):
    if device.type == "cpu":
        pytest.skip("the CPU allocator does not tell what is allocated")
    width, depth = 64, 12
    model = new_model(device, depth, width)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    room = 2 * 4 * 2 * 4 * width * width  # two chunks of four parameters, in halves of two
    manager = manage(optimizer, new_pool(), room=room)
    peaks = []
    for step in range(4):
        loss_of(model, device, step).backward()
        most, left = taken_by_a_step(device, optimizer)
        peaks.append(most)
        counters = 1024 * depth
        assert left <= counters, "state stays on the device"
        optimizer.zero_grad()
    temporaries = 4 * 4 * width * width  # a foreach step's own, for the parameters of a chunk
    assert max(peaks) <= room + temporaries, f"{max(peaks)} bytes in a step, room is {room}"
    assert manager.statistics().chunks == depth // 2
    assert manager.statistics().peak_bytes <= room
    assert "chunk(s)" in manager.report()


def two_chunks(width: int, parameters: int) -> int:
    """Room for two chunks of so many parameters' momentum."""
    return 2 * parameters * 4 * width * width


def most_in_a_step(device, new_pool, width, depth, room) -> tuple[int, int]:
    """Bytes that a step has on the device beside what is there before it: measured, and its own
    account of them.

    SGD with momentum allocates nothing for itself, one parameter after another.
    """
    model = new_model(device, depth, width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    manager = manage(optimizer, new_pool(), room=room)
    peaks = []
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, device, step).backward()
        most, left = taken_by_a_step(device, optimizer)
        if step:  # before the first one there is no state
            assert left == 0, "state stays on the device"
            peaks.append(most)
    return max(peaks), manager.statistics().peak_bytes


def assert_most(found: tuple[int, int], expected: int, request: pytest.FixtureRequest) -> None:
    """Never more; and exactly that where no copy ends before somebody waits for it ("lazy")."""
    measured, account = found
    assert measured <= expected, f"{measured - expected} bytes more than two chunks"
    assert account == expected, "the room is not used, or the step does not know what it takes"
    if "lazy" in request.node.name:
        assert measured == expected


@pytest.mark.accelerator
@pytest.mark.parametrize("parameters", [2, 4, 6])
def test_the_device_holds_two_chunks_to_the_byte(device, new_pool, parameters, request):
    width = 64
    room = two_chunks(width, parameters)
    assert_most(most_in_a_step(device, new_pool, width, 24, room), room, request)


@pytest.mark.accelerator
def test_of_long_parameters_the_device_holds_two_to_the_byte(device, new_pool, request):
    width = 64
    found = most_in_a_step(device, new_pool, width, 8, 4096)
    assert_most(found, two_chunks(width, 1), request)


@pytest.mark.accelerator
@pytest.mark.parametrize(("room", "depth"), [(4096, 8), (two_chunks(64, 4), 24)])
def test_without_waiting_for_the_last_chunk_the_device_holds_more(
    device, new_pool, monkeypatch, room, depth, request
):
    """The mutation: what two chunks have left is noticed by the two tests above."""
    monkeypatch.setattr(StateStream, "_make_room", lambda stream, nbytes: None)
    monkeypatch.setattr(StateMover, "take_over", lambda mover, tensor: 0)
    found = most_in_a_step(device, new_pool, 64, depth, room)
    with pytest.raises(AssertionError, match=r"the room is not used|more than two chunks"):
        assert_most(found, max(room, two_chunks(64, 1)), request)


def test_counters_and_short_tensors_stay_and_are_told(device, new_pool):
    model = new_model(device)
    optimizer = torch.optim.AdamW(model.parameters())
    manager = memswap.manage_optimizer(optimizer, pool=new_pool())  # min_bytes: 4096
    loss_of(model, device, 0).backward()
    optimizer.step()
    assert away_bytes(optimizer) == 0
    assert manager.statistics().kept == {"counter": 4 * 4, "small": 4 * 2 * 24 * 24 * 4}
    assert "small" in manager.report()


# ---------------------------------------------------------------- what stands around a step
def schedulers(model: nn.Module, optimizer: Any, step: int) -> None:
    if step == 0:
        optimizer.first = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=30)
    optimizer.zero_grad(set_to_none=step % 2 == 0)
    loss_of(model, model[0].weight.device, step).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.first.step()


def accumulation(model: nn.Module, optimizer: Any, step: int) -> None:
    loss_of(model, model[0].weight.device, step).backward()
    if step % 3 == 2:
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


def some_without_gradient(model: nn.Module, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    loss_of(model, model[0].weight.device, step).backward()
    if step % 2:
        model[step % 4].weight.grad = None
    optimizer.step()


def closures(model: nn.Module, optimizer: Any, step: int) -> None:
    calls = []

    def closure() -> torch.Tensor:
        calls.append(step)
        optimizer.zero_grad()
        loss = loss_of(model, model[0].weight.device, step)
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    assert len(calls) == 1, "the closure ran once for each chunk"
    assert torch.is_tensor(loss), "step() returns what the closure returned"


def more_groups(model: nn.Module, optimizer: Any, step: int) -> None:
    if step == 5:
        torch.manual_seed(3)
        new = nn.Linear(24, 24, bias=False).to(model[0].weight.device)
        model.append(new)
        optimizer.add_param_group({"params": new.parameters(), "lr": 0.003})
    optimizer.zero_grad()
    loss_of(model, model[0].weight.device, step).backward()
    optimizer.step()


AROUND = [schedulers, accumulation, some_without_gradient, closures, more_groups]


@pytest.mark.few_schedules
@pytest.mark.parametrize("form", ["single", "foreach"])
@pytest.mark.parametrize("around", AROUND, ids=lambda one: one.__name__)
def test_what_stands_around_a_step(device, new_pool, around, form):
    plain = plain_training(device, "AdamW", form, around=around)
    make = maker("AdamW", form)
    assert_same(train(device, make, new_pool(), managed=True, around=around), plain)


class AllAtOnce:
    """All that may stand around a step, in one training of twenty steps."""

    def __init__(self, optimizer: Any, device: torch.device, scales: bool) -> None:
        self.device, self.scales = device, scales
        self.seen: list[str] = []
        self.scaler = torch.amp.GradScaler(device.type, init_scale=4.0, enabled=scales)
        self.watch(optimizer)

    def watch(self, optimizer: Any) -> None:
        """A scheduler of this optimizer, and hooks on its step."""
        self.scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.9)
        optimizer.register_step_pre_hook(lambda *_: self.seen.append("before"))
        optimizer.register_step_post_hook(lambda *_: self.seen.append("after"))

    def step(self, model: nn.Module, optimizer: Any, number: int) -> None:
        if number == 5:
            more_groups(model, optimizer, number)
            return
        if number % 5 == 4:
            closures(model, optimizer, number)
            return
        if number % 3:  # the gradients of two steps add up
            optimizer.zero_grad(set_to_none=number % 2 == 0)
        self.scaler.scale(loss_of(model, self.device, number)).backward()
        if number == 12 and self.scales:
            model[1].weight.grad[0, 0] = float("inf")  # a step that the scaler skips
        self.scaler.unscale_(optimizer)
        if number != 12:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if number % 7 == 2:
            model[number % 4].weight.grad = None
        self.scaler.step(optimizer)
        self.scaler.update()
        self.scheduler.step()


def all_at_once(device: Any, name: str, form: str, pool: Any, **options: Any) -> Any:
    """Two groups, one that is added, a checkpoint that is loaded, and a pickle that goes on."""
    make = maker(name, form)
    scales = name != "Rprop"  # whose state has the gradient's sign: nothing to scale

    def made(model: nn.Module) -> Any:
        first, *rest = model.parameters()
        return make([{"params": [first], "lr": 0.02}, {"params": rest, "weight_decay": 0.1}])

    model = new_model(device)
    optimizer = made(model)
    managers = [] if pool is None else [manage(optimizer, pool, **options)]
    around = AllAtOnce(optimizer, device, scales)
    for number in range(20):
        if number == 8:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        if number == 15:
            for hooks in (
                optimizer._optimizer_step_pre_hooks,
                optimizer._optimizer_step_post_hooks,
            ):
                for key in [key for key, one in hooks.items() if one.__name__ == "<lambda>"]:
                    del hooks[key]  # which no pickle takes
            del optimizer.step  # the scheduler's, which no pickle takes either
            model, optimizer = pickle.loads(pickle.dumps((model, optimizer)))
            if pool is not None:
                managers.append(manage(optimizer, pool, **options))
            around.watch(optimizer)
        around.step(model, optimizer, number)
    if pool is not None:
        assert all(one.statistics().away_bytes > 0 for one in managers[-1:])
        assert managers[-1].statistics().chunks > 1
    return state_bits(optimizer, model), around.seen


@functools.cache
def plain_all_at_once(device: Any, name: str, form: str) -> Any:
    """The same without memswap, once for all schedules."""
    return all_at_once(device, name, form, None)


# The steps themselves are proven under all schedules above.
@pytest.mark.few_schedules
@pytest.mark.parametrize(("name", "form"), FORMS)
def test_everything_around_the_steps_of_every_optimizer(device, new_pool, name, form):
    if form == "fused" and device.type not in ("cpu", "cuda"):
        pytest.skip("torch has fused steps for CPU and CUDA")
    if name in ("Adafactor", "Adagrad") and torch.__version__ < "2.13":
        pytest.skip("torch's own step fails: on CUDA, and after a group is added")
    room = 3 * 200 if name == "Adafactor" else ROOM
    plain, seen = plain_all_at_once(device, name, form)
    found, ours = all_at_once(device, name, form, new_pool(), room=room)
    assert_same(found, plain)
    assert ours == seen and len(seen) >= 2 * 19


def test_a_scheduler_made_before_is_no_obstacle(device, new_pool):
    def run(pool: Any) -> list[torch.Tensor]:
        model = new_model(device)
        optimizer = maker("AdamW")(model.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        manager = manage(optimizer, pool) if pool else None
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # torch warns where it thinks that no step was made
            for step in range(6):
                optimizer.zero_grad()
                loss_of(model, device, step).backward()
                optimizer.step()
                scheduler.step()
        assert manager is None or manager.statistics().chunks > 1
        return state_bits(optimizer, model)

    assert_same(run(new_pool()), run(None))


def test_several_groups_keep_their_own_numbers(device, new_pool):
    def make(parameters):
        first, *rest = parameters
        return torch.optim.AdamW(
            [{"params": [first], "lr": 0.1}, {"params": rest, "weight_decay": 0.3}], foreach=True
        )

    plain = train(device, make, managed=False)
    assert_same(train(device, make, new_pool(), managed=True), plain)


@pytest.mark.parametrize("named", [True, False])
def test_named_parameters(device, new_pool, named):
    model = new_model(device)
    given = model.named_parameters() if named else model.parameters()
    optimizer = torch.optim.SGD(given, lr=0.1, momentum=0.9)
    manage(optimizer, new_pool())
    for step in range(3):
        loss_of(model, device, step).backward()
        optimizer.step()
    assert away_bytes(optimizer) > 0


def test_step_hooks_run_once_and_see_the_optimizer(device, new_pool):
    seen: list[str] = []

    def around(model, optimizer, step):
        if step == 0:
            optimizer.register_step_pre_hook(
                lambda one, args, kwargs: seen.append("before" if one is optimizer else "other")
            )
            optimizer.register_step_post_hook(
                lambda one, args, kwargs: seen.append("after" if one is optimizer else "other")
            )
            # What a hook does to gradients holds for every chunk.
            optimizer.register_step_pre_hook(
                lambda one, args, kwargs: [p.grad.mul_(0.5) for p in model.parameters()] and None
            )
        optimizer.zero_grad()
        loss_of(model, device, step).backward()
        optimizer.step()

    make = maker("AdamW", "foreach")
    plain = train(device, make, managed=False, around=around, steps=4)
    assert seen == ["before", "after"] * 4
    seen.clear()
    assert_same(train(device, make, new_pool(), managed=True, around=around, steps=4), plain)
    assert seen == ["before", "after"] * 4


@pytest.mark.parametrize("form", ["single", "fused"])
def test_grad_scaler_that_skips_a_step(device, new_pool, form):
    if form == "fused" and device.type not in ("cpu", "cuda"):
        pytest.skip("torch has fused steps for CPU and CUDA")

    def run(pool: Any) -> list[torch.Tensor]:
        scaler = torch.amp.GradScaler(device.type, init_scale=4.0)

        def around(model, optimizer, step):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, device, step)).backward()
            if step in (2, 5):
                model[1].weight.grad[0, 0] = float("inf")
            scaler.step(optimizer)
            scaler.update()

        make = maker("AdamW", form)
        return train(device, make, pool, managed=pool is not None, around=around, steps=8)

    assert_same(run(new_pool()), run(None))


@pytest.mark.parametrize("name", ["SparseAdam", "Adagrad", "SGD"])
def test_sparse_gradients(device, new_pool, name):
    options = {"momentum": 0.9, "lr": 0.01} if name == "SGD" else {"lr": 0.01}

    def run(pool: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.ModuleList(nn.Embedding(50, 8, sparse=True) for _ in range(4)).to(device)
        optimizer = getattr(torch.optim, name)(list(model.parameters()), **options)
        manager = manage(optimizer, pool) if pool else None
        for step in range(6):
            optimizer.zero_grad()
            ids = torch.randint(0, 50, (9,), generator=torch.Generator().manual_seed(step))
            sum(one(ids.to(device)).square().sum() for one in model).backward()
            optimizer.step()
        if manager is not None and name == "SGD":  # its momentum is as sparse as its gradients
            assert manager.statistics().kept["not plain"] > 0
        elif manager is not None:
            assert away_bytes(optimizer) > 0
        return [one.to_dense() for one in state_bits(optimizer, model)]

    try:
        plain = run(None)
    except (NotImplementedError, RuntimeError) as error:
        pytest.skip(f"{device.type} has no sparse gradients here: {str(error).splitlines()[0]}")
    assert_same(run(new_pool()), plain)


CAPTURABLE = [
    (name, form)
    for name, form in FORMS
    if "capturable" in inspect.signature(getattr(torch.optim, name)).parameters
]


@pytest.mark.few_schedules
@pytest.mark.parametrize(("name", "form"), CAPTURABLE)
def test_capturable_counters_on_the_device(device, new_pool, name, form):
    if form == "fused" and device.type not in ("cpu", "cuda"):
        pytest.skip("torch has fused steps for CPU and CUDA")
    make = maker(name, form, capturable=True)
    try:
        plain = plain_training(device, name, form, steps=5, capturable=True)
    except AssertionError as error:
        pytest.skip(f"torch: {error}")
    assert_same(train(device, make, new_pool(), managed=True, steps=5), plain)


def test_a_learning_rate_that_is_a_tensor(device, new_pool):
    make = maker("AdamW", "single", lr=torch.tensor(0.01))
    plain = train(device, make, managed=False, steps=5)
    assert_same(train(device, make, new_pool(), managed=True, steps=5), plain)


# ---------------------------------------------------------------- saving, loading, copying
def halves(device, pool, between, name="AdamW", form="single") -> list[torch.Tensor]:
    """Trains, hands the optimizer through `between`, trains on with what comes back."""
    model = new_model(device)
    optimizer = maker(name, form)(model.parameters())
    manager = manage(optimizer, pool) if pool is not None else None
    for step in range(5):
        optimizer.zero_grad()
        loss_of(model, device, step).backward()
        optimizer.step()
    model, optimizer = between(model, optimizer, manager)
    for step in range(5, 10):
        optimizer.zero_grad()
        loss_of(model, device, step).backward()
        optimizer.step()
    return state_bits(optimizer, model)


def unchanged(model, optimizer, manager):
    return model, optimizer


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Adafactor", "Adagrad"])
def test_state_dict_loads_into_a_managed_and_a_plain_optimizer(device, new_pool, name, tmp_path):
    plain = halves(device, None, unchanged, name)

    def resumed(managed: bool):
        def between(model, optimizer, manager):
            torch.save(optimizer.state_dict(), tmp_path / "saved.pt")
            loaded = torch.load(tmp_path / "saved.pt")
            again = maker(name)(model.parameters())
            if managed:
                manage(again, new_pool())
            again.load_state_dict(loaded)
            if managed:
                assert away_bytes(again) > 0, "loaded state stays on the device"
            for value in again.state.values():
                for tensor in plain_tensors(value):
                    assert tensor.numel() <= 1 or tensor.device == device
            return model, again

        return between

    assert_same(halves(device, new_pool(), resumed(True), name), plain)
    assert_same(halves(device, new_pool(), resumed(False), name), plain)
    assert_same(halves(device, None, resumed(True), name), plain)


def test_loading_into_the_same_optimizer_lets_go_of_the_old_state(device, new_pool):
    pool = new_pool()

    def between(model, optimizer, manager):
        saved = optimizer.state_dict()
        before = pool.statistics().in_use_bytes
        optimizer.load_state_dict(saved)
        gc.collect()
        if device.type != "cpu":
            torch.accelerator.synchronize()
        assert pool.statistics().in_use_bytes == before
        for value in saved["state"].values():
            assert all(away_of(tensor) is None for tensor in plain_tensors(value))
        return model, optimizer

    assert_same(halves(device, pool, between), halves(device, None, unchanged))


def test_neither_saving_nor_loading_has_all_state_on_the_device(device, new_pool):
    if device.type == "cpu":
        pytest.skip("the CPU allocator does not tell what is allocated")
    module = torch.get_device_module(device)
    width, depth = 64, 12
    model = new_model(device, depth, width)
    optimizer = torch.optim.AdamW(model.parameters())
    manage(optimizer, new_pool(), room=3 * 2 * 4 * width * width)
    loss_of(model, device, 0).backward()
    optimizer.step()
    torch.accelerator.synchronize()
    one = 4 * width * width
    for act in ("save", "load"):
        before = module.memory_allocated()
        module.reset_peak_memory_stats()
        if act == "save":
            saved = optimizer.state_dict()
        else:
            optimizer.load_state_dict(saved)
        torch.accelerator.synchronize()
        most = module.max_memory_allocated() - before
        assert most <= 3 * one, f"{act}: {most} bytes on the device, one tensor has {one}"


def test_distributed_checkpoint_saves_and_resumes(device, new_pool, tmp_path):
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    from torch.distributed.checkpoint import state_dict as states

    def between(model, optimizer, manager):
        saved = {"optim": states.get_optimizer_state_dict(model, optimizer)}
        dcp.save(saved, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
        again = maker("AdamW")(model.parameters())
        if manager is not None:
            manage(again, new_pool())
        again.zero_grad()  # the functions below make state to load into only where there is none
        saved = {"optim": states.get_optimizer_state_dict(model, again)}
        dcp.load(saved, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
        states.set_optimizer_state_dict(model, again, saved["optim"])
        return model, again

    assert_same(halves(device, new_pool(), between), halves(device, None, unchanged))


@pytest.mark.parametrize("how", ["pickle", "deepcopy"])
def test_pickles_and_copies_are_plain_optimizers(device, new_pool, how):
    def between(model, optimizer, manager):
        pair = (model, optimizer)
        if how == "pickle":
            model, copied = pickle.loads(pickle.dumps(pair))
        else:
            model, copied = copy.deepcopy(pair)
        assert "_memswap_managed" not in vars(copied)
        assert away_bytes(copied) == 0
        return model, copied

    assert_same(halves(device, new_pool(), between), halves(device, None, unchanged))


def test_present_has_all_state_and_a_step_inside_it_is_the_same(device, new_pool):
    def between(model, optimizer, manager):
        with manager.present():
            assert away_bytes(optimizer) == 0
            for value in optimizer.state.values():
                value["exp_avg"].mul_(1)
            optimizer.zero_grad()
            loss_of(model, device, 77).backward()
            optimizer.step()
        assert away_bytes(optimizer) > 0
        return model, optimizer

    def plain_between(model, optimizer, manager):
        optimizer.zero_grad()
        loss_of(model, device, 77).backward()
        optimizer.step()
        return model, optimizer

    assert_same(halves(device, new_pool(), between), halves(device, None, plain_between))


def test_remove_leaves_the_optimizer_as_it_was(device, new_pool):
    pool = new_pool()

    def between(model, optimizer, manager):
        manager.remove()
        manager.remove()
        assert away_bytes(optimizer) == 0
        assert not [name for name in vars(optimizer) if "memswap" in name]
        assert not optimizer._optimizer_step_pre_hooks
        assert not optimizer._optimizer_step_post_hooks
        gc.collect()
        assert_pool_empty(pool)
        return model, optimizer

    assert_same(halves(device, pool, between), halves(device, None, unchanged))


# ---------------------------------------------------------------- identity
def test_state_tensors_keep_their_identity(device, new_pool):
    model = new_model(device)
    optimizer = maker("AdamW")(model.parameters())
    manage(optimizer, new_pool())
    loss_of(model, device, 0).backward()
    optimizer.step()
    first = [one for value in optimizer.state.values() for one in plain_tensors(value)]
    shapes = [(one.shape, one.stride(), one.dtype, one.device) for one in first]
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, device, step).backward()
        optimizer.step()
    after = [one for value in optimizer.state.values() for one in plain_tensors(value)]
    assert all(a is b for a, b in zip(first, after, strict=True))
    assert shapes == [(one.shape, one.stride(), one.dtype, one.device) for one in after]


def test_using_state_that_is_away_says_so(device, new_pool):
    model = new_model(device)
    optimizer = maker("AdamW")(model.parameters())
    manage(optimizer, new_pool())
    loss_of(model, device, 0).backward()
    optimizer.step()
    moment = optimizer.state[model[0].weight]["exp_avg"]
    with pytest.raises(RuntimeError, match=r"away between steps.*present\(\)"):
        moment.add(1)
    with pytest.raises(memswap.NotSwappedError, match="managed optimizer"):
        memswap.swap_in(moment)
    with pytest.raises(ValueError, match="already swapped out"):
        memswap.swap_out(moment)


def test_state_that_others_look_at_stays(device, new_pool):
    model = new_model(device)
    optimizer = maker("AdamW")(model.parameters())
    manager = manage(optimizer, new_pool())
    loss_of(model, device, 0).backward()
    optimizer.step()
    with manager.present():
        view = optimizer.state[model[0].weight]["exp_avg"][1:]
    expected = view.clone()
    assert away_of(optimizer.state[model[0].weight]["exp_avg"]) is None
    assert manager.statistics().kept["shared"] > 0
    assert same_bits(view, expected)
    del view
    optimizer.step()
    assert "shared" not in manager.statistics().kept, "it stays although nobody looks any more"


def test_parameters_kept_in_state_never_leave(device, new_pool):
    class Anchored(torch.optim.SGD):
        """Keeps the parameter itself in its state, and so do others."""

        def __init__(self, parameters, lr):
            super().__init__(parameters, lr=lr, momentum=0.9)
            for group in self.param_groups:
                for parameter in group["params"]:
                    self.state[parameter]["anchor"] = parameter

    model = new_model(device)
    optimizer = Anchored(model.parameters(), 0.1)
    manager = manage(optimizer, new_pool())
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, device, step).backward()
        optimizer.step()
    assert manager.statistics().kept["parameter"] > 0
    loss_of(model, device, 9)


def test_tensors_that_several_parameters_share_stay(device, new_pool):
    """As the quantization tables of 8-bit optimizers do."""

    class Tabled(Lion):
        def __init__(self, params, lr=1e-3):
            super().__init__(params, lr)
            table = torch.linspace(0, 1, 64).to(device)
            for group in self.param_groups:
                for p in group["params"]:
                    self.state[p].update(table=table, exp_avg=torch.zeros_like(p))

        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    p.data.add_(self.state[p]["table"].sum(), alpha=1e-4)
            return super().step(closure)

    plain = train(device, Tabled, managed=False)
    assert_same(train(device, Tabled, new_pool(), managed=True, chunked=True), plain)


def test_an_optimizer_for_each_parameter(device, new_pool):
    """As those that step inside of backward: one pool for all, and one lane."""

    def run(managed: bool) -> list[torch.Tensor]:
        model = new_model(device, depth=12)
        optimizers = [maker("AdamW")([one]) for one in model.parameters()]
        pools, pool, handles = set(), new_pool(), []
        for number, parameter in enumerate(model.parameters()):
            if managed:
                manage(optimizers[number], pool)

            def step(_: Any, one: Any = optimizers[number]) -> None:
                one.step()
                one.zero_grad()

            handles.append(parameter.register_post_accumulate_grad_hook(step))
        for step_number in range(4):
            loss_of(model, device, step_number).backward()
        flush_autograd(device)
        for handle in handles:  # or the collector would not see the cycle
            handle.remove()
        if managed:
            for one in optimizers:
                (transfers,) = vars(one)["_memswap_managed"]._mover._transfers.all()
                pools.add((transfers.pool, transfers.lane))
            assert len(pools) == 1, "a lane for each optimizer"
            assert all(away_bytes(one) > 0 for one in optimizers)
        return [tensor for one in optimizers for tensor in state_bits(one, model)]

    assert_same(run(True), run(False))


# ---------------------------------------------------------------- optimizers from elsewhere
class Lion(torch.optim.Optimizer):
    """The sign of an interpolation between momentum and gradient, parameter by parameter."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99)):
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in filter(lambda p: p.grad is not None, group["params"]):
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                moment = state["exp_avg"]
                b1, b2 = group["betas"]
                p.add_(
                    moment.clone().mul_(b1).add(p.grad, alpha=1 - b1).sign_(), alpha=-group["lr"]
                )
                state["exp_avg"] = moment.mul(b2).add(p.grad, alpha=1 - b2)  # a new tensor
        return loss


class Counting(Lion):
    """Counts steps in its groups, as schedule-free optimizers do."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        return super().step(closure)


class Global(torch.optim.Optimizer):
    """Scales by a number that it computes over all parameters of a group."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr, "d": 1.0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            total = sum(float(p.grad.square().sum()) for p in group["params"])
            group["d"] = total
            for p in group["params"]:
                state = self.state[p]
                state.setdefault("sum", torch.zeros_like(p)).add_(p.grad)
                p.sub_(state["sum"] * (group["lr"] / (1 + total)))


@pytest.mark.parametrize("kind", [Lion, Counting, Global], ids=lambda kind: kind.__name__)
def test_unknown_optimizers_have_all_state_back_in_a_step(device, new_pool, kind):
    plain = train(device, kind, managed=False)
    model = new_model(device)
    optimizer = kind(model.parameters())
    manager = manage(optimizer, new_pool())
    for step in range(20):
        optimizer.zero_grad()
        loss_of(model, device, step).backward()
        optimizer.step()
    assert manager.statistics().chunks == 0
    assert away_bytes(optimizer) > 0
    assert "chunked=True" in manager.report()
    assert_same(state_bits(optimizer, model), plain)


@pytest.mark.parametrize("kind", [Lion, Counting], ids=lambda kind: kind.__name__)
def test_unknown_optimizers_go_in_chunks_where_the_user_says_so(device, new_pool, kind):
    plain = train(device, kind, managed=False)
    assert_same(train(device, kind, new_pool(), managed=True, chunked=True), plain)


def test_what_a_step_writes_into_a_group_is_there_afterwards(device, new_pool):
    model = new_model(device)
    optimizer = Counting(model.parameters())
    manage(optimizer, new_pool(), chunked=True)
    for step in range(3):
        loss_of(model, device, step).backward()
        optimizer.step()
    assert optimizer.param_groups[0]["k"] == 3


def test_a_step_over_all_parameters_is_not_taken_for_one_in_chunks(device, new_pool):
    model = new_model(device)
    optimizer = Global(model.parameters())
    manage(optimizer, new_pool(), chunked=True)
    loss_of(model, device, 0).backward()
    with pytest.raises(OptimizerStepError, match="'d' of a parameter group over all"):
        optimizer.step()


def test_lbfgs_has_all_state_back_and_says_so(device, new_pool):
    def run(pool: Any) -> list[torch.Tensor]:
        model = new_model(device, depth=2)
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
        manager = manage(optimizer, pool) if pool else None
        for step in range(6):

            def closure(step: int = step) -> torch.Tensor:
                optimizer.zero_grad()
                loss = loss_of(model, device, step)
                loss.backward()
                return loss

            optimizer.step(closure)
        if manager is not None:
            assert "LBFGS" in manager.report()
            assert away_bytes(optimizer) > 0
        return state_bits(optimizer, model)

    assert_same(run(new_pool()), run(None))


def test_a_subclass_that_adds_to_the_step_is_not_taken_for_its_base():
    class Own(torch.optim.AdamW):
        def step(self, closure=None):
            return super().step(closure)

    class Renamed(torch.optim.AdamW):
        pass

    assert not steps_in_parts(Own)
    assert steps_in_parts(Renamed)


def test_a_step_that_calls_its_base_class(device, new_pool):
    class Own(torch.optim.AdamW):
        def step(self, closure=None):
            return super().step(closure)

    plain = train(device, Own, managed=False)
    assert_same(train(device, Own, new_pool(), managed=True, chunked=True), plain)
    assert_same(train(device, Own, new_pool(), managed=True), plain)


# ---------------------------------------------------------------- errors and faults
def test_an_error_in_a_step_loses_nothing(device, new_pool):
    """Of the optimizer's own, in the middle of its groups: those before it are stepped."""
    pool = new_pool()

    def run(managed: bool) -> list[torch.Tensor]:
        model = new_model(device)
        optimizer = maker("AdamW")([{"params": [one]} for one in model.parameters()])
        if managed:
            manage(optimizer, pool)
        for step in range(6):
            optimizer.zero_grad()
            loss_of(model, device, step).backward()
            if step == 3:
                kept = optimizer.state[model[2].weight].pop("exp_avg_sq")
                with pytest.raises(KeyError, match="exp_avg_sq"):
                    optimizer.step()
                optimizer.state[model[2].weight]["exp_avg_sq"] = kept
            optimizer.step()
        return state_bits(optimizer, model)

    assert_same(run(True), run(False))
    gc.collect()
    assert_pool_empty(pool)


def test_an_error_in_a_closure_or_a_hook_loses_nothing(device, new_pool):
    def run(pool: Any) -> list[torch.Tensor]:
        model = new_model(device)
        optimizer = maker("AdamW")(model.parameters())
        if pool:
            manage(optimizer, pool)

        def broken(*_: Any) -> None:
            raise ValueError("not now")

        for step in range(6):
            optimizer.zero_grad()
            loss_of(model, device, step).backward()
            if step == 2:
                with pytest.raises(ValueError, match="not now"):
                    optimizer.step(broken)
            if step == 4:
                handle = optimizer.register_step_pre_hook(broken)
                with pytest.raises(ValueError, match="not now"):
                    optimizer.step()
                handle.remove()
            optimizer.step()
        return state_bits(optimizer, model)

    assert_same(run(new_pool()), run(None))


def test_a_full_pool_leaves_state_where_it_is(device, new_pool):
    make = maker("AdamW")
    plain = train(device, make, managed=False)
    pool = new_pool(budget="8KiB")
    model = new_model(device)
    optimizer = make(model.parameters())
    with pytest.warns(UserWarning, match="optimizer state stay where they are"):
        manager = manage(optimizer, pool)
        for step in range(20):
            optimizer.zero_grad()
            loss_of(model, device, step).backward()
            optimizer.step()
    assert manager.statistics().kept["pool"] > 0
    assert_same(state_bits(optimizer, model), plain)


@pytest.mark.cpu_only
def test_a_disk_that_fails_loses_nothing(device, tmp_path):
    make = maker("AdamW")
    plain = train(device, make, managed=False, steps=8)
    pool = memswap.DiskPool(tmp_path, budget="16MiB", extent="1MiB")
    pool.reserve("1MiB")  # space is set aside, and then the disk fails
    model = new_model(device)
    optimizer = make(model.parameters())
    manage(optimizer, pool)
    with pytest.warns(UserWarning, match="optimizer state stay where they are"):
        for step in range(8):
            optimizer.zero_grad()
            loss_of(model, device, step).backward()
            if step in (2, 5):
                with files_no_longer_than(0):
                    optimizer.step()
                    state_bits(optimizer, model)  # waits for what is written
            else:
                optimizer.step()
    assert_same(state_bits(optimizer, model), plain)
    del optimizer
    gc.collect()
    assert_pool_empty(pool)


@pytest.mark.cpu_only
def test_a_disk_that_cannot_be_read_is_an_error_and_training_can_go_on(device, tmp_path):
    import os

    from helpers import descriptor_under

    make = maker("AdamW")
    pool = memswap.DiskPool(tmp_path, budget="16MiB", extent="1MiB")
    plain = train(device, make, managed=False, steps=4)
    model = new_model(device)
    optimizer = make(model.parameters())
    manager = manage(optimizer, pool)
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, device, step).backward()
        if step == 2:
            optimizer.state_dict()  # waits for what is written
            number = descriptor_under(tmp_path)
            kept = os.dup(number)
            with open(os.devnull, "rb") as nothing:
                os.dup2(nothing.fileno(), number)
            with pytest.raises(memswap.TransferError, match="cannot be read back"):
                optimizer.step()
            with pytest.raises(memswap.TransferError, match="cannot be read back"):
                manager.remove()
            time.sleep(0.2)  # until threads have tried to read what was to come next
            os.dup2(kept, number)
            os.close(kept)
        optimizer.step()
    assert_same(state_bits(optimizer, model), plain)


@pytest.mark.accelerator
def test_a_device_that_is_full_in_a_step_loses_nothing(device, new_pool):
    if device.type == "cuda":
        pytest.skip("needs a device whose memory can be bounded: --device sim")
    from simdev import _C

    width, depth = 64, 12
    model = new_model(device, depth, width)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    manage(optimizer, new_pool(), room=3 * 2 * 4 * width * width)
    loss_of(model, device, 0).backward()
    optimizer.step()
    saved = state_bits(optimizer, model)
    module = torch.get_device_module(device)
    torch.accelerator.synchronize()
    clean, failed = module.memory_allocated(), 0
    for free in range(8):  # 0: not even the first chunk comes back
        torch.accelerator.synchronize()
        torch.accelerator.empty_cache()
        _C.set_capacity(0, module.memory_allocated() + free * 4 * width * width)
        try:
            optimizer.step()
        except torch.OutOfMemoryError:
            failed += 1
        torch.accelerator.synchronize()
        _C.set_capacity(0, 2**30)
        now = state_bits(optimizer, model)
        assert len(now) == len(saved)
        assert all(torch.isfinite(tensor).all() for tensor in now)
        if not free:
            assert_same(now, saved)
    assert 0 < failed < 8, "the device was never full, or always"
    optimizer.step()
    torch.accelerator.synchronize()
    assert module.memory_allocated() <= clean, "an error has left memory behind"


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"optimizer": object()}, TypeError, "expected a torch.optim.Optimizer"),
        ({"action": 3}, TypeError, "expected a memswap.Action"),
        ({"action": "recompute"}, ValueError, "expected one of keep"),
        ({"pool": 3}, TypeError, "expected a memswap.HostPool"),
        ({"room": "much"}, ValueError, "room"),
    ],
)
def test_wrong_arguments_are_named(device, wrong, error, message):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(3, device=device))], lr=0.1)
    with pytest.raises(error, match=message):
        memswap.manage_optimizer(**{"optimizer": optimizer, **wrong})


def test_managing_twice_is_an_error(device, new_pool):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(3, device=device))], lr=0.1)
    manager = manage(optimizer, new_pool())
    with pytest.raises(ValueError, match="managed already"):
        manage(optimizer, new_pool())
    manager.remove()
    manage(optimizer, new_pool())


def test_a_managed_optimizer_dies_with_its_name(device, new_pool):
    import weakref

    pool = new_pool()
    model = new_model(device)
    optimizer = maker("AdamW")(model.parameters())
    manage(optimizer, pool)
    loss_of(model, device, 0).backward()
    optimizer.step()
    gc.collect()
    weak = weakref.ref(optimizer)
    del optimizer
    flush_autograd(device)
    gc.collect()
    assert weak() is None
    assert_pool_empty(pool)


def test_nothing_but_state_is_on_its_way(device, new_pool):
    """An optimizer without state (plain SGD) is none the worse."""
    make = maker("SGD", momentum=0.0)
    model = new_model(device)
    optimizer = make(model.parameters())
    manager = manage(optimizer, new_pool())
    loss_of(model, device, 0).backward()
    optimizer.step()
    numbers = manager.statistics()
    assert numbers.sent_bytes == numbers.brought_bytes == 0
    assert numbers.room_bytes == ROOM
    assert "nothing away" in manager.report()
