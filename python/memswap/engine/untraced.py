"""Methods that dynamo does not trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import torch

_P = ParamSpec("_P")
_R = TypeVar("_R")


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
