"""Operators: hooks that open a window at each matrix product of managed layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from memswap.engine.autograd import in_backward
from memswap.hooks.module_hooks import ModuleHooks

if TYPE_CHECKING:
    from types import FrameType

    from memswap._C import Iteration, Span
    from memswap.engine.engine import Engine
    from memswap.windows import Windows

#: Matrix products in backward for each one in forward: one for the input, one for the weight.
BACKWARD_PRODUCTS = 2.0

_LOOKUPS = (nn.Embedding, nn.EmbeddingBag)  # their matrices are tables
_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)


class OperatorWindows:
    """Hooks that open a window at each operator of some units, forward and backward.

    In forward the hooks of the operator's module do, in backward a pre-hook of its autograd node.
    Inside a compiled region module hooks fold away; a unit whose operators did not show opens one
    window for itself.

    Args:
        engine: whose encodes and decodes wait.
        units: the managed modules, by name.
        options: which operators count, and what is known of their time.
    """

    def __init__(self, engine: Engine, units: Mapping[str, nn.Module], options: Windows) -> None:
        self.engine = engine
        self.durations = engine.durations
        self.cost = options.seconds
        self._hooks = ModuleHooks()
        self._operators = ModuleHooks()
        self._iteration: Iteration | None = None
        self._entered = 0  # units, in this iteration
        self._expected = len(units)
        known: set[int] = set()
        others = {f"under {i}": module for i, module in enumerate(options.modules_under())}
        for name, unit in {**units, **others}.items():
            operators = [
                (f"{name}.{path}", module)
                for path, module in unit.named_modules()
                if id(module) not in known
                and has_matrix(module, options.operators)
                and not isinstance(module, torch.jit.ScriptModule)  # takes no hooks
            ]
            known.update(id(module) for _, module in operators)
            place = _Place(name)
            if name in units:
                self._hooks.add(unit, place, self._begin, in_compiled_code=False)
            for key, module in operators:
                self._operators.add(module, _Place(key, place), self._begin, in_compiled_code=False)

    def remove(self) -> None:
        """Take the hooks off the modules."""
        self._hooks.remove()
        self._operators.remove()

    def _begin(
        self, place: _Place, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _Windowed | None:
        if not torch.is_grad_enabled():
            return None
        x = shaped_tensor(args)
        if place.unit is not None:
            place.unit.operators += 1
            return None if torch.jit.is_tracing() else _Windowed(self, place, module, x, opens=True)
        if in_backward():
            return None
        place.operators = 0
        return _WindowedUnit(self, place, module, x, place.is_whole and not torch.jit.is_tracing())

    def open(
        self,
        key: str,
        amount: float,
        products: float,
        module: nn.Module,
        shape: tuple[int, ...] | None,
    ) -> None:
        """Open a window: an operator is about to be launched.

        Args:
            key: under which its time is measured.
            amount: elements of its input, by which its time is scaled.
            products: how many products of the forward's size it is.
            module: the operator's module.
            shape: of its input; None where that has none.
        """
        seconds: float | None = self.engine.lock.run(self.durations.seconds, key, amount)
        if seconds is None and self.cost is not None and shape is not None:
            weight = getattr(module, "weight", None)
            if isinstance(module, nn.Linear) and isinstance(weight, torch.Tensor):
                shapes = (shape, (module.in_features, module.out_features))
                seconds = self.cost("matmul", shapes)
        self.engine.open_window((seconds or 0.0) * products)

    def enter_unit(self) -> None:
        iteration = self.engine.iteration
        if iteration is not self._iteration:
            self._expected = self._entered or self._expected
            self._entered, self._iteration = 0, iteration
        self._entered += 1

    def leave_unit(self) -> None:
        if self._entered == self._expected:
            self.engine.end_forward()


@dataclass(slots=True, eq=False)
class _Place:
    """Where a window may open: at an operator, or at a unit whose operators do not show."""

    key: str
    unit: _Place | None = None  # that an operator belongs to; of a unit None
    operators: int = 0  # that opened a window since the unit was entered
    is_whole: bool = False  # whether the unit opens one for itself


class _Windowed:
    """One call of a module under which codec work may run."""

    def __init__(
        self,
        windows: OperatorWindows,
        place: _Place,
        module: nn.Module,
        x: torch.Tensor | None,
        opens: bool,
    ) -> None:
        self._windows, self._place, self._module, self._opens = windows, place, module, opens
        self._amount = float(x.numel()) if x is not None else 1.0
        self._shape = None if x is None else tuple(x.shape)
        self._device = None if x is None else x.device
        self._span: Span | None = None

    def enter(self, call: FrameType | None) -> None:
        windows, device = self._windows, self._device
        if not self._opens:
            return
        windows.open(self._place.key, self._amount, 1.0, self._module, self._shape)
        if device is not None and windows.durations.measuring:
            start = windows.durations.start
            self._span = windows.engine.lock.run(start, self._place.key, self._amount, device)

    def leave(self, output: object) -> None:
        if not self._opens:
            return
        self._stop()
        made = first_tensor((output,))
        if made is not None and made.grad_fn is not None:
            windows, key, amount = self._windows, self._place.key, self._amount
            module, shape = self._module, self._shape  # and no tensor

            def at_backward(gradients: object) -> None:
                windows.open(key, amount, BACKWARD_PRODUCTS, module, shape)

            made.grad_fn.register_prehook(at_backward)

    def abandon(self) -> None:
        self._stop()

    def _stop(self) -> None:
        span, self._span = self._span, None
        if span is not None:
            self._windows.engine.lock.run(self._windows.durations.stop, span)


class _WindowedUnit(_Windowed):
    """One call of a unit."""

    def enter(self, call: FrameType | None) -> None:
        self._windows.enter_unit()
        super().enter(call)

    def leave(self, output: object) -> None:
        super().leave(output)
        self._place.is_whole = self._place.operators == 0
        self._windows.leave_unit()


def has_matrix(module: nn.Module, operators: tuple[type[nn.Module], ...]) -> bool:
    """Whether a module multiplies by a matrix of its own, or is of a type that was named."""
    if isinstance(module, (*operators, nn.Linear)):
        return True
    if isinstance(module, _LOOKUPS + _NORMS):
        return False
    return any(parameter.dim() >= 2 for parameter in module.parameters(recurse=False))


def shaped_tensor(values: Iterable[object]) -> torch.Tensor | None:
    """The first tensor, if it has a shape: a nested one of torch's strided layout has none."""
    found = first_tensor(values)
    return None if found is None or (found.is_nested and found.layout is torch.strided) else found


def first_tensor(values: Iterable[object]) -> torch.Tensor | None:
    """The first tensor among some values, or inside the first of them that is a tuple or list."""
    for value in values:
        if isinstance(value, torch.Tensor):
            return value
        if isinstance(value, tuple | list):
            return first_tensor(value)
    return None
