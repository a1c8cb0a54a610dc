"""When memory, disk or the user's own code fails: keep, say so once, lose nothing."""

from __future__ import annotations

import copy
import os
import pickle
import warnings

import pytest
import torch
from budget_layers import managed, new_layers
from budget_layers import step as budget_step
from helpers import (
    EVERYTHING,
    Training,
    assert_released,
    assert_same_gradients,
    descriptor_under,
    files_no_longer_than,
    let_sends_end,
    new_input,
    new_stack,
    random,
    same_bits,
    train_step,
)
from torch import nn

import memswap
from memswap._native import native
from memswap.engine import transfers


def expected_gradients(device, x):
    model = new_stack(device)
    return train_step(model, lambda: model(x))


@pytest.mark.parametrize(
    "budget",
    [
        pytest.param("1B", marks=pytest.mark.own_form("a recipe leaves without a pool")),
        "4KiB",
        "20KiB",
    ],
)
def test_spent_budget_keeps_and_trains_identically(device, new_pool, way, budget):
    x = new_input(device)
    pool = new_pool(budget=budget)
    training = Training(way, new_stack(device), pool)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(3):
            found = train_step(training.model, lambda: training.loss(x))
            assert_same_gradients(found, expected_gradients(device, x))
    stats = training.stats()
    assert stats.kept["pool"].tensors > 0, "what found no room is not counted"
    assert stats.kept["pool"].bytes > 0
    ours = [str(w.message) for w in told if "memswap" in str(w.message)]
    assert len(ours) == 1, f"told {len(ours)} times instead of once: {ours}"
    assert "budget" in ours[0] and "less memory saved" in ours[0], ours[0]
    assert pool.statistics().reserved_bytes <= pool.budget_bytes, "the budget is not a hard limit"
    training.assert_released(moved=budget != "1B")


@pytest.mark.own_form("a recipe needs no room in the pool")
def test_room_that_comes_back_is_used_again(device, new_pool):
    pool = new_pool(budget="1MiB")
    engine = memswap.saved_tensors(EVERYTHING, pool=pool)
    x = random(device, 200_000).requires_grad_()  # 0.8 MB: one fits, two do not
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(3):
            with engine:
                loss = (x * 2).sin().exp().sum()
            loss.backward()
            del loss
    assert engine.stats().moved_storages >= 1
    assert engine.stats().kept["pool"].tensors >= 1
    assert_released(engine, pool)


@pytest.mark.own_form("a recipe leaves without a pool")
@pytest.mark.accelerator
def test_memory_that_cannot_be_pinned_keeps(device, way):
    if device.type == "cuda":
        pytest.skip("faults are injected on the simulated accelerator")
    from simdev import faults

    x = new_input(device)
    expected = expected_gradients(device, x)
    pool = memswap.HostPool(budget="64MiB", slab="64KiB", device=device, pageable=False)
    training = Training(way, new_stack(device), pool)
    with faults.pinned_budget(0), pytest.warns(UserWarning, match="memswap") as told:
        assert_same_gradients(train_step(training.model, lambda: training.loss(x)), expected)
    assert len(told) == 1
    stats = training.stats()
    assert stats.kept["pool"].tensors > 0
    training.assert_released(moved=False)
    training.swap.reset_stats()
    pool.trim()  # which asks anew at once
    assert_same_gradients(train_step(training.model, lambda: training.loss(x)), expected)
    training.assert_released()


@pytest.mark.accelerator
def test_pinning_that_fails_now_and_then(device, way):
    if device.type == "cuda":
        pytest.skip("faults are injected on the simulated accelerator")
    from simdev import faults

    x = new_input(device)
    expected = expected_gradients(device, x)
    pool = memswap.HostPool(budget="64MiB", slab="4KiB", device=device, pageable=False)
    training = Training(way, new_stack(device), pool)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with faults.fail_pinned(n=2, after=1):
            assert_same_gradients(train_step(training.model, lambda: training.loss(x)), expected)
    training.assert_released()


@pytest.mark.accelerator
def test_device_out_of_memory_in_backward_is_torchs_error_and_loses_nothing(device, new_pool):
    if device.type == "cuda":
        pytest.skip("needs a device of a few MiB: the simulated one")
    import simdev

    pool = new_pool()
    engine = memswap.saved_tensors(EVERYTHING, pool=pool, prefetch_bytes=0)
    # 16 MiB: an allocator that takes segments has no room for another one in those it has.
    x = torch.linspace(-1, 1, 1 << 22).to(device).requires_grad_()
    with engine:
        loss = (x * 2).sin().exp().sum()
    let_sends_end(engine, device)
    torch.accelerator.empty_cache()
    used = torch.get_device_module(device).memory_reserved()
    simdev._C.set_capacity(0, used + (1 << 19))
    try:
        with pytest.raises(torch.OutOfMemoryError):
            loss.backward(retain_graph=True)
    finally:
        simdev._C.set_capacity(0, 2**30)
    x.grad = None
    loss.backward()  # with room again, the same graph runs
    leaf = x.detach().clone().requires_grad_()
    (leaf * 2).sin().exp().sum().backward()
    assert same_bits(x.grad, leaf.grad), "a failed backward lost or changed what was away"
    del loss
    assert_released(engine, pool)


# --- the disk ------------------------------------------------------------------------------------


@pytest.mark.cpu_only
def test_full_disk_keeps_and_trains_identically(device, tmp_path, way):
    x = new_input(device)
    expected = expected_gradients(device, x)
    pool = memswap.DiskPool(tmp_path, budget="64MiB", extent="64KiB")
    training = Training(way, new_stack(device), pool)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with files_no_longer_than(64 * 1024):
            found = train_step(training.model, lambda: training.loss(x))
            let_sends_end(training.swap, device)
    assert_same_gradients(found, expected)
    stats = training.stats()
    assert stats.kept["pool"].tensors > 0, "the disk was never full"
    assert stats.moved_storages > 0, "the room that there was went unused"
    assert len([w for w in told if "memswap" in str(w.message)]) == 1
    assert_same_gradients(train_step(training.model, lambda: training.loss(x)), expected)
    training.assert_released()


@pytest.mark.own_form("a recipe writes nothing")
@pytest.mark.cpu_only
def test_write_that_fails_keeps_the_bytes_and_says_so_once(device, tmp_path):
    pool = memswap.DiskPool(tmp_path, budget="16MiB", extent="1MiB")
    pool.reserve("1MiB")  # space is set aside, and then the disk fails
    engine = memswap.saved_tensors(EVERYTHING, pool=pool)
    x = random(device, 4096).requires_grad_()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with files_no_longer_than(0):
            with engine:
                loss = (x * 2).sin().exp().sum()
            let_sends_end(engine, device)
        loss.backward()
    leaf = x.detach().clone().requires_grad_()
    (leaf * 2).sin().exp().sum().backward()
    assert same_bits(x.grad, leaf.grad), "bytes that could not be written were lost"
    ours = [str(w.message) for w in told if "memswap" in str(w.message)]
    assert len(ours) == 1 and "stays where it is" in ours[0], ours
    assert engine.stats().kept["pool"].tensors == 2
    assert engine.stats().returned_storages == 0
    del loss
    assert_released(engine, pool)


@pytest.mark.own_form("a recipe has no bytes on the disk")
@pytest.mark.cpu_only
def test_bytes_that_vanished_from_the_disk_raise_a_clear_error(device, tmp_path):
    pool = memswap.DiskPool(tmp_path, budget="16MiB", extent="1MiB")
    engine = memswap.saved_tensors(EVERYTHING, pool=pool)
    x = random(device, 4096).requires_grad_()
    with engine:
        loss = (x * 2).sin().sum()
    let_sends_end(engine, device)
    os.truncate(f"/proc/self/fd/{descriptor_under(tmp_path)}", 0)
    with pytest.raises(memswap.TransferError, match="cannot be brought back") as caught:
        loss.backward()
    assert isinstance(caught.value, RuntimeError)
    assert x.grad is None, "a gradient was made of bytes that are not there"


@pytest.mark.cpu_only
def test_pool_leaves_no_file_behind(device, tmp_path):
    pool = memswap.DiskPool(tmp_path, budget="16MiB")
    engine = memswap.saved_tensors(EVERYTHING, pool=pool)
    x = random(device, 4096).requires_grad_()
    with engine:
        loss = (x * 2).sin().sum()
    let_sends_end(engine, device)
    assert os.listdir(tmp_path) == [], "the file has a name: a crash would leave it on the disk"
    loss.backward()


# --- the user's own code -------------------------------------------------------------------------


def test_policy_function_that_raises_is_heard_and_leaves_nothing_behind(device, new_pool, way):
    calls = []

    def decide(tensor, info):
        calls.append(info)
        if len(calls) == 3:
            raise ZeroDivisionError("in the user's policy")
        return memswap.Action.SWAP

    x = new_input(device)
    expected = expected_gradients(device, x)
    policy = memswap.Policy(min_bytes=1, fn=decide)
    training = Training(way, new_stack(device), new_pool(), policy)
    try:
        training.loss(x)
    except ZeroDivisionError as error:
        assert "in the user's policy" in str(error)
    else:
        pytest.fail("an error in the policy function was swallowed")
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    import gc

    gc.collect()
    training.assert_released()
    assert_same_gradients(train_step(training.model, lambda: training.loss(x)), expected)
    training.assert_released()


@pytest.mark.parametrize("returned", [None, "swap", True])
def test_policy_function_that_returns_nonsense_is_told(device, new_pool, returned):
    policy = memswap.Policy(min_bytes=1, fn=lambda tensor, info: returned)
    engine = memswap.saved_tensors(policy, pool=new_pool())
    x = random(device, 8).requires_grad_()
    with pytest.raises(TypeError, match=r"fn=\.\.\.\) returned"):
        with engine:
            (x * 2).sin()


def scripted():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(nn.Linear(2, 2))


@pytest.mark.one_schedule
@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda m: memswap.manage([]), ValueError, "found no modules"),
        (lambda m: memswap.manage({}), ValueError, "found no modules"),
        (lambda m: memswap.manage([m, m]), ValueError, "given twice"),
        (lambda m: memswap.manage([m, scripted()]), TypeError, "saved_tensors"),
        (lambda m: memswap.chain([m, scripted()]), TypeError, "torch.jit"),
        (lambda m: memswap.manage([m, "layer"]), TypeError, "found str, expected an nn.Module"),
        (lambda m: memswap.manage(3), TypeError, "found int, expected an nn.Module"),
        (lambda m: memswap.manage([nn.ModuleList([m])]), TypeError, "never called"),
        (lambda m: memswap.manage({"layers": nn.ModuleList([m])}), TypeError, "never called"),
        (lambda m: memswap.checkpoint_module("layers"), TypeError, "checkpoint_module.*found str"),
        (
            lambda m: memswap.manage(m, budget="170%"),
            ValueError,
            "budget.*up to 100%, found '170%'",
        ),
        (lambda m: memswap.decode(b"bytes"), TypeError, "decode takes a Frame, found bytes"),
        (memswap.swap_out, TypeError, "swap_out.*found Linear"),
        (
            lambda m: copy.deepcopy(memswap.manage([nn.Identity()])),
            TypeError,
            "outside of the model",
        ),
        (lambda m: memswap.manage(m, budget="a lot"), ValueError, "a lot"),
        (
            lambda m: memswap.manage(m, budget="24XB"),
            ValueError,
            "24GiB.* share .*100%, found '24XB'",
        ),
        (lambda m: memswap.manage(m, budget="70"), ValueError, "write '70%' .* '70GiB'"),
        (lambda m: memswap.manage(m, budget=0), ValueError, "0 bytes"),
        (lambda m: memswap.manage(m, budget="0GiB"), ValueError, "0 bytes"),
        (lambda m: memswap.manage(m, "70%"), TypeError, "budget='70%'"),
        (lambda m: memswap.manage(m, "24GiB"), TypeError, "budget='24GiB'"),
        (lambda m: memswap.Policy(action="swop"), ValueError, "keep, encode, swap, encode_swap"),
        (lambda m: memswap.manage(m, budget=-1), ValueError, "negative"),
        (lambda m: memswap.manage(m, prefetch_bytes=-1), ValueError, "negative"),
        (lambda m: memswap.manage(m, prefetch_bytes="3 bananas"), ValueError, "3 bananas"),
        (lambda m: memswap.manage(m, prefetch_bytes=1.5), ValueError, "1.5"),
        (lambda m: memswap.manage(m, policy="swap"), TypeError, "Policy"),
        (lambda m: memswap.manage(m, pool="a path"), TypeError, "[Pp]ool"),
        (lambda m: memswap.saved_tensors("swap"), TypeError, "Policy"),
        (lambda m: memswap.saved_tensors(pool=3), TypeError, "[Pp]ool"),
        (lambda m: memswap.saved_tensors(prefetch_bytes="x"), ValueError, "'x'"),
        (lambda m: memswap.manage(m, rates="H200"), TypeError, r"memswap\.Rates"),
        (lambda m: memswap.manage(m, group=3), TypeError, "found int, expected a ProcessGroup"),
        (lambda m: memswap.Group("a", groups=3), TypeError, r"expected a memswap\.Groups"),
        (lambda m: memswap.Group("a").add(3), TypeError, r"'a': add\(\) found int"),
        (lambda m: memswap.swap_modules(m, None), TypeError, "found NoneType, expected a pattern"),
        (lambda m: memswap.checkpoint(3, m), TypeError, "found int, expected a function"),
        (lambda m: memswap.checkpoint(m, use_reentrant=False), TypeError, "leave this argument"),
        (lambda m: memswap.checkpoint(m, context_fn=3), TypeError, "expected policy_fn"),
        (lambda m: memswap.Windows(under=3), TypeError, "found int, expected nn.Modules"),
        (lambda m: memswap.window(seconds="x"), TypeError, "found str, expected seconds"),
        (lambda m: memswap.HostPool("lots"), ValueError, r"HostPool\(budget=...\).*'lots'"),
        (lambda m: memswap.DiskPool("/nowhere/at"), FileNotFoundError, "no directory /nowhere"),
        (lambda m: pickle.dumps(memswap.saved_tensors()), TypeError, "cannot be copied or pickled"),
        (lambda m: copy.deepcopy(memswap.Group("a")), TypeError, "cannot be copied or pickled"),
    ],
)
def test_wrong_arguments_are_refused_at_once_in_clear_words(device, call, error, words):
    module = nn.Linear(2, 2)
    with pytest.raises(error, match=words):
        call(module)
    assert not module._forward_hooks and not module._forward_pre_hooks, (
        "a refused call left hooks on the module"
    )


@pytest.mark.one_schedule
def test_modules_that_never_run_are_told_by_the_report(device):
    layers = nn.ModuleDict({"a": nn.Linear(2, 2)})
    with memswap.manage(layers) as manager:
        assert manager.units == ("a",)
        assert "none of these modules has run" in manager.report()


@pytest.mark.accelerator
def test_host_tensors_beside_an_accelerator_stay(device, new_pool):
    for pool in (None, new_pool()):
        engine = memswap.saved_tensors(EVERYTHING, pool=pool)
        x = random(torch.device("cpu"), 64).requires_grad_()
        with engine:
            loss = (x * 2).sin().sum()
        loss.backward()
        assert engine.stats().moved_storages == 0, "host memory was swapped to host memory"
        assert sum(c.tensors for c in engine.stats().kept.values()) == 1


# --- under a budget ------------------------------------------------------------------------------


class TriesAgain(nn.Module):
    """Runs its layer again where memory was short."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.failures = 0

    def forward(self, x):
        try:
            return self.inner(x)
        except torch.OutOfMemoryError:
            self.failures += 1
            return self.inner(x)


@pytest.mark.cpu_only
@pytest.mark.parametrize("failing_step", [2, 4, 6])  # learning, first under a plan, later
def test_a_save_that_fails_under_a_budget_costs_no_step(
    device, new_pool, monkeypatch, failing_step
):
    """The books of the step were off by one from there on, and the next forward raised."""
    layers = nn.ModuleList(TriesAgain(layer) for layer in new_layers(device))
    expected = budget_step(layers, 32, device)
    left, opened = [0], transfers.open_lane

    class Failing(native.LaneAround):
        def __init__(self, lane: native.Lane) -> None:
            super().__init__(lane)
            self.lane = lane

        def send(self, storage: native.StorageRef, block: native.Block) -> native.Ticket:
            left[0] -= 1
            if left[0] == 0:
                raise torch.OutOfMemoryError("no memory for a send")
            return self.lane.send(storage, block)

    monkeypatch.setattr(transfers, "open_lane", lambda *a, **k: Failing(opened(*a, **k)))
    policy = memswap.Policy(action=memswap.Action.SWAP, min_bytes=1)
    manager = managed(layers, new_pool(), "60%", policy)
    for number in range(12):
        left[0] = 3 if number == failing_step else 0
        assert_same_gradients(budget_step(layers, 32, device), expected)
    assert sum(layer.failures for layer in layers) == 1
    assert manager.plan is not None
    manager.remove()


@pytest.mark.parametrize("door", ["with block", "manage", "chain"])
def test_a_warning_points_at_the_users_line(device, door):
    """Not into memswap or torch, which called the hook that warns."""
    layers = nn.ModuleList([nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(3)])
    layers.to(device)
    pool = memswap.HostPool(device=device, budget="4KiB", slab="4KiB")
    policy = memswap.Policy(action=memswap.Action.SWAP, min_bytes=1)
    x = torch.ones(64, 64, device=device)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        if door == "with block":
            with memswap.saved_tensors(policy, pool=pool):
                for layer in layers:
                    x = layer(x)
        else:
            put = memswap.manage if door == "manage" else memswap.chain
            with put(layers, policy, pool=pool):
                for layer in layers:
                    x = layer(x)
    told = [one for one in told if "memswap" in str(one.message)]
    assert told, "a pool that is too small was not told of"
    assert {one.filename for one in told} == {__file__}, "the user's line is another"
