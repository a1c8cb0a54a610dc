"""HyperParallel's wrappers by their own names: what a module or a function saves is swapped.

A wrapped module is the module itself: no parameter is renamed, and a ``state_dict`` fits before and
after. A wrapped function is a module without parameters. In a layer that is linked
(:meth:`SwapManager.set_forward_prefetch_layer`) what is chosen travels with the layer's group;
elsewhere it moves by memswap's own schedule.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from functools import cache
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from memswap import checkpointing
from memswap._warn import warn
from memswap.activations import manage
from memswap.checkpointing import CheckpointPolicy, checkpoint_module
from memswap.compat.hyper_parallel.manager import SwapManager
from memswap.engine.action import Action, TensorInfo
from memswap.engine.autograd import in_backward
from memswap.engine.hook_scope import HookScope
from memswap.hooks.module_hooks import ModuleHooks, hooks_on
from memswap.planning.policy import Policy

if TYPE_CHECKING:
    from memswap._C import Batch
    from memswap.engine.transfers import Pool

_units = count()


class ActivationPolicy(enum.Enum):
    """What a policy of :func:`swap_wrapper` says about a saved tensor."""

    SAVE = 0
    SWAP = 1


SavedPolicy = Callable[[torch.Tensor], "ActivationPolicy | CheckpointPolicy"]

_SWAPS: dict[object, bool] = {
    ActivationPolicy.SAVE: False,
    ActivationPolicy.SWAP: True,
    CheckpointPolicy.MUST_SAVE: False,
    CheckpointPolicy.MUST_SWAP: True,
}


class FunctionModule(nn.Module):  # type: ignore[misc]
    """A function as a module, so that it can be wrapped, linked and called like one."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the function returns."""
        return self.function(*args, **kwargs)

    def extra_repr(self) -> str:
        """The function's name."""
        return getattr(self.function, "__qualname__", type(self.function).__name__)


class _Joining:
    """How what a wrapped module or function saves joins the group that collects at that moment.

    Owned by the module's hooks; a copied or pickled module is not wrapped.

    Args:
        allows: whether a saved tensor may leave.
        caller: which wrapper it is of.
    """

    def __init__(self, allows: Callable[[torch.Tensor], bool], caller: str) -> None:
        self.allows = allows
        self.caller = caller
        self.unit = f"wrapper {next(_units)}"
        self._hooks = ModuleHooks()

    def watch(self, module: nn.Module) -> None:
        """Inside of all hooks that the module has so far."""
        self._hooks.add(module, self.unit, self._call_begins, ends_first=True)

    def scope(self) -> HookScope | None:
        """Hooks that save for the group; None: none collects."""
        if not torch.is_grad_enabled() or in_backward():
            return None
        manager = SwapManager()
        batch: Batch | None = manager.collecting()
        if batch is None:
            return None
        manager.wrappers[self.unit] = self
        return HookScope(batch.engine, self.unit, batch=batch)

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """One call of a function."""
        scope = None if torch.compiler.is_compiling() else self.scope()
        if scope is None:
            return function(*args, **kwargs)
        scope.enter()
        try:
            return function(*args, **kwargs)
        finally:
            scope.leave()

    def _call_begins(
        self, unit: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> HookScope | None:
        return self.scope()


def checkpoint_wrapper(
    module: nn.Module | Callable[..., Any],
    policy_fn: Any = None,
    *,
    swap_inputs: bool = False,
    group_swap: bool = False,
    **options: Any,
) -> nn.Module:
    """Make each forward of a module a checkpointed region; returns the module itself.

    Args:
        module: a module, or a function, which becomes a module.
        policy_fn: ``policy_fn(ctx, op, *args, **kwargs) -> CheckpointPolicy``.
        swap_inputs: whether the region's inputs are swapped until backward.
        group_swap: taken and not needed: storages of up to 1 MiB always travel together.
        **options: see :class:`memswap.Checkpointing`.
    """
    wrapped = as_module(module, "checkpoint_wrapper")
    # In a linked layer a group's engine has the last word about sizes.
    options.setdefault("min_bytes", 1)
    checkpoint_module(wrapped, policy_fn, swap_inputs=swap_inputs, **options)
    _Joining(nothing, "checkpoint_wrapper").watch(wrapped)
    return wrapped


def swap_wrapper(
    module: nn.Module | Callable[..., Any],
    policy_fn: SavedPolicy | None = None,
    group_swap: bool = False,
    *,
    pool: Pool | None = None,
) -> nn.Module:
    """Swap what a module saves, or what a policy chooses of it; returns the module itself.

    Args:
        module: a module, or a function, which becomes a module.
        policy_fn: ``policy_fn(tensor)`` says SAVE or SWAP (:class:`ActivationPolicy`), or MUST_SAVE
            or MUST_SWAP (:class:`CheckpointPolicy`). None: everything is swapped.
        group_swap: taken and not needed: storages of up to 1 MiB always travel together.
        pool: where bytes go outside of linked layers.

    Raises:
        TypeError: neither a module nor a function; in the forward, if the policy returns something
            else.
    """
    wrapped = as_module(module, "swap_wrapper")
    swaps = read_policy(policy_fn, "swap_wrapper")
    if is_wrapped(wrapped, "swap_wrapper"):
        warn(
            f"memswap: swap_wrapper(): this {type(wrapped).__name__} is wrapped already, and its "
            "first policy goes on to apply; wrap each module once"
        )
        return wrapped

    def action(tensor: torch.Tensor, info: TensorInfo) -> Action:
        return Action.SWAP if swaps(tensor) else Action.KEEP

    fn = None if policy_fn is None else action
    manage({type(wrapped).__name__: wrapped}, Policy(Action.SWAP, min_bytes=1, fn=fn), pool=pool)
    _Joining(swaps, "swap_wrapper").watch(wrapped)
    return wrapped


def swap(
    function: Callable[..., Any],
    *args: Any,
    policy_fn: SavedPolicy | None = None,
    group_swap: bool = False,
    **kwargs: Any,
) -> Any:
    """``function(*args, **kwargs)``; what it saves travels with the group that collects now.

    Args:
        function: the function or module. Outside of linked layers, and where no group's name was
            set, what it saves stays on the device: there :class:`memswap.saved_tensors` swaps.
        *args: what it is called with.
        policy_fn: see :func:`swap_wrapper`.
        group_swap: taken and not needed: storages of up to 1 MiB always travel together.
        **kwargs: for the function.

    Raises:
        TypeError: the policy returns something else.
    """
    return _Joining(read_policy(policy_fn, "swap"), "swap").run(function, args, kwargs)


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    swap_inputs: bool = False,
    policy_fn: Any = None,
    group_swap: bool = False,
    **kwargs: Any,
) -> Any:
    """``function(*args, **kwargs)`` as a region: :func:`memswap.checkpoint`.

    In a linked layer what the region swaps travels with the layer's group.

    Args:
        function: the function or module.
        *args: what it is called with.
        swap_inputs: whether the region's inputs are swapped until backward.
        policy_fn: ``policy_fn(ctx, op, *args, **kwargs) -> CheckpointPolicy``.
        group_swap: taken and not needed: storages of up to 1 MiB always travel together.
        **kwargs: for the function, and the options of :func:`memswap.checkpoint`.
    """
    options = {"swap_inputs": swap_inputs, "policy_fn": policy_fn, "min_bytes": 1, **kwargs}
    return regions().run(checkpointing.checkpoint, (function, *args), options)


def is_wrapped(module: nn.Module, caller: str) -> bool:
    """Whether a module was given to a wrapper before."""
    owners = (owner for owner, _, _ in hooks_on(module))
    return any(isinstance(owner, _Joining) and owner.caller == caller for owner in owners)


@cache
def regions() -> _Joining:
    """How single regions join the group that collects: one for all calls."""
    return _Joining(nothing, "checkpoint")


def as_module(module: Any, caller: str) -> nn.Module:
    """A module as it is; a function as a module."""
    if isinstance(module, nn.Module):
        return module
    if not callable(module):
        raise TypeError(
            f"{caller}(): found {type(module).__name__}, expected an nn.Module or a function"
        )
    return FunctionModule(module)


def read_policy(policy_fn: SavedPolicy | None, caller: str) -> Callable[[torch.Tensor], bool]:
    """Whether a saved tensor is swapped, by a policy of that system; None: everything is."""
    if policy_fn is None:
        return everything

    def swaps(tensor: torch.Tensor) -> bool:
        says = policy_fn(tensor)
        if says not in _SWAPS:
            raise TypeError(
                f"{caller}(policy_fn=...): found {says!r}, expected ActivationPolicy.SAVE or "
                "SWAP, or CheckpointPolicy.MUST_SAVE or MUST_SWAP"
            )
        return _SWAPS[says]

    return swaps


def everything(tensor: torch.Tensor) -> bool:
    """What a wrapper without a policy swaps."""
    return True


def nothing(tensor: torch.Tensor) -> bool:
    """What a region leaves on the device stays there: it names what moves."""
    return False
