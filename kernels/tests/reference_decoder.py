"""A second decoder, written from docs/format.md alone, so that the CPU codec's encoder and decoder
cannot agree on the same misreading of it. Python's standard library, and slow on purpose.

    memswap_kernels_golden_write inputs <inputs>
    python kernels/tests/reference_decoder.py kernels/tests/golden <inputs>

decodes every golden frame, checks its header, positions, checksums and counters, and compares the
elements with what was encoded.
"""

from __future__ import annotations

import struct
import sys
from collections import Counter
from pathlib import Path

BLOCK = 1024

# dtype: (width, E bits, R planes' widths, low to high)
FLOATS: dict[int, tuple[int, int, tuple[int, ...]]] = {
    1: (2, 8, (8,)),
    2: (2, 5, (8, 2, 1)),
    3: (4, 8, (8, 8, 8)),
    6: (8, 8, (8,) * 7),
    4: (1, 4, (4,)),
    5: (1, 5, (2, 1)),
}
WIDTHS = {7: 1, 8: 1, 9: 1, 10: 2, 11: 2, 12: 4, 13: 4, 14: 8, 15: 8, 16: 1, 17: 2, 18: 4, 19: 8}
DENSE, SPARSE, BITS, INTS, RAW, UPCAST = range(6)
LQ2, LQ3, FW2, LITERAL, ZEROS, SIGNED_ZEROS, BITMAP, REFERENCE = 1, 2, 3, 10, 11, 12, 13, 14


class FrameError(ValueError):
    pass


def width_of(dtype: int) -> int:
    return FLOATS[dtype][0] if dtype in FLOATS else WIDTHS[dtype]


def slab_bytes_of(dtype: int, layout: int) -> int:
    if layout == DENSE:
        return sum(128 * width for width in FLOATS[dtype][2]) + 256
    return {SPARSE: 0, BITS: 0, INTS: 0, RAW: 1024 * width_of(dtype), UPCAST: 1280}[layout]


def plane(data: bytes, width: int) -> list[int]:
    mask = (1 << width) - 1
    if width == 8:
        return list(data[:1024])
    if width == 1:
        return [data[e // 8] >> (e % 8) & 1 for e in range(BLOCK)]
    stride = 128 * width
    return [data[e % stride] >> (width * (e // stride)) & mask for e in range(BLOCK)]


def plane_widths(bits: int) -> list[int]:
    widths = [8] * (bits // 8)
    return widths + [width for width in (4, 2, 1) if bits % 8 & width]


class Payload:
    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def take(self, count: int) -> bytes:
        part = self.data[self.at : self.at + count]
        if len(part) != count:
            raise FrameError("a stream ends behind its payload")
        self.at += count
        return part

    def stream(self, symbols: int, width: int) -> list[int]:
        number = int.from_bytes(self.take((symbols * width + 7) // 8), "little")
        return [number >> (width * i) & ((1 << width) - 1) for i in range(symbols)]

    def field(self, bits: int) -> list[int]:
        values = [0] * BLOCK
        shift = 0
        for width in plane_widths(bits):
            for e, symbol in enumerate(plane(self.take(128 * width), width)):
                values[e] |= symbol << shift
            shift += width
        return values

    def close(self) -> None:
        if (self.at + 7) // 8 * 8 != len(self.data) or any(self.data[self.at :]):
            raise FrameError("the payload is not exactly its streams")


def lq2(codes: list[int], center: int, payload: Payload) -> list[int]:
    """S1, S2 and the E bytes behind codes that are already known."""
    first = payload.stream(codes.count(0), 2)
    second = payload.stream(first.count(3), 4)
    explicit = list(payload.take(second.count(15)))
    nibble = [6 + i for i in range(12)] + [255, 254]
    exponents = []
    for code in codes:
        if code:
            exponents.append((center - code) % 256)
        elif (one := first.pop(0)) != 3:
            exponents.append((center - (0, 4, 5)[one]) % 256)
        elif (two := second.pop(0)) == 15:
            exponents.append(explicit.pop(0))
        else:
            exponents.append(0 if two == 14 else (center - nibble[two]) % 256)
    return exponents


def lq3(codes: list[int], center: int, payload: Payload) -> list[int]:
    first = payload.stream(codes.count(0), 4)
    explicit = list(payload.take(first.count(15)))
    nibble = [8 + i for i in range(12)] + [0, 255]
    exponents = []
    for code in codes:
        if code:
            exponents.append((center - code) % 256)
        elif (one := first.pop(0)) == 15:
            exponents.append(explicit.pop(0))
        else:
            exponents.append(0 if one == 14 else (center - nibble[one]) % 256)
    return exponents


def joined(dtype: int, exponents: list[int], rest: list[int]) -> list[int]:
    """Elements of E and R, rotated back."""
    width, exponent_bits, planes = FLOATS[dtype]
    bits = 8 * width
    elements = []
    for exponent, low in zip(exponents, rest, strict=True):
        rotated = (exponent % (1 << exponent_bits)) << sum(planes) | low
        elements.append(rotated >> 1 | (rotated & 1) << (bits - 1))
    return elements


def dense(dtype: int, slab: bytes, payload: Payload, mode: int, center: int) -> list[int]:
    rest = [0] * BLOCK
    at = shift = 0
    for width in FLOATS[dtype][2]:
        for e, symbol in enumerate(plane(slab[at : at + 128 * width], width)):
            rest[e] |= symbol << shift
        at += 128 * width
        shift += width
    low = plane(slab[at : at + 256], 2)
    if mode == LQ2:
        exponents = lq2(low, center, payload)
    elif mode == LQ3:
        high = plane(payload.take(128), 1)
        codes = [a | b << 2 for a, b in zip(low, high, strict=True)]
        exponents = lq3(codes, center, payload)
    else:
        more = payload.field(mode - FW2)
        exponents = [(center - (a | b << 2)) % 256 for a, b in zip(low, more, strict=True)]
    return joined(dtype, exponents, rest)


def bitmap_of(payload: Payload, packed: bool) -> list[int]:
    if not packed:
        return plane(payload.take(128), 1)
    not_zero, not_full = payload.stream(128, 1), payload.stream(128, 1)
    data = bytearray()
    for z, f in zip(not_zero, not_full, strict=True):
        if not z and not f:
            raise FrameError("a byte of a bitmap is all zeros and all ones")
        data += payload.take(1) if z and f else b"\xff" if z else b"\0"
    return plane(bytes(data), 1)


def sparse(dtype: int, payload: Payload, mode: int, packed: bool, center: int) -> list[int]:
    bitmap = bitmap_of(payload, packed)
    survivors = sum(bitmap)
    rest = [0] * survivors
    shift = 0
    for width in FLOATS[dtype][2]:
        for i, symbol in enumerate(payload.stream(survivors, width)):
            rest[i] |= symbol << shift
        shift += width
    codes = payload.stream(survivors, 2)
    signs = payload.stream(BLOCK - survivors, 1) if mode == SIGNED_ZEROS else [0] * BLOCK
    values = iter(joined(dtype, lq2(codes, center, payload), rest))
    sign_bit = 8 * width_of(dtype) - 1
    zeros = iter(signs)
    return [next(values) if bit else next(zeros) << sign_bit for bit in bitmap]


def decode_block(
    dtype: int, layout: int, slab: bytes, data: bytes, mode: int, packed: bool, center: int
) -> list[int]:
    width = width_of(dtype)
    if packed and mode not in (ZEROS, SIGNED_ZEROS, BITMAP):
        raise FrameError("a packed bitmap where there is none")
    payload = Payload(data)
    if mode == LITERAL:
        everything = slab + payload.take(BLOCK * width - len(slab))
        elements = [
            int.from_bytes(everything[i * width : (i + 1) * width], "little") for i in range(BLOCK)
        ]
    elif layout == DENSE:
        elements = dense(dtype, slab, payload, mode, center)
    elif layout == UPCAST:
        elements = [high << 16 for high in dense(1, slab, payload, mode, center)]
    elif layout == SPARSE:
        elements = sparse(dtype, payload, mode, packed, center)
    elif mode == BITMAP:
        elements = bitmap_of(payload, packed)
    else:
        minimum = int.from_bytes(payload.take(8), "little")
        elements = [(minimum + x) % (1 << 8 * width) for x in payload.field(center)]
    payload.close()
    return elements


def decode(frame: bytes) -> bytes:
    """The elements' bytes of a portable, checked frame."""
    magic, version, dtype, layout, flags = struct.unpack_from("<IHBBB", frame)
    status, n, blocks, slab_bytes = struct.unpack_from("<IQII", frame, 12)
    capacity, used, overflow, zeros, _ = struct.unpack_from("<5Q", frame, 32)
    counts = struct.unpack_from("<14I", frame, 72)
    tiles = (blocks + 7) // 8
    records = 128 + blocks * slab_bytes
    var = records + 32 * tiles
    if (
        (magic, version, flags, status, overflow) != (0x3146534D, 1, 3, 0, 0)
        or frame[9:12] != b"\0\0\0"
        or blocks != (n + BLOCK - 1) // BLOCK
        or slab_bytes != slab_bytes_of(dtype, layout)
        or capacity != used
        or var + 8 * used != len(frame)
    ):
        raise FrameError("not a portable, checked frame")
    width = width_of(dtype)
    output = bytearray()
    modes: Counter[int] = Counter()
    position = 0
    zeros_found = 0
    for tile in range(tiles):
        record = struct.unpack_from("<I8H8BI", frame, records + 32 * tile)
        if record[0] != position:
            raise FrameError("positions are not in the order of the tiles")
        tile_bytes = bytearray()
        for i in range(min(8, blocks - 8 * tile)):
            block = 8 * tile + i
            mode, packed, units = record[1 + i] >> 12, record[1 + i] >> 11 & 1, record[1 + i] & 2047
            slab = frame[128 + block * slab_bytes : 128 + (block + 1) * slab_bytes]
            payload = frame[var + 8 * position : var + 8 * (position + units)]
            elements = decode_block(dtype, layout, slab, payload, mode, bool(packed), record[9 + i])
            elements = elements[: n - block * BLOCK]
            zeros_found += zeros_of(dtype, layout, mode, elements)
            tile_bytes += b"".join(element.to_bytes(width, "little") for element in elements)
            modes[mode] += 1
            position += units
        padded = bytes(tile_bytes) + bytes(-len(tile_bytes) % 4)
        words = struct.unpack(f"<{len(padded) // 4}I", padded)
        checksum = sum(word * (2 * j + 1) for j, word in enumerate(words)) % 4294967291
        if checksum != record[17]:
            raise FrameError("the checksum is another one")
        output += tile_bytes
    if position != used or any(modes[mode + 1] != counts[mode] for mode in range(14)):
        raise FrameError("the header's counters are not the records'")
    if zeros_found != zeros:
        raise FrameError(f"{zeros_found} zeros, the header says {zeros}")
    return bytes(output)


def zeros_of(dtype: int, layout: int, mode: int, elements: list[int]) -> int:
    if layout not in (DENSE, SPARSE, UPCAST) or (layout == UPCAST and mode == LITERAL):
        return 0
    width, exponent_bits, _ = FLOATS[dtype]
    below = 0 if layout == SPARSE else 8 * width - 1 - exponent_bits
    magnitude = (1 << (8 * width - 1)) - 1
    return sum((element & magnitude) >> below == 0 for element in elements)


def main(golden: Path, inputs: Path) -> int:
    paths = sorted(golden.glob("*.msf"))
    for path in paths:
        try:
            elements = decode(path.read_bytes())
        except FrameError as error:
            print(f"{path.name}: {error}", file=sys.stderr)
            return 1
        if elements != (inputs / path.with_suffix(".bin").name).read_bytes():
            print(f"{path.name}: decodes to other elements", file=sys.stderr)
            return 1
    print(f"{len(paths)} golden frames decoded")
    return 0 if paths else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
