"""HookScope: the pair of hooks that joins autograd to an engine."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from memswap._native import native
from memswap.engine.autograd import arrived, is_frozen_parameter, is_parameter, top_hooks
from memswap.engine.calls import is_running
from memswap.engine.compiled import uncompiled_methods
from memswap.engine.handle import Given, Handle, Parts, Passed, unpack

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from memswap._C import Batch
    from memswap.engine.action import Action
    from memswap.engine.engine import Engine

    HookPair = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]

push_hooks = torch._C._autograd._push_saved_tensors_default_hooks
pop_hooks = torch._C._autograd._pop_saved_tensors_default_hooks
_hooks_disabled = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message


def can_save() -> bool:
    """Whether saved-tensor hooks may be installed now: transforms of torch.func forbid them."""
    return _hooks_disabled() is None


class HookScope(native.HookScope):
    """One installation of an engine's hooks: a ``with`` block, or one call of a unit.

    `pack` is native (csrc/bind/hooks.cpp): it captures the tensor, keeps what persists, and has the
    engine save everything else.

    Args:
        action: what to do with all that is packed, instead of what the policy says.
        group: storages of one group come back in the order in which they were saved
            (`Iteration.admit`).
        batch: of a group, that saves here; None: no group does.
    """

    __slots__ = ("call", "recipes")

    #: The call of a module that it is for; None: a ``with`` block, which always ends by itself.
    call: FrameType | None
    #: The recipes that know the operators of what it is for, while its hooks are installed.
    recipes: native.Recipes | None

    # Native members, by what they are in Python.
    engine: Engine
    unit: str
    action: Action | None
    why_kept: str
    """The reason that is counted for what `action` keeps."""
    group: int | None
    outer: HookPair | None
    ordinal: int
    """Of the storage that was considered last."""
    batch: Batch | None

    def __init_subclass__(cls) -> None:
        uncompiled_methods(cls)

    def __init__(
        self,
        engine: Engine,
        unit: str,
        action: Action | None = None,
        group: int | None = None,
        batch: Batch | None = None,
    ) -> None:
        super().__init__(engine)
        self.call = None
        self.recipes = None
        self.unit = unit
        if batch is not None:
            self.batch = batch
        if action is not None:
            self.action = action
        if group is not None:
            self.group = group
        self.covered = action is not None or engine.policy.covers(unit)

    def within(self, unit: str, action: Action | None, group: int | None) -> HookScope:
        """Another scope for a part of what this one is for: a region of a checkpoint.

        Args:
            unit: name of the part.
            action: what to do with all that is packed, instead of what the policy says.
            group: the region's number.
        """
        return HookScope(self.engine, unit, action, group, self.batch)

    def enter(self, call: FrameType | None = None) -> None:
        """Install the hooks, unless saving here is somebody else's business.

        [Note: Composition] PyTorch applies only the innermost pair of hooks. What a scope does not
        move it therefore hands to the pair that was installed before. Inside a region of
        torch.utils.checkpoint the scope steps aside altogether: the region saves nothing but its
        inputs, which the hooks outside it see. Where saved-tensor hooks are disabled (torch.func),
        tensors stay.

        Args:
            call: the call of a module that this is for; None: a ``with`` block.
        """
        self.call = call
        uninstall_interrupted()
        if not torch.is_grad_enabled() or not can_save():
            return
        outer = top_hooks(True)
        if outer is not None and getattr(outer[0], "__module__", "") == "torch.utils.checkpoint":
            return
        self.outer = outer
        push_hooks(self.pack, unpack)
        self.pushed = True
        if self.engine.recipes is not None and self.engine.knows_operators:
            self.recipes = self.engine.recipes
            self.recipes.enter()

    def leave(self, output: object = None) -> None:
        """The block or the call ends: take the hooks off."""
        uninstall_interrupted(self)
        self.uninstall()
        self.pack_waiting()

    def abandon(self) -> None:
        """The call's end was not seen, or will not be: take the hooks off if they are innermost.

        Otherwise whoever is above goes first, and a scope that comes later finds these.
        """
        uninstall_interrupted()
        if self._on_top() or not self.pushed:  # where they are off, the call's frame goes
            self.uninstall()
        self.pack_waiting()

    def uninstall(self) -> None:
        """Take the hooks off if they are there. See [Note: Interrupts]."""
        if self.pushed or self._on_top():
            self.pushed = False
            pop_hooks()
        recipes, self.recipes = self.recipes, None
        if recipes is not None:
            recipes.leave()
        self.call = None  # its frame holds a graph, and the graph these hooks

    def _on_top(self) -> bool:
        top = top_hooks(True)
        return top is not None and bool(top[0] == self.pack)

    def is_frozen(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor with a class of its own is a frozen parameter, or a view of one."""
        return is_frozen_parameter(tensor)

    def or_outer(self, tensor: torch.Tensor, handle: Handle) -> Handle:
        """Hand a tensor that stays to the outer hooks, if there are any ([Note: Composition])."""
        if self.outer is None or type(handle) is not native.Handle or not handle.stays:
            return handle
        pack_hook, unpack_hook = self.outer
        return Passed(pack_hook(tensor), unpack_hook)

    def pack_unusual(self, tensor: torch.Tensor) -> Handle:
        """A tensor that a storage alone does not describe: by its parts, or kept.

        [Note: Ragged sizes] Torch names a jagged tensor's ragged size after the very tensor of its
        offsets, and sizes with other names do not fit each other. So only the values move.
        """
        there = arrived(tensor)
        if there is not tensor:
            handle: Handle = self.pack(there)
            return handle
        jagged = tensor.layout is torch.jagged
        if (
            self.outer is None
            and is_traceable_wrapper_subclass(tensor)
            and (jagged or not tensor.is_nested)
            and not is_parameter(tensor)
        ):
            names, context = tensor.__tensor_flatten__()
            moving = ["_values"] if jagged else names
            inner = {name: getattr(tensor, name) for name in names}
            parts = {
                name: self.pack(part)
                if name in moving and isinstance(part, torch.Tensor)
                else Given(part)
                for name, part in inner.items()
            }
            return Parts(tensor, parts, context)
        self.engine.lock.run(self._keep_unusual)
        return self.or_outer(tensor, native.kept_handle(tensor))

    def _keep_unusual(self) -> None:
        self.engine.ledger.offer(0)
        self.engine.ledger.keep("not a plain tensor", 0)


uncompiled_methods(HookScope)


class OpenBlocks(threading.local):
    """The scopes of the ``with`` blocks that a thread is in, the innermost last."""

    def __init__(self) -> None:
        self.scopes: list[HookScope] = []

    def enter(self, scope: HookScope, *, installs: bool = True) -> None:
        """A block begins. It is known for longer than its hooks are installed: Ctrl-C may come."""
        self.scopes.append(scope)
        if installs:
            scope.enter()

    def leave(self) -> None:
        """The innermost block ends."""
        if self.scopes:
            scope = self.scopes[-1]
            uninstall_interrupted()
            scope.uninstall()
            del self.scopes[-1]
            scope.leave()


def current_scope() -> HookScope | None:
    """The scope whose hooks this thread would save through now, if they are memswap's."""
    top = top_hooks(True)
    owner = None if top is None else getattr(top[0], "__self__", None)
    return owner if isinstance(owner, HookScope) else None


def uninstall_interrupted(ends: HookScope | None = None) -> None:
    """Take off innermost hooks whose call has ended.

    [Note: Interrupts] Ctrl-C may come behind any step, and torch runs no hook of a module after
    it. A scope knows its call before its hooks are installed, and for longer than they are, so
    whichever scope begins or ends next finds them, of whichever engine.

    Args:
        ends: the scope whose call ends now; None: one begins.
    """
    scope = current_scope()
    while (
        scope is not None
        and scope is not ends
        and scope.call is not None
        and not is_running(scope.call)
    ):
        scope.uninstall()
        scope = current_scope()
