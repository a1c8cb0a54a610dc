"""One tensor, encoded losslessly: ``encode``, ``decode`` and ``Frame``.

    frame = memswap.encode(activations)     # about two thirds of a bfloat16 tensor
    frame.nbytes, frame.ratio               # bytes held, and 1.5 where a third is saved
    same = memswap.decode(frame)            # bit for bit, NaN payloads and -0 included

The format is specified in docs/format.md. These functions run at once, on the current stream; what
encodes a model's saved tensors behind its computation is ``memswap.saved_tensors``.

On a CPU, frames and decoded tensors live in memory that is used again and again: pages fresh from
the system cost more than the encoding. ``spare_memory()`` says how much is kept, at most an eighth
of the machine's memory (but 1 GiB, and never more than 4), and ``trim_spare_memory()`` gives back
what nothing uses.
"""

from __future__ import annotations

import enum
import math
import struct
from typing import Any, Literal, TypeAlias

import torch

from memswap._native import native
from memswap.errors import FrameError

__all__ = [
    "Frame",
    "Layout",
    "LayoutName",
    "decode",
    "dtype_code",
    "encode",
    "spare_memory",
    "trim_spare_memory",
]

LayoutName: TypeAlias = Literal["dense", "sparse", "bits", "ints", "raw", "upcast"]


class Layout(enum.IntEnum):
    """How a frame lays its elements out (docs/format.md section 3)."""

    DENSE = 0
    """Floats: exponents are coded, signs and mantissas stand as they are."""
    SPARSE = 1
    """Floats with many zeros: what a ReLU or a mask leaves."""
    BITS = 2
    """One-byte elements that are 0 or 1: masks."""
    INTS = 3
    """Integers close to each other, or constants of any dtype."""
    RAW = 4
    """The bytes as they are."""
    UPCAST = 5
    """float32 whose low 16 bits are 0: bfloat16 that was cast up."""


_FRAME_MAGIC = b"MSF1"
_TRAILER_MAGIC = b"MST1"
_VERSION = 1
_HEADER = struct.Struct("<4sHBBB3xIQIIQQQ")  # to overflow_used; docs/format.md section 1
_HEADER_NBYTES = 128
_FORMATS = "bBc"  # of buffers of bytes
_MAX_DIMENSIONS = 64  # of a tensor of torch's
_DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}


def dtype_code(dtype: torch.dtype) -> int:
    """The frame dtype (docs/format.md section 2) of a torch dtype, or of a complex dtype's parts.

    Raises:
        ValueError: no frame has elements of that size.
    """
    code: int = native.dtype_code(dtype)
    return code


class Frame:
    """One tensor's bytes, losslessly encoded, on the device of the tensor.

    Made by :func:`encode` or :meth:`from_bytes`. Immutable; dropping it frees its memory.

    Args:
        frame_bytes: the frame as docs/format.md has it: uint8, of one dimension.
        size: of the tensor.
        stride: of the tensor, in elements.
        dtype: of the tensor.
        layout: of the frame; None: its header says it, and nobody has read that yet.
    """

    __slots__ = ("_bytes", "_dtype", "_layout", "_size", "_stride")

    def __init__(
        self,
        frame_bytes: torch.Tensor,
        size: torch.Size,
        stride: tuple[int, ...],
        dtype: torch.dtype,
        layout: Layout | None = None,
    ) -> None:
        self._bytes = frame_bytes
        self._layout = layout  # None: its header knows; a decode there may take another launch
        self._size = size
        self._stride = stride
        self._dtype = dtype

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the frame holds."""
        return int(self._bytes.nbytes)

    @property
    def raw_nbytes(self) -> int:
        """Bytes of the tensor's elements."""
        return int(math.prod(self._size) * self._dtype.itemsize)

    @property
    def ratio(self) -> float:
        """``raw_nbytes / nbytes``, the compression ratio: above 1 where encoding pays."""
        return self.raw_nbytes / self.nbytes

    @property
    def shape(self) -> torch.Size:
        """The tensor's size."""
        return self._size

    @property
    def dtype(self) -> torch.dtype:
        """The tensor's dtype."""
        return self._dtype

    @property
    def device(self) -> torch.device:
        """Where the frame is, and where it is decoded."""
        return self._bytes.device

    def stride(self) -> tuple[int, ...]:
        """Strides, in elements, of the tensor that :func:`decode` returns."""
        return self._stride

    def __repr__(self) -> str:
        return (
            f"<Frame of {tuple(self._size)} {self._dtype} on {self.device}, {self.nbytes} bytes, "
            f"{self.ratio:.2f}x>"
        )

    def to_bytes(self) -> bytes:
        """The frame in a form that any machine reads (docs/format.md sections 1 and 7).

        Waits for the device. Raises:
            FrameError: the frame is damaged.
        """
        try:
            portable = native.portable_frame(self._bytes)
        except native.DamagedFrameError as fault:
            raise FrameError(f"cannot write this frame: {fault}") from None
        name = str(self._dtype).removeprefix("torch.").encode("ascii")
        dimensions = len(self._size)
        trailer = struct.pack(
            f"<4sI{2 * dimensions}qB",
            _TRAILER_MAGIC,
            dimensions,
            *self._size,
            *self._stride,
            len(name),
        )
        return native.bytes_of(portable) + trailer + name

    @classmethod
    def from_bytes(cls, buffer: bytes | bytearray | memoryview) -> Frame:
        """The frame that :meth:`to_bytes` wrote, on the CPU. The bytes are copied.

        Headers and lengths are checked here, payloads when the frame is decoded. A flipped bit in a
        mantissa can be noticed only in a frame that was made with ``checksum=True``. Nothing longer
        than ``buffer`` is allocated here, whatever a header claims.

        Raises:
            FrameError: these are not the bytes of a frame that this version reads.
            TypeError: ``buffer`` has no bytes to read.
        """
        view = _bytes_in(buffer)
        frame_nbytes = _frame_nbytes(view)
        size, stride, dtype = _read_trailer(view[frame_nbytes:])
        frame_bytes = native.frame_of(view[:frame_nbytes])
        try:
            report = native.read_header(frame_bytes)
        except native.DamagedFrameError as fault:
            raise FrameError(f"{fault}: the frame is damaged; write it again") from None
        elements = math.prod(size) * (2 if dtype.is_complex else 1)
        if (report.elements, report.dtype) != (elements, native.dtype_code(dtype)):
            raise FrameError(
                f"the header says {report.elements} elements of dtype {report.dtype}, the trailer "
                f"{elements} of dtype {native.dtype_code(dtype)} ({dtype}): the frame is damaged; "
                "write it again"
            )
        return cls(frame_bytes, size, stride, dtype)

    def __copy__(self) -> Frame:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Frame:
        """The frame itself, which nothing can change; not its bytes on the CPU, as a pickle's."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles as :meth:`to_bytes`. An unpickled frame is on the CPU, wherever this one is."""
        return Frame.from_bytes, (self.to_bytes(),)


def encode(
    tensor: torch.Tensor, *, layout: LayoutName | None = None, checksum: bool = False
) -> Frame:
    """Encode a tensor losslessly.

    Args:
        tensor: any dense tensor of torch's own, on the CPU or on a device with a codec. It is not
            changed, and autograd does not see this.
        layout: how the frame lays its elements out (:class:`Layout`). None: in the way that takes
            the fewest bytes, which a sample of the tensor's blocks of 1024 elements tells. A layout
            that does not suit the values costs bytes, never bits.
        checksum: store a checksum of each 8192 elements, which :func:`decode` compares.

    Returns:
        A frame on the tensor's device. On an accelerator this waits until the encode is done, to
        give back the memory that it did not need, and before it, with ``layout=None``, for the
        sample.

    Raises:
        TypeError: a tensor without plain memory of its own (sparse, quantized, meta, a subclass).
        ValueError: a layout that does not go with the dtype, or a device without a codec.
    """
    _check_plain(tensor)
    named = None if layout is None else _layout_named(layout)
    code = native.dtype_code(tensor.dtype)
    with torch.no_grad():
        flat, stride = _memory_order(tensor.resolve_conj().resolve_neg())
        if flat.is_complex():
            flat = torch.view_as_real(flat).view(-1)
        chosen = Layout(native.choose_layout(flat, code)) if named is None else named
        frame_bytes = native.encode_tensor(flat, code, int(chosen), checksum)
        return Frame(native.exact_frame(frame_bytes), tensor.shape, stride, tensor.dtype, chosen)


def decode(frame: Frame) -> torch.Tensor:
    """The tensor that was encoded, bit for bit, on the frame's device.

    Strides are the tensor's own where it was dense (its elements fill one piece of memory, in any
    order of dimensions), otherwise those of a contiguous tensor. On an accelerator this waits for
    the decode, to learn whether the frame was in order.

    Raises:
        FrameError: the frame is damaged.
        TypeError: ``frame`` is no :class:`Frame`.
    """
    if not isinstance(frame, Frame):
        raise TypeError(
            f"decode takes a Frame, found {type(frame).__name__} (of bytes: Frame.from_bytes)"
        )
    elements = math.prod(frame.shape)
    try:
        flat = native.decode_tensor(frame._bytes, [elements], frame.dtype, True, frame._layout)
    except native.DamagedFrameError as fault:
        raise FrameError(
            f"cannot decode {frame!r}: {fault}. The bytes have changed since they were encoded; "
            "encode the tensor again, or read the frame again from where it was written."
        ) from None
    return flat.as_strided(frame.shape, frame.stride())


def spare_memory() -> dict[str, int | float | str]:
    """What ``encode`` and ``decode`` on a CPU hold; keys as in ``HostPool.statistics()``."""
    return native.spare_pool().statistics()


def trim_spare_memory() -> int:
    """Give the memory that no frame and no decoded tensor uses back to the system. Its bytes."""
    return native.spare_pool().trim()


def _check_plain(tensor: torch.Tensor) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"encode takes a tensor, found {type(tensor).__name__}")
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
    if not plain or tensor.is_quantized or tensor.device.type == "meta":
        raise TypeError(
            f"encode takes a dense tensor with memory of its own, found {type(tensor).__name__} "
            f"with layout {tensor.layout} and dtype {tensor.dtype} on {tensor.device}; encode the "
            "tensors that it consists of"
        )


def _layout_named(name: str) -> Layout:
    try:
        return Layout[name.upper()]
    except (KeyError, AttributeError):
        known = ", ".join(repr(layout.name.lower()) for layout in Layout)
        raise ValueError(f"layout={name!r}: expected one of {known} or None") from None


def _memory_order(tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """The elements in the order of their memory, and the strides that lead back."""
    if tensor.is_contiguous():
        return tensor.reshape(-1), tensor.stride()
    if torch.ops.aten.is_non_overlapping_and_dense(tensor):
        return tensor.as_strided((tensor.numel(),), (1,)), tensor.stride()
    contiguous = tensor.contiguous()
    return contiguous.view(-1), contiguous.stride()


def _bytes_in(buffer: Any) -> memoryview:
    try:
        view = memoryview(buffer)
    except TypeError:
        raise TypeError(
            f"from_bytes takes bytes, a bytearray or a memoryview, found {type(buffer).__name__}"
        ) from None
    # What a cast does not take (steps, no elements, structures) is copied once more.
    plain = view.c_contiguous and view.nbytes > 0 and view.format in _FORMATS
    return view.cast("B") if plain else memoryview(view.tobytes())


def _frame_nbytes(view: memoryview) -> int:
    """Length of the frame at the beginning of a buffer, after what can be said about its header."""
    again = "read it again from where it was written, or write it again"
    magic = bytes(view[:4])
    if magic == _FRAME_MAGIC[::-1]:
        raise FrameError(
            f"found {magic!r}, expected {_FRAME_MAGIC!r}: these bytes were swapped on a big-endian "
            "machine; swap them back, frames are little-endian everywhere"
        )
    if len(magic) == 4 and magic != _FRAME_MAGIC:
        raise FrameError(
            f"found {magic!r}, expected {_FRAME_MAGIC!r}: this is no memswap frame (or not its "
            "beginning)"
        )
    if len(view) >= 6 and (version := int.from_bytes(view[4:6], "little")) != _VERSION:
        raise FrameError(
            f"found a frame of version {version}, expected {_VERSION}: "
            + ("install a newer memswap to read it" if version > _VERSION else again)
        )
    if len(view) < _HEADER_NBYTES:
        raise FrameError(
            f"found {len(view)} bytes, expected at least the {_HEADER_NBYTES} of a header: the "
            f"frame is cut short; {again}"
        )
    _, _, dtype, layout, flags, status, elements, _, _, capacity, used, overflow = (
        _HEADER.unpack_from(view)
    )
    if status != 0 or overflow != 0 or used > capacity or flags > 3:
        raise FrameError(
            f"found status {status}, overflow {overflow}, var {used} of {capacity} units, flags "
            f"{flags}: the frame is damaged or was not written by Frame.to_bytes; {again}"
        )
    try:
        sizes = native.frame_sizes(dtype, layout, elements)
    except ValueError as error:
        raise FrameError(f"{error}: the header is damaged; {again}") from None
    if capacity > sizes.max_var_units:
        raise FrameError(
            f"found room for {capacity} units of payload, expected at most {sizes.max_var_units} "
            f"for {elements} elements: the header is damaged; {again}"
        )
    nbytes: int = sizes.fixed_nbytes + 8 * capacity
    if len(view) < nbytes:
        raise FrameError(
            f"found {len(view)} bytes, expected {nbytes} and a trailer: the frame is cut short; "
            f"{again}"
        )
    return nbytes


def _read_trailer(trailer: memoryview) -> tuple[torch.Size, tuple[int, ...], torch.dtype]:
    """Size, strides and dtype of the tensor, from what stands behind its frame."""
    again = "read it again from where it was written, or write it again"
    if bytes(trailer[:4]) != _TRAILER_MAGIC[: len(trailer)] or len(trailer) < 8:
        raise FrameError(
            f"found {bytes(trailer[:4])!r} behind the frame, expected {_TRAILER_MAGIC!r}: the "
            f"tensor's description is missing or cut short; {again}"
        )
    dimensions = int.from_bytes(trailer[4:8], "little")
    numbers_end = 8 + 16 * dimensions
    if dimensions > _MAX_DIMENSIONS or len(trailer) < numbers_end + 1:
        raise FrameError(
            f"found {len(trailer)} bytes of description for {dimensions} dimensions, expected more "
            f"than {numbers_end}: the frame is cut short or damaged; {again}"
        )
    numbers = struct.unpack_from(f"<{2 * dimensions}q", trailer, 8)
    name_end = numbers_end + 1 + trailer[numbers_end]
    if len(trailer) != name_end:
        raise FrameError(
            f"found {len(trailer)} bytes of description, expected {name_end}: the frame is cut "
            f"short or has something behind it; {again}"
        )
    name = bytes(trailer[numbers_end + 1 :]).decode("ascii", "replace")
    dtype = _DTYPES.get(name)
    if dtype is None:
        raise FrameError(
            f"found a tensor of dtype {name!r}, which torch {torch.__version__} does not have; "
            "decode it where that dtype is known, or write it again"
        )
    size, stride = numbers[:dimensions], numbers[dimensions:]
    if not _is_dense(size, stride):
        raise FrameError(
            f"found size {size} with strides {stride}, expected those of a dense tensor: the frame "
            f"is damaged; {again}"
        )
    return torch.Size(size), stride, dtype


def _is_dense(size: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether a tensor of this size and these strides fills one piece of memory exactly."""
    if any(length < 0 for length in size) or any(step < 0 for step in stride):
        return False
    if 0 in size:
        return True
    expected = 1
    for step, length in sorted(zip(stride, size, strict=True)):
        if length == 1:
            continue
        if step != expected:
            return False
        expected *= length
    return True
