"""torch.ops.memswap.encode and decode: operators like any other, in a graph and out of it."""

from __future__ import annotations

import sys
import threading
import time

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from memswap import codec
from memswap._native import native

pytestmark = pytest.mark.cpu_only

encode = torch.ops.memswap.encode
decode = torch.ops.memswap.decode
BF16 = codec.dtype_code(torch.bfloat16)


def round_trip(x: torch.Tensor) -> torch.Tensor:
    return decode(encode(x, BF16, codec.Layout.DENSE.value), x.shape, x.dtype)


@pytest.mark.parametrize("elements", [0, 1, 1024, 8193, 100_000])
@pytest.mark.parametrize("checksum", [False, True])
def test_a_round_trip_keeps_every_bit(elements: int, checksum: bool) -> None:
    x = torch.randn(elements).bfloat16()
    frame = encode(x, BF16, 0, checksum)
    assert frame.numel() == native.frame_sizes(BF16, 0, elements).max_nbytes
    assert torch.equal(decode(frame, [elements], x.dtype).view(torch.int16), x.view(torch.int16))


@pytest.mark.parametrize(
    ("tensor", "dtype", "layout"),
    [
        (torch.randn(3, 700).bfloat16(), BF16, 0),
        (torch.randn(3, 700), 3, 0),
        (torch.rand(5000) < 0.5, 7, 2),
        (torch.arange(5000), 14, 3),
        (torch.randn(7, 30, dtype=torch.complex64).view(torch.float32), 3, 1),
        (torch.randn(40, 50).t(), 3, 0),
    ],
)
def test_opcheck(tensor: torch.Tensor, dtype: int, layout: int) -> None:
    torch.library.opcheck(encode, (tensor, dtype, layout))
    torch.library.opcheck(encode, (tensor, dtype, layout, True))
    frame = encode(tensor, dtype, layout)
    torch.library.opcheck(decode, (frame, list(tensor.shape), tensor.dtype))


def test_decode_takes_the_layout_that_encode_was_given() -> None:
    x = torch.randn(3, 700).bfloat16()
    frame = encode(x, BF16, 1)
    assert torch.equal(decode(frame, x.shape, x.dtype, 1), x)
    torch.library.opcheck(decode, (frame, list(x.shape), x.dtype, 1))
    for layout in (-1, 6, 300):
        with pytest.raises(ValueError, match=f"no frame has layout {layout}"):
            decode(frame, x.shape, x.dtype, layout)


def test_under_fake_tensors_and_meta_the_sizes_are_known() -> None:
    with FakeTensorMode():
        fake = encode(torch.empty(9000, dtype=torch.bfloat16), BF16, 0)
    real = encode(torch.zeros(9000, dtype=torch.bfloat16), BF16, 0)
    meta = encode(torch.empty(9000, dtype=torch.bfloat16, device="meta"), BF16, 0)
    assert fake.shape == real.shape == meta.shape and fake.dtype == torch.uint8
    assert decode(meta, [90, 100], torch.bfloat16).shape == (90, 100)


@pytest.mark.parametrize("dynamic", [False, True])
def test_under_compile_in_one_graph(dynamic: bool) -> None:
    compiled = torch.compile(
        lambda x: round_trip(x * 2) + 1, backend="aot_eager", fullgraph=True, dynamic=dynamic
    )
    for rows in (3, 5, 8):
        x = torch.randn(rows, 1000).bfloat16()
        assert torch.equal(compiled(x), x * 2 + 1)


def test_a_frame_that_lost_its_alignment_decodes() -> None:
    x = torch.randn(5000).bfloat16()
    frame = encode(x, BF16, 0)
    for shift in (1, 8, 64):
        moved = torch.cat([frame.new_zeros(shift), frame])[shift:]
        assert torch.equal(decode(moved, [5000], x.dtype), x)


def test_wrong_arguments_are_value_errors_and_damage_is_a_runtime_error() -> None:
    x = torch.randn(5000).bfloat16()
    frame = encode(x, BF16, 0)
    with pytest.raises(ValueError, match="dtype 14 and layout 0"):
        encode(x, 14, 0)
    with pytest.raises(ValueError, match="dtype 99"):
        encode(x, 99, 0)
    with pytest.raises(ValueError, match="aligned array of elements of 8"):
        encode(x[:3], 14, 3)
    with pytest.raises(ValueError, match="tensor of bytes with one dimension"):
        decode(frame.view(-1, 1), [5000], x.dtype)
    with pytest.raises(RuntimeError, match="header"):
        decode(frame, [4999], x.dtype)
    with pytest.raises(RuntimeError, match="header"):
        decode(frame, [2500], torch.float32)
    with pytest.raises(RuntimeError, match="header"):
        decode(frame[:1000], [5000], x.dtype)


def test_encoding_is_not_differentiable_and_says_nothing_else() -> None:
    x = torch.randn(100, dtype=torch.bfloat16, requires_grad=True)
    frame = encode(x, BF16, 0)
    assert not frame.requires_grad
    assert not decode(frame, [100], x.dtype).requires_grad


def test_other_threads_run_while_one_encodes() -> None:
    """The GIL is let go of: another thread counts on meanwhile."""
    x = torch.randn(16 << 20).bfloat16()
    turns = 0
    stop = threading.Event()

    def count() -> None:
        nonlocal turns
        while not stop.is_set():
            turns += 1
            time.sleep(0)

    def counted_meanwhile() -> bool:
        before = turns
        encode(x, BF16, 0)
        return turns > before

    thread = threading.Thread(target=count)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # it runs only where this one lets go of the GIL
    try:
        thread.start()
        # A busy machine may have no processor for it during one encode.
        assert any(counted_meanwhile() for _ in range(50)), "the other thread stood still"
    finally:
        stop.set()
        sys.setswitchinterval(interval)
        thread.join()


@pytest.mark.parametrize("size", [[-1], [-5000, -1], [1 << 32, 1 << 32], [1 << 62, 4]])
def test_a_size_that_no_tensor_has_is_a_value_error(size: list[int]) -> None:
    for elements in (0, 5000):
        frame = encode(torch.zeros(elements).bfloat16(), BF16, 0)
        with pytest.raises(ValueError, match="no tensor of"):
            decode(frame, size, torch.bfloat16)


def test_nothing_is_allocated_for_elements_that_a_frame_does_not_have() -> None:
    frame = encode(torch.zeros(5000).bfloat16(), BF16, 0)
    for elements in (1 << 40, 1 << 60):  # MemoryError, or memory that is touched by nobody
        with pytest.raises(RuntimeError, match=f"says 5000 elements, expected {elements}"):
            decode(frame, [elements], torch.bfloat16)
    for cut in (0, 100):
        with pytest.raises(RuntimeError, match=f"found {cut} bytes, expected a frame's header"):
            decode(frame[:cut], [5000], torch.bfloat16)
