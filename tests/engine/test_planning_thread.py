"""Plans are made on a thread beside training: no forward waits, nothing outlives its manager."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from budget_layers import SWAP, forward, kept_peak, managed, new_layers, step
from helpers import assert_same_gradients

import memswap
from memswap import BudgetError
from memswap.planning import making

pytestmark = [pytest.mark.one_schedule, pytest.mark.planning_thread]

WAIT_S = 30.0


class Gate:
    """Holds planning up until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.threads: list[threading.Thread] = []
        self.began, self.opened = threading.Event(), threading.Event()
        make_plan = making.make_plan

        def held(*arguments, **options):
            self.threads.append(threading.current_thread())
            self.began.set()
            assert self.opened.wait(WAIT_S)
            return make_plan(*arguments, **options)

        monkeypatch.setattr(making, "make_plan", held)

    def await_planning(self, step: Callable[[], object]) -> None:
        """Take steps until a plan is in the making. How many that takes depends on the machine."""
        end = time.monotonic() + WAIT_S
        while not self.began.is_set():
            assert time.monotonic() < end, "nothing was planned"
            step()


@pytest.fixture
def gate(monkeypatch) -> Iterator[Gate]:
    held = Gate(monkeypatch)
    yield held
    held.opened.set()
    for thread in held.threads:
        thread.join(WAIT_S)


def test_no_step_waits_for_a_plan_and_a_later_one_follows_it(device, new_pool, gate):
    layers = new_layers(device)
    plain = step(layers, 32, device)
    with managed(layers, new_pool(), "60%") as manager:
        assert "no plan yet, the first steps learn" in manager.report()
        gate.await_planning(lambda: assert_same_gradients(step(layers, 32, device), plain))
        for _ in range(6):
            assert_same_gradients(step(layers, 32, device), plain)
        assert manager.plan is None, "planning is held up"
        assert "no plan yet, it is being made beside training" in manager.report()
        assert gate.threads[0] is not threading.current_thread(), "a hook plans"
        gate.opened.set()
        plan = manager.wait_for_plan()
        assert plan is not None and plan.moved_bytes > 0 and manager.plan is not None
        manager.reset_stats()
        assert_same_gradients(step(layers, 32, device), plain)
        assert manager.stats().peak_resident_bytes <= plan.budget_bytes
        assert len(gate.threads) == 1, "plans were asked for while one was in the making"


def test_waiting_between_two_steps_has_the_plan_in_the_next_one(device, new_pool):
    layers = new_layers(device)
    with managed(layers, new_pool(), "60%") as manager:
        for number in range(1, 6):
            step(layers, 32, device)
            assert (manager.wait_for_plan() is not None) == (number >= 3), f"after step {number}"
    unplanned = memswap.manage(layers, SWAP, pool=new_pool())
    assert unplanned.wait_for_plan() is None
    unplanned.remove()


def test_a_budget_that_cannot_be_met_is_raised_where_somebody_waits_or_goes_on(device, new_pool):
    layers = new_layers(device)
    plain = step(layers, 32, device)
    with managed(layers, new_pool(), budget=1) as manager:
        for _ in range(3):
            step(layers, 32, device)
        with pytest.raises(BudgetError, match="at least"):
            manager.wait_for_plan()
        assert_same_gradients(step(layers, 32, device), plain)


def test_a_manager_that_goes_while_its_plan_is_made_leaves_nothing_alive(device, new_pool, gate):
    layers = new_layers(device)
    manager = managed(layers, new_pool(), "60%")
    gate.await_planning(training := partial(step, layers, 32, device))
    model, engine = weakref.ref(layers), weakref.ref(manager._engine)
    del manager, layers, training
    gc.collect()
    assert model() is None, "planning keeps the model alive"
    assert engine() is None, "planning keeps the engine alive"


def test_removing_a_manager_ends_its_planning(device, new_pool, gate):
    layers = new_layers(device)
    manager = managed(layers, new_pool(), "60%")
    gate.await_planning(lambda: step(layers, 32, device))
    threading.Timer(0.05, gate.opened.set).start()
    manager.remove()
    assert not gate.threads[0].is_alive(), "a thread outlives its manager"
    assert manager.plan is None


def test_more_forwards_than_planned_for_have_no_plan_until_there_is_one_for_them(
    device, new_pool, gate
):
    layers = new_layers(device)
    plain = step(layers, 32, device)
    gate.opened.set()
    budget = int(1.3 * kept_peak(device, new_pool()))
    gate.opened.clear()
    with managed(layers, new_pool(), budget) as manager:
        for _ in range(3):
            step(layers, 32, device)
        gate.opened.set()
        manager.wait_for_plan()
        gate.opened.clear()
        assert manager.plan.moved_bytes == 0 and manager.plan.in_flight == 1
        losses = [forward(layers, 32, device) for _ in range(2)]
        moved = manager.stats().moved_storages
        assert moved > 0, "the second forward kept all that its plan, for one alone, keeps"
        gate.opened.set()
        for loss in losses:
            layers.zero_grad(set_to_none=True)
            loss.backward()
        assert_same_gradients([one.grad for one in layers.parameters()], plain)
        del loss, losses
        assert manager.wait_for_plan().in_flight == 2


def test_a_plan_that_an_interrupt_has_lost_is_made_again(device, new_pool):
    def interrupt(frame, event, argument):
        if frame.f_code.co_filename.endswith("learner.py") and frame.f_code.co_name == "taken":
            raise KeyboardInterrupt

    layers = new_layers(device)
    with managed(layers, new_pool(), "60%") as manager:
        for _ in range(3):
            step(layers, 32, device)
        before = sys.gettrace()
        sys.settrace(interrupt)
        try:
            with pytest.raises(KeyboardInterrupt):
                manager.wait_for_plan()
        finally:
            sys.settrace(before)
        for _ in range(2):
            step(layers, 32, device)
        assert manager.wait_for_plan() is not None


def test_training_goes_on_where_the_system_has_no_thread_for_planning(
    device, new_pool, monkeypatch
):
    def refused(thread):
        raise RuntimeError("can't start new thread")

    layers = new_layers(device)
    plain = step(layers, 32, device)
    with managed(layers, new_pool(), "60%") as manager:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refused)
            for _ in range(6):
                assert_same_gradients(step(layers, 32, device), plain)
            assert manager.plan is None
            assert manager.wait_for_plan() is not None, "who waits has nothing better to do"
        assert_same_gradients(step(layers, 32, device), plain)


@pytest.mark.cpu_only
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_process_that_is_forked_while_a_plan_is_made_makes_it_itself(new_pool, gate):
    device = torch.device("cpu")
    layers = new_layers(device)
    with managed(layers, new_pool(), "60%") as manager:
        gate.await_planning(lambda: step(layers, 32, device))
        child = os.fork()
        if child == 0:  # no pytest here
            status = 1
            try:
                gate.opened = threading.Event()
                gate.opened.set()
                status = 0 if manager.wait_for_plan() is not None else 2
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        gate.opened.set()
        assert manager.wait_for_plan() is not None


EXITING = """
import sys, threading, time
sys.path.insert(0, sys.argv[1])
import torch
import memswap
from memswap.planning import making
from budget_layers import managed, new_layers, step

make_plan = making.make_plan

planning = threading.Event()

def slow(*arguments, **options):
    print("planning", flush=True)
    planning.set()
    time.sleep(0.3)
    return make_plan(*arguments, **options)

making.make_plan = slow
device = torch.device("cpu")
layers = new_layers(device)
manager = managed(layers, memswap.DiskPool(budget="16MiB"), "60%")
while not planning.is_set():
    step(layers, 32, device)
"""


@pytest.mark.cpu_only
def test_an_interpreter_exits_while_a_plan_is_made():
    folder = os.path.dirname(__file__)
    done = subprocess.run(
        [sys.executable, "-c", EXITING, folder],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert done.stdout.startswith("planning")
