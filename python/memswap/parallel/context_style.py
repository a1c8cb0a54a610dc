"""ContextStyle: how an attention's tensors lie; Arguments: where its forward takes them."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from torch import nn

from memswap.parallel.layouts import LAYOUTS, Balance, Layout

Role = Literal["q", "k", "v", "kv", "qkv"]
Packing = Literal["separate", "kv", "qkv"]

#: The tensors that attention gets, by packing.
ROLES: dict[Packing, tuple[Role, ...]] = {
    "separate": ("q", "k", "v"),
    "kv": ("q", "kv"),
    "qkv": ("qkv",),
}


@dataclass(frozen=True, slots=True)
class ContextStyle:
    """The options of a :class:`ContextParallel`, which explains them; checked."""

    layout: Layout
    balance: Balance
    packing: Packing
    qkv: Sequence[int | str]
    unpacked: tuple[str, ...] | None
    heads: int | None
    sequence_length: int | None
    kv_sequence_length: int | None
    ranges: str | None
    mask: str | None
    verify: bool
    use_local_output: bool

    @classmethod
    def of(
        cls,
        *,
        layout: str,
        balance: Balance,
        packing: Packing,
        qkv: Sequence[int | str] | None,
        unpacked: Sequence[str] | None,
        heads: int | None,
        sequence_length: int | None,
        kv_sequence_length: int | None,
        ranges: str | None,
        mask: str | None,
        verify: bool,
        use_local_output: bool,
    ) -> ContextStyle:
        """Check them, and fill in what follows from others.

        Raises:
            ValueError: what was found and what was expected.
        """
        if layout not in LAYOUTS:
            raise ValueError(f"layout={layout!r}: expected one of {sorted(LAYOUTS)}")
        if balance not in get_args(Balance):
            raise ValueError(f"balance={balance!r}: expected one of {get_args(Balance)}")
        if packing not in ROLES:
            raise ValueError(f"packing={packing!r}: expected one of {sorted(ROLES)}")
        if packing != "separate" and layout == "bnsd":
            raise ValueError("layout='bnsd' has no packed form; expected packing='separate'")
        tensors = len(ROLES[packing])
        if qkv is not None and len(qkv) != tensors:
            raise ValueError(f"qkv={tuple(qkv)}: expected {tensors} for packing={packing!r}")
        if qkv is not None and len(set(qkv)) != tensors:
            raise ValueError(f"qkv={tuple(qkv)}: expected {tensors} different places or names")
        if unpacked is not None and (packing != "qkv" or len(unpacked) not in (2, 3)):
            raise ValueError(
                f"unpacked={tuple(unpacked)} with packing={packing!r}: expected two names (q, kv) "
                "or three (q, k, v), with packing='qkv'"
            )
        if not use_local_output and (balance == "headtail" or sequence_length is not None):
            raise ValueError(
                "use_local_output=False: a DTensor cannot say how balance='headtail' or uneven "
                "parts cut the sequence; expected another balance and no sequence_length"
            )
        return cls(
            LAYOUTS[layout],
            balance,
            packing,
            range(tensors) if qkv is None else tuple(qkv),
            None if unpacked is None else tuple(unpacked),
            heads,
            sequence_length,
            sequence_length if kv_sequence_length is None else kv_sequence_length,
            ranges,
            mask,
            verify,
            use_local_output,
        )


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
