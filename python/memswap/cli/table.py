"""Plain text tables and the units in them."""

from __future__ import annotations

from collections.abc import Sequence


def render_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lay rows out under a header: the first column to the left, the others to the right.

    Args:
        header: one title per column.
        rows: as many cells as there are titles, in each.
    """
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]

    def lay_out(line: Sequence[str]) -> str:
        cells = [line[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        return "  ".join(cells).rstrip()

    rule = "  ".join("-" * width for width in widths)
    return "\n".join([lay_out(header), rule, *(lay_out(row) for row in rows)])


def format_seconds(seconds: float) -> str:
    """Write a duration in microseconds, milliseconds or seconds."""
    if abs(seconds) < 1e-3:
        return f"{seconds * 1e6:.1f} us"
    return f"{seconds * 1e3:.1f} ms" if abs(seconds) < 1 else f"{seconds:.2f} s"


def format_ratio(value: float, baseline: float) -> str:
    """Write ``value`` as a multiple of ``baseline``; a dash where the baseline is zero."""
    return f"{value / baseline:.2f}x" if baseline else "-"
