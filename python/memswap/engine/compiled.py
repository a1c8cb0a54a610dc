"""Beside torch.compile: what of memswap runs as it is, and whether compiled code is about to run.

[Note: Compiled as without]
Hooks on modules are a part of what dynamo traces. One that it must not trace ends the graph there,
other operators are then fused, and gradients have other last bits. So the hooks of layers are
traced, and do nothing in compiled code: its graph is the one without memswap. What the graph saves
is saved when it returns, by whatever hooks are installed around it:

- a layer that is compiled by itself runs its hooks before its compiled forward, and saves there;
- for a model that is compiled as a whole, the model's own hook does: `CompiledCall` in
  hooks/units.py.

Torch runs these hooks under its frame evaluation, which would compile them as well, and so would
it what autograd calls in what is not compiled there. Code objects can be left out of that, which
costs nothing when they run; `torch.compiler.disable` wraps each call, and imports dynamo.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import torch

_P = ParamSpec("_P")
_R = TypeVar("_R")

_eval_frame: Any = torch._C._dynamo.eval_frame
_SKIP = _eval_frame._FrameAction.SKIP
_DEFAULT = _eval_frame._FrameAction.DEFAULT


def uncompiled(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Leave a function, and whatever it calls, out of what torch.compile compiles as it runs."""
    return _left_out(function, _SKIP)


def uncompiled_alone(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Leave a function out, and not what it calls: it can ask :func:`runs_compiled`."""
    return _left_out(function, _DEFAULT)


def uncompiled_methods(kind: type) -> None:
    """:func:`uncompiled` for all methods that a class itself defines."""
    for member in vars(kind).values():
        if isinstance(member, types.FunctionType):
            uncompiled(member)


def untraced(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """``torch.compiler.disable`` for a method that is registered as a hook.

    Bookkeeping must not be traced: one scope would be baked into the compiled code. The original
    imports dynamo where it decorates, and dynamo takes as long as the rest of torch; this one does
    when somebody takes the method from an instance, and leaves the original in the class.
    """
    return cast(Callable[_P, _R], _Untraced(method))


class _Untraced:
    def __init__(self, method: Callable[..., Any]) -> None:
        self.__doc__ = method.__doc__
        self._method = method

    def __set_name__(self, owner: type, name: str) -> None:
        self._owner, self._name = owner, name

    def __get__(self, instance: object, owner: type) -> Any:
        disabled: Any = torch.compiler.disable(self._method)
        setattr(self._owner, self._name, disabled)
        return disabled.__get__(instance, owner)


def _left_out(function: Callable[_P, _R], callees: Any) -> Callable[_P, _R]:
    code = cast(types.FunctionType, function).__code__
    _eval_frame.set_code_exec_strategy(code, _eval_frame._FrameExecStrategy(_SKIP, callees))
    return function


@uncompiled_alone
def runs_compiled() -> bool:
    """Whether torch.compile compiles what runs now, as it is called."""
    return _eval_frame.get_eval_frame_callback() is not None
