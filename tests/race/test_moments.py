"""Moments of a device: of the one that was asked for, and none while a graph is captured."""

from __future__ import annotations

import pytest
import torch
from planned_stacks import COMPUTE, LAZY
from race_workloads import DEVICE

import memswap
from memswap._native import native
from memswap.windows import Windows
from simdev import laboratory, virtual_time

pytestmark = [pytest.mark.own_laboratory, pytest.mark.one_schedule]

CUDA = torch.device("cuda", 0)


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


@pytest.fixture
def capturing(monkeypatch):
    """A GPU whose current stream captures a graph, as far as anybody may ask."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)


def test_nothing_is_timed_while_a_graph_is_captured(capturing):
    """An event that is recorded then belongs to the graph: it never happens in this process."""
    recorder = native.Recorder(CUDA, torch.cuda.is_current_stream_capturing)
    recorder.close()
    assert recorder.ready() and recorder.take() is None
    windows = Windows().engine(memswap.Policy(), None, None).windows
    assert windows is not None
    windows.begin_iteration()  # the second one is measured
    assert windows.durations.measuring
    assert windows.durations.start("product", 1.0, CUDA) is None


def test_an_iteration_that_ends_in_a_capture_has_no_record_and_nobody_waits_for_it():
    captured: list[bool] = []
    recorder = native.Recorder(DEVICE, lambda: bool(captured))
    captured.append(True)
    assert not recorder.ready()
    recorder.close()
    assert recorder.ready()
    recorder.wait()
    assert recorder.take() is None
