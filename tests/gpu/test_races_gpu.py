"""Races on a real GPU, where nobody can look into the machine: delays make them happen by time.

The simulator finds the same ones by rule. Torch's stream sanitizer says the rest. Needs
--device cuda.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_training import Region, new_pool, train
from helpers import EVERYTHING, assert_same_gradients

import memswap
from memswap._native import native
from memswap.engine import transfers

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]

HERE = Path(__file__).resolve().parent
#: Cycles of torch.cuda._sleep: some milliseconds on any GPU, longer than any kernel or copy here.
DELAY_CYCLES = 5_000_000


def cuda_stream(stream: torch.Stream) -> torch.cuda.Stream:
    return torch.cuda.Stream(
        stream_id=stream.stream_id,
        device_index=stream.device_index,
        device_type=stream.device_type,
    )


class Delayed(native.LaneAround):
    """A lane around whose transfers the chosen streams sleep, so that an edge left out shows."""

    def __init__(self, lane: Any, slow: frozenset[str]) -> None:
        super().__init__(lane)
        self.lane, self.slow = lane, slow
        self.sends = cuda_stream(lane.send_stream)
        self.fetches = cuda_stream(lane.fetch_stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.lane, name)

    def sleep(self, where: str, stream: torch.cuda.Stream | None = None) -> None:
        if where in self.slow:
            with torch.cuda.stream(stream):  # None: the current one
                torch.cuda._sleep(DELAY_CYCLES)

    def send(self, storage: Any, block: Any) -> Any:
        self.sleep("producer")  # the send must wait for it: edge 1
        self.sleep("send", self.sends)  # whoever frees or fetches must wait for it: edges 2 and 3
        ticket = self.lane.send(storage, block)
        self.sleep("after send", self.sends)
        return ticket

    def fetch(self, block: Any) -> Any:
        self.sleep("allocation")  # what used the memory before may still run: edge 4
        self.sleep("fetch", self.fetches)  # the consumer must wait for it: edges 5 and 7
        fetched = self.lane.fetch(block)
        self.sleep("consumer")  # reads late; the memory must not be reused before: edge 6
        return fetched


@contextlib.contextmanager
def delayed_lanes(slow: set[str]) -> Iterator[None]:
    original = transfers.open_lane
    transfers.open_lane = lambda *a, **k: Delayed(original(*a, **k), frozenset(slow))
    try:
        yield
    finally:
        transfers.open_lane = original


@pytest.mark.parametrize(
    "slow",
    [
        {"producer"},
        {"send"},
        {"after send"},
        {"allocation"},
        {"fetch"},
        {"consumer"},
        {"producer", "consumer", "allocation"},
        {"send", "fetch"},
    ],
    ids=lambda slow: "+".join(sorted(slow)),  # in the next process as in this one
)
def test_delays_before_each_edge_change_nothing(device: torch.device, slow: set[str]) -> None:
    expected = train(device, contextlib.nullcontext, steps=2)
    with delayed_lanes(slow):
        for prefetch_bytes in ("auto", 0):
            saved = memswap.saved_tensors(
                EVERYTHING, pool=new_pool(device), prefetch_bytes=prefetch_bytes
            )
            found = train(device, lambda: saved, steps=2)
            assert saved.stats().moved_storages > 0
            assert_same_gradients(found, expected)


def test_a_lane_that_leaves_an_edge_out_is_found_by_a_delay(device: torch.device) -> None:
    """The test above can fail: here the send does not wait for what produces the tensor."""

    class Unordered(Delayed):
        def send(self, storage: Any, block: Any) -> Any:
            self.sleep("producer")
            with torch.cuda.stream(self.sends):  # so compute is not what the send waits for
                return self.lane.send(storage, block)

    expected = train(device, contextlib.nullcontext, steps=2)
    original = transfers.open_lane
    transfers.open_lane = lambda *a, **k: Unordered(original(*a, **k), frozenset({"producer"}))
    try:
        saved = memswap.saved_tensors(EVERYTHING, pool=new_pool(device), prefetch_bytes=0)

        # Each forward begins with a delay, or small kernels would be done before the copy starts.
        def delayed(on: torch.device, region: Region) -> Any:
            torch.cuda._sleep(DELAY_CYCLES)
            return train(on, region, steps=2)

        found = delayed(device, lambda: saved)
    finally:
        transfers.open_lane = original
    with pytest.raises(AssertionError, match="differs"):
        assert_same_gradients(found, expected)


def test_torchs_stream_sanitizer_has_nothing_to_say() -> None:
    """A process of its own: the sanitizer is switched on when torch is first imported."""
    program = f"""
import sys
sys.path[:0] = [{str(HERE)!r}, {str(HERE.parent / "engine")!r}]
import torch, memswap
import gpu_training
device = torch.device("cuda", 0)
saved = memswap.saved_tensors(gpu_training.EVERYTHING, pool=gpu_training.new_pool(device))
stream = torch.cuda.Stream(device)
gpu_training.train(device, lambda: saved, steps=2)
stream.wait_stream(torch.cuda.current_stream(device))
with torch.cuda.stream(stream):
    gpu_training.train(device, lambda: saved, steps=2)
torch.cuda.synchronize()
assert saved.stats().moved_storages > 0
print("finished")
"""
    path = [entry for entry in sys.path if entry] + [os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "TORCH_CUDA_SANITIZER": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
    }
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=80,
        check=False,
    )
    assert "possible data race" not in ended.stderr, ended.stderr[-4000:]
    assert ended.returncode == 0 and "finished" in ended.stdout, ended.stderr[-4000:]
