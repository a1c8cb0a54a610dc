"""Handle: what a pack hook returns to autograd, and what unpack makes a tensor of again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from memswap._native import native

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(slots=True, eq=False)
class Passed:
    """The handle of a save that goes to the hooks that were installed before ours."""

    packed: object
    unpack_hook: Callable[[Any], torch.Tensor]

    def unpack(self) -> torch.Tensor:
        return self.unpack_hook(self.packed)


@dataclass(slots=True, eq=False)
class Given:
    """A part of a wrapper subclass that is no tensor (a device mesh)."""

    part: object

    def unpack(self) -> object:
        return self.part


class Parts:
    """The handle of a wrapper subclass (DTensor and its like), whose inner tensors move.

    Args:
        tensor: the subclass's.
        parts: handles of what moves, and what is kept as it is, by the names of its inner tensors.
        context: what its class rebuilds it with (`__tensor_flatten__`).
    """

    __slots__ = ("context", "guard", "kind", "outer_size", "outer_stride", "parts")

    def __init__(
        self,
        tensor: torch.Tensor,
        parts: dict[str, Handle | Given],
        context: object,
    ) -> None:
        self.kind = type(tensor)
        self.guard = native.VersionGuard(tensor)
        self.parts = parts
        self.context = context
        self.outer_size = tensor.size()
        self.outer_stride = tensor.stride()

    def unpack(self) -> torch.Tensor:
        if self.guard.edited:
            native.raise_inplace_edit(
                f"{self.kind.__name__} {list(self.outer_size)}",
                self.guard.current_version,
                self.guard.version,
            )
        inner = {name: part.unpack() for name, part in self.parts.items()}
        unflatten = self.kind.__tensor_unflatten__
        tensor: torch.Tensor = unflatten(inner, self.context, self.outer_size, self.outer_stride)
        return tensor


#: The native one is a share of an entry, or a tensor that stays (csrc/engine/entry.h).
Handle = native.Handle | Passed | Parts


#: The unpack hook of every engine: (handle) -> tensor.
unpack: Callable[[Handle], torch.Tensor] = native.unpack
