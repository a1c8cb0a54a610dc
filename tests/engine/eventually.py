"""Waiting for what another thread does at a moment of its own."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable


def eventually(
    condition: Callable[[], object], timeout_s: float = 10, collect: bool = False
) -> bool:
    """Whether it comes true before the time is over.

    A thread lets go of what it worked with only when it is scheduled again, and on a busy machine
    that is after its result was seen: a worker of a transfer's block, autograd's thread of a graph,
    gloo's of a collective's tensors.

    Args:
        collect: cycles may hold it too, such as an exception and its traceback.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        if collect:
            gc.collect()
        if condition():
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
