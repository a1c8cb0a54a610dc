"""ModuleHooks: the forward hooks of memswap on modules, from the begin of a call to its end.

[Note: A call's end]
What a call has begun ends with that call and with no other, and at once. A call is known by its
frame ([Note: Which call] in engine/calls.py), which the hook at its end finds again:

- the end of a call whose begin was not seen is nobody's: another's hook raised before ours ran;
- what was begun later and has not ended was interrupted, and is abandoned first;
- a call that has ended without its hook (KeyboardInterrupt, an exception in compiled code) is
  noticed and abandoned when the next one begins.

A call is known before its scope has done anything. So an interrupt behind any step leaves a call
that is found, and abandoning a scope that has done half of its work, or all, does the rest.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import torch

from memswap.engine.calls import current_call, is_running
from memswap.engine.untraced import untraced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from torch import nn
    from torch.utils.hooks import RemovableHandle

KeyT = TypeVar("KeyT")


class Scope(Protocol):
    """What one call of a module is for the owner of its hooks."""

    def enter(self, call: FrameType | None) -> None:
        """The call begins."""

    def leave(self, output: object) -> None:
        """It ends, with this output; with None where it raises."""

    def abandon(self) -> None:
        """Its end was not seen, or will not be. The scope may have been left already."""


class _Call:
    """A call that has begun."""

    __slots__ = ("frame", "key", "scope")

    def __init__(self, frame: FrameType | None, key: object) -> None:
        self.frame = frame
        self.key = key
        self.scope: Scope | None = None


class _Running(threading.local):
    """The calls that a thread is in, the innermost last."""

    def __init__(self) -> None:
        self.calls: list[_Call] = []


class ModuleHooks(Generic[KeyT]):
    """Forward hooks of several modules for one owner. Calls may nest, recur, raise and be cut off.

    Args:
        begin: ``begin(key, module, args, kwargs)`` is called when a module's forward is about to
            run, and returns the scope of that call, which is then entered; or None.
    """

    def __init__(
        self, begin: Callable[[KeyT, nn.Module, tuple[Any, ...], dict[str, Any]], Scope | None]
    ) -> None:
        self._begin = begin
        self._handles: list[RemovableHandle] = []
        self._running = _Running()

    def __len__(self) -> int:
        """How many modules have these hooks."""
        return len(self._handles) // 2  # one where a call begins, one where it ends

    @property
    def owner(self) -> object:
        """Whose method is called when a call begins."""
        return getattr(self._begin, "__self__", None)

    def add(
        self,
        module: nn.Module,
        key: KeyT,
        *,
        in_compiled_code: bool = True,
        begins_first: bool = False,
        ends_first: bool = False,
    ) -> None:
        """Have the calls of a module begin and end here.

        Args:
            module: a module that these hooks are not on yet.
            key: what `begin` is told about it.
            begins_first: whether calls begin here before they begin for hooks that are there.
            ends_first: whether they end here before they end for those.
            in_compiled_code: whether the hooks are called where torch.compile traces the module's
                caller, which ends the compiled graph there; otherwise they are not there for it.
        """
        hook = _Hook(self, key)
        before, after = hook.before, hook.after
        if not in_compiled_code:
            before, after = hook.before_untraced_only, hook.after_untraced_only
        self._handles += [
            module.register_forward_pre_hook(before, prepend=begins_first, with_kwargs=True),
            module.register_forward_hook(after, prepend=ends_first, always_call=True),
        ]

    def remove(self) -> None:
        """Take the hooks off the modules; nobody will tell the end of this thread's calls."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.abandon()

    def abandon(self) -> None:
        """Abandon this thread's calls."""
        self._abandon_from(0)

    def running(self, key: KeyT) -> int:
        """How many calls of a key this thread is in, one that begins now included."""
        return sum(call.key == key for call in self._running.calls)

    @property
    def depth(self) -> int:
        """How many calls this thread is in, one that begins now included."""
        return len(self._running.calls)

    def _call_begins(
        self, key: KeyT, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        calls = self._running.calls
        while calls and calls[-1].frame is not None and not is_running(calls[-1].frame):
            self._abandon_from(len(calls) - 1)
        call = _Call(current_call(), key)
        calls.append(call)
        scope = self._begin(key, module, args, kwargs)
        if scope is not None:
            call.scope = scope
            scope.enter(call.frame)

    def _call_ends(self, key: KeyT, output: object) -> None:
        calls = self._running.calls
        frame = current_call() if calls else None
        for place in reversed(range(len(calls))):
            if calls[place].frame is frame and calls[place].key == key:
                self._abandon_from(place + 1)
                scope = calls[place].scope
                if scope is not None:
                    scope.leave(output)
                del calls[place:]
                return

    def _abandon_from(self, place: int) -> None:
        calls = self._running.calls
        while len(calls) > place:
            scope = calls[-1].scope
            if scope is not None:
                scope.abandon()
            del calls[-1]


class _Hook(Generic[KeyT]):
    """The hooks of one module. Those of a copied or pickled module do nothing."""

    def __init__(self, hooks: ModuleHooks[KeyT] | None, key: KeyT | None) -> None:
        self.hooks = hooks
        self._key: Any = key

    @untraced
    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.hooks is not None:
            self.hooks._call_begins(self._key, module, args, kwargs)

    @untraced
    def after(self, module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        if self.hooks is not None:
            self.hooks._call_ends(self._key, output)

    def before_untraced_only(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if not torch.compiler.is_compiling() and self.hooks is not None:
            self.hooks._call_begins(self._key, module, args, kwargs)

    def after_untraced_only(self, module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        if not torch.compiler.is_compiling() and self.hooks is not None:
            self.hooks._call_ends(self._key, output)

    def __deepcopy__(self, memo: dict[int, object]) -> _Hook[KeyT]:
        return _Hook(None, None)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hook, (None, None)


def owners(module: nn.Module) -> Iterator[tuple[object, Any]]:
    """Who has hooks of this kind on a module, and what they call the module."""
    for registered in module._forward_pre_hooks.values():
        hook = getattr(registered, "__self__", None)
        if isinstance(hook, _Hook) and hook.hooks is not None:
            yield hook.hooks.owner, hook._key
