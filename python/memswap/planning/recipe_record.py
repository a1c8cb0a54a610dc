"""RecipeRecord: the recipes that one iteration could have used, and what they read."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from memswap.planning.step import Recipe

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import torch

    from memswap._C import ProvenRecipe

#: Nodes of autograd that a tensor is looked through: views, and casts of what autocast was given.
_LOOKED_THROUGH = ("View", "UnsafeView", "Reshape", "Transpose", "T", "Permute", "Clone", "ToCopy")
#: Of them, in a row.
_MOST_LOOKED_THROUGH = 4

_NODE = re.compile(r"Backward\d*$")
_CAPITAL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_TOKEN = re.compile(r"\w+|[(),]")


class RecipeRecord:
    """By storage, for one iteration that is timed."""

    def __init__(self) -> None:
        self._proven: dict[int, ProvenRecipe] = {}
        self._names: dict[int, str] = {}

    def name(self, index: int, tensor: torch.Tensor, parameters: Mapping[int, str]) -> None:
        """A storage is saved; what it is called, as far as its place in the graph tells.

        Args:
            index: of the storage.
            tensor: that is saved.
            parameters: of its unit: ``id(parameter)`` -> the path of its module.
        """
        found = name_of(tensor, parameters)
        self._names[index] = found or f"a tensor of {str(tensor.dtype).removeprefix('torch.')}"

    def seen(self, index: int, recipe: ProvenRecipe) -> None:
        """A storage that is saved has a recipe."""
        self._proven[index] = recipe

    def of(self, index: int) -> Recipe | None:
        """The recipe of a storage; None: it has none."""
        proven = self._proven.get(index)
        if proven is None:
            return None
        sources = [source for source in proven.saved if source is not None]
        names = [
            "a buffer" if source is None else self._names.get(source, "a tensor")
            for source in proven.saved
        ]
        return Recipe(
            in_words(proven.words, names),
            tuple(dict.fromkeys(sources)),
            proven.seconds,
            proven.made_nbytes,
        )


def name_of(tensor: torch.Tensor, parameters: Mapping[int, str]) -> str | None:
    """The module whose parameter made a tensor, or else the operator that did; None: nobody knows.

    Args:
        tensor: as autograd saves it.
        parameters: ``id(parameter)`` -> what its module is called.
    """
    node = looked_through(tensor.grad_fn)
    if node is None:
        return None
    for source, _ in node.next_functions:
        leaf = getattr(looked_through(source), "variable", None)
        if leaf is not None and id(leaf) in parameters:
            return parameters[id(leaf)]
    return _CAPITAL.sub("_", kind_of(node)).lower() or None


def looked_through(node: Any) -> Any:
    """The node of autograd's that stands behind views and casts; None: there is none."""
    for _ in range(_MOST_LOOKED_THROUGH):
        if node is None or kind_of(node) not in _LOOKED_THROUGH:
            break
        node = node.next_functions[0][0]
    return node


def kind_of(node: Any) -> str:
    """What a node of autograd's is the backward of: ``"Addmm"``."""
    return _NODE.sub("", node.name().rpartition("::")[2])


def in_words(call: str, names: Sequence[str]) -> str:
    """A recipe for people.

    Args:
        call: as native code tells it: ``"mul(silu(saved), saved)"``.
        names: what stands for each ``saved``, in their order.

    Returns:
        Such as ``"mul of silu(gate) and up"``.
    """
    named = iter(names)
    tokens = [next(named, one) if one in ("saved", "kept") else one for one in _TOKEN.findall(call)]
    outer, arguments = tokens[0], list(_arguments(tokens[2:-1]))
    if not arguments:
        return outer
    *first, last = arguments
    return f"{outer} of {', '.join(first)} and {last}" if first else f"{outer} of {last}"


def _arguments(tokens: Sequence[str]) -> Iterator[str]:
    """The arguments of one call, each as one text."""
    depth, text = 0, ""
    for token in tokens:
        depth += (token == "(") - (token == ")")
        if token == "," and not depth:
            yield text
            text = ""
        else:
            text += ", " if token == "," else token
    if text:
        yield text
