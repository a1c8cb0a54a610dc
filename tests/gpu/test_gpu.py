"""The engine on a real GPU: the same promises, where nobody can look into the machine.

Delays make the races that the simulator finds by rule happen by time; CUDA's own tools (the sync
debug mode, torch's stream sanitizer, memory statistics) say the rest. Needs --device cuda.
"""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS is first used

import pytest
import torch
from helpers import EVERYTHING, assert_nothing_left, assert_same_gradients, gradients
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import memswap
from memswap.engine import transfer

pytestmark = pytest.mark.gpu

HERE = Path(__file__).resolve().parent
WIDTH, DEPTH, LENGTH, BATCH = 256, 4, 128, 8
#: Cycles of torch.cuda._sleep: some milliseconds on any GPU, longer than any kernel or copy here.
DELAY_CYCLES = 5_000_000
Region = Callable[[], contextlib.AbstractContextManager[Any]]


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    """The same bits from the same program. Not `warn_only`: then attention's backward only warns,
    and adds in any order, flash attention's and float32's alike."""
    before = torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before, warn_only=warned)
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()


class Layer(nn.Module):
    """A pre-norm transformer layer with causal attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = (*x.shape[:2], 3, 4, WIDTH // 4)
        q, k, v = self.qkv(self.norm1(x)).view(shape).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(DEPTH)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean()


def new_model(device: torch.device, seed: int = 0) -> Transformer:
    torch.manual_seed(seed)
    return Transformer().to(device)


def new_input(device: torch.device, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(BATCH, LENGTH, WIDTH, generator=generator).to(device)


def new_pool(device: torch.device) -> memswap.HostPool:
    return memswap.HostPool(budget="1GiB", slab="16MiB", device=device)


def train(device: torch.device, region: Region, steps: int = 3) -> list[torch.Tensor | None]:
    """Gradients of several steps, and between them a graph that is dropped unused."""
    model = new_model(device)
    found: list[torch.Tensor | None] = []
    for step in range(steps):
        x = new_input(device, seed=step)
        with region():
            loss = model(x)
        loss.backward()
        del loss
        found += gradients(model)
        model.zero_grad(set_to_none=True)
        with region():
            dropped = model(x)
        del dropped
    return found


def check(
    device: torch.device, program: Callable[[torch.device, Region], Any], **options: Any
) -> memswap.Stats:
    """The program plain and managed."""
    expected = program(device, contextlib.nullcontext)
    saved = memswap.saved_tensors(EVERYTHING, pool=new_pool(device), **options)
    found = program(device, lambda: saved)
    torch.cuda.synchronize(device)
    assert_same_gradients(found, expected)
    stats = saved.stats()
    assert stats.moved_storages > 0 and stats.freed_bytes > 0, "nothing moved"
    assert_nothing_left(stats)
    return stats


@pytest.mark.parametrize("prefetch_bytes", ["auto", 0, "1MiB"])
def test_gradients_are_bit_identical(device: torch.device, prefetch_bytes: Any) -> None:
    check(device, train, prefetch_bytes=prefetch_bytes)


# ---------------------------------------------------------------- races, by time
def cuda_stream(parts: tuple[int, int, int]) -> torch.cuda.Stream:
    stream_id, device_index, device_type = parts
    return torch.cuda.Stream(
        stream_id=stream_id, device_index=device_index, device_type=device_type
    )


class Delayed:
    """A lane around whose transfers the chosen streams sleep, so that an edge left out shows."""

    def __init__(self, lane: Any, slow: frozenset[str]) -> None:
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
    original = transfer.open_lane
    transfer.open_lane = lambda *a, **k: Delayed(original(*a, **k), frozenset(slow))
    try:
        yield
    finally:
        transfer.open_lane = original


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
    original = transfer.open_lane
    transfer.open_lane = lambda *a, **k: Unordered(original(*a, **k), frozenset({"producer"}))
    try:
        saved = memswap.saved_tensors(EVERYTHING, pool=new_pool(device), prefetch_bytes=0)

        # Each forward begins with a delay, or small kernels would be done before the copy starts.
        def delayed(on: torch.device, region: Region) -> Any:
            torch.cuda._sleep(DELAY_CYCLES)
            return train(on, region, steps=2)

        found = delayed(device, lambda: saved)
    finally:
        transfer.open_lane = original
    with pytest.raises(AssertionError, match="differs"):
        assert_same_gradients(found, expected)


# ---------------------------------------------------------------- streams
def test_training_on_streams_of_the_users_own(device: torch.device) -> None:
    def program(on: torch.device, region: Region) -> list[torch.Tensor | None]:
        streams = [torch.cuda.Stream(on) for _ in range(2)]
        found: list[torch.Tensor | None] = []
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream(on))
            with torch.cuda.stream(stream):
                found += train(on, region, steps=2)
        torch.cuda.synchronize(on)
        return found

    check(device, program, prefetch_bytes=0)


def test_two_devices(device: torch.device) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")

    def program(on: torch.device, region: Region) -> list[torch.Tensor | None]:
        other = torch.device("cuda", 1)
        first, second = new_model(on, seed=0), new_model(other, seed=1)
        for step in range(3):
            with region():
                x = new_input(on, seed=step)
                for layer in first.layers:
                    x = layer(x)
                loss = second(x.to(other))
            loss.backward()
            del loss, x
        return gradients(first) + gradients(second)

    check(device, program)


# ---------------------------------------------------------------- a steady step
class Steady:
    """A managed model after some steps."""

    def __init__(self, device: torch.device, how: str, policy: memswap.Policy = EVERYTHING) -> None:
        self.pool = new_pool(device)
        self.model, self.x = new_model(device), new_input(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4, foreach=True)
        self.region: Region = contextlib.nullcontext
        self.swap: Any = None
        if how == "saved_tensors":
            self.swap = memswap.saved_tensors(policy, pool=self.pool)
            self.region = lambda: self.swap
        elif how == "manage":
            self.swap = memswap.manage(self.model.layers, policy, pool=self.pool)
        for _ in range(5):
            self.step()
        torch.cuda.synchronize(device)

    def step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        with self.region():
            loss = self.model(self.x)
        loss.backward()
        self.optimizer.step()


@pytest.mark.parametrize("how", ["saved_tensors", "manage"])
@pytest.mark.parametrize("action", ["swap", "encode", "encode_swap"])
def test_a_steady_step_never_waits_on_the_host(device: torch.device, how: str, action: str) -> None:
    steady = Steady(device, how, memswap.Policy(action=memswap.Action(action), min_bytes=1))
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(10):
            steady.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert steady.swap.stats().moved_storages > 0


@pytest.mark.parametrize("how", ["saved_tensors", "manage"])
def test_a_steady_step_takes_nothing_from_the_driver(device: torch.device, how: str) -> None:
    steady = Steady(device, how)

    def taken() -> tuple[int, int]:
        torch.cuda.synchronize(device)
        segments = torch.cuda.memory_stats(device)["num_device_alloc"]
        return segments, steady.pool.statistics().slabs_acquired

    # How far the host is ahead varies, and with it what is alive at once and where free pieces lie:
    # nobody can say in which step the last segment is taken.
    counts = [taken()]
    for _ in range(5):
        for _ in range(50):
            steady.step()
        counts.append(taken())
        if counts[-1] == counts[-2]:
            break
    assert counts[-1] == counts[-2], f"segments and slabs after each 50 steps: {counts}"
    assert_nothing_left(steady.swap.stats())


def test_the_peak_of_device_memory_is_lower(device: torch.device) -> None:
    def peak_of(how: str) -> tuple[int, Any]:
        steady = Steady(device, how)
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        if steady.swap is not None:
            steady.swap.reset_stats()
        steady.step()
        torch.cuda.synchronize(device)
        stats = steady.swap.stats() if steady.swap is not None else None
        return torch.cuda.max_memory_allocated(device) - before, stats

    plain, _ = peak_of("plain")
    managed, stats = peak_of("manage")
    assert stats.freed_bytes > 0
    # Gradients are as large as here as the activations of a layer, and what is in flight counts.
    assert managed < plain - stats.freed_bytes // 4, (
        f"the peak of a step fell from {plain} to {managed} bytes; {stats.freed_bytes} were freed"
    )


# ---------------------------------------------------------------- what large models use
def test_a_bf16_transformer_with_autocast_and_flash_attention(device: torch.device) -> None:
    def program(on: torch.device, region: Region) -> list[torch.Tensor | None]:
        model = new_model(on)
        found: list[torch.Tensor | None] = []
        for step in range(3):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                with sdpa_kernel(SDPBackend.FLASH_ATTENTION), region():
                    loss = model(new_input(on, seed=step))
            loss.backward()
            del loss
            found += gradients(model)
            model.zero_grad(set_to_none=True)
        return found

    if torch.cuda.get_device_capability(device) < (8, 0):
        pytest.skip("flash attention needs compute capability 8.0")
    repeated = [program(device, contextlib.nullcontext) for _ in range(2)]
    assert_same_gradients(*repeated)  # or the comparison would say nothing
    check(device, program)


@pytest.mark.parametrize("action", ["swap", "encode", "encode_swap"])
def test_a_captured_graph_keeps_its_tensors_and_says_so(device: torch.device, action: str) -> None:
    """Nothing leaves inside a capture: the graph would replay copies into blocks of others."""

    def gradients_of_replay(region: Region) -> list[torch.Tensor | None]:
        model, x = new_model(device), new_input(device)
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):  # as torch.cuda.graph's documentation warms up
            for _ in range(3):
                model.zero_grad(set_to_none=True)
                model(x).backward()
        torch.cuda.current_stream(device).wait_stream(side)
        model.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), region():
            loss = model(x)
            loss.backward()
        x.copy_(new_input(device, seed=7))
        graph.replay()
        torch.cuda.synchronize(device)
        found = gradients(model)
        graph.reset()
        return found

    expected = gradients_of_replay(contextlib.nullcontext)
    policy = memswap.Policy(action=memswap.Action(action), min_bytes=1)
    saved = memswap.saved_tensors(policy, pool=new_pool(device))
    with saved:  # the lane and the pool exist before the capture, as in a run that captures later
        new_model(device)(new_input(device)).backward()
    saved.reset_stats()
    found = gradients_of_replay(lambda: saved)
    assert_same_gradients(found, expected)
    stats = saved.stats()
    assert stats.moved_storages == 0, "a storage left inside a capture"
    assert stats.kept["stream capture"].tensors > 0


def test_torchs_stream_sanitizer_has_nothing_to_say() -> None:
    """A process of its own: the sanitizer is switched on when torch is first imported."""
    program = f"""
import sys
sys.path[:0] = [{str(HERE)!r}, {str(HERE.parent / "engine")!r}]
import torch, memswap
import test_gpu
device = torch.device("cuda", 0)
saved = memswap.saved_tensors(test_gpu.EVERYTHING, pool=test_gpu.new_pool(device))
stream = torch.cuda.Stream(device)
test_gpu.train(device, lambda: saved, steps=2)
stream.wait_stream(torch.cuda.current_stream(device))
with torch.cuda.stream(stream):
    test_gpu.train(device, lambda: saved, steps=2)
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
