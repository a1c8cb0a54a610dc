"""What can be done with a saved tensor, and what a policy's function is told of it."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Action(enum.Enum):
    """Where a saved tensor's bytes wait for backward."""

    KEEP = "keep"
    """On the device, as autograd would leave them."""
    ENCODE = "encode"
    """On the device, losslessly encoded. What does not shrink is kept."""
    SWAP = "swap"
    """In the pool (pinned host memory, or a file on a CPU)."""
    ENCODE_SWAP = "encode_swap"
    """In the pool, losslessly encoded. What does not shrink is swapped as it is."""
    RECOMPUTE = "recompute"
    """Nowhere: the one operator that made it is run again, where that has proven to give the same
    bits. Everything else is encoded or swapped, as suits the device."""


# For who asks once per tensor: looking a member up in its class runs a hook of Enum's.
KEEP, ENCODE, SWAP, ENCODE_SWAP = Action.KEEP, Action.ENCODE, Action.SWAP, Action.ENCODE_SWAP
RECOMPUTE = Action.RECOMPUTE

#: Native code knows an action by its number (csrc/engine/action.h), which is its place here.
ACTIONS = tuple(Action)
NUMBERS = {action: number for number, action in enumerate(ACTIONS)}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What a policy function is told about a saved tensor besides the tensor itself."""

    unit: str
    """Name of the unit (layer) that saved it; ``""`` outside :func:`memswap.manage`."""
    nbytes: int
    """Bytes of the tensor's elements."""
    storage_nbytes: int
    """Bytes of the storage behind it, which move as a whole."""
