"""memswap.encode, decode and Frame: every bit of every tensor, and words for every broken frame."""

from __future__ import annotations

import copy
import pickle
import struct
from typing import Any

import pytest
import torch
from apart import run_python
from hypothesis import given, settings
from hypothesis import strategies as st

import memswap
from memswap import codec
from memswap._native import native

pytestmark = pytest.mark.cpu_only

DTYPES = [
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
    torch.bool,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.uint32,
    torch.int64,
    torch.uint64,
    torch.complex32,
    torch.complex64,
    torch.complex128,
]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The elements' bytes, in the order of the elements. Equal bits are what `lossless` means."""
    return (
        torch.view_as_real(tensor).contiguous().view(torch.uint8)
        if tensor.is_complex()
        else (tensor.contiguous().view(-1).view(torch.uint8))
    )


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


def of_bytes(data: bytes, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of arbitrary bit patterns."""
    raw = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0).byte()
    if dtype.is_complex:
        real = {8: torch.float32, 16: torch.float64, 4: torch.float16}[dtype.itemsize]
        return torch.view_as_complex(raw.view(real).view(-1, 2))
    return raw.view(dtype)


def layouts_for(dtype: torch.dtype) -> list[str]:
    code = codec.dtype_code(dtype)
    names = ["ints", "raw"]
    names += ["dense", "sparse"] if code <= 6 else []
    names += ["bits"] if dtype.itemsize == 1 else []
    names += ["upcast"] if code == 3 else []
    return names


@pytest.fixture
def frame() -> memswap.Frame:
    generator = torch.Generator().manual_seed(0)
    return memswap.encode(torch.randn(30, 1000, generator=generator).bfloat16(), checksum=True)


# ---------------------------------------------------------------- bits
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(data=st.data())
@settings(max_examples=40)
def test_every_bit_pattern_of_every_dtype_comes_back(dtype: torch.dtype, data: Any) -> None:
    elements = data.draw(st.integers(0, 40) | st.sampled_from([1023, 1024, 1025, 9000]))
    nbytes = elements * dtype.itemsize
    seed = data.draw(st.binary(min_size=1, max_size=256))
    tensor = of_bytes((seed * (nbytes // len(seed) + 1))[:nbytes], dtype)
    layout = data.draw(st.sampled_from([None, *layouts_for(dtype)]))
    frame = memswap.encode(tensor, layout=layout, checksum=data.draw(st.booleans()))
    assert same_bits(memswap.decode(frame), tensor)
    again = memswap.Frame.from_bytes(frame.to_bytes())
    assert same_bits(memswap.decode(again), tensor)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_random_bits_of_several_tiles_come_back(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    data = torch.randint(0, 256, (20_000 * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    tensor = of_bytes(bytes(data.tolist()), dtype)
    for layout in [None, *layouts_for(dtype)]:
        assert same_bits(memswap.decode(memswap.encode(tensor, layout=layout)), tensor), layout


def layouts() -> list[Any]:
    base = torch.arange(2 * 3 * 4 * 5, dtype=torch.float32).view(2, 3, 4, 5) - 7.5
    return [
        pytest.param(base, id="contiguous"),
        pytest.param(base.permute(3, 1, 0, 2), id="permuted"),
        pytest.param(base.to(memory_format=torch.channels_last), id="channels_last"),
        pytest.param(base[:, 1], id="a slice with gaps"),
        pytest.param(base[1], id="a dense slice with an offset"),
        pytest.param(base[:1].expand(6, 3, 4, 5), id="expanded"),
        pytest.param(base[..., ::2], id="every second"),
        pytest.param(torch.tensor(3.5), id="no dimensions"),
        pytest.param(torch.empty(0), id="no elements"),
        pytest.param(torch.empty(4, 0, 3), id="no elements, three dimensions"),
        pytest.param(base.view(1, 120, 1), id="dimensions of one"),
        pytest.param(base.to(torch.complex64).conj(), id="conjugated"),
        pytest.param(base.to(torch.complex64).conj().imag, id="negated"),
        pytest.param(base.requires_grad_(), id="requires grad"),
    ]


@pytest.mark.parametrize("tensor", layouts())
def test_a_tensor_keeps_its_size_and_a_dense_one_its_strides(tensor: torch.Tensor) -> None:
    frame = memswap.encode(tensor)
    for back in (
        memswap.decode(frame),
        memswap.decode(memswap.Frame.from_bytes(frame.to_bytes())),
        memswap.decode(pickle.loads(pickle.dumps(frame))),
    ):
        assert same_bits(back, tensor.detach().resolve_conj().resolve_neg())
        if torch.ops.aten.is_non_overlapping_and_dense(tensor):
            assert back.stride() == tensor.stride()
        assert not back.requires_grad


def test_encoding_changes_nothing_and_is_not_recorded_by_autograd() -> None:
    tensor = torch.randn(100, requires_grad=True)
    version = tensor._version
    frame = memswap.encode(tensor * 2)
    assert tensor._version == version and memswap.decode(frame).grad_fn is None


def test_a_frame_decodes_any_number_of_times_into_memory_of_its_own() -> None:
    tensor = torch.randn(5000)
    frame = memswap.encode(tensor)
    first = memswap.decode(frame)
    first.zero_()
    assert same_bits(memswap.decode(frame), tensor)


def test_bools_that_are_neither_0_nor_1_come_back_among_bitmaps() -> None:
    generator = torch.Generator().manual_seed(2)
    data = torch.randint(0, 2, (8 * 1024 * 3,), dtype=torch.uint8, generator=generator)
    data[5000:5100] = torch.arange(100, 200)
    mask = data.view(torch.bool)
    frame = memswap.encode(mask)
    assert same_bits(memswap.decode(frame), mask)
    assert frame.ratio > 5, "one strange block is no reason to store the others as they are"


# ---------------------------------------------------------------- sizes
def test_bfloat16_activations_take_about_two_thirds() -> None:
    frame = memswap.encode(torch.randn(1 << 20).bfloat16())
    assert frame.ratio > 1.45, f"bfloat16 from a normal distribution: {frame.ratio:.2f}x"
    assert frame.raw_nbytes == 2 << 20
    assert abs(frame.nbytes - len(frame.to_bytes())) < 100


def test_masks_and_zeros_and_constants_are_small() -> None:
    coins = torch.rand(1 << 20) < 0.5
    assert 7.7 < memswap.encode(coins).ratio < 8
    dropout = torch.rand(1 << 20) >= 0.1
    assert memswap.encode(dropout).ratio > 9
    causal = torch.ones(1024, 1024, dtype=torch.bool).tril()
    assert memswap.encode(causal).ratio > 20
    zeros = torch.zeros(1 << 20, dtype=torch.bfloat16)
    assert memswap.encode(zeros, layout="sparse").ratio > 50
    assert memswap.encode(zeros).ratio > 150
    attention = torch.randn(1024, 1024).tril().bfloat16()
    assert memswap.encode(attention).ratio > 2.8
    relu = torch.relu(torch.randn(1 << 20)).bfloat16()
    assert memswap.encode(relu).ratio > 1.5 * memswap.encode(relu, layout="dense").ratio
    ids = torch.randint(0, 50_000, (1 << 16,))
    assert memswap.encode(ids).ratio > 3.7
    upcast = torch.randn(1 << 18).bfloat16().float()
    assert memswap.encode(upcast).ratio > 2.8


def test_the_worst_case_is_close_to_the_raw_bytes() -> None:
    noise = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8).view(torch.bfloat16)
    for layout in (None, "sparse", "ints", "raw"):
        assert memswap.encode(noise, layout=layout).ratio > 0.996  # type: ignore[arg-type]


def test_a_frame_holds_exactly_its_own_memory() -> None:
    memswap.codec.trim_spare_memory()
    before = int(memswap.codec.spare_memory()["in_use_bytes"])
    frame = memswap.encode(torch.randn(1 << 20).bfloat16())
    held = int(memswap.codec.spare_memory()["in_use_bytes"]) - before
    assert held == frame.nbytes, "the tail of the worst case was not given back"
    del frame
    assert int(memswap.codec.spare_memory()["in_use_bytes"]) == before
    assert memswap.codec.trim_spare_memory() > 0


def test_spare_memory_is_bounded_and_what_does_not_fit_works_all_the_same() -> None:
    frames = [memswap.encode(torch.zeros(64 << 20, dtype=torch.uint8), layout="raw")]
    budget = 1 << 30
    assert int(memswap.codec.spare_memory()["reserved_bytes"]) <= budget
    assert not memswap.decode(frames[0]).any()


# ---------------------------------------------------------------- what is refused
@pytest.mark.parametrize(
    "tensor",
    [
        pytest.param(torch.eye(3).to_sparse(), id="sparse"),
        pytest.param(torch.empty(3, device="meta"), id="meta"),
        pytest.param(torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), id="quantized"),
    ],
)
def test_a_tensor_without_plain_memory_is_a_type_error(tensor: torch.Tensor) -> None:
    with pytest.raises(TypeError, match="dense tensor with memory of its own"):
        memswap.encode(tensor)


def test_fake_tensors_are_a_type_error() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        fake = mode.from_tensor(torch.ones(3))
    with pytest.raises(TypeError, match="FakeTensor"):
        memswap.encode(fake)


def test_a_layout_that_is_none_or_does_not_fit_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="expected one of 'dense'"):
        memswap.encode(torch.ones(3), layout="thick")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="dtype 14 and layout 0"):
        memswap.encode(torch.ones(3, dtype=torch.int64), layout="dense")


# ---------------------------------------------------------------- broken frames
def patched(data: bytes, offset: int, patch: bytes) -> bytes:
    return data[:offset] + patch + data[offset + len(patch) :]


@pytest.mark.parametrize(
    ("offset", "patch", "words"),
    [
        (0, b"PK\x03\x04", "no memswap frame"),
        (0, b"1FSM", "big-endian"),
        (4, b"\x02\x00", "version 2, expected 1: install a newer memswap"),
        (4, b"\x00\x00", "version 0, expected 1"),
        (6, b"\x63", "no frame has dtype 99"),
        (7, b"\x02", "no frame has dtype 1 and layout 2"),
        (12, b"\x01", "status 1"),
        (16, struct.pack("<Q", 1 << 63), "damaged"),
        (16, struct.pack("<Q", 5), "damaged"),
        (24, struct.pack("<I", 7), "damaged"),
        (32, struct.pack("<Q", 1 << 60), "damaged"),
        (40, struct.pack("<Q", 1 << 60), "damaged"),
    ],
)
def test_a_damaged_header_is_named(
    frame: memswap.Frame, offset: int, patch: bytes, words: str
) -> None:
    with pytest.raises(memswap.FrameError, match=words):
        memswap.Frame.from_bytes(patched(frame.to_bytes(), offset, patch))


@pytest.mark.parametrize("kept", [0, 1, 3, 4, 5, 100, 127, 128, 2000, -1, -9, -20, -50])
def test_a_truncated_frame_is_named(frame: memswap.Frame, kept: int) -> None:
    with pytest.raises(memswap.FrameError, match=r"cut short|no memswap frame"):
        memswap.Frame.from_bytes(frame.to_bytes()[:kept])


def test_something_behind_a_frame_is_named(frame: memswap.Frame) -> None:
    with pytest.raises(memswap.FrameError, match="something behind it"):
        memswap.Frame.from_bytes(frame.to_bytes() + b"x")


@pytest.mark.parametrize(
    ("replacement", "words"),
    [
        (b"bfloat15", "'bfloat15', which torch"),
        (b"float\x00\xff1", "which torch"),
    ],
)
def test_an_unknown_dtype_is_named(frame: memswap.Frame, replacement: bytes, words: str) -> None:
    data = frame.to_bytes()
    with pytest.raises(memswap.FrameError, match=words):
        memswap.Frame.from_bytes(data[: -len(replacement)] + replacement)


def test_sizes_and_strides_that_do_not_fit_are_named(frame: memswap.Frame) -> None:
    data = frame.to_bytes()
    sizes = len(data) - len("bfloat16") - 1 - 4 * 8
    with pytest.raises(memswap.FrameError, match="strides"):
        memswap.Frame.from_bytes(patched(data, sizes, struct.pack("<2q", 30, 1001)))
    with pytest.raises(memswap.FrameError, match="strides"):
        memswap.Frame.from_bytes(patched(data, sizes + 16, struct.pack("<2q", 1, 30000)))
    with pytest.raises(memswap.FrameError, match="the trailer 29000 of dtype"):
        memswap.Frame.from_bytes(patched(data, sizes, struct.pack("<q", 29)))
    with pytest.raises(memswap.FrameError, match="dimensions"):
        memswap.Frame.from_bytes(patched(data, sizes - 4, struct.pack("<I", 1 << 31)))


@given(position=st.integers(0, 1 << 30), flip=st.integers(1, 255))
@settings(max_examples=300)
def test_no_flipped_byte_of_a_checked_frame_goes_unnoticed(position: int, flip: int) -> None:
    """Wherever it is: an error, or the very same bits (padding, counters, a stride of a one)."""
    tensor = torch.linspace(-3, 3, 3000).bfloat16()
    data = bytearray(memswap.encode(tensor, checksum=True).to_bytes())
    data[position % len(data)] ^= flip
    try:
        back = memswap.decode(memswap.Frame.from_bytes(bytes(data)))
    except memswap.FrameError:
        return
    if back.dtype == tensor.dtype:  # one float8 dtype's name becomes no other's by one byte
        assert same_bits(back, tensor)


def test_a_frame_that_was_overwritten_is_named_when_decoded(frame: memswap.Frame) -> None:
    frame._bytes[200] ^= 1
    with pytest.raises(memswap.FrameError, match="checksum"):
        memswap.decode(frame)
    frame._bytes[0] ^= 1
    with pytest.raises(memswap.FrameError, match="header"):
        memswap.decode(frame)
    with pytest.raises(memswap.FrameError, match="header"):
        frame.to_bytes()


def test_from_bytes_takes_any_buffer_at_any_alignment(frame: memswap.Frame) -> None:
    data = frame.to_bytes()
    expected = memswap.decode(frame)
    spread = bytes(byte for byte in data for _ in range(2))
    doubles = memoryview(bytes(8) + data + bytes(-len(data) % 8))
    for buffer in (
        data,
        bytearray(data),
        memoryview(data).toreadonly(),
        memoryview(b"xyz" + data)[3:],
        memoryview(spread)[::2],
        memoryview(data).cast("B", (len(data), 1)),
    ):
        assert same_bits(memswap.decode(memswap.Frame.from_bytes(buffer)), expected)
    with pytest.raises(memswap.FrameError, match="no memswap frame"):
        memswap.Frame.from_bytes(doubles.cast("d"))


@pytest.mark.parametrize("thing", ["MSF1", 128, None, [77, 83], torch.zeros(200).byte()])
def test_from_bytes_says_what_has_no_bytes(thing: Any) -> None:
    with pytest.raises(TypeError, match=f"a memoryview, found {type(thing).__name__}"):
        memswap.Frame.from_bytes(thing)


def test_a_copy_of_a_frame_is_the_frame(frame: memswap.Frame) -> None:
    """Which stays on its device: a pickle's way would bring it to the CPU."""
    assert copy.copy(frame) is frame and copy.deepcopy([frame])[0] is frame


def test_bytes_need_no_numpy() -> None:
    """Torch works without it, and so do files and pickles of frames."""
    done = run_python(
        """
import sys
sys.modules["numpy"] = None
import pickle, torch, memswap
tensor = torch.arange(5000).float()
back = memswap.decode(pickle.loads(pickle.dumps(memswap.encode(tensor))))
print(torch.equal(back, tensor))
"""
    )
    assert done.stdout.strip() == "True", done.stderr


LARGE = st.sampled_from([0, 1, 1023, 2**31, 2**41, 2**41 + 1, 2**60, 2**63 - 1, 2**64 - 1])
FIELDS = [(6, "B"), (7, "B"), (8, "B"), (12, "I"), (16, "Q"), (24, "I"), (28, "I")]
FIELDS += [(32, "Q"), (40, "Q"), (48, "Q")]


@given(
    fields=st.lists(st.tuples(st.sampled_from(FIELDS), LARGE | st.integers(0, 20)), max_size=4),
    trailer=st.lists(LARGE, max_size=4),
    behind=st.binary(max_size=40),
)
@settings(max_examples=300)
def test_a_hostile_header_is_an_error_and_takes_no_memory(
    fields: list[tuple[tuple[int, str], int]], trailer: list[int], behind: bytes
) -> None:
    """Whatever it claims: an error, or a tensor that these bytes justify."""
    data = bytearray(memswap.encode(torch.arange(3000).view(30, 100)).to_bytes())
    for (offset, kind), value in fields:
        struct.pack_into(f"<{kind}", data, offset, value % 256 ** struct.calcsize(kind))
    sizes = data.index(b"MST1") + 8
    for place, value in enumerate(trailer):
        struct.pack_into("<Q", data, sizes + 8 * place, value)
    codec.trim_spare_memory()
    refused = codec.spare_memory()["refusals"]
    try:
        back = memswap.decode(memswap.Frame.from_bytes(bytes(data) + behind))
    except memswap.FrameError:
        back = None
    assert back is None or back.nbytes == 24_000 or back.numel() == 0
    spare = codec.spare_memory()
    assert spare["refusals"] == refused and spare["reserved_bytes"] <= 8 << 20


def test_the_trailer_is_the_one_of_the_specification() -> None:
    tensor = torch.zeros(2, 3, dtype=torch.complex64).t()
    data = memswap.encode(tensor).to_bytes()
    name = b"complex64"
    assert data.endswith(b"MST1" + struct.pack("<I4qB", 2, 3, 2, 1, 3, len(name)) + name), (
        "docs/format.md section 7"
    )
    header = native.read_header(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    assert (header.elements, header.dtype) == (12, codec.dtype_code(torch.float32))
