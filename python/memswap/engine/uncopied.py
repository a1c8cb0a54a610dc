"""Uncopied: what belongs to one process, and says so."""

from __future__ import annotations

from typing import NoReturn


class Uncopied:
    """Threads, memory and hooks of this process: neither a deep copy nor a pickle has them."""

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a memswap {type(self).__name__} cannot be copied or pickled: it belongs to this "
            "process and to what it manages here. Keep it outside of models and of what is sent to "
            "other processes, and make another one there."
        )
