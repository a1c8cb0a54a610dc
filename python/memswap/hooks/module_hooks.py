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

import sys
import threading
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from memswap.engine.calls import current_call, is_running
from memswap.engine.compiled import runs_compiled, uncompiled, uncompiled_alone, untraced

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from torch.utils.hooks import RemovableHandle


class Scope(Protocol):
    """What one call of a module is for the owner of its hooks."""

    def enter(self, call: FrameType | None) -> object:
        """The call begins. Returns None, or the ``(args, kwargs)`` that the module is to get."""

    def leave(self, output: object) -> object:
        """It ends, with this output; with None where it raises.

        Returns None, or the output that its caller is to get.
        """

    def abandon(self) -> None:
        """Its end was not seen, or will not be. The scope may have been left already."""


class AtBegin:
    """The scope of a call of which only the begin matters.

    Args:
        changed: the ``(args, kwargs)`` that the module is to get.
    """

    def __init__(self, changed: tuple[Any, Any]) -> None:
        self._changed: tuple[Any, Any] | None = changed

    def enter(self, call: FrameType | None) -> object:
        changed, self._changed = self._changed, None  # they may be gone before the call ends
        return changed

    def leave(self, output: object) -> None:
        pass

    def abandon(self) -> None:
        pass


class AtEnd:
    """The scope of a call of which only the end matters.

    Args:
        then: gets the output, and returns None, or the output that the module's caller is to get.
    """

    def __init__(self, then: Callable[[Any], object]) -> None:
        self._then = then

    def enter(self, call: FrameType | None) -> None:
        pass

    def leave(self, output: object) -> object:
        return self._then(output)

    def abandon(self) -> None:
        pass


class _Call:
    """A call that has begun."""

    __slots__ = ("error", "frame", "hook", "scope")

    def __init__(self, frame: FrameType | None, hook: _Hook) -> None:
        self.frame = frame
        self.hook = hook
        self.scope: Scope | None = None
        #: Of those who call the module while they handle one.
        self.error = sys.exc_info()[1]


class _Running(threading.local):
    """The calls that a thread is in, the innermost last."""

    def __init__(self) -> None:
        self.calls: list[_Call] = []
        self.compiled = False  # the call that began last is of compiled code


Begin = Callable[[Any, nn.Module, tuple[Any, ...], dict[str, Any]], Scope | None]


class ModuleHooks:
    """Forward hooks of several modules for one owner. Calls may nest, recur, raise and be cut off.

    The modules own what is called, so the owner lives while they have its hooks, and this refers to
    nobody: an owner that has removed its hooks is in no circle.

    Args:
        copied: is called where a module that has these hooks is copied or pickled, and may raise.
            The copy's hooks do nothing.
    """

    def __init__(self, copied: Callable[[], object] | None = None) -> None:
        self.copied = copied
        self._handles: list[RemovableHandle] = []
        self._running = _Running()

    def __len__(self) -> int:
        """How many modules have these hooks."""
        return len(self._handles) // 2  # one where a call begins, one where it ends

    def add(
        self,
        module: nn.Module,
        key: object,
        begin: Begin,
        *,
        in_compiled_code: bool = True,
        begins_first: bool = False,
        ends_first: bool = False,
        abandons_raised: bool = False,
    ) -> None:
        """Have the calls of a module begin and end here.

        Args:
            module: a module that these hooks are not on yet.
            key: what `begin` is told about it.
            begin: ``begin(key, module, args, kwargs)`` is called when the module's forward is about
                to run, and returns the scope of that call, which is then entered; or None.
            in_compiled_code: whether the hooks are called where torch.compile traces the module's
                caller, which ends the compiled graph there; otherwise they are not there for it
                ([Note: Compiled as without] in engine/compiled.py).
            begins_first: whether calls begin here before they begin for hooks that are there.
            ends_first: whether they end here before they end for those.
            abandons_raised: whether the scope of a call that raises is abandoned, and not left with
                None.
        """
        hook = _Hook(self, key, begin, abandons_raised)
        before, after = hook.before, hook.after
        if not in_compiled_code:
            before, after = hook.before_outside, hook.after_outside
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

    def depth(self, keys: Collection[object] | None = None) -> int:
        """How many calls this thread is in, one that begins now included.

        Args:
            keys: of the modules whose calls count; None: all.
        """
        self._abandon_ended()
        calls = self._running.calls
        return len(calls) if keys is None else sum(call.hook.key in keys for call in calls)

    def compiled(self) -> bool:
        """Whether the call that begins now is of code that torch.compile compiles.

        Of modules that were added with ``in_compiled_code=False``.
        """
        return self._running.compiled

    @uncompiled
    def _call_begins(
        self,
        hook: _Hook,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        compiled: bool = False,
    ) -> object:
        self._abandon_ended()
        self._running.compiled = compiled
        call = _Call(current_call(), hook)
        self._running.calls.append(call)
        scope = hook.begin(hook.key, module, args, kwargs)
        if scope is None:
            return None
        call.scope = scope
        return scope.enter(call.frame)

    @uncompiled
    def _call_ends(self, hook: _Hook, output: object) -> object:
        calls = self._running.calls
        frame = current_call() if calls else None
        for place in reversed(range(len(calls))):
            if calls[place].frame is frame and calls[place].hook is hook:
                if hook.abandons_raised and sys.exc_info()[1] is not calls[place].error:
                    self._abandon_from(place)
                    return None
                self._abandon_from(place + 1)
                scope = calls[place].scope
                changed = None if scope is None else scope.leave(output)
                del calls[place:]
                return changed
        return None

    def _abandon_ended(self) -> None:
        calls = self._running.calls
        while calls and calls[-1].frame is not None and not is_running(calls[-1].frame):
            self._abandon_from(len(calls) - 1)

    def _abandon_from(self, place: int) -> None:
        calls = self._running.calls
        while len(calls) > place:
            scope = calls[-1].scope
            if scope is not None:
                scope.abandon()
            del calls[-1]


class _Hook:
    """The hooks of one module. Those of a copied or pickled module do nothing."""

    def __init__(
        self, hooks: ModuleHooks | None, key: object, begin: Begin, abandons_raised: bool = False
    ) -> None:
        self.hooks = hooks
        self.key = key
        self.begin = begin
        self.abandons_raised = abandons_raised

    @untraced
    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        hooks = self.hooks
        return None if hooks is None else hooks._call_begins(self, module, args, kwargs)

    @untraced
    def after(self, module: nn.Module, args: tuple[Any, ...], output: object) -> object:
        return None if self.hooks is None else self.hooks._call_ends(self, output)

    @uncompiled_alone
    def before_outside(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> object:
        if torch.compiler.is_dynamo_compiling() or self.hooks is None:
            return None
        return self.hooks._call_begins(self, module, args, kwargs, runs_compiled())

    @uncompiled_alone
    def after_outside(self, module: nn.Module, args: tuple[Any, ...], output: object) -> object:
        if torch.compiler.is_dynamo_compiling() or self.hooks is None:
            return None
        return self.hooks._call_ends(self, output)

    def __deepcopy__(self, memo: dict[int, object]) -> _Hook:
        kind, arguments = self.__reduce__()
        copied: _Hook = kind(*arguments)
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        if self.hooks is not None and self.hooks.copied is not None:
            self.hooks.copied()
        return _Hook, (None, None, _nothing)


def _nothing(key: object, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    return None


def hooks_on(module: nn.Module) -> Iterator[tuple[object, ModuleHooks, Any]]:
    """The hooks of this kind on a module: whose method they call, they, and the module's key."""
    for registered in module._forward_pre_hooks.values():
        hook = getattr(registered, "__self__", None)
        if isinstance(hook, _Hook) and hook.hooks is not None:
            yield getattr(hook.begin, "__self__", None), hook.hooks, hook.key
