"""warn: a warning that points at the user's own line."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from types import FrameType

#: Where no user's line is: memswap's own files, and torch's, which call hooks.
_INTERNAL = tuple(str(Path(file).parent) + os.sep for file in (__file__, str(torch.__file__)))


def warn(message: str) -> None:
    """Warn at the innermost line that is neither memswap's nor torch's.

    In a thread of autograd's, where there is none, at the caller's.
    """
    level = 2
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_INTERNAL):
        frame = frame.f_back
        level += 1
    warnings.warn(message, stacklevel=2 if frame is None else level)
