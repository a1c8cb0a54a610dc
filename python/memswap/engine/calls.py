"""Calls: which call of a module the running code belongs to, and whether it still runs.

[Note: Which call]
Torch tells the hooks of a module nothing about the call that they belong to. A module may call
itself, another's hook may raise before ours or after it, and after a KeyboardInterrupt no hook runs
at all; so neither the module nor a count of calls says whether a call that began is the one that
ends. The frame of the function in torch that runs a call and its hooks is that call. It is known
by its name and its file, because torch.compile runs it with other code. A frame that is held is
nobody else's later, and one that is not on the thread's stack any more has ended, in whatever way.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from types import FrameType

_RUNS_A_CALL = nn.Module._call_impl.__code__


def current_call() -> FrameType | None:
    """The innermost call of a module on this thread's stack; None outside of modules."""
    frame: FrameType | None = sys._getframe(1)
    name, file = _RUNS_A_CALL.co_name, _RUNS_A_CALL.co_filename
    while frame is not None:
        code = frame.f_code
        if code.co_name == name and code.co_filename == file:
            return frame
        frame = frame.f_back
    return None


def is_running(call: FrameType) -> bool:
    """Whether a call of this thread has not ended."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame is call:
            return True
        frame = frame.f_back
    return False
