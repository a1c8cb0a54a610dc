"""Workspace: what was on a device beside saved activations in one iteration, as data."""

from __future__ import annotations

from dataclasses import dataclass

#: Allocators of accelerators round up to this.
GRANULARITY_BYTES = 512


@dataclass(frozen=True, slots=True)
class Workspace:
    """What a recorder has seen ([Note: Workspace] in csrc/engine/workspace.h)."""

    extra_nbytes: tuple[int, ...]
    """From each mark to the next, the most bytes."""
    gradient_nbytes: tuple[int, ...]
    """Of these, gradients of parameters when the mark was over."""
    baseline_nbytes: int
    """Of these, what was there when the iteration began."""
