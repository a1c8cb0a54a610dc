"""Hooks: join a unit's modules to its context, in forward and in backward."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from memswap.engine.calls import current_call, is_running
from memswap.engine.untraced import untraced
from memswap.parallel import running

if TYPE_CHECKING:
    from types import FrameType

    from memswap.parallel.schedule import ShardContext
    from memswap.parallel.unit import Unit


class Hooks:
    """Joins a unit's modules to its context."""

    def __init__(self, unit: Unit, context: ShardContext) -> None:
        self.unit = unit
        self.context = context
        self._calls: list[Call] = []
        """Forward calls that have begun and not ended, known by [Note: Which call]."""

    def install(self, module: nn.Module) -> None:
        module.register_forward_pre_hook(self.before_forward, prepend=True, with_kwargs=True)
        module.register_forward_hook(self.after_forward, always_call=True)
        module.register_state_dict_pre_hook(self.show_shards)
        module.register_load_state_dict_pre_hook(self.drop_weights)

    @untraced
    def before_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any]:
        call = self._begin()
        self.context.enter_forward(self.unit)
        running.enter(self, functools.partial(self.context.exchange_arrived, self.unit))
        policy = self.unit.policy
        if policy.param_dtype is not None and policy.cast_forward_inputs:
            args, kwargs = _cast((args, kwargs), policy.param_dtype)
        if torch.is_grad_enabled() and self.unit.frozen:
            inputs = _differentiable((args, kwargs))
            if inputs:
                call.reads_frozen = ReadsFrozen(self)
                torch.autograd.graph.register_multi_grad_hook(inputs, call.reads_frozen.ended)
        return args, kwargs

    def _begin(self) -> Call:
        while self._calls and not self._calls[-1].runs():
            self._calls.pop()  # it was cut off: no hook has told its end
        self._calls.append(Call(current_call()))
        return self._calls[-1]

    def _end(self) -> Call | None:
        """The call that ends now; None: it has not begun here, since another's hook raised."""
        frame = current_call()
        for place in reversed(range(len(self._calls))):
            call = self._calls[place]
            if call.frame is frame:
                del self._calls[place:]
                return call
        return None

    @untraced
    def after_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        call = self._end()
        if call is None:
            return output
        running.leave(self)
        policy = self.unit.policy
        if policy.output_dtype is not None:
            output = _cast(output, policy.output_dtype)
        outputs = _differentiable(output) if torch.is_grad_enabled() else []
        versions, frozen = self.unit.versions, call.reads_frozen
        for tensor in outputs:
            tensor.register_hook(functools.partial(self.before_backward, versions, frozen))
        self.context.leave_forward(self.unit, module, bool(outputs))
        return output

    @untraced
    def anchor(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self.context.reach_anchor(self.unit)

    def before_backward(
        self, versions: tuple[int, ...], frozen: ReadsFrozen | None, gradient: torch.Tensor
    ) -> None:
        self.context.enter_unit_backward(self.unit, versions)
        if frozen is not None:
            frozen.began()

    def show_shards(self, *args: Any) -> None:
        self.unit.hide()

    def drop_weights(self, *args: Any) -> None:
        self.context.release(self.unit)


class Call:
    """One forward call of a unit."""

    def __init__(self, frame: FrameType | None) -> None:
        self.frame = frame
        self.reads_frozen: ReadsFrozen | None = None

    def runs(self) -> bool:
        """Whether it has not ended, in whatever way."""
        return self.frame is None or is_running(self.frame)


class ReadsFrozen:
    """One forward call of a unit with frozen parameters, and how far its backward is.

    A frozen weight is read by operators that lead to no gradient of the unit's own. They lead to
    the call's inputs; only when those have their gradients has backward left the unit.
    """

    def __init__(self, hooks: Hooks) -> None:
        self._hooks = hooks
        self._open = False

    def began(self) -> None:
        if not self._open:
            self._open = True
            self._hooks.context.call_began_backward(self._hooks.unit)

    def ended(self, gradients: Sequence[torch.Tensor | None]) -> None:
        if self._open:
            self._open = False
            self._hooks.context.call_ended_backward(self._hooks.unit)


def _differentiable(values: Any) -> list[torch.Tensor]:
    return [
        value
        for value in pytree.tree_leaves(values)
        if isinstance(value, torch.Tensor) and value.requires_grad
    ]


def _cast(values: Any, dtype: torch.dtype) -> Any:
    def cast_one(value: torch.Tensor) -> torch.Tensor:
        return value.to(dtype) if value.is_floating_point() else value

    return pytree.tree_map_only(torch.Tensor, cast_one, values)
