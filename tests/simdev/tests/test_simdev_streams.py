"""Streams, events, devices and threads behave as CUDA's do."""

from __future__ import annotations

import threading

import pytest
import torch

import simdev
from simdev import SCHEDULES, Schedule, counters, laboratory, run_in, virtual_time
from simdev.laboratory import FREE

DEVICE = simdev.NAME
ALL = [*SCHEDULES, FREE]
LAZY = Schedule("lazy", "lazy", check="throw")
EAGER = SCHEDULES[0]

every_schedule = pytest.mark.parametrize("schedule", ALL, ids=str)


def current():
    return torch.accelerator.current_stream()


def test_the_accelerator_api_knows_the_device():
    assert torch.accelerator.current_accelerator().type == DEVICE
    assert torch.accelerator.device_count() == 2
    assert getattr(torch, DEVICE).is_available()
    assert torch.ones(1, device=DEVICE).device.type == DEVICE
    assert getattr(torch.ones(1).to(DEVICE), f"is_{DEVICE}")


@pytest.mark.parametrize("shape", [(), (1,), (1, 1, 1)], ids=str)
def test_item_takes_one_element_of_any_shape(shape):
    assert torch.full(shape, 2.5, device=DEVICE).item() == 2.5
    assert torch.arange(6.0, device=DEVICE)[4:5].item() == 4.0
    with pytest.raises(RuntimeError):
        torch.zeros(2, device=DEVICE).item()


@every_schedule
def test_ordered_work_on_two_streams_gives_one_result(schedule):
    def body():
        main, side = current(), torch.Stream(device=DEVICE)
        x = torch.full((64, 64), 2.0, device=DEVICE)
        host = torch.empty(64, 64, pin_memory=True)
        side.wait_stream(main)
        with side:
            host.copy_(x @ x, non_blocking=True)
            copied = side.record_event()
        main.wait_event(copied)
        x.zero_()
        copied.synchronize()
        return [host.clone()]

    assert torch.equal(run_in(schedule, body)[0], torch.full((64, 64), 256.0))


def test_lazy_runs_nothing_that_nobody_waits_for():
    with laboratory(LAZY, allow_device_growth=True, allow_pinned_growth=True):
        host = torch.zeros(4, pin_memory=True)
        host.copy_(torch.ones(4, device=DEVICE), non_blocking=True)
        assert host.tolist() == [0.0] * 4
        current().synchronize()
        assert host.tolist() == [1.0] * 4


def test_polling_an_event_ends_and_orders_the_host():
    with laboratory(LAZY, allow_device_growth=True, allow_pinned_growth=True):
        host = torch.empty(4, pin_memory=True)
        host.copy_(torch.ones(4, device=DEVICE), non_blocking=True)
        event = current().record_event()
        polls = 0
        while not event.query():
            polls += 1
            assert polls < 100
        assert polls > 0
        simdev.host_access(host, name="read after polling")
        assert host.tolist() == [1.0] * 4


def test_a_stream_may_wait_for_itself():
    with laboratory(LAZY):
        stream = torch.Stream(device=DEVICE)
        for _ in range(3):
            stream.wait_stream(stream)
            stream.wait_event(stream.record_event())
        stream.synchronize()


def test_streams_come_from_a_pool_that_never_hands_out_the_default_stream():
    with laboratory(EAGER):
        ids = [torch.Stream(device=DEVICE).stream_id for _ in range(70)]
    assert ids[:32] == list(range(1, 33))
    assert ids[32:64] == ids[:32]


def test_native_handles_tell_streams_apart_and_the_default_is_null():
    default = getattr(torch, DEVICE).default_stream()
    handles = {torch.Stream(device=f"{DEVICE}:{i % 2}").native_handle for i in range(10)}
    assert default.native_handle == 0
    assert len(handles) == 10 and 0 not in handles


@every_schedule
def test_autograd_runs_each_backward_on_its_forward_stream(schedule):
    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, log):
            ctx.log, ctx.stream_id = log, current().stream_id
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            ctx.log.append((ctx.stream_id, current().stream_id))
            return grad * 2, None

    def body():
        log = []
        main, one, two = current(), torch.Stream(device=DEVICE), torch.Stream(device=DEVICE)
        weight = torch.ones(32, 32, device=DEVICE, requires_grad=True)
        one.wait_stream(main)
        with one:
            a = Probe.apply(weight, log)
        two.wait_stream(one)
        with two:
            b = Probe.apply(a, log)
        main.wait_stream(two)
        Probe.apply(b, log).sum().backward()
        # Allocated on a side stream and used on the next: the user's duty, as on CUDA.
        a.record_stream(two)
        b.record_stream(main)
        for grad_user in (one, two):
            main.wait_stream(grad_user)
            grad_user.wait_stream(main)
        return log, weight.grad.cpu()

    log, grad = run_in(schedule, body)
    assert log == [(0, 0), (2, 2), (1, 1)]
    assert bool((grad == 8).all())


@every_schedule
def test_record_stream_defers_the_reuse_of_memory(schedule):
    def body():
        main, side = current(), torch.Stream(device=DEVICE)
        a = torch.full((1000,), 3.0, device=DEVICE)
        pointer = a.data_ptr()
        host = torch.empty(1000, pin_memory=True)
        side.wait_stream(main)
        with side:
            host.copy_(a, non_blocking=True)
        a.record_stream(side)
        del a
        b = torch.zeros(1000, device=DEVICE)
        if schedule.policy == "lazy":
            assert b.data_ptr() != pointer
        side.synchronize()
        return host.clone()

    assert bool((run_in(schedule, body) == 3).all())


@every_schedule
def test_two_devices(schedule):
    def body():
        x = torch.arange(6.0, device=f"{DEVICE}:1").view(2, 3)
        y = (x * 2).to(f"{DEVICE}:0") + 1
        with torch.device(f"{DEVICE}:1"):
            z = torch.ones(2, 3)
        assert z.device.index == 1
        return (y.to(f"{DEVICE}:1") + z).cpu()

    assert torch.equal(run_in(schedule, body), torch.arange(6.0).view(2, 3) * 2 + 2)


def test_tensors_on_two_devices_do_not_mix():
    def body():
        torch.ones(2, device=f"{DEVICE}:0") + torch.ones(2, device=f"{DEVICE}:1")

    with pytest.raises(RuntimeError, match="device"):
        run_in(EAGER, body)


@every_schedule
def test_four_host_threads(schedule):
    def work(index, results):
        torch.accelerator.set_device_index(index % 2)
        stream = torch.Stream(device=f"{DEVICE}:{index % 2}")
        for i in range(25):
            with stream:
                x = torch.full((64,), float(i), device=f"{DEVICE}:{index % 2}")
                results[index] += (x * 2).sum().item()

    def body():
        results = [0.0] * 4
        threads = [threading.Thread(target=work, args=(i, results)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results

    assert run_in(schedule, body) == [64 * 2 * sum(range(25))] * 4


@pytest.fixture(scope="module")
def python_kernel():
    @torch.library.custom_op("simdev_tests::triple", mutates_args=(), device_types="cpu")
    def triple(x: torch.Tensor) -> torch.Tensor:
        return x * 3

    triple.register_fake(torch.empty_like)
    return triple


@every_schedule
@pytest.mark.timeout(60)
def test_a_kernel_written_in_python_never_deadlocks_a_host_that_holds_the_gil(
    schedule, python_kernel
):
    def body():
        side = torch.Stream(device=DEVICE)
        y = python_kernel(torch.ones(3, device=DEVICE))
        event = current().record_event()
        side.wait_event(event)  # the bindings of these keep the GIL
        while not event.query():
            pass
        z = python_kernel(y)
        z.untyped_storage().resize_(1 << 20)  # may flush the cache and wait
        side.wait_stream(current())
        current().synchronize()
        return z.tolist()

    assert run_in(schedule, body) == [9.0] * 3


def test_blocking_calls_are_counted_and_queries_and_waits_are_not():
    with laboratory(EAGER, allow_device_growth=True, allow_pinned_growth=True):
        side = torch.Stream(device=DEVICE)
        x = torch.ones(4, device=DEVICE)
        host = torch.empty(4, pin_memory=True)
        counters.reset()
        side.wait_stream(current())
        with side:
            host.copy_(x, non_blocking=True)
        event = side.record_event()
        current().wait_event(event)
        event.query()
        assert counters.host_syncs() == 0
        for count, block in enumerate(
            [
                event.synchronize,
                side.synchronize,
                torch.accelerator.synchronize,
                x.cpu,
                x[0].item,
                lambda: x.copy_(torch.ones(4)),
                x.nonzero,
            ],
            start=1,
        ):
            block()
            assert counters.host_syncs() >= count
        assert host.tolist() == [1.0] * 4


def test_prefetching_hides_copies_in_virtual_time_whatever_the_schedule():
    def elapsed(lookahead, layers=6, n=1 << 18):
        side, main = torch.Stream(device=DEVICE), current()
        host = [torch.ones(n, pin_memory=True) for _ in range(layers)]
        total = torch.zeros(n, device=DEVICE)
        arrived = {}

        def fetch(i):
            if i < layers and i not in arrived:
                tensor = torch.empty(n, device=DEVICE)
                side.wait_stream(main)
                with side:
                    tensor.copy_(host[i], non_blocking=True)
                arrived[i] = tensor, side.record_event()

        with virtual_time(hbm_gb_per_s=50) as clock:
            for i in range(layers):
                for ahead in range(lookahead + 1):
                    fetch(i + ahead)
                tensor, event = arrived[i]
                main.wait_event(event)
                total += tensor
                main_done = main.record_event()
                side.wait_event(main_done)
            assert total[0].item() == layers
            return clock.elapsed_us()

    times = [[run_in(s, elapsed, ahead) for s in SCHEDULES] for ahead in (0, 2)]
    assert all(len(set(same)) == 1 for same in times), "virtual time depends on the schedule"
    assert times[1][0] < times[0][0]


def test_elapsed_time_is_virtual():
    with (
        laboratory(LAZY, allow_device_growth=True),
        virtual_time(host_us=0, launch_us=10, hbm_gb_per_s=1),
    ):
        begin, end = (torch.Event(device=DEVICE, enable_timing=True) for _ in range(2))
        x = torch.empty(1000, device=DEVICE)
        begin.record()
        x.zero_()
        end.record()
        end.synchronize()
        # Written in place: read and written, 2 * 4000 bytes at 1000 bytes per microsecond.
        assert begin.elapsed_time(end) == pytest.approx((10 + 8) / 1000)
