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

    from memswap.parallel.launches import Scheduled
    from memswap.parallel.schedule import ShardContext
    from memswap.parallel.unit import Unit


class UnitHooks:
    """The hooks on a unit's modules: what :func:`shard` leaves on each of them.

    Args:
        unit: whose modules they are.
        context: decides what happens when their calls begin and end.
    """

    def __init__(self, unit: Unit, context: ShardContext) -> None:
        self.unit = unit
        self.context = context

    @property
    def scheduled(self) -> Scheduled:
        """The unit in its context."""
        return self.context.scheduled[self.unit]

    def install(self, modules: Sequence[nn.Module], anchors: Sequence[nn.Module]) -> None:
        """Join the unit's modules, and the submodules before whose calls the next is gathered."""
        calls = self.scheduled.calls
        for module in modules:
            calls.add(module, None, self._begin, begins_first=True)
            module.register_state_dict_pre_hook(self._before_state_dict)
            module.register_load_state_dict_pre_hook(self._before_loading)
        for anchor in anchors:
            calls.add(anchor, None, self._reach_anchor)

    def _begin(self, key: object, module: nn.Module, args: Any, kwargs: Any) -> UnitCall:
        return UnitCall(self, module, args, kwargs)

    def _reach_anchor(self, *call: Any) -> None:
        self.context.reach_anchor(self.unit)

    def _before_state_dict(self, *args: Any) -> None:
        self.unit.hide()  # it has the shards

    def _before_loading(self, *args: Any) -> None:
        self.context.release(self.unit)  # what was gathered will not be what the shards are


class UnitCall:
    """One forward call of a unit's module, and its backward.

    A frozen weight is read by operators that lead to no gradient of the unit's own. They lead to
    the call's inputs; only when those have their gradients has backward left the unit. So the
    backward of a call of a unit with frozen parameters is open until then.
    """

    def __init__(self, hooks: UnitHooks, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._hooks = hooks
        self._module = module
        self._inputs: tuple[Any, Any] | None = (args, kwargs)
        self._reads_frozen = False
        self._open = False

    def enter(self, call: FrameType | None) -> tuple[Any, Any]:
        """Have the weights there; what the module is to get."""
        unit, context = self._hooks.unit, self._hooks.context
        inputs, self._inputs = self._inputs, None  # they may be gone before the call ends
        assert inputs is not None
        context.enter_forward(unit)
        listen(self, functools.partial(context.exchange_arrived, unit))
        if unit.policy.param_dtype is not None and unit.policy.cast_forward_inputs:
            inputs = _cast(inputs, unit.policy.param_dtype)
        found = _differentiable(inputs) if unit.frozen else []
        if found:
            self._reads_frozen = True
            torch.autograd.graph.register_multi_grad_hook(found, self._ends_backward)
        return inputs

    def leave(self, output: Any) -> Any:
        """The unit is not used any more, until its backward; what the caller is to get."""
        listen_no_more(self)
        unit = self._hooks.unit
        if unit.policy.output_dtype is not None:
            output = _cast(output, unit.policy.output_dtype)
        outputs = _differentiable(output)
        begins_backward = functools.partial(self._begins_backward, unit.versions)
        for tensor in outputs:
            tensor.register_hook(begins_backward)
        self._hooks.context.leave_forward(unit, self._module, bool(outputs))
        return output

    def abandon(self) -> None:
        """It was interrupted, so no hook has told its end."""
        listen_no_more(self)
        self._hooks.context.abandon_forward(self._hooks.unit)

    def _begins_backward(self, versions: tuple[int, ...], gradient: torch.Tensor) -> None:
        """An output has its gradient; ``versions`` are of the shards that forward gathered."""
        self._hooks.context.enter_unit_backward(self._hooks.unit, versions)
        if self._reads_frozen and not self._open:
            self._open = True
            self._hooks.scheduled.open_calls += 1

    def _ends_backward(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """The inputs have their gradients."""
        if self._open:
            self._open = False
            self._hooks.scheduled.open_calls -= 1
            self._hooks.context.gradient_arrived(self._hooks.unit)


def _differentiable(values: Any) -> list[torch.Tensor]:
    """The tensors whose gradients a backward will compute."""
    if not torch.is_grad_enabled():
        return []
    tensors = [one for one in pytree.tree_leaves(values) if isinstance(one, torch.Tensor)]
    return [one for one in tensors if one.requires_grad]


def _cast(values: Any, dtype: torch.dtype) -> Any:
    def cast_one(value: torch.Tensor) -> torch.Tensor:
        return value.to(dtype) if value.is_floating_point() else value

    return pytree.tree_map_only(torch.Tensor, cast_one, values)
