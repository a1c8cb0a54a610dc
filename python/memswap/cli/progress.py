"""A progress bar on standard error."""

from __future__ import annotations

import sys

WIDTH = 30


class ProgressBar:
    """Draws over one line of a terminal; without a terminal it prints one line, at the end."""

    def __init__(self, title: str, total: int) -> None:
        self._title = title
        self._total = total
        self._terminal = sys.stderr.isatty()

    def show(self, done: int, note: str = "") -> None:
        """Show that ``done`` of the total are finished, and a few words beside it."""
        finished = done >= self._total
        if not self._terminal and not finished:
            return
        filled = WIDTH * done // max(self._total, 1)
        bar = "#" * filled + "." * (WIDTH - filled)
        line = f"{self._title:<18} [{bar}] {done}/{self._total}  {note}"
        begin, end = ("\r\033[K", "\n" if finished else "") if self._terminal else ("", "\n")
        print(begin + line, end=end, file=sys.stderr, flush=True)
