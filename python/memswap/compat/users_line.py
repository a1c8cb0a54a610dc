"""Where the user called: warnings point there, also those that are raised much later."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import NamedTuple

import torch

_NOT_THE_USERS = tuple(
    f"{folder}/" for folder in (Path(__file__).parents[1], Path(torch.__file__).parent)
)


class UsersLine(NamedTuple):
    """A line of the user's program."""

    filename: str
    line: int

    @classmethod
    def here(cls) -> UsersLine:
        """The innermost line on the stack that is neither memswap's nor torch's."""
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
            frame = frame.f_back
        return cls(frame.f_code.co_filename, frame.f_lineno)

    def warn(self, message: str) -> None:
        """Warn, pointing at this line."""
        warnings.warn_explicit(message, UserWarning, self.filename, self.line)
