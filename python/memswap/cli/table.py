"""Plain text tables and the units in them."""

from __future__ import annotations

from collections.abc import Sequence

from memswap.engine.units import aligned


def render_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lay rows out under a header: the first column to the left, the others to the right.

    Args:
        header: one title per column.
        rows: as many cells as there are titles, in each.
    """
    rule = ["-" * max(map(len, column)) for column in zip(header, *rows, strict=True)]
    return "\n".join(aligned([header, rule, *rows]))


def format_seconds(seconds: float) -> str:
    """Write a duration in microseconds, milliseconds or seconds."""
    if abs(seconds) < 1e-3:
        return f"{seconds * 1e6:.1f} us"
    return f"{seconds * 1e3:.1f} ms" if abs(seconds) < 1 else f"{seconds:.2f} s"


def format_ratio(value: float, baseline: float) -> str:
    """Write ``value`` as a multiple of ``baseline``; a dash where the baseline is zero."""
    return f"{value / baseline:.2f}x" if baseline else "-"
