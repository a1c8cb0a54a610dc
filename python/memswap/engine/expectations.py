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

#: Each is told of in csrc/engine/expectations.h (ExpectationLimits).
WORTH, RETRY_AFTER, TRIAL_SHARE, MARGIN, MARGIN_UNITS = native.EXPECTATION_LIMITS


class Key(NamedTuple):
    """Which tensor it is, step after step. The same program makes the same keys."""

    unit: str
    ordinal: int
    """Place among the storages that one scope of the unit considered."""
    nbytes: int
    dtype: torch.dtype


def open_expectations(device: torch.device) -> Expectations:
    """What is expected of the tensors of a device that one engine encodes: nothing yet."""
    return Expectations(device, (WORTH, RETRY_AFTER, TRIAL_SHARE, MARGIN, MARGIN_UNITS))
