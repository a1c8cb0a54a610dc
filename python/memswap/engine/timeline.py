"""Timeline: in which order storages were saved and demanded, and what that predicts.

A passage is one forward of the managed part and the backward that belongs to it. The last passage
that was demanded predicts the next one, storage by storage, for as long as the sizes agree. A wrong
guess costs a stall or a little memory, never an error.

[Note: The window]
Backward demands the storages that were saved last first, so whatever leaves last would have to be
back at once: at the moment of the peak it frees nothing. What is demanded first, up to a window of
bytes, therefore stays, and from then on the window slides: whatever lies within that many bytes
ahead of the latest demand is on its way back. The same window bounds both, so a peak holds the
window, not the window twice. Decoding takes a fraction of the time of a transfer, and what is
encoded on the device frees only a part of its bytes, so for those an automatic window is shorter.
Where decodes wait for operators to run beside, it is as long as these would have needed it in the
last backward ([Note: Bytes ahead]), within a share of what is encoded.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from memswap._native import native

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memswap._C import Forecast, Script

NEEDED_AT_ONCE = "needed at once"
NEVER_FREED = "never freed"
PLANNED = "planned"

#: An automatic window is this share of a passage's bytes, and never less than its largest storage.
AUTO_WINDOW_SHARE = 1 / 8

#: The same for bytes that are encoded where they are; and the largest storage comes with the small
#: ones around it (the weight beside the input of a matrix product).
DECODE_WINDOW_SHARE, DECODE_WINDOW_SLACK = 1 / 32, 1.25

#: Of the bytes that are encoded where they are, those that may be decoded at a time for operators
#: to hide it: what frames free of them is given up.
MOST_DECODED_SHARE = 1 / 4


class Passage(native.Passage):
    """One forward, as it happens. The saver's lock serialises the calls.

    The books are native (csrc/bind/passage.cpp): `admit` and `place` when a storage is saved,
    `demand` when backward asks for it. Here stands what they are told to expect.

    `group` of `admit`: a checkpoint region replays its forward, so the storages of one region,
    which have the same number there, are expected back in the order in which they were saved.
    """

    __slots__ = ("__weakref__", "_window_bytes")

    # Native members, by what they are in Python.
    held: set[int]
    """Storages that stayed alive although they had left."""
    course: Any
    """What a director knows of it."""
    script: Script | None
    """What a plan says of its storages."""
    alone: bool
    """Whether the script is followed without asking the director."""

    def __init__(self, forecast: Forecast | None, window_bytes: int | None) -> None:
        self._window_bytes = window_bytes
        if forecast is not None:
            self.follow(forecast)

    @property
    def over(self) -> bool:
        """Whether nothing that was saved is alive: no graph will demand it."""
        return all(self.entry(index) is None for index in range(self.count))

    @property
    def window_bytes(self) -> int:
        predicted = self.predicted_window_bytes
        return self.own_window_bytes if predicted is None else predicted

    @property
    def own_window_bytes(self) -> int:
        """The window that the storages so far make."""
        if self._window_bytes is not None:
            return self._window_bytes
        hidden = min(self.bytes_ahead, self.decoded_bytes * MOST_DECODED_SHARE)
        return int(max(self.least_window_bytes, hidden))

    @property
    def least_window_bytes(self) -> int:
        """The same, whatever operators decodes wait for."""
        if self._window_bytes is not None:
            return self._window_bytes
        shares = self.raw_bytes * AUTO_WINDOW_SHARE + self.decoded_bytes * DECODE_WINDOW_SHARE
        return int(max(self.raw_most, self.decoded_most * DECODE_WINDOW_SLACK, shares))

    @property
    def leaving_bytes(self) -> int:
        """Bytes that may leave at once: the window, and never less than one storage."""
        return max(self.window_bytes, self.raw_most, self.decoded_most)

    def expected(self) -> tuple[Sequence[int], int]:
        """In which order its storages will be demanded, where no forecast says it; the window."""
        return first_guess(self.groups), self.window_bytes


class Timeline:
    """The passages of one saver."""

    def __init__(self, window_bytes: int | None) -> None:
        self.window_bytes = window_bytes  # None: automatic
        self._recent: deque[Passage] = deque(maxlen=8)
        self._forecast: Forecast | None = None
        self._forecast_of: Passage | None = None

    def begin(self) -> Passage:
        """A new passage, with what the last demanded one predicts."""
        latest = next((p for p in reversed(self._recent) if p.began_backward), None)
        if latest is not None and latest is not self._forecast_of:
            window = latest.own_window_bytes
            self._forecast = latest.forecast(window, NEEDED_AT_ONCE, NEVER_FREED)
            self._forecast_of = latest
        passage = Passage(self._forecast, self.window_bytes)
        self._recent.append(passage)
        return passage


def first_guess(groups: Sequence[int | None]) -> list[int]:
    """The order in which nobody has seen storages demanded: last saved first, group by group."""
    runs: list[list[int]] = []
    for index, group in enumerate(groups):
        if runs and group is not None and group == groups[index - 1]:
            runs[-1].append(index)
        else:
            runs.append([index])
    return [index for run in reversed(runs) for index in run]
