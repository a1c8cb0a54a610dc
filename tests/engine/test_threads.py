"""Several threads: one managed model, one engine, or an engine each."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers import (
    EVERYTHING,
    assert_released,
    assert_same_gradients,
    new_input,
    new_stack,
    random,
)

import memswap

pytestmark = pytest.mark.every_action

THREADS = 3


def in_threads(work, count=THREADS):
    """Run `work(number)` in several threads that start together; their results in order."""
    barrier = threading.Barrier(count)

    def start(number):
        barrier.wait(timeout=60)
        return work(number)

    with ThreadPoolExecutor(count) as pool:
        return [f.result(timeout=120) for f in [pool.submit(start, n) for n in range(count)]]


def gradients_of(model, x):
    return torch.autograd.grad(model(x), list(model.parameters()))


def test_threads_that_share_a_managed_model(device, new_pool):
    """DataParallel's way: replicas of forward and backward in threads, one model."""
    model = new_stack(device, depth=2)
    inputs = [new_input(device, seed=n) for n in range(THREADS)]
    expected = [gradients_of(model, x) for x in inputs]
    pool = new_pool()
    manager = memswap.manage(model.layers, EVERYTHING, pool=pool)
    for _ in range(3):
        found = in_threads(lambda n: gradients_of(model, inputs[n]))
        for number in range(THREADS):
            assert_same_gradients(found[number], expected[number])
    assert manager.stats().moved_storages > 0
    manager.remove()
    assert_released(manager, pool)


def test_threads_that_share_a_engine(device, new_pool):
    model = new_stack(device, depth=2)
    inputs = [new_input(device, seed=n) for n in range(THREADS)]
    expected = [gradients_of(model, x) for x in inputs]
    pool = new_pool()
    engine = memswap.saved_tensors(EVERYTHING, pool=pool)

    def work(number):
        out = []
        for _ in range(3):
            with engine:
                loss = model(inputs[number])
            out.append(torch.autograd.grad(loss, list(model.parameters())))
        return out

    for number, rounds in enumerate(in_threads(work)):
        for found in rounds:
            assert_same_gradients(found, expected[number])
    assert_released(engine, pool)


def test_threads_with_a_engine_each_and_one_pool(device, new_pool):
    models = [new_stack(device, depth=2, seed=n) for n in range(THREADS)]
    inputs = [new_input(device, seed=n) for n in range(THREADS)]
    expected = [gradients_of(m, x) for m, x in zip(models, inputs, strict=True)]
    pool = new_pool()
    engines = [memswap.saved_tensors(EVERYTHING, pool=pool) for _ in range(THREADS)]

    def work(number):
        for _ in range(3):
            with engines[number]:
                loss = models[number](inputs[number])
            found = torch.autograd.grad(loss, list(models[number].parameters()))
        return found

    for number, found in enumerate(in_threads(work)):
        assert_same_gradients(found, expected[number])
    for engine in engines:
        assert_released(engine, pool)


def test_backward_in_another_thread_than_forward(device, new_pool):
    model, x = new_stack(device, depth=2), new_input(device)
    expected = gradients_of(model, x)
    pool = new_pool()
    manager = memswap.manage(model.layers, EVERYTHING, pool=pool)
    live = [model(x) for _ in range(THREADS)]
    found = in_threads(lambda n: torch.autograd.grad(live[n], list(model.parameters())))
    for one in found:
        assert_same_gradients(one, expected)
    live.clear()
    manager.remove()
    assert_released(manager, pool)


def test_one_retained_graph_run_by_several_threads(device, new_pool):
    """Each storage is demanded by all threads at once."""
    model, x = new_stack(device, depth=2), new_input(device)
    expected = gradients_of(model, x)
    pool = new_pool()
    engine = memswap.saved_tensors(EVERYTHING, pool=pool)
    with engine:
        live = [model(x)]
    engine._engine.settle()
    found = in_threads(
        lambda n: torch.autograd.grad(live[0], list(model.parameters()), retain_graph=True)
    )
    for one in found:
        assert_same_gradients(one, expected)
    live.clear()
    assert_released(engine, pool)


@pytest.mark.one_schedule
def test_graphs_dropped_in_one_thread_while_another_packs(device, new_pool):
    model, x = new_stack(device, depth=2), new_input(device)
    pool = new_pool()
    engine = memswap.saved_tensors(EVERYTHING, pool=pool)

    def work(number):
        for _ in range(5):
            with engine:
                loss = model(x)
            if number == 0:
                loss.backward()
            del loss

    in_threads(work)
    assert_released(engine, pool)


def test_hooks_of_one_thread_are_not_seen_in_another(device, new_pool):
    engine = memswap.saved_tensors(EVERYTHING, pool=new_pool())
    x = random(device, 8).requires_grad_()

    def elsewhere():
        (x * 2).sin()

    with engine:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert engine.stats().offered_tensors == 0


@pytest.mark.cpu_only
def test_garbage_of_one_engine_collected_while_another_works_does_not_deadlock(device, new_pool):
    """The cycle collector runs anywhere: also inside engine A, over dead graphs of engine B."""
    both_inside = threading.Barrier(2)
    garbage: list[list] = [[], []]
    armed = threading.Event()

    def collecting(number):
        def decide(tensor, info):
            if armed.is_set() and garbage[1 - number]:
                both_inside.wait(timeout=20)
                garbage[1 - number].clear()  # the last reference to the other engine's graph
            return memswap.Action.SWAP

        return decide

    engines = [
        memswap.saved_tensors(memswap.Policy(min_bytes=1, fn=collecting(n)), pool=new_pool())
        for n in range(2)
    ]
    x = random(device, 8).requires_grad_()
    for number, engine in enumerate(engines):
        with engine:
            kept = (x * 2).sin()
        garbage[number].append(kept)
        del kept
    armed.set()

    def work(number):
        with engines[number]:
            (x * 3).sin()

    threads = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert not any(t.is_alive() for t in threads), "two engines wait for each other's lock for ever"
    gc.collect()
