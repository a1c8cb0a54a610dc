"""Recomputed: what a checkpoint region saves again in backward, on the books while it is there."""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from memswap._native import native
from memswap.engine.autograd import in_backward

if TYPE_CHECKING:
    from collections.abc import Callable

    from memswap._C import WeakStorage
    from memswap.engine.engine import Engine

_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks


class Recomputed:
    """Storages that recomputations saved and that backward has not used up.

    They count as resident, so that a budget and a peak mean the same bytes whether a unit is
    recomputed or not. Torch holds them; here are weak references, looked through at each mark.

    Args:
        engine: whose ledger counts them.
        noted: called whenever there are more. Its object, which owns this one, is not kept alive.
    """

    def __init__(self, engine: Engine, noted: Callable[[], None]) -> None:
        self._engine = engine
        self._noted = weakref.WeakMethod(noted)
        self._storages: dict[int, tuple[WeakStorage, int]] = {}
        self._told_nbytes = 0

    def counting(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """The function of a region; what it saves in backward is counted."""

        def counted(*args: Any, **kwargs: Any) -> Any:
            hooks = _top_hooks(True) if in_backward() else None
            if hooks is None:
                return fn(*args, **kwargs)
            pack, unpack = hooks
            known = self._entries()

            # With the name of torch's hook: whoever asks whose turn it is to save shall find torch.
            @functools.wraps(pack)
            def counting_pack(tensor: torch.Tensor) -> Any:
                self._count(tensor, known)
                return pack(tensor)

            with saved_tensors_hooks(counting_pack, unpack):
                return fn(*args, **kwargs)

        return counted

    def sweep(self) -> None:
        """Take off the books what is gone. Under the engine's lock."""
        if not self._storages and not self._told_nbytes:
            return
        for key in [key for key, (weak, _) in self._storages.items() if weak.expired()]:
            del self._storages[key]
        self._settle()

    def clear(self) -> None:
        """No backward runs: what is there still is somebody else's."""
        self._storages.clear()
        self._settle()

    @property
    def nbytes(self) -> int:
        """Of all of them."""
        return sum(nbytes for _, nbytes in self._storages.values())

    def _settle(self) -> None:
        """Tell the ledger, whatever it was told before: Ctrl-C may come behind any line."""
        self._engine.watched = bool(self._storages)  # its director looks through them at each mark
        nbytes = self.nbytes
        self._engine.ledger.set_recomputed(nbytes)
        self._told_nbytes = nbytes

    def _entries(self) -> set[int]:
        """Storages of entries, the regions' inputs among them: the ledger knows those."""
        engine = self._engine
        with engine.lock:
            iteration = engine.iteration
            entries = map(iteration.entry, range(iteration.count))
            return {entry.identity.key for entry in entries if entry is not None}

    def _count(self, tensor: torch.Tensor, known: set[int]) -> None:
        view = native.capture(tensor)
        engine = self._engine
        if view is None or view.of_leaf or view.key in known or engine.is_persistent(view.key):
            return
        with engine.lock:
            self.sweep()
            if view.key in self._storages:
                return
            weak = native.WeakStorage(native.StorageRef(tensor))
            self._storages[view.key] = (weak, view.storage_nbytes)
            self._settle()
            noted = self._noted()
            if noted is not None:
                noted()
