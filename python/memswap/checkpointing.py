"""Activation checkpointing whose saved outputs and inputs can leave the device.

The machinery is torch's own non-reentrant checkpoint. memswap stands at its two public seams: the
``context_fn`` (checkpoints/region.py), which decides operator by operator, and the saved-tensor
hooks around it, which see the inputs that a region keeps.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypedDict
from weakref import ref

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts, noop_context_fn

from memswap.checkpoints.call import (
    counting,
    flattened,
    stopping_behind_operators,
    with_the_same_parameters,
)
from memswap.checkpoints.policy import (
    CheckpointPolicy,
    Decide,
    PolicyLike,
    checked_ops,
    keep_collectives,
    read_policy,
    torch_policy,
)
from memswap.checkpoints.region import Region
from memswap.engine.action import Action
from memswap.engine.autograd import in_backward
from memswap.engine.engine import Engine
from memswap.engine.hook_scope import HookScope, current_scope
from memswap.engine.transfers import check_pool
from memswap.engine.uncopied import Uncopied
from memswap.engine.units import parsed_prefetch
from memswap.hooks.blocks import named_units
from memswap.hooks.managed import Counted
from memswap.planning.policy import Policy

if TYPE_CHECKING:
    from memswap.engine.transfers import Pool

__all__ = [
    "CheckpointPolicy",
    "Checkpointing",
    "checkpoint",
    "checkpoint_module",
    "keep_collectives",
]

MIN_BYTES = Policy().min_bytes

#: The scope that serves the region around the running code: regions inside it share its engine.
#: Not to be seen from the hooks, which are torch's there.
_serving: ContextVar[HookScope | None] = ContextVar("memswap_checkpoint", default=None)


class _TorchOptions(TypedDict):
    determinism_check: str
    preserve_rng_state: bool
    early_stop: bool


def checkpoint(
    fn: Callable[..., Any],
    *args: Any,
    policy_fn: PolicyLike | None = None,
    swap_inputs: bool | Action = False,
    pool: Pool | None = None,
    min_bytes: int | str = MIN_BYTES,
    determinism_check: str = "default",
    preserve_rng_state: bool = True,
    early_stop: bool = True,
    **kwargs: Any,
) -> Any:
    """``fn(*args, **kwargs)``, run again in backward instead of keeping what it computed.

    Like :func:`torch.utils.checkpoint.checkpoint` with ``use_reentrant=False``; what the policy
    saves can also wait in a pool or as a frame. Inside :func:`memswap.manage` or
    :class:`memswap.saved_tensors` it goes through that engine. Elsewhere a call has an engine, and
    without ``pool`` a pool, of its own: for many regions use :class:`Checkpointing` or
    :func:`checkpoint_module`, which share one and prefetch across regions.

    Args:
        fn: the function or module. It must do the same when it is run again.
        *args: what it is called with.
        policy_fn: ``policy_fn(ctx, op, *args, **kwargs)`` returns for each operator's output a
            :class:`CheckpointPolicy`, one of torch's, or a bool (whether to save). Or a list of
            operators to save. It is called in the forward only. None: everything is recomputed.
        swap_inputs: whether the tensors among the arguments, which a region keeps, leave as well:
            True for ``Action.SWAP``, or another action.
        pool: where they go; see :class:`memswap.saved_tensors`. One that is given is used even
            inside ``manage`` and ``saved_tensors``.
        min_bytes: storages of fewer bytes stay. Inside ``manage`` and ``saved_tensors`` their
            policy's ``min_bytes`` counts.
        determinism_check: ``"default"`` compares shapes, dtypes and devices of what is recomputed,
            and the arguments of what is not, with the forward; ``"none"`` does not.
        preserve_rng_state: whether random operators draw what they drew in the forward.
        early_stop: whether recomputation ends with the last tensor that backward needs.
        **kwargs: what ``fn`` is called with by name.

    Returns:
        What ``fn`` returns. Without gradients enabled, nothing is saved and nothing recomputed.

    Raises:
        InplaceEditError: in backward, if an output that the policy saves was edited in place.
        RecomputeError: in backward, if ``fn`` does something else when it is run again.
        TransferError: in backward, if the pool cannot give bytes back.
        TypeError, ValueError: a policy or an option that is none.
    """
    options = _TorchOptions(
        determinism_check=determinism_check,
        preserve_rng_state=preserve_rng_state,
        early_stop=early_stop,
    )
    if torch.compiler.is_compiling():
        return _traced(fn, args, kwargs, policy_fn, options)
    _check_call(fn, kwargs)
    own = Checkpointing(
        policy_fn, swap_inputs=swap_inputs, pool=pool, min_bytes=min_bytes, **options
    )
    return own.run(fn, args, kwargs)


class Checkpointing(Uncopied, Counted):
    """Checkpointed regions that share one engine: a pool, lanes and a prefetch order.

    Regions inside :func:`memswap.manage` or :class:`memswap.saved_tensors` use that engine instead,
    unless a ``pool`` was given; their statistics are counted there.

    Args:
        policy_fn: what happens to the operators' outputs; see :func:`checkpoint`, as for all.
        swap_inputs: whether the regions' inputs leave as well.
        pool: where swapped tensors go.
        min_bytes: shorter tensors stay.
        prefetch_bytes: see :class:`memswap.saved_tensors`.
        determinism_check: how what is recomputed is compared with what was saved.
        preserve_rng_state: whether random numbers are the same when a region runs again.
        early_stop: whether a region stops once everything that backward needs was computed.
    """

    def __init__(
        self,
        policy_fn: PolicyLike | None = None,
        *,
        swap_inputs: bool | Action = False,
        pool: Pool | None = None,
        min_bytes: int | str = MIN_BYTES,
        prefetch_bytes: int | str = "auto",
        determinism_check: str = "default",
        preserve_rng_state: bool = True,
        early_stop: bool = True,
    ) -> None:
        check_pool(pool)
        self._policy_fn = policy_fn
        self._decide: Decide | None = None if policy_fn is None else read_policy(policy_fn)
        self._input_action = _input_action(swap_inputs)
        self._has_pool = pool is not None
        # Whatever leaves through this engine does so by an action that its scope names.
        policy = Policy(action=Action.KEEP, min_bytes=min_bytes)
        super().__init__({"": Engine(policy, pool, parsed_prefetch(prefetch_bytes))})
        self._options = _TorchOptions(
            determinism_check=determinism_check,
            preserve_rng_state=preserve_rng_state,
            early_stop=early_stop,
        )
        self._modules: list[ref[nn.Module]] = []  # their forwards refer to this object

    def _of_what(self) -> str:
        return f" of {sum(one() is not None for one in self._modules)} module(s)"

    def checkpoint(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """``fn(*args, **kwargs)`` as a region; see :func:`memswap.checkpoint`.

        Args:
            fn: what is run, and run again in backward.
            *args: its arguments.
            **kwargs: the same by name.
        """
        if torch.compiler.is_compiling():
            return _traced(fn, args, kwargs, self._policy_fn, self._options)
        _check_call(fn, kwargs)
        return self.run(fn, args, kwargs)

    def remove(self) -> None:
        """Give the modules of :func:`checkpoint_module` their own forward back.

        Graphs that are alive can still run backward.
        """
        for module in filter(None, (one() for one in self._modules)):
            replaced = module.__dict__.get("forward")
            if isinstance(replaced, _CheckpointedForward):
                replaced.remove()
        self._modules.clear()
        self._engine.settle()

    @property
    def leaves_it_to_plans(self) -> bool:
        """Whether a plan may save what these regions compute instead of recomputing it.

        A policy is the user's own word about that, and another pool is out of a plan's sight.
        """
        return self._decide is None and not self._has_pool

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The region itself, outside of what torch.compile traces.

        Args:
            fn: what is run, and run again in backward.
            args: its arguments.
            kwargs: the same by name.
        """
        if not torch.is_grad_enabled():
            return fn(*args, **kwargs)
        around = None if self._has_pool else current_scope() or _serving.get()
        engine = self._engine if around is None else around.engine
        if not in_backward():
            engine.lock.run(_begin_iteration, engine, around is None)
        # The place in the forward names the region: the same in each step, and no other's.
        group = engine.iteration.size
        unit = f"{'' if around is None else around.unit}@{group}"
        outer = HookScope(engine, "") if around is None else around
        outputs = outer.within(unit, None, group)
        options = self._options
        checks = options["determinism_check"] != "none"
        context_fn = noop_context_fn
        if self._decide is not None:
            keeps_random_state = options["preserve_rng_state"]
            context_fn = Region(self._decide, outputs, keeps_random_state, checks).contexts
        called, flat = flattened(fn, args, kwargs)
        if checks:
            called = with_the_same_parameters(fn, called)
        if options["early_stop"]:
            called = stopping_behind_operators(called)
        if around is not None and around.engine.planning.directed:
            called = counting(around.engine, called)
        inputs = outer.within(f"{unit}/inputs", self._input_action, group)
        if self._input_action is not None:
            inputs.enter()
        served = _serving.set(outputs)
        try:
            return torch_checkpoint(
                called, *flat, use_reentrant=False, context_fn=context_fn, **options
            )
        finally:
            _serving.reset(served)
            inputs.leave()


def _begin_iteration(engine: Engine, alone: bool) -> None:
    """A region may be the first of a forward; `alone`: no hook scope around it says so."""
    iteration = engine.iteration
    if iteration.began_backward or (alone and iteration.over):
        engine.begin_iteration()


def checkpoint_module(
    modules: nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module],
    policy_fn: PolicyLike | None = None,
    **options: Any,
) -> Checkpointing:
    """Make each forward of these modules a checkpointed region.

    Replaces each module's ``forward``, on the instance, and nothing else: no wrapper, no renamed
    parameter, no change of the module's type or its ``state_dict``. Hooks of the module run outside
    the region, once. A copied or pickled module has its own forward again.

    Args:
        modules: the layers, in any order; see :func:`memswap.manage`.
        policy_fn: see :func:`checkpoint`.
        **options: see :class:`Checkpointing`.

    Returns:
        What the regions share: their statistics, and :meth:`Checkpointing.remove`.

    Raises:
        TypeError: an element is no module.
        ValueError: no modules, one of them twice, or one that is checkpointed already.
    """
    units = list(named_units(modules, "checkpoint_module()").values())
    for module in units:
        if isinstance(module.__dict__.get("forward"), _CheckpointedForward):
            raise ValueError(
                f"checkpoint_module(): this {type(module).__name__} is checkpointed already; call "
                "remove() on what the first checkpoint_module() returned"
            )
    checkpointing = Checkpointing(policy_fn, **options)
    for module in units:
        module.forward = _CheckpointedForward(module, checkpointing)
    checkpointing._modules = [ref(module) for module in units]
    return checkpointing


class _CheckpointedForward:
    """Stands in a module's ``__dict__`` as its ``forward``. Does not keep the module alive."""

    def __init__(self, module: nn.Module, checkpointing: Checkpointing) -> None:
        self._module = ref(module)
        self._checkpointing = checkpointing
        #: A forward that somebody else had put on the instance.
        self._replaced: Callable[..., Any] | None = module.__dict__.get("forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        own = self._own()
        if not torch.compiler.is_compiling() and not self._recomputes(args, kwargs):
            return own(*args, **kwargs)
        return self._checkpointing.checkpoint(own, *args, **kwargs)

    def _recomputes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether this forward is a region: under a budget the plan says so."""
        module, scope = self._module(), current_scope()
        if module is None or scope is None or not self._checkpointing.leaves_it_to_plans:
            return True
        director = scope.engine.director
        if director is None or not torch.is_grad_enabled() or in_backward():
            return True
        return director.recomputes(module, (*args, *kwargs.values()))

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._own())

    def remove(self) -> None:
        module = self._module()
        if module is not None:
            del module.__dict__["forward"]
            if self._replaced is not None:
                module.forward = self._replaced

    def _own(self) -> Callable[..., Any]:
        if self._replaced is not None:
            return self._replaced
        module = self._module()
        if module is None:
            raise ReferenceError("the module of this checkpointed forward is gone; keep the module")
        # By the type of now: fully_shard changes it.
        own: Callable[..., Any] = type(module).forward.__get__(module)
        return own

    def __reduce__(self) -> tuple[Any, ...]:
        if self._replaced is not None:
            return _itself, (self._replaced,)
        # The copy's own method: when this is asked for, the copy has no forward in its `__dict__`.
        return getattr, (self._module(), "forward")


def _check_call(fn: object, kwargs: dict[str, Any]) -> None:
    """Refuse torch's own options, which would be handed on to the function."""
    if not callable(fn):
        raise TypeError(
            f"checkpoint(): found {type(fn).__name__}, expected a function or a module, and then "
            "its arguments"
        )
    if "use_reentrant" in kwargs:
        raise TypeError(
            "checkpoint(use_reentrant=...): memswap's checkpoint is always the non-reentrant one; "
            "leave this argument of torch.utils.checkpoint away"
        )
    if "context_fn" in kwargs:
        raise TypeError(
            "checkpoint(context_fn=...): expected policy_fn=..., which takes the same policies and "
            "operators as torch's create_selective_checkpoint_contexts"
        )


def _itself(forward: Callable[..., Any]) -> Callable[..., Any]:
    return forward


def _traced(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    policy_fn: PolicyLike | None,
    options: _TorchOptions,
) -> Any:
    """A region inside a graph that torch.compile traces: torch's own.

    The compiled graph saves what the policy says shall be saved or leave, and the hooks around it
    move that.
    """
    if policy_fn is None:
        return torch_checkpoint(fn, *args, use_reentrant=False, **options, **kwargs)
    if callable(policy_fn):
        translated: Any = functools.partial(torch_policy, policy_fn)
    else:
        translated = checked_ops(policy_fn)
    context_fn = functools.partial(create_selective_checkpoint_contexts, translated)
    return torch_checkpoint(
        fn, *args, use_reentrant=False, context_fn=context_fn, **options, **kwargs
    )


def _input_action(swap_inputs: bool | Action) -> Action | None:
    if isinstance(swap_inputs, Action):
        return swap_inputs
    if isinstance(swap_inputs, bool):
        return Action.SWAP if swap_inputs else None
    raise TypeError(
        f"swap_inputs={swap_inputs!r}: found {type(swap_inputs).__name__}, expected a bool or a "
        "memswap.Action"
    )
