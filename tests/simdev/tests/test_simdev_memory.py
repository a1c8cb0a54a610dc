"""Device and pinned memory: capacity, caching, pinning, resizing, injected failures."""

from __future__ import annotations

import pytest
import torch

import simdev
from simdev import SCHEDULES, Schedule, counters, faults, laboratory, run_in

DEVICE = simdev.NAME
EAGER = SCHEDULES[0]
LAZY = Schedule("lazy", "lazy", check="throw")
MIB = 2**20

every_schedule = pytest.mark.parametrize("schedule", SCHEDULES, ids=str)


@every_schedule
def test_out_of_memory_only_after_the_cache_was_flushed(schedule):
    def body():
        kept = []
        with pytest.raises(torch.OutOfMemoryError, match="capacity 4194304"):
            for _ in range(10):
                kept.append(torch.empty(MIB // 4, device=DEVICE))
        assert len(kept) == 4
        kept.clear()
        # The cached megabytes are of another size: they have to be given back first.
        torch.empty(MIB, device=DEVICE).zero_()
        return torch.accelerator.memory_allocated()

    assert run_in(schedule, body, capacity=4 * MIB) == 0


def test_memory_statistics():
    with laboratory(EAGER, capacity=8 * MIB):
        torch.accelerator.reset_peak_memory_stats()
        before = torch.accelerator.memory_allocated()
        x = torch.empty(MIB, dtype=torch.uint8, device=DEVICE)
        assert torch.accelerator.memory_allocated() - before == MIB
        assert torch.accelerator.get_memory_info() == (7 * MIB, 8 * MIB)
        del x
        assert torch.accelerator.memory_allocated() == before
        assert torch.accelerator.max_memory_allocated() == before + MIB
        assert torch.accelerator.memory_reserved() == MIB
        torch.accelerator.empty_cache()
        assert torch.accelerator.memory_reserved() == 0


def test_memory_is_reused_at_once_and_by_its_stream_only():
    with laboratory(EAGER):
        pointer = torch.empty(1000, device=DEVICE).data_ptr()
        again = torch.empty(1000, device=DEVICE)
        assert again.data_ptr() == pointer
        del again
        with torch.Stream(device=DEVICE):
            other = torch.empty(1000, device=DEVICE)
        assert other.data_ptr() != pointer
        del other


def test_fresh_and_freed_memory_reads_as_nan():
    def body():
        fresh = torch.empty(4, device=DEVICE).cpu()
        x = torch.ones(4, device=DEVICE)
        alias = torch.empty(0, device=DEVICE).set_(x.untyped_storage(), 0, (4,), (1,))
        x.untyped_storage().resize_(0)
        with pytest.raises(RuntimeError, match="illegal memory access"):
            alias + 1
        return fresh

    assert run_in(EAGER, body).isnan().all()


@every_schedule
def test_a_storage_is_resized_away_and_restored_in_place(schedule):
    def body():
        torch.manual_seed(0)
        w = torch.randn(8, 8).to(DEVICE).requires_grad_()
        x = torch.randn(4, 8).to(DEVICE).requires_grad_()
        y = (x @ w).relu()
        z = y @ w
        storage, version = y.untyped_storage(), y._version
        nbytes = storage.nbytes()
        host = torch.empty(nbytes // 4, pin_memory=True)
        host.copy_(y.detach().view(-1))
        storage.resize_(0)
        assert storage.nbytes() == 0 and y.shape == (4, 8)
        torch.full((4, 8), 7.0, device=DEVICE)  # likely in the bytes that were given back
        storage.resize_(nbytes)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(y):
            y.view(-1).copy_(host)
        assert y._version == version
        z.sum().backward()
        return x.grad.cpu()

    grad = run_in(schedule, body)
    assert torch.equal(grad, run_in(EAGER, body)) and not grad.isnan().any()


def test_growing_a_storage_keeps_its_bytes():
    def body():
        x = torch.arange(4.0, device=DEVICE)
        x.untyped_storage().resize_(64)
        y = torch.arange(4.0, device=DEVICE)
        y.resize_(8)
        return x.tolist(), y[:4].tolist()

    assert run_in(LAZY, body) == ([0.0, 1, 2, 3],) * 2


def test_every_way_to_pin_memory():
    with laboratory(EAGER):
        assert torch.empty(4, pin_memory=True).is_pinned()
        assert torch.ones(3).pin_memory().is_pinned()
        assert torch.ones(3).pin_memory().tolist() == [1.0] * 3
        assert not torch.ones(3).is_pinned()
        loader = torch.utils.data.DataLoader([1.0, 2.0], pin_memory=True)
        assert all(batch.is_pinned() for batch in loader)
        with pytest.raises(RuntimeError, match="pinned"):
            torch.empty(4, device=DEVICE, pin_memory=True)


def test_pinned_memory_in_use_by_a_copy_is_not_handed_out_again():
    def body():
        device = torch.ones(1024, device=DEVICE)
        host = torch.empty(1024, pin_memory=True)
        pointer = host.data_ptr()
        host.copy_(device, non_blocking=True)
        del host
        assert torch.empty(1024, pin_memory=True).data_ptr() != pointer
        torch.accelerator.synchronize()
        assert torch.empty(1024, pin_memory=True).data_ptr() == pointer

    run_in(LAZY, body)


def test_a_pinned_slot_that_is_reused_too_early_is_caught():
    def body(wait):
        slot = torch.empty(64, pin_memory=True)
        out, back, main = (torch.Stream(device=DEVICE) for _ in range(2)), None, None
        first, second = out
        main = torch.accelerator.current_stream()
        a, b = (torch.full((64,), float(i), device=DEVICE) for i in (1, 2))
        back = torch.empty(64, device=DEVICE)
        for stream in (first, second):
            stream.wait_stream(main)
        with first:
            slot.copy_(a, non_blocking=True)
            back.copy_(slot, non_blocking=True)
        if wait:
            second.wait_stream(first)
        with second:
            slot.copy_(b, non_blocking=True)
        for stream in (first, second):
            main.wait_stream(stream)
        return back[0].item()

    for schedule in SCHEDULES:
        assert run_in(schedule, body, True) == 1.0
    with pytest.raises(RuntimeError, match="stream race: 'copy_d2h'"):
        run_in(EAGER, body, False)
    wrong = [s for s in simdev.schedules(20) if run_in(s.with_check("off"), body, False) != 1.0]
    assert wrong, "no schedule showed the reused slot's bytes"


@pytest.mark.parametrize("way", ["count", "budget"])
def test_pin_failures_are_injected_and_end_with_the_block(way):
    with laboratory(EAGER):
        context = faults.fail_pinned(2, after=1) if way == "count" else faults.pinned_budget(4096)
        kept = []
        with context:
            kept.append(torch.empty(1024, pin_memory=True))
            for _ in range(2):
                with pytest.raises(torch.AcceleratorError, match="cannot pin"):
                    torch.empty(1024, pin_memory=True)
            if way == "count":
                kept.append(torch.empty(1024, pin_memory=True))
        kept.append(torch.empty(1024, pin_memory=True))
        kept.clear()


def test_driver_allocations_are_counted_and_stop_in_a_steady_step():
    with laboratory(EAGER):

        def step():
            host = torch.empty(1000, pin_memory=True)
            host.copy_(torch.ones(1000, device=DEVICE) * 2, non_blocking=True)
            torch.accelerator.synchronize()

        step()
        assert counters.device_allocations() > 0 and counters.pinned_allocations() == 1
        counters.reset()
        step()
        assert counters.device_allocations() == 0 and counters.pinned_allocations() == 0


def test_unpinned_copies_are_staged_or_block():
    with laboratory(LAZY):
        source, device = torch.ones(4), torch.empty(4, device=DEVICE)
        counters.reset()
        device.copy_(source, non_blocking=True)
        assert counters.host_syncs() == 0
        source.zero_()
        back = torch.empty(4)
        back.copy_(device, non_blocking=True)
        assert back.tolist() == [1.0] * 4 and counters.host_syncs() == 1
        del device


def test_tensors_are_saved_and_loaded(tmp_path):
    def body():
        torch.save(torch.ones(2, device=DEVICE), tmp_path / "x.pt")
        x = torch.load(tmp_path / "x.pt")
        assert x.device.type == DEVICE
        return x.tolist()

    assert run_in(EAGER, body) == [1.0, 1.0]
