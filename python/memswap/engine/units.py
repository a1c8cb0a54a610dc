"""Sizes in bytes, written the way people write them, and columns of them."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

# Binary units are powers of 1024, decimal ones powers of 1000 (IEC 80000-13).
_UNIT_BYTES = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_LONGEST_BYTES = 2**63 - 1
_SIZE = re.compile(r"\s*(\d+(?:_\d+)*(?:\.\d+)?|\.\d+)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_bytes(size: int | str, argument: str = "", *, auto: bool = False) -> int:
    """Bytes of a size such as ``"24GiB"``, ``"512 MiB"``, ``"1.5GB"``, ``"4096B"`` or ``4096``.

    Fractions of a byte are cut off.

    Args:
        size: a text or a number of bytes.
        argument: whose value it is, for messages.
        auto: whether the caller takes ``"auto"`` as well, for messages.

    Raises:
        ValueError: a negative number, more than 2**63 - 1, an unknown unit, a bool, or a float or
            digits alone (``"24"``), whose unit could only be guessed; ``"0"`` needs none.
    """
    named = f"{argument}: " if argument else ""
    if isinstance(size, int) and not isinstance(size, bool):
        if size < 0:
            raise ValueError(f"{named}a size in bytes cannot be negative, found {size}")
        return _addressable(size, named)
    if isinstance(size, str) and size.strip() == "0":
        return 0
    match = _SIZE.fullmatch(size) if isinstance(size, str) else None
    unit = match and _UNIT_BYTES.get(match[2].lower())
    if match is None or unit is None:
        raise ValueError(
            f"{named}expected {'auto or ' if auto else ''}a size in bytes such as 24GiB, 512MiB, "
            f"1.5GB or an int, found {size!r}{unit_hint(size)}"
        )
    whole, _, fraction = match[1].replace("_", "").partition(".")
    # In whole numbers: a float would lose bytes beyond 2**53.
    scaled: int = int((whole or "0") + fraction) * unit // 10 ** len(fraction)
    return _addressable(scaled, named)


def unit_hint(size: object) -> str:
    """What to write for a size without a unit, or one that is cut short (``"24G"``); or nothing."""
    match = _SIZE.fullmatch(size) if isinstance(size, str) else None
    if match is None or match[2].lower() not in ("", "k", "m", "g", "t"):
        return ""
    if not match[2]:
        return f". Write '{match[1]}GiB' for a size, or {match[1]} or '{match[1]}B' for bytes"
    letter = match[2].upper()
    return f". Write '{match[1]}{letter}iB' or '{match[1]}{letter}B'"


def is_size(text: str) -> bool:
    """Whether a text has the form of a size: a number, and a unit that is known."""
    match = _SIZE.fullmatch(text)
    return match is not None and match[2].lower() in _UNIT_BYTES


def _addressable(nbytes: int, named: str) -> int:
    if nbytes > _LONGEST_BYTES:
        raise ValueError(f"{named}no machine has {nbytes} bytes; expected at most {_LONGEST_BYTES}")
    return nbytes


def parsed_prefetch(prefetch_bytes: int | str) -> int | None:
    """Bytes to prefetch, or None for automatic."""
    if prefetch_bytes == "auto":
        return None
    return parse_bytes(prefetch_bytes, "prefetch_bytes", auto=True)


def format_bytes(nbytes: float) -> str:
    """``nbytes`` with a binary unit: ``"512 B"``, ``"1.5 KiB"``, ``"3.00 GiB"``."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"


def aligned(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> list[str]:
    """Lay rows of cells out in columns, two blanks apart.

    Args:
        rows: as many cells in each.
        left: which columns are laid out to the left; the others, of numbers, are to the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
