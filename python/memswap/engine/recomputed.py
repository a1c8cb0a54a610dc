"""Recomputed: what a checkpoint region saves again in backward is counted while it is there."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from memswap._native import native
from memswap.engine.autograd import in_backward, top_hooks

if TYPE_CHECKING:
    from collections.abc import Callable

    from memswap.engine.engine import Engine


def counting(engine: Engine, fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function of a region, so that what it saves in backward counts as resident.

    Torch holds these storages; the engine looks through them at each mark
    (csrc/engine/recomputed.h).

    Args:
        engine: whose ledger counts them.
        fn: what the region runs, in forward and again in backward.
    """

    def counted(*args: Any, **kwargs: Any) -> Any:
        hooks = top_hooks(True) if in_backward() else None
        if hooks is None:
            return fn(*args, **kwargs)
        pack, unpack = hooks
        known = _entries(engine)

        # With the name of torch's hook: whoever asks whose turn it is to save shall find torch.
        @functools.wraps(pack)
        def counting_pack(tensor: torch.Tensor) -> Any:
            _count(engine, tensor, known)
            return pack(tensor)

        with saved_tensors_hooks(counting_pack, unpack):
            return fn(*args, **kwargs)

    return counted


def _entries(engine: Engine) -> set[int]:
    """Storages of entries, the regions' inputs among them: the ledger knows those."""
    with engine.lock:
        iteration = engine.iteration
        entries = map(iteration.entry, range(iteration.size))
        return {entry.identity.key for entry in entries if entry is not None}


def _count(engine: Engine, tensor: torch.Tensor, known: set[int]) -> None:
    view = native.capture(tensor)
    if view is None or view.of_leaf or view.key in known or engine.is_persistent(view.key):
        return
    with engine.lock:
        engine.count_recomputed(native.StorageRef(tensor))
