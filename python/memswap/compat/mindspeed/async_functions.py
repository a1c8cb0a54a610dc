"""Functions of torch that ``async_funcs`` names: while a context lives, each call is a window.

In MindSpeed they are replaced for the whole process, and here they are as well: those that a script
names, for as long as a context lives that was told to. A module that has taken the function itself
(``from torch import matmul``) before goes on with that one. Nothing else of torch is ever replaced.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakSet, finalize

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

#: Where each function is found: attributes of modules and classes.
_PLACES: dict[str, tuple[tuple[object, str], ...]] = {
    "matmul": ((torch, "matmul"), (torch.Tensor, "matmul")),
    "allgather": (
        (torch.distributed, "_all_gather_base"),
        (torch.distributed, "all_gather_into_tensor"),
    ),
    "all2all": ((torch.distributed, "all_to_all_single"),),
}

#: Names of functions that can be windows.
ASYNC_FUNCS = tuple(_PLACES)


def checked_name(name: str) -> None:
    """Raises ValueError unless it is one of :data:`ASYNC_FUNCS`."""
    if name not in _PLACES:
        raise ValueError(f"async_funcs: found {name!r}, expected one of {', '.join(ASYNC_FUNCS)}")


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a function that is about to be made."""

    name: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    device: torch.device
    key: str
    """Calls of one key take a time that goes with their amount."""
    amount: float


class Owner(Protocol):
    """Who wants functions to be windows."""

    def window(self, call: Call) -> AbstractContextManager[None]:
        """What the call is made in."""


class AsyncFunctions:
    """Which functions of this process are replaced, and for whom. There is one: :data:`FUNCTIONS`.

    An owner is held weakly. When the last one of a function is gone, the function is as it was.
    """

    def __init__(self) -> None:
        self._owners: dict[str, WeakSet[Owner]] = {name: WeakSet() for name in ASYNC_FUNCS}
        self._originals: dict[str, list[tuple[object, str, Any, Any]]] = {}
        self._lock = threading.RLock()

    def wrap(self, name: str, owner: Owner) -> None:
        """Calls of a function are made in windows of an owner from now on."""
        checked_name(name)
        with self._lock:
            self._owners[name].add(owner)
            if name not in self._originals:
                self._originals[name] = [
                    self._replace(name, holder, attribute)
                    for holder, attribute in _PLACES[name]
                    if hasattr(holder, attribute)  # without torch.distributed there is none
                ]
        finalize(owner, self._let_go, name)

    def _replace(self, name: str, holder: object, attribute: str) -> tuple[object, str, Any, Any]:
        function = getattr(holder, attribute)
        owners = self._owners[name]

        @functools.wraps(function)
        def windowed(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or torch.jit.is_tracing():
                return function(*args, **kwargs)
            call = call_of(name, args, kwargs)
            if call is None:
                return function(*args, **kwargs)
            with contextlib.ExitStack() as windows:
                for owner in tuple(owners):
                    windows.enter_context(owner.window(call))
                return function(*args, **kwargs)

        own = vars(holder).get(attribute)  # None: inherited
        setattr(holder, attribute, windowed)
        return holder, attribute, windowed, own

    def _let_go(self, name: str) -> None:
        """An owner is gone."""
        with self._lock:
            if tuple(self._owners[name]):  # whose length counts it for a moment longer
                return
            for holder, attribute, windowed, own in self._originals.pop(name, ()):
                if vars(holder).get(attribute) is not windowed:
                    continue  # somebody else has replaced it since
                if own is None:
                    delattr(holder, attribute)
                else:
                    setattr(holder, attribute, own)


def call_of(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call | None:
    """A call that can be a window: of tensors of an accelerator, and not asynchronous itself.

    Args:
        name: of the function.
        args: what it is called with.
        kwargs: the same by name.
    """
    if kwargs.get("async_op") or any(one is True for one in args):
        return None
    tensors = [one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)]
    if len(tensors) < 2 or tensors[0].device.type in ("cpu", "meta"):
        return None
    first, second = tensors[0], tensors[1]
    key = f"{name} {tuple(second.shape)}" if name == "matmul" else name
    return Call(name, args, kwargs, first.device, key, float(max(first.numel(), 1)))


#: Functions are replaced for the process, so there is one of these.
FUNCTIONS = AsyncFunctions()
