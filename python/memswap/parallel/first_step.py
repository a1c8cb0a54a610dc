"""FirstStep: whether what a style was applied to has run, found out when the first step ends."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import ReferenceType, WeakMethod, finalize, ref

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from memswap.engine.autograd import graph_task, in_backward
from memswap.hooks.module_hooks import AtEnd, ModuleHooks
from memswap.parallel.arriving import ArrivingTensor


def before_optimizer_steps(method: Callable[[Optimizer], None]) -> finalize[[], Any]:
    """Call a bound method before the steps of all optimizers, for as long as its object lives."""
    weak = WeakMethod(method)  # torch keeps the hook; it keeps nothing

    def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        alive = weak()
        if alive is not None:
            alive(optimizer)

    handle = register_optimizer_step_pre_hook(before_step)
    owner: Any = method.__self__  # type: ignore[attr-defined]
    return finalize(owner, handle.remove)


class FirstStep:
    """Calls ``check`` at the end of the first step of the models that it watches.

    That is the end of the first backward pass that reaches a watched module's output; of modules
    whose outputs need no gradient, their second forward; and the first step of an optimizer that
    has a parameter of a module that is expected to run, before it writes anything. A check that
    raises is made again at the end of the next step; one that does not is the last.
    """

    def __init__(self, check: Callable[[], None]) -> None:
        self._check = check
        self._watched: list[nn.Module] = []
        self._hooks = ModuleHooks()
        self._without_graph: set[nn.Module] = set()
        self._task = -1
        self._active = False
        self._expected: list[ReferenceType[nn.Module]] = []
        self._optimizers: finalize[[], FirstStep] | None = None

    @property
    def watched(self) -> tuple[nn.Module, ...]:
        """The models whose first step is awaited."""
        return tuple(self._watched)

    def expect(self, modules: list[nn.Module]) -> None:
        """Await the first step of these modules, which are new and have to run in it."""
        self._active = True
        self._expected += map(ref, modules)
        if self._optimizers is None and any(True for one in modules for _ in one.parameters()):
            self._optimizers = before_optimizer_steps(self._before_step)

    def watch(self, module: nn.Module) -> None:
        """Notice the end of this model's first step."""
        if module not in self._watched:
            self._watched.append(module)
            self._hooks.add(module, None, self._before, abandons_raised=True)

    def follow(self, output: Any) -> bool:
        """Have the gradients of an output tell that a backward has begun. Whether there are any."""
        found = [
            one
            for one in tree_leaves(output)
            if isinstance(one, torch.Tensor) and one.requires_grad and torch.is_grad_enabled()
        ]
        if self._active:
            for tensor in found:
                if not isinstance(tensor, ArrivingTensor):  # a hook would make it wait
                    tensor.register_hook(self._in_backward)
        return bool(found)

    def end(self) -> None:
        """Take all hooks off: the first step is over."""
        self._hooks.remove()
        self._watched.clear()
        self._without_graph.clear()
        self._expected.clear()
        self._active = False
        if self._optimizers is not None:
            self._optimizers()
            self._optimizers = None

    def _before(self, key: object, module: nn.Module, args: Any, kwargs: Any) -> AtEnd:
        if module in self._without_graph and not in_backward():
            self._finish()
        return AtEnd(partial(self._after, module))

    def _after(self, module: nn.Module, output: Any) -> None:
        if not in_backward() and not self.follow(output):
            self._without_graph.add(module)

    def _in_backward(self, gradient: torch.Tensor) -> None:
        if self._active and graph_task() != self._task:
            self._task = graph_task()
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def _before_step(self, optimizer: Optimizer) -> None:
        expected = [one() for one in self._expected]
        own = {id(weight) for one in expected if one is not None for weight in one.parameters()}
        if any(id(weight) in own for group in optimizer.param_groups for weight in group["params"]):
            self._finish()

    def _finish(self) -> None:
        if self._active:
            self._check()
            self.end()
