"""The laboratory reports what is amiss, and leaves a clean machine behind whatever happened."""

from __future__ import annotations

import pytest
import torch

import simdev
from simdev import LaboratoryError, Schedule, faults, laboratory, run_in, virtual_time

DEVICE = simdev.NAME
EAGER, LAZY = simdev.SCHEDULES[:2]


def test_the_matrix_has_every_deterministic_policy():
    assert [s.name for s in simdev.SCHEDULES] == [
        "eager",
        "lazy",
        "side_first",
        "main_first",
        "random0",
        "random1",
        "random2",
    ]
    assert [s.name for s in simdev.schedules(1)][-1] == "random0"
    assert simdev.SCHEDULES[0].check == "throw"


def test_leaked_device_and_pinned_memory_is_listed():
    kept = []

    def body():
        kept.append(torch.ones(1000, device=DEVICE))
        kept.append(torch.empty(10, pin_memory=True))

    with pytest.raises(LaboratoryError) as caught:
        run_in(LAZY, body)
    device, pinned = caught.value.leaks
    assert device.startswith("4000 device bytes in 1 block(s)")
    assert pinned.startswith("40 pinned bytes in 1 block(s)")
    kept.clear()
    with pytest.raises(LaboratoryError, match="pinned"):
        run_in(LAZY, body, allow_device_growth=True)
    kept.clear()
    run_in(LAZY, body, allow_device_growth=True, allow_pinned_growth=True)


def test_memory_from_before_may_die_inside_and_cycles_are_no_leak():
    before = [torch.ones(10, device=DEVICE)]

    def body():
        before.clear()
        cycle = [torch.ones(10, device=DEVICE)]
        cycle.append(cycle)

    run_in(LAZY, body)


def test_races_are_listed_and_may_be_forgiven():
    def body():
        side = torch.Stream(device=DEVICE)
        x = torch.ones(4, device=DEVICE)
        with side:
            x.add_(1)
        torch.accelerator.current_stream().wait_stream(side)

    with pytest.raises(LaboratoryError, match="race report") as caught:
        run_in(LAZY, body)
    assert "aten::add" in caught.value.reports[0]
    caught.value.reports[:] = [r.split(", task")[0] for r in caught.value.reports]
    with laboratory(LAZY) as lab:
        body()
        assert [r.split(", task")[0] for r in lab.forgive()] == caught.value.reports
    with pytest.raises(RuntimeError, match="stream race"):
        run_in(EAGER, body)


def test_an_asynchronous_error_that_nobody_saw_is_raised_at_the_end():
    def body():
        torch.nn.functional.embedding(
            torch.tensor([7], device=DEVICE), torch.ones(3, 2, device=DEVICE)
        )

    with pytest.raises(LaboratoryError, match="an asynchronous task failed"):
        run_in(LAZY, body)


def test_everything_is_reset_after_an_exception():
    with pytest.raises(ZeroDivisionError):
        with laboratory(Schedule("lazy", "lazy"), capacity=1 << 20), virtual_time(host_us=1000):
            simdev._C.fail_pinned_requests(0, 100)
            simdev._C.set_pinned_budget(1)
            simdev._C.mutate_lying_queries()
            torch.ones(4, device=DEVICE)
            1 / 0  # noqa: B018
    assert torch.accelerator.get_memory_info()[1] == 2**30
    torch.empty(1000, pin_memory=True)
    torch.ones(4, device=DEVICE)
    event = torch.accelerator.current_stream().record_event()
    assert event.query(), "eager again: all work is done when a call returns"
    with laboratory(LAZY, allow_device_growth=True):
        torch.ones(1, device=DEVICE)
        assert simdev._C.host_virtual_us() < 100
        assert not torch.accelerator.current_stream().query()


def test_laboratories_do_not_nest():
    with laboratory(EAGER):
        with pytest.raises(RuntimeError, match="do not nest"), laboratory(LAZY):
            pass


def test_each_laboratory_starts_from_the_same_machine():
    def body():
        stream = torch.Stream(device=DEVICE)
        torch.ones(4, device=DEVICE)
        return stream.stream_id, simdev.counters.device_allocations()

    assert len({run_in(EAGER, body) for _ in range(3)}) == 1


def test_random_schedules_are_reproducible_executions():
    def trace(seed):
        """What an unsynchronised host sees after each launch tells how far the device is."""

        def body():
            host = torch.zeros(40, pin_memory=True)
            seen = []
            streams = [torch.Stream(device=DEVICE) for _ in range(4)]
            ones = torch.ones(1, device=DEVICE)
            for stream in streams:
                stream.wait_stream(torch.accelerator.current_stream())
            for i in range(40):
                with streams[i % 4]:
                    host[i : i + 1].copy_(ones, non_blocking=True)
                seen.append(tuple(host.nonzero().flatten().tolist()))
            torch.accelerator.synchronize()
            return seen

        return run_in(Schedule("random", "random", seed, check="off"), body)

    assert trace(1) == trace(1)
    assert trace(1) != trace(2)


def test_failed_pins_do_not_outlive_a_laboratory():
    with laboratory(EAGER):
        with faults.fail_pinned(5), pytest.raises(torch.AcceleratorError):
            torch.empty(4, pin_memory=True)
        torch.empty(4, pin_memory=True)
