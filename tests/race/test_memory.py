"""Memory that is short, refused, dropped early or still in flight when something ends."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from eventually import eventually
from helpers import (
    EVERYTHING,
    assert_nothing_left,
    assert_same_gradients,
    gradients,
    new_input,
    new_stack,
)
from race_workloads import (
    DEVICE,
    lanes_opened,
    new_pool,
    on_host,
    one_stream,
    plain,
    run_apart,
)
from torch import nn

import memswap
from memswap._native import native
from memswap.engine import hook_scope as scope_module
from simdev import _C, NAME, faults, laboratory, run_in

device_module = getattr(torch, NAME)
SIDE, LAYERS = 64, 24


# ---------------------------------------------------------------- device memory
def train_chain(region: Any, steps: int = 2) -> list[torch.Tensor]:
    """A model whose activations are most of its memory."""
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(SIDE, SIDE, generator=generator) / 8).to(DEVICE).requires_grad_()
    for step in range(steps):
        with region():
            x = torch.full((SIDE, SIDE), 0.1 * (step + 1), device=DEVICE)
            for _ in range(LAYERS):
                x = (x @ weight).tanh()
            loss = x.square().mean()
        del x
        loss.backward()
        del loss
    return on_host([weight.grad])


def peak_of(schedule: Any, region: Any) -> tuple[int, list[torch.Tensor]]:
    def body() -> tuple[int, list[torch.Tensor]]:
        device_module.reset_peak_memory_stats()
        found = train_chain(region)
        return device_module.max_memory_allocated(), found

    return run_in(schedule, body, allow_pinned_growth=True)


@pytest.mark.own_laboratory
@pytest.mark.parametrize("prefetch_bytes", ["auto", 0])
def test_a_model_that_does_not_fit_trains_under_memswap(schedule: Any, prefetch_bytes: Any) -> None:
    plain_peak, expected = peak_of(schedule, plain)
    capacity = plain_peak * 2 // 3

    def bounded(lane: Any) -> Any:
        """Before anything is known about a model, 256 MiB may leave at once: more than all this."""
        lane.set_max_leaving_bytes(2 * SIDE * SIDE * 4)
        return lane

    def managed() -> list[torch.Tensor]:
        saved = memswap.saved_tensors(EVERYTHING, pool=new_pool(), prefetch_bytes=prefetch_bytes)
        with lanes_opened(bounded):
            return train_chain(lambda: saved)

    with pytest.raises(torch.OutOfMemoryError):
        run_in(schedule, train_chain, plain, capacity=capacity)
    found = run_in(schedule, managed, capacity=capacity)
    assert_same_gradients(found, expected)


@contextmanager
def no_room_for_prefetch(times: int) -> Iterator[list[int]]:
    """The first returns ahead of their use find no device memory; demands do."""
    failed: list[int] = []  # in each unpack
    unpack = scope_module.unpack

    def watched(handle: Any) -> torch.Tensor:
        moved = getattr(handle, "handle", handle)  # one that waited for its operator has it inside
        entry = getattr(moved, "entry", None)
        # A demand brings its own storage first, unless that has come back ahead.
        demanded = int(isinstance(entry, native.Entry) and entry.is_away)
        before = _C.memory_stats(0)["out_of_memory"]
        with faults.fail_device(times - sum(failed), after=demanded):
            try:
                return unpack(handle)
            finally:
                failed.append(_C.memory_stats(0)["out_of_memory"] - before)

    scope_module.unpack = watched
    try:
        yield failed
    finally:
        scope_module.unpack = unpack


@pytest.mark.parametrize("times", [1, 5, 10_000])
def test_no_room_during_prefetch_is_survived(times: int) -> None:
    expected = one_stream(plain)

    def managed() -> memswap.saved_tensors:
        saved = memswap.saved_tensors(EVERYTHING, pool=new_pool(), prefetch_bytes="16KiB")
        assert_same_gradients(one_stream(lambda: saved), expected)
        return saved

    with_room = managed().stats().stalls
    with no_room_for_prefetch(times) as failed:
        saved = managed()
    assert sum(failed), "no prefetch was tried"
    stalls = saved.stats().stalls
    if times > 1000:  # there never was room
        assert stalls >= 5, "what could not be prefetched was not demanded"
    else:
        # What was short of room is tried again. After the second failure in a row some demands pass
        # without a try, up to 7 of them; the first storage that backward demands stalls anyway.
        most = with_room + times + 1 + sum([0, 1, 3, 7, 7][:times])
        assert stalls <= most, f"{stalls} stalls, {with_room} of them with room"
    torch.accelerator.synchronize()
    assert_nothing_left(saved.stats())


@pytest.mark.own_laboratory
def test_no_room_for_a_demand_is_an_out_of_memory_error_and_backward_can_be_tried_again(
    schedule: Any,
) -> None:
    """Nothing is lost: with room again, the same graph gives the right gradients."""

    def body() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        x = torch.full((SIDE, SIDE), 0.5, device=DEVICE, requires_grad=True)
        loss = x.exp().sin().square().sum()
        (expected,) = torch.autograd.grad(loss, x)
        del loss
        saved = memswap.saved_tensors(EVERYTHING, pool=new_pool(), prefetch_bytes=0)
        with saved:
            loss = x.exp().sin().square().sum()
        torch.accelerator.synchronize()
        saved.stats()
        device_module.empty_cache()
        reserved = device_module.memory_reserved()
        _C.set_capacity(0, reserved)
        with pytest.raises(torch.OutOfMemoryError):
            loss.backward(retain_graph=True)
        _C.set_capacity(0, 1 << 30)
        (found,) = torch.autograd.grad(loss, x)
        return on_host([found]), on_host([expected])

    found, expected = run_in(schedule, body)
    assert_same_gradients(found, expected)


# ---------------------------------------------------------------- pinned memory
@pytest.mark.filterwarnings("ignore:memswap")
@pytest.mark.parametrize("after", [0, 1, 2])
def test_when_pinning_fails_tensors_stay_and_gradients_are_the_same(after: int) -> None:
    expected = one_stream(plain)
    pool = new_pool(budget="64MiB", slab="8KiB")
    saved = memswap.saved_tensors(EVERYTHING, pool=pool)
    with faults.fail_pinned(n=10_000, after=after):
        found = one_stream(lambda: saved)
    assert_same_gradients(found, expected)
    stats = saved.stats()
    assert stats.kept["pool"].tensors > 0, "pinning failed and nothing was kept"
    assert (stats.moved_storages > 0) == (after > 0)
    assert pool.native.statistics()["refusals"] >= stats.kept["pool"].tensors
    torch.accelerator.synchronize()
    assert_nothing_left(stats)


@pytest.mark.filterwarnings("ignore:memswap")
def test_pinning_works_again_after_it_has_failed() -> None:
    assert_pinning_works_again(lambda pool: pool.trim())


@pytest.mark.filterwarnings("ignore:memswap")
@pytest.mark.one_schedule
def test_pinning_works_again_after_a_second() -> None:
    """For so long a pool leaves a system alone that has refused, on the host's clock."""
    assert_pinning_works_again(lambda pool: time.sleep(1.1))


def assert_pinning_works_again(after: Callable[[Any], object]) -> None:
    pool = new_pool()
    saved = memswap.saved_tensors(EVERYTHING, pool=pool)
    expected = one_stream(plain)
    with faults.fail_pinned(n=10_000):
        assert_same_gradients(one_stream(lambda: saved), expected)
    assert saved.stats().moved_storages == 0
    after(pool)
    assert_same_gradients(one_stream(lambda: saved), expected)
    assert saved.stats().moved_storages > 0, "one failure has ended swapping for ever"


@pytest.mark.filterwarnings("ignore:memswap")
@pytest.mark.parametrize("limited", ["by the system", "by the pool"])
def test_a_spent_budget_keeps_tensors_and_is_never_exceeded(limited: str) -> None:
    expected = one_stream(plain)
    budget = 16 << 10
    pinned = _C.pinned_stats()["allocated"]
    pool = new_pool(budget=budget if limited == "by the pool" else "64MiB", slab="4KiB")
    saved = memswap.saved_tensors(EVERYTHING, pool=pool)
    with faults.pinned_budget(pinned + budget if limited == "by the system" else 1 << 30):
        found = one_stream(lambda: saved)
        statistics = pool.native.statistics()
    assert_same_gradients(found, expected)
    assert statistics["reserved_bytes"] <= budget
    stats = saved.stats()
    assert stats.kept["pool"].tensors > 0 and stats.moved_storages > 0


def test_the_user_is_told_once_why_tensors_stay() -> None:
    model, x = new_stack(DEVICE, depth=1), new_input(DEVICE)
    saved = memswap.saved_tensors(EVERYTHING, pool=new_pool())
    with faults.fail_pinned(n=10_000), pytest.warns(UserWarning, match="stays on") as warnings:
        with saved:
            model(x).backward()
        with saved:
            model(x).backward()
    told = [w for w in warnings if "memswap" in str(w.message)]
    assert len(told) == 1, f"told {len(told)} times"
    assert "injected failure" in str(told[0].message), "the system's own words are missing"


# ---------------------------------------------------------------- ends in the wrong order
def test_a_pool_may_go_before_the_graphs_that_use_it() -> None:
    model, x = new_stack(DEVICE, depth=2), new_input(DEVICE)
    model(x).backward()
    expected = gradients(model)
    model.zero_grad(set_to_none=True)
    pool = new_pool()
    saved = memswap.saved_tensors(EVERYTHING, pool=pool)
    with saved:
        loss = model(x)
    del pool, saved
    gc.collect()
    loss.backward()
    assert_same_gradients(gradients(model), expected)


def test_a_pool_goes_while_copies_still_use_its_slabs() -> None:
    """Pinned memory must not be returned under a copy: the pool blocks until they have ended."""
    for _ in range(3):
        pool = new_pool()
        saved = memswap.saved_tensors(EVERYTHING, pool=pool, prefetch_bytes=0)
        model, x = new_stack(DEVICE, depth=1), new_input(DEVICE)
        with saved:
            loss = model(x)
        del loss, saved, pool
        scratch = torch.zeros(1 << 18, dtype=torch.uint8, pin_memory=True)  # the same size again
        del scratch


@pytest.mark.parametrize("when", ["after forward", "amid backward", "with returns under way"])
def test_a_graph_is_dropped_with_transfers_in_flight(when: str) -> None:
    model, x = new_stack(DEVICE, depth=2), new_input(DEVICE)
    model(x).backward()
    expected = gradients(model)
    pool = new_pool()
    saved = memswap.saved_tensors(
        EVERYTHING, pool=pool, prefetch_bytes="1MiB" if "returns" in when else 0
    )

    class StopError(Exception):
        pass

    def stop(gradient: torch.Tensor) -> None:
        raise StopError

    for _ in range(3):
        model.zero_grad(set_to_none=True)
        with saved:
            hidden = model.layers[0](model.enter(x))
            loss = model.layers[1](hidden).square().mean()
        if when != "after forward":
            hidden.register_hook(stop)
            with pytest.raises(StopError):
                loss.backward()
        del loss, hidden
        scratch = [torch.randn(16, 16).to(DEVICE) for _ in range(8)]  # uses memory again at once
        del scratch
        # Autograd's device thread lets go of an exception's frames at a moment of its own.
        gone = eventually(lambda: not pool.native.statistics()["blocks"], collect=True)
        assert gone, "blocks outlive a dropped graph"
    model.zero_grad(set_to_none=True)
    with saved:
        loss = model(x)
    loss.backward()
    assert_same_gradients(gradients(model), expected)
    del loss
    torch.accelerator.synchronize()
    assert_nothing_left(saved.stats())


class Fails(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.fail = inner, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        if self.fail:
            raise ValueError("amid the forward")
        return x


@pytest.mark.parametrize("how", ["saved_tensors", "manage"])
def test_an_exception_amid_the_forward_with_sends_in_flight(how: str) -> None:
    model, x = new_stack(DEVICE, depth=3), new_input(DEVICE)
    model.layers[1] = Fails(model.layers[1])
    model(x).backward()
    expected = gradients(model)
    pool = new_pool()
    if how == "manage":
        swap: Any = memswap.manage(model.layers, EVERYTHING, pool=pool)
        region: Any = plain
    else:
        swap = memswap.saved_tensors(EVERYTHING, pool=pool)

        def region() -> Any:
            return swap

    for fail in (True, False, True, True, False):
        model.zero_grad(set_to_none=True)
        model.layers[1].fail = fail
        try:
            with region():
                loss = model(x)
        except ValueError:
            assert fail
        else:
            loss.backward()
            del loss
            assert_same_gradients(gradients(model), expected)
        gc.collect()
        assert pool.native.statistics()["blocks"] == 0, "blocks outlive a forward that failed"
    torch.accelerator.synchronize()
    assert_nothing_left(swap.stats())
    if how == "manage":
        swap.remove()


# ---------------------------------------------------------------- the interpreter ends
@pytest.mark.own_laboratory
@pytest.mark.parametrize("at", ["forward", "backward", "prefetch", "exit handler", "exception"])
def test_the_interpreter_may_end_with_work_pending(
    request: pytest.FixtureRequest, schedule: Any, at: str
) -> None:
    if schedule.policy not in ("eager", "lazy"):
        pytest.skip("the other schedules end between these two")
    seldom_pending = schedule.policy == "eager" and at not in ("forward", "exit handler")
    if seldom_pending and not request.config.getoption("--slow"):
        pytest.skip("slow: runs with --slow (make test-all)")
    program = f"""
import atexit, sys, torch, simdev, memswap
torch.set_num_threads(1)
from simdev import _C
_C.set_policy(_C.Policy.{schedule.policy}, 0)
device = torch.device(simdev.NAME, 0)
at = {at!r}
pool = memswap.HostPool(budget="64MiB", slab="1MiB", device=device)
window = "1MiB" if at == "prefetch" else 0
saved = memswap.saved_tensors(memswap.Policy(min_bytes=1), pool=pool, prefetch_bytes=window)
weights = [torch.randn(64, 64).to(device).requires_grad_() for _ in range(6)]
def forward():
    x = torch.ones(64, 64, device=device)
    with saved:
        for weight in weights:
            x = (x @ weight).tanh()
    return x.sum()
forward().backward()
loss = forward()
if at in ("backward", "prefetch"):
    weights[3].register_hook(lambda g: 1 / 0)
    try:
        loss.backward()
    except ZeroDivisionError:
        pass
if at == "exit handler":
    atexit.register(loss.backward)
print("reached the end", flush=True)
if at == "exception":
    raise SystemExit(7)
"""
    ended = run_apart(program)
    assert "reached the end" in ended.stdout, ended.stderr[-2000:]
    expected = 7 if at == "exception" else 0
    assert ended.returncode == expected, f"ended with {ended.returncode}: {ended.stderr[-2000:]}"
    assert not ended.stderr.strip(), f"said at its end: {ended.stderr[-2000:]}"


@pytest.mark.own_laboratory
@pytest.mark.one_schedule
def test_a_laboratory_of_its_own_finds_what_a_leak_would_be(schedule: Any) -> None:
    """The search for leaks that all of the above relies on."""
    kept: list[Any] = []

    def body() -> None:
        saved = memswap.saved_tensors(EVERYTHING, pool=new_pool(), prefetch_bytes=0)
        with saved:
            kept.append(new_stack(DEVICE, depth=1)(new_input(DEVICE)))

    with pytest.raises(AssertionError, match="still live"):
        with laboratory(schedule):
            body()
    kept.clear()
