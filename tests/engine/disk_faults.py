"""A disk that fails: the system's own errors, in the place of a pool's nameless file."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from helpers import descriptor_under, files_no_longer_than

Fault = Callable[[Path], AbstractContextManager[None]]


def instead(path: str, flags: int) -> Fault:
    """Have the pool's descriptor name something else for the time of a `with` block."""

    @contextlib.contextmanager
    def fault(folder: Path) -> Iterator[None]:
        number = descriptor_under(folder)
        kept = os.dup(number)
        other = os.open(path, flags)
        os.dup2(other, number)
        os.close(other)
        try:
            yield
        finally:
            os.dup2(kept, number)
            os.close(kept)

    return fault


#: What writes meet, by name. The first page of a process' memory is never there: EIO.
WRITES: dict[str, Fault] = {
    "disk full": instead("/dev/full", os.O_RDWR),
    "EIO": instead("/proc/self/mem", os.O_RDWR),
    "vanished": instead(os.devnull, os.O_RDONLY),
    "no byte": lambda folder: files_no_longer_than(0),
    "short writes": lambda folder: files_no_longer_than(4096),
}

#: What reads meet.
READS: dict[str, Fault] = {
    "EIO": instead("/proc/self/mem", os.O_RDWR),
    "vanished": instead(os.devnull, os.O_WRONLY),
    "short reads": instead(os.devnull, os.O_RDONLY),
}
