"""Entry: one storage that autograd saved, and where its bytes are. It is native."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from memswap._native import native

if TYPE_CHECKING:
    import torch

    from memswap.engine.action import Action
    from memswap.engine.transfer import Route

#: Where an entry's bytes are. Which steps are legal: csrc/engine/residence.h.
State = native.State

#: Why a storage stays that has lost its memory before it was sent.
RESIZED = "resized"

#: One saved storage that may leave (csrc/bind/entry.cpp).
Entry = native.Entry

#: A storage that stays for good.
Stay = native.Stay


class Order(NamedTuple):
    """How an entry will leave, once it is told to."""

    route: Route
    action: Action
    unit: str
    ordinal: int
    dtype: torch.dtype
