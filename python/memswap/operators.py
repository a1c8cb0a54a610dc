"""Operators: hooks that open a window at each matrix product of managed layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from memswap.engine.autograd import in_backward
from memswap.engine.durations import Durations
from memswap.engine.untraced import untraced

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from memswap.engine.durations import Span
    from memswap.engine.timeline import Passage
    from memswap.engine.windowed import WindowedSaver
    from memswap.windows import Windows

#: Matrix products in backward for each one in forward: one for the input, one for the weight.
BACKWARD_PRODUCTS = 2.0

_LOOKUPS = (nn.Embedding, nn.EmbeddingBag)  # their matrices are tables
_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)


class OperatorWindows:
    """Hooks that open a window at each operator of some units, forward and backward.

    In forward a pre-hook of the operator's module does, in backward a pre-hook of its autograd
    node. Inside a compiled region module hooks fold away; a unit whose operators did not show opens
    one window for itself.
    """

    def __init__(
        self, saver: WindowedSaver, units: Mapping[str, nn.Module], options: Windows
    ) -> None:
        self.saver = saver
        self.durations = saver.observer if isinstance(saver.observer, Durations) else None
        self.cost = options.seconds
        self._handles: list[RemovableHandle] = []
        self._passage: Passage | None = None
        self._entered = 0  # units, in this passage
        self._expected = len(units)
        known: set[int] = set()
        others = {f"under {i}": module for i, module in enumerate(options.modules_under())}
        for name, unit in {**units, **others}.items():
            operators = [
                (f"{name}.{path}", module)
                for path, module in unit.named_modules()
                if id(module) not in known and has_matrix(module, options.operators)
            ]
            known.update(id(module) for _, module in operators)
            hooks = _UnitWindow(self, name)
            if name in units:
                self._register(unit, hooks)
            for key, module in operators:
                self._register(module, _OperatorWindow(self, key, hooks))

    def _register(self, module: nn.Module, hooks: _OperatorWindow | _UnitWindow) -> None:
        self._handles.append(module.register_forward_pre_hook(hooks.before))
        self._handles.append(module.register_forward_hook(hooks.after))

    def remove(self) -> None:
        """Take the hooks off the modules."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def open(self, key: str, amount: float, products: float, module: nn.Module, x: Any) -> None:
        """An operator is about to be launched."""
        saver = self.saver
        with saver.lock:
            seconds = self.durations.seconds(key, amount) if self.durations is not None else None
            if seconds is None and self.cost is not None and x is not None:
                weight = getattr(module, "weight", None)
                if isinstance(module, nn.Linear) and isinstance(weight, torch.Tensor):
                    shapes = (tuple(x.shape), (module.in_features, module.out_features))
                    seconds = self.cost("matmul", shapes)
            saver.open_window((seconds or 0.0) * products)

    def enter_unit(self) -> None:
        passage = self.saver.passage
        if passage is not self._passage:
            self._expected = self._entered or self._expected
            self._entered, self._passage = 0, passage
        self._entered += 1

    def leave_unit(self) -> None:
        if self._entered == self._expected:
            self.saver.end_forward()


class _Hooks:
    """Hooks of one module. A copied or pickled module opens no windows."""

    def __init__(self, windows: OperatorWindows | None, key: str) -> None:
        self._windows = windows
        self._key = key
        self._span: Span | None = None

    def __deepcopy__(self, memo: dict[int, object]) -> _Hooks:
        return type(self)(None, self._key)

    def __reduce__(self) -> tuple[type[_Hooks], tuple[None, str]]:
        return type(self), (None, self._key)

    def _open(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        windows = self._windows
        if windows is None or torch.jit.is_tracing():
            return
        x = shaped_tensor(args)
        amount = float(x.numel()) if x is not None else 1.0
        windows.open(self._key, amount, 1.0, module, x)
        if windows.durations is not None and x is not None and windows.durations.measuring:
            with windows.saver.lock:
                self._span = windows.durations.start(self._key, amount, x.device)

    def _close(self, module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        windows = self._windows
        if windows is None or torch.jit.is_tracing():
            return
        span, self._span = self._span, None
        if span is not None and windows.durations is not None:
            with windows.saver.lock:
                windows.durations.stop(span)
        made = first_tensor((output,))
        if made is not None and made.grad_fn is not None:
            x = shaped_tensor(args)
            amount = float(x.numel()) if x is not None else 1.0
            made.grad_fn.register_prehook(_AtBackward(windows, self._key, amount, module, x))


class _AtBackward:
    """Opens an operator's window when its backward begins. Holds no tensor."""

    __slots__ = ("_amount", "_key", "_module", "_shape", "_windows")

    def __init__(
        self,
        windows: OperatorWindows,
        key: str,
        amount: float,
        module: nn.Module,
        x: torch.Tensor | None,
    ) -> None:
        self._windows, self._key, self._amount, self._module = windows, key, amount, module
        self._shape = None if x is None else _Shaped(tuple(x.shape))

    def __call__(self, gradients: object) -> None:
        self._windows.open(self._key, self._amount, BACKWARD_PRODUCTS, self._module, self._shape)


@dataclass(frozen=True, slots=True)
class _Shaped:
    """What is left of a tensor when only its shape matters."""

    shape: tuple[int, ...]


class _OperatorWindow(_Hooks):
    """The window of one operator. Dynamo folds its hooks away."""

    def __init__(
        self, windows: OperatorWindows | None, key: str, unit: _UnitWindow | None = None
    ) -> None:
        super().__init__(windows, key)
        self._unit = unit

    def before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or self._unit is None:
            return
        self._unit.operators += 1
        self._open(module, args)

    def after(self, module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        self._close(module, args, output)


class _UnitWindow(_Hooks):
    """The window of a unit, where its operators do not open their own."""

    def __init__(self, windows: OperatorWindows | None, key: str) -> None:
        super().__init__(windows, key)
        self.operators = 0  # that opened a window since the unit was entered
        self._whole = False

    @untraced
    def before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self._windows is None or not torch.is_grad_enabled() or in_backward():
            return
        self._windows.enter_unit()
        self.operators = 0
        if self._whole:
            self._open(module, args)

    @untraced
    def after(self, module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        if self._windows is None or not torch.is_grad_enabled() or in_backward():
            return
        if self._whole:
            self._close(module, args, output)
        self._whole = self.operators == 0
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
