"""Recipes: storages that are computed again, by the operator that made them.

What is known of operators, which storages become recipes, and how they are run stands in
csrc/engine (recipes.h). Here stands when an engine has them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memswap._native import native
from memswap.engine.action import RECOMPUTE
from memswap.engine.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from memswap.planning.policy import Policy

#: Times that a place has to give the same bits before its storage becomes a recipe.
PROOFS: int = native.RECIPE_PROOFS


def wants_recipes(policy: Policy, directed: bool) -> bool:
    """Whether a policy may ask for Action.RECOMPUTE, or a director to whom it leaves the choice."""
    if policy.fn is not None or policy.action is RECOMPUTE:
        return True
    return directed and policy.recipes and policy.action is None


def describe_recipes(known: native.Recipes | None) -> list[str]:
    """Which operators are run again in backward, by what was proven; no line where none is.

    Args:
        known: an engine's; None: it has recomputed nothing.
    """
    found: dict[str, list[int]] = {}
    for (_, _, nbytes), (words, passed, failed) in known.learnt() if known is not None else ():
        if passed >= PROOFS and not failed:
            found.setdefault(words, []).append(nbytes)
    return [f"recipes: {in_words(found)}"] if found else []


def in_words(sizes: Mapping[str, Sequence[int]]) -> str:
    """Recipes for people, those of most bytes first: ``"silu of gate (4 x, 12.0 MiB)"``.

    Args:
        sizes: bytes of the storages that each makes again.
    """
    ordered = sorted(sizes.items(), key=lambda item: -sum(item[1]))
    return "; ".join(f"{w} ({len(each)} x, {format_bytes(sum(each))})" for w, each in ordered)
