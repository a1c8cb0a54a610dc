"""LiveLine: one line below a training's progress bars, by tqdm."""

from __future__ import annotations

from typing import Any

from memswap.errors import MemswapError


class LiveLine:
    """A line of text that is written over, for as long as a training runs.

    Raises:
        MemswapError: tqdm is not installed.
    """

    def __init__(self) -> None:
        try:
            from tqdm.auto import tqdm
        except ImportError as error:
            raise MemswapError(
                "memswap: found live=True and no tqdm, expected tqdm to write the line: install "
                "it, or leave live= out and print manager.line() yourself"
            ) from error
        self._new: Any = tqdm
        self._line: Any = None

    def show(self, text: str) -> None:
        """Write this in the place of what was there."""
        if self._line is None:
            self._line = self._new(total=0, bar_format="{desc}", leave=True)
        self._line.set_description_str(text)

    def close(self) -> None:
        """Leave the line as it is; the next one is another."""
        line, self._line = self._line, None
        if line is not None:
            line.close()
