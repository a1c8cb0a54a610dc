"""FirstStep: whether what a style was applied to has run, found out when the first step ends."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from memswap.engine.autograd import graph_task, in_backward


class FirstStep:
    """Calls ``check`` at the end of the first step of the models that it watches.

    That is the end of the first backward pass that reaches a watched module's output; of modules
    whose outputs need no gradient, their second forward. A check that raises is made again at the
    end of the next step; one that does not is the last.
    """

    def __init__(self, check: Callable[[], None]) -> None:
        self._check = check
        self._handles: dict[nn.Module, list[RemovableHandle]] = {}
        self._without_graph: set[nn.Module] = set()
        self._task = -1
        self._active = False

    @property
    def watched(self) -> list[nn.Module]:
        return list(self._handles)

    def begin(self) -> None:
        """There is something new to look at."""
        self._active = True

    def watch(self, module: nn.Module) -> None:
        if module not in self._handles:
            self._handles[module] = [
                module.register_forward_pre_hook(self._before),
                module.register_forward_hook(self._after),
            ]

    def follow(self, output: Any) -> bool:
        """Whether there is something whose gradient will tell that a backward pass has begun."""
        found = [
            one
            for one in tree_leaves(output)
            if isinstance(one, torch.Tensor) and one.requires_grad and torch.is_grad_enabled()
        ]
        if self._active:
            for tensor in found:
                tensor.register_hook(self._in_backward)
        return bool(found)

    def end(self) -> None:
        """Look no more."""
        for handles in self._handles.values():
            for handle in handles:
                handle.remove()
        self._handles.clear()
        self._without_graph.clear()
        self._active = False

    def _before(self, module: nn.Module, args: Any) -> None:
        if module in self._without_graph and not in_backward():
            self._finish()

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if not in_backward() and not self.follow(output):
            self._without_graph.add(module)

    def _in_backward(self, gradient: torch.Tensor) -> None:
        if self._active and graph_task() != self._task:
            self._task = graph_task()
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def _finish(self) -> None:
        if self._active:
            self._check()
            self.end()


def parallelized_models(module: nn.Module) -> list[nn.Module]:
    """The models in which ``parallelize_module`` found ``module``, the whole one first.

    A style is told the submodule only; the calls that led to it know the rest.
    """
    models: list[nn.Module] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is parallelize_module.__code__:
            model = frame.f_locals.get("module")
            if isinstance(model, nn.Module) and model is not module:
                models.insert(0, model)
        frame = frame.f_back
    return models
