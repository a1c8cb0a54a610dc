"""The CUDA codec on a real GPU: frames as the CPU writes them, and tensors that come back.

Needs --device cuda. The emulator (tests/unit/test_cuda_emulator.py) has run the same kernels
already; what only a GPU can show is that its compiler and its memory agree.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import memswap
from memswap import codec
from memswap._native import native

pytestmark = pytest.mark.gpu

FLOATS = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
LENGTHS = [0, 1, 1000, 1024, 8192, 100_003, 1_000_000]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def some_tensor(dtype: torch.dtype, length: int, kind: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(length)
    if dtype == torch.bool:
        return torch.rand(length, generator=generator) < 0.3
    if dtype in INTEGERS:
        high = 100 if kind == "normal" else torch.iinfo(dtype).max
        return torch.randint(0, high, (length,), generator=generator).to(dtype)
    if kind == "bits":
        width = torch.empty(0, dtype=dtype).element_size()
        raw = torch.randint(0, 256, (length * width,), generator=generator, dtype=torch.uint8)
        return raw.view(dtype)
    values = torch.randn(length, generator=generator)
    if kind == "sparse":
        values = values.relu()
    return values.to(dtype)


def test_the_self_check_finds_no_fault(device: torch.device) -> None:
    """First, because every test below would fail for what it finds."""
    assert native.codec_faults(device) == []


@pytest.mark.parametrize("kind", ["normal", "sparse", "bits"])
@pytest.mark.parametrize("dtype", [*FLOATS, *FP8, *INTEGERS, torch.bool], ids=str)
def test_frames_are_those_of_the_cpu_and_come_back(
    device: torch.device, dtype: torch.dtype, kind: str
) -> None:
    for length in LENGTHS:
        tensor = some_tensor(dtype, length, kind)
        on_gpu = memswap.encode(tensor.to(device))
        on_cpu = memswap.encode(tensor)
        assert on_gpu.to_bytes() == on_cpu.to_bytes(), f"another frame for {length} elements"
        back = memswap.decode(on_gpu)
        assert back.device == device and back.dtype == dtype
        assert torch.equal(as_bytes(back.cpu()), as_bytes(tensor)), f"{length} elements"


@pytest.mark.parametrize("dtype", [*FLOATS, *FP8, torch.int32, torch.bool], ids=str)
def test_what_does_not_fit_frames_is_in_pinned_memory_and_comes_back(
    device: torch.device, dtype: torch.dtype
) -> None:
    """Kernels write there, and read there: all payloads, since the frames have no room for any."""
    pool = memswap.HostPool("64MiB", slab="16MiB", device=device, pageable=False)
    lane = native.StreamCodecLane(device, arena_budget=0, arena_pool=pool.native)
    layout = {torch.bool: 2, torch.int32: 3}.get(dtype, 0)  # bits, ints, dense
    code = native.dtype_code(dtype)
    tensors = [some_tensor(dtype, length, "bits") for length in (100_003, 1_000_000)]
    views, made = [], []
    for tensor in tensors:
        on_device = tensor.to(device)
        views.append(native.capture(on_device))
        encoding = lane.encode(native.StorageRef(on_device), (code, layout, 0))
        assert encoding is not None, lane.last_refusal
        made.append(encoding)
        del on_device
    for encoded, departure in made:
        departure.wait()
        assert encoded.overflow_nbytes == 0, "the device's memory was taken"
    for view, (encoded, _), tensor in zip(views, made, tensors, strict=True):
        storage, arrival = lane.decode(encoded)
        arrival.wait()
        back = view.rebuild(storage, False)
        assert torch.equal(as_bytes(back.cpu()), as_bytes(tensor))
        assert encoded.report().overflow_used > 0, "nothing overflowed, so this tested nothing"
    assert lane.decode_status() == 0


@pytest.mark.parametrize("offset", [1, 3, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8], ids=str)
def test_tensors_at_any_offset_come_back(
    device: torch.device, dtype: torch.dtype, offset: int
) -> None:
    tensor = some_tensor(dtype, 50_000, "normal")[offset:]
    view = some_tensor(dtype, 50_000, "normal").to(device)[offset:]
    assert torch.equal(as_bytes(memswap.decode(memswap.encode(view)).cpu()), as_bytes(tensor))


def test_encoding_on_a_side_stream_waits_for_nothing_else(device: torch.device) -> None:
    tensor = torch.randn(1 << 20, device=device).to(torch.bfloat16)
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        back = memswap.decode(memswap.encode(tensor))
    torch.cuda.current_stream(device).wait_stream(stream)
    assert torch.equal(as_bytes(back), as_bytes(tensor))


def kernels_of(work: Callable[[], object]) -> list[str]:
    """Names of the kernels that a call launches."""
    work()  # what is only done once
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    on_device = [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return [event.name for event in on_device if "memcpy" not in event.name.lower()]


def test_the_operators_decode_of_a_named_shape_is_one_launch(device: torch.device) -> None:
    dtype, layout = codec.dtype_code(torch.bfloat16), codec.Layout.DENSE.value
    x = some_tensor(torch.bfloat16, 100_000, "normal").to(device)
    frame = torch.ops.memswap.encode(x, dtype, layout)
    named = kernels_of(lambda: torch.ops.memswap.decode(frame, x.shape, x.dtype, layout))
    unknown = kernels_of(lambda: torch.ops.memswap.decode(frame, x.shape, x.dtype))
    encodes = kernels_of(lambda: torch.ops.memswap.encode(x, dtype, layout))
    assert len(named) == 1 and len(unknown) == 2 and len(encodes) == 2, (named, unknown, encodes)


def test_operators_in_a_graph_that_is_replayed_code_what_is_there_then(
    device: torch.device,
) -> None:
    dtype = codec.dtype_code(torch.bfloat16)
    x = some_tensor(torch.bfloat16, 100_000, "sparse").to(device)

    def there_and_back(layout: int) -> torch.Tensor:
        frame = torch.ops.memswap.encode(x, dtype, layout)
        return torch.ops.memswap.decode(frame, x.shape, x.dtype, layout)

    there_and_back(0)  # the codec's self-check waits, which no capture allows
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [there_and_back(layout) for layout in (0, 1)]
    for seed in range(3):
        torch.manual_seed(seed)
        x.copy_(torch.randn(100_000).relu())
        graph.replay()
        for back in found:
            assert torch.equal(as_bytes(back), as_bytes(x))
