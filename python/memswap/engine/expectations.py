"""Expectations: what a tensor's frame will be like, from what it was like the last time.

They are native (csrc/engine/expectations.h), as is taking in what encoders report. Here stand the
numbers that they go by where nothing is known for sure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from memswap._native import native

if TYPE_CHECKING:
    import torch

Expectations = native.Expectations
FrameSizes = native.FrameSizes

_LIMITS = native.ExpectationLimits()

#: A frame longer than this share of the raw bytes is not worth its time.
WORTH: float = _LIMITS.worth

#: Encodes of one tensor between two looks at whether it shrinks by now, or in another layout.
RETRY_AFTER: int = _LIMITS.retry_after

#: Of the bytes that one iteration encodes, those whose layout is a mere trial.
TRIAL_SHARE: float = _LIMITS.trial_share

#: Capacity beyond what was needed last time: a factor, and for small frames units of 8 bytes.
MARGIN: float = _LIMITS.margin
MARGIN_UNITS: int = _LIMITS.margin_units


class Key(NamedTuple):
    """Which tensor it is, step after step. The same program makes the same keys."""

    unit: str
    ordinal: int
    """Place among the storages that one scope of the unit considered."""
    nbytes: int
    dtype: torch.dtype


def limits() -> native.ExpectationLimits:
    """The numbers above, for expectations that are made now."""
    made = native.ExpectationLimits()
    made.worth = WORTH
    made.retry_after = RETRY_AFTER
    made.trial_share = TRIAL_SHARE
    made.margin = MARGIN
    made.margin_units = MARGIN_UNITS
    return made


def open_expectations(device: torch.device) -> Expectations:
    """What is expected of the tensors of a device that one engine encodes: nothing yet."""
    return Expectations.of_device(device, limits())
