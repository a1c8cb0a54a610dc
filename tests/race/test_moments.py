"""Moments of a device: of the one that was asked for, and none while a graph is captured."""

from __future__ import annotations

import pytest
import torch
from planned_stacks import COMPUTE, LAZY
from race_workloads import DEVICE

import memswap
from memswap._native import native
from memswap.windows import Windows
from simdev import capturing, laboratory, virtual_time

pytestmark = [pytest.mark.own_laboratory, pytest.mark.one_schedule]


def test_a_second_device_is_timed_by_its_own_stream():
    """Its layers run while another device is the current one."""
    other = torch.device(DEVICE.type, 1)
    assert torch.accelerator.current_device_index() == 0

    def seconds_of(products: int) -> float:
        """Of an iteration that saves nothing, from its begin to its end."""
        x = torch.ones(64, 64, device=other)
        recorder = native.Recorder(other)
        for _ in range(products):
            x = x @ x
        recorder.close()
        recorder.wait()
        record = recorder.take()
        assert record is not None and record.gaps_s == []
        return record.tail_s

    def measured() -> tuple[float, float]:
        with virtual_time(**COMPUTE):
            return seconds_of(50), seconds_of(0)

    with laboratory(LAZY):
        busy_s, idle_s = measured()
    assert busy_s > 25e-6, f"50 products took {busy_s * 1e6:.1f} us on the second device"
    assert idle_s < 0.5 * busy_s


asks_devices = pytest.mark.skipif(
    torch.__version__ < (2, 13), reason="torch asks no device of ours whether it captures a graph"
)


@asks_devices
def test_nothing_is_timed_while_a_graph_is_captured():
    """An event that is recorded then belongs to the graph: it never happens in this process."""
    with laboratory(LAZY), capturing(torch.accelerator.current_stream(DEVICE)):
        recorder = native.Recorder(DEVICE)
        recorder.close()
        assert recorder.ready() and recorder.take() is None
        windows = Windows().engine(memswap.Policy(), None, None).windows
        assert windows is not None
        windows.begin_iteration()  # the second one is measured
        assert windows.durations.measuring
        assert windows.durations.start("product", 1.0, DEVICE) is None


@asks_devices
def test_an_iteration_that_ends_in_a_capture_has_no_record_and_nobody_waits_for_it():
    with laboratory(LAZY):
        recorder = native.Recorder(DEVICE)
        assert not recorder.ready()
        with capturing(torch.accelerator.current_stream(DEVICE)):
            recorder.close()
        assert recorder.ready()
        recorder.wait()
        assert recorder.take() is None


@asks_devices
def test_what_is_saved_while_a_graph_is_captured_stays():
    """On the stream that captures it. Another one's storages leave."""
    policy = memswap.Policy(action=memswap.Action.SWAP, min_bytes=1)
    other = torch.Stream(DEVICE)

    def step(saved: memswap.saved_tensors, stream: torch.Stream) -> int:
        saved.reset_stats()
        with stream, saved:
            x = torch.ones(64, 64, device=DEVICE, requires_grad=True)
            loss = (x * 2).sin().sin().sin().sum()  # backward needs the last one at once
        with stream:
            loss.backward()
        torch.accelerator.synchronize(DEVICE)
        return saved.stats().moved_storages

    def check() -> None:
        saved = memswap.saved_tensors(policy)
        assert step(saved, other) > 1
        with capturing(other):
            assert step(saved, torch.accelerator.current_stream(DEVICE)) > 1
            assert step(saved, other) == 0
            assert saved.stats().kept["stream capture"].tensors == 3
        assert step(saved, other) > 1

    with laboratory(LAZY, allow_pinned_growth=True):
        check()
