"""Workspace: what is on a device beside saved activations, measured while an iteration runs.

[Note: Workspace]
Operators allocate for themselves, gradients come to be, and a loss has logits that no layer saves:
memswap's account knows nothing of all that, and the device's allocator knows only the sum. So in an
iteration that is recorded, the allocator's peak is read at each mark ([Note: Marks] in record.py),
and begun anew when the mark is over. The peak between two marks, less what the saved storages took
of the device when the first mark was over, is what was there besides: parameters, buffers and
inputs among it. What a forward or an operator lets go of between two marks is held to the second
one: the replay counts it until then, and a peak after it went would otherwise hide as much of what
was there besides. A plan is made as if that were there at the same marks, whatever it decides. What
memswap itself does at a mark is no part of it; the replay knows that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from memswap.engine.autograd import plain_parts

#: Allocators of accelerators round up to this.
GRANULARITY_BYTES = 512


@dataclass(frozen=True, slots=True)
class Workspace:
    """What was on the device beside saved activations in one iteration."""

    extra_nbytes: tuple[int, ...]
    """From each mark to the next, the most bytes."""
    gradient_nbytes: tuple[int, ...]
    """Of these, gradients of parameters when the mark was over."""
    baseline_nbytes: int
    """Of these, what was there when the iteration began."""


def gradient_bytes(parameters: Iterable[torch.Tensor]) -> int:
    """Bytes of the gradients that parameters have now."""
    return sum(
        part.numel() * part.element_size()
        for parameter in parameters
        if (gradient := parameter.grad) is not None and gradient.layout is torch.strided
        for part in plain_parts(gradient)
    )


class WorkspaceRecord:
    """Takes down one iteration. Whoever owns the gauge says what it has read (`note_peak`).

    Args:
        present: bytes of the device that saved storages take now.
        hold: takes hold of these storages.
        gradients: bytes of the gradients that parameters have now.
        other_nbytes: what is not counted: optimizer state that is planned by itself.
        baseline_nbytes: what was there beside saved activations when the iteration began.
        first_peak_bytes: the most that the device had since then.
    """

    def __init__(
        self,
        present: Callable[[], int],
        hold: Callable[[], object],
        gradients: Callable[[], int],
        other_nbytes: int,
        baseline_nbytes: int,
        first_peak_bytes: int,
    ) -> None:
        self._present_now, self._hold_now, self._gradients_now = present, hold, gradients
        self._held: object = None
        self._other_nbytes = other_nbytes
        self._baseline_nbytes = baseline_nbytes
        self._mark = 0
        self._present = present()
        self._extra: dict[int, int] = {}
        self._gradients: dict[int, int] = {0: gradients()}
        self.note_peak(first_peak_bytes)

    def note_peak(self, peak_bytes: int) -> None:
        """The most that the device had since the last mark, or the last call of this."""
        self._held = None
        beside = peak_bytes - self._present - self._other_nbytes
        self._extra[self._mark] = max(self._extra.get(self._mark, 0), beside)

    def after_mark(self, mark: int) -> None:
        """Memswap's work at a mark is over."""
        self._mark, self._present = mark, self._present_now()
        self._gradients[mark] = self._gradients_now()
        self._held = self._hold_now()

    def take(self, marks: int) -> Workspace:
        """The record of an iteration of so many marks that is over."""
        return Workspace(
            tuple(self._extra.get(mark, self._baseline_nbytes) for mark in range(marks)),
            tuple(self._gradients.get(mark, 0) for mark in range(marks)),
            self._baseline_nbytes,
        )
