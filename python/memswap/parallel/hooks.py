"""UnitHooks: join a unit's modules to its context, in forward and in backward."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from memswap.parallel.in_flight import listen, listen_no_more

if TYPE_CHECKING:
    from types import FrameType

    from memswap.parallel.schedule import ShardContext
    from memswap.parallel.unit import Unit


class UnitHooks:
    """Joins a unit's modules to its context.

    Args:
        unit: whose modules they are.
        context: decides what happens when their calls begin and end.
    """

    def __init__(self, unit: Unit, context: ShardContext) -> None:
        self.unit = unit
        self.context = context
        self._calls = context.scheduled[unit].calls

    def install(self, module: nn.Module) -> None:
        """Join one of the unit's modules."""
        self._calls.add(module, None, self._call, begins_first=True)
        module.register_state_dict_pre_hook(self.show_shards)
        module.register_load_state_dict_pre_hook(self.drop_weights)

    def install_anchor(self, module: nn.Module) -> None:
        """Have the next unit gathered before each call of a submodule."""
        self._calls.add(module, None, self._reach_anchor)

    def _call(self, key: object, module: nn.Module, args: Any, kwargs: Any) -> UnitCall:
        return UnitCall(self, module, args, kwargs)

    def _reach_anchor(self, key: object, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.context.reach_anchor(self.unit)

    def before_backward(
        self, versions: tuple[int, ...], frozen: ReadsFrozen | None, gradient: torch.Tensor
    ) -> None:
        """The gradient of an output of the unit's is there; its backward begins.

        Args:
            versions: of the shards that its forward gathered.
            frozen: the call whose output it is, if the unit has frozen parameters.
            gradient: of that output.
        """
        self.context.enter_unit_backward(self.unit, versions)
        if frozen is not None:
            frozen.began()

    def show_shards(self, *args: Any) -> None:
        """A state_dict is asked for: it has the shards."""
        self.unit.hide()

    def drop_weights(self, *args: Any) -> None:
        """A state_dict is loaded: what was gathered is no longer what the shards are."""
        self.context.release(self.unit)


class UnitCall:
    """One forward call of a unit's module: the scope that ModuleHooks tells of begin and end.

    It casts the call's inputs and output, has the weights gathered, and sees to the unit's
    backward.
    """

    def __init__(self, hooks: UnitHooks, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._hooks = hooks
        self._module = module
        self._inputs: tuple[Any, Any] | None = (args, kwargs)
        self._reads_frozen: ReadsFrozen | None = None

    def enter(self, call: FrameType | None) -> tuple[Any, Any]:
        """Have the weights there; what the module is to get."""
        unit, context = self._hooks.unit, self._hooks.context
        inputs, self._inputs = self._inputs, None  # they may be gone before the call ends
        assert inputs is not None
        context.enter_forward(unit)
        listen(self, functools.partial(context.exchange_arrived, unit))
        if unit.policy.param_dtype is not None and unit.policy.cast_forward_inputs:
            inputs = _cast(inputs, unit.policy.param_dtype)
        if torch.is_grad_enabled() and unit.frozen:
            found = _differentiable(inputs)
            if found:
                self._reads_frozen = ReadsFrozen(self._hooks)
                torch.autograd.graph.register_multi_grad_hook(found, self._reads_frozen.ended)
        return inputs

    def leave(self, output: Any) -> Any:
        """The unit is not used any more, until its backward; what the caller is to get."""
        listen_no_more(self)
        unit = self._hooks.unit
        if unit.policy.output_dtype is not None:
            output = _cast(output, unit.policy.output_dtype)
        outputs = _differentiable(output) if torch.is_grad_enabled() else []
        before = functools.partial(self._hooks.before_backward, unit.versions, self._reads_frozen)
        for tensor in outputs:
            tensor.register_hook(before)
        self._hooks.context.leave_forward(unit, self._module, bool(outputs))
        return output

    def abandon(self) -> None:
        """It was interrupted, so no hook has told its end."""
        listen_no_more(self)
        self._hooks.context.abandon_forward(self._hooks.unit)


class ReadsFrozen:
    """One forward call of a unit with frozen parameters, and how far its backward is.

    A frozen weight is read by operators that lead to no gradient of the unit's own. They lead to
    the call's inputs; only when those have their gradients has backward left the unit.
    """

    def __init__(self, hooks: UnitHooks) -> None:
        self._hooks = hooks
        self._open = False

    def began(self) -> None:
        """Backward has come to the call."""
        if not self._open:
            self._open = True
            self._hooks.context.call_began_backward(self._hooks.unit)

    def ended(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """The call's inputs have their gradients."""
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
