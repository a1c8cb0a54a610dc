"""EarlyLaunches: exchanges that were launched before anybody said what attention will get.

[Note: Early launches] A projection's exchange is launched when the projection returns, before
anybody has said what attention will get. The launch is kept under the identity of the tensor that
the projection returned, weakly: several microbatches have one each, and one that attention never
saw before its tensor died is waited for at the next opportunity, since its buffers are in use until
then. Attention takes it only if it gets that very tensor in that version. A view, a rotated or
normalized copy, an edited tensor is another value, and using the launch for it would be silently
wrong; it takes the ordinary path. So does a recomputation of the attention alone, whose launch has
been used up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from memswap.parallel.exchange import Pending

#: What has to be called so that what nobody wants any more has been waited for.
Orphans = list[Callable[[], object]]


class EarlyLaunches:
    """The early launches of one attention module, by role."""

    def __init__(self) -> None:
        self.orphans: Orphans = []
        self._launched: dict[str, Any] = {}

    def __len__(self) -> int:
        return sum(len(kept) for kept in self._launched.values())

    def keep(self, role: str, tensor: torch.Tensor, pending: Pending) -> None:
        kept = self._launched.setdefault(role, WeakTensorKeyDictionary())
        kept[tensor] = _Early(pending, tensor, self.orphans)

    def take(self, role: str, tensor: torch.Tensor) -> Pending | None:
        """The launch that is of this very tensor: see [Note: Early launches]."""
        kept = self._launched.get(role)
        launched: _Early | None = None if kept is None else kept.pop(tensor, None)
        if launched is not None and launched.is_of(tensor):
            return launched.take()
        del launched  # an orphan now
        self.drop_orphans()
        return None

    def drop_orphans(self) -> None:
        """Wait for launches that nobody wants: their buffers are in use until then."""
        while self.orphans:
            self.orphans.pop(0)()


class _Early:
    """An early launch, with what the tensor was like; one that dies untaken is an orphan."""

    def __init__(self, pending: Pending, tensor: torch.Tensor, orphans: Orphans) -> None:
        self._pending: Pending | None = pending
        self._version = tensor._version
        self._had_grad = _wants_grad(tensor)
        self._orphans = orphans

    def is_of(self, tensor: torch.Tensor) -> bool:
        return tensor._version == self._version and self._had_grad >= _wants_grad(tensor)

    def take(self) -> Pending | None:
        pending, self._pending = self._pending, None
        return pending

    def __del__(self) -> None:
        if self._pending is not None:
            self._orphans.append(self._pending.discard)


def _wants_grad(tensor: torch.Tensor) -> bool:
    return bool(tensor.requires_grad and torch.is_grad_enabled())
