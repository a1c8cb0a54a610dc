"""Arguments: finds the arguments of an attention module's forward, by place or by name."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn


class Arguments:
    """The arguments of ``module``'s forward."""

    def __init__(self, module: nn.Module) -> None:
        by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        self._module = type(module).__name__
        self._names = [
            name
            for name, one in inspect.signature(module.forward).parameters.items()
            if one.kind in by_place
        ]

    def by_name(self, args: list[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        """All that have a name, however they were passed."""
        return {**dict(zip(self._names, args, strict=False)), **kwargs}

    def by_place(self, name: str, args: list[Any]) -> bool:
        """Whether an argument was passed by place."""
        return name in self._names[: len(args)]

    def find(self, which: int | str, args: list[Any], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Where an argument is: a list and an index, or a dict and a name.

        Raises:
            TypeError: it was not passed.
        """
        if isinstance(which, int):
            place = which
        else:
            place = self._names.index(which) if which in self._names else len(args)
        if place < len(args):
            return args, place
        name: str | None
        if isinstance(which, str):
            name = which
        else:
            name = self._names[place] if place < len(self._names) else None
        if name in kwargs:
            return kwargs, name
        raise TypeError(
            f"ContextParallel: {self._module} was called without argument {which!r}; found "
            f"{len(args)} positional ones and {sorted(kwargs)}; say which with qkv=(...)"
        )
