"""Real text that every machine has: the source files of Python's own standard library."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch

DEFAULT_BYTES = 4 << 20
# Installed packages are not part of the library, and its test suite is mostly tables.
LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__"})


def read_corpus(max_bytes: int = DEFAULT_BYTES) -> bytes:
    """Read the standard library's ``.py`` files, in the order of their paths.

    Args:
        max_bytes: stop after this many bytes.

    Returns:
        The same bytes in every process that runs this Python.

    Raises:
        FileNotFoundError: this Python came without its sources.
    """
    root = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(root.rglob("*.py")):
        if LEFT_OUT.isdisjoint(path.relative_to(root).parts):
            text += path.read_bytes()
            if len(text) >= max_bytes:
                break
    if not text:
        raise FileNotFoundError(
            f"The demo trains on the sources of Python's standard library, and {root} holds no "
            ".py file. Run it with a Python that has them."
        )
    return bytes(text[:max_bytes])


class Batches:
    """Draws windows of the corpus, the same ones for the same seed.

    Args:
        text: bytes to learn.
        batch: windows per step.
        sequence: tokens per window; one token is one byte.
        seed: of the generator that chooses where windows begin.

    Raises:
        ValueError: the text is shorter than one window and its last target.
    """

    def __init__(self, text: bytes, batch: int, sequence: int, seed: int) -> None:
        if len(text) <= sequence + 1:
            raise ValueError(f"A window of {sequence} bytes does not fit in {len(text)} of text.")
        self._bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._window = torch.arange(sequence + 1)
        self._batch = batch
        self._generator = torch.Generator().manual_seed(seed)

    def draw(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens and the tokens that follow them: two int64 ``[batch, sequence]``."""
        last = len(self._bytes) - len(self._window)
        begin = torch.randint(0, last + 1, (self._batch, 1), generator=self._generator)
        windows = self._bytes[begin + self._window].long().to(device)
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
