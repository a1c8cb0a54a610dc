"""Recipes: storages that are computed again, by the operator that made them.

What is known of operators, which storages become recipes, and how they are run stands in
csrc/engine (recipes.h). Here stands when an engine has them.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch.optim.optimizer import register_optimizer_step_pre_hook

from memswap._native import native
from memswap.engine.action import RECOMPUTE
from memswap.engine.units import format_bytes

if TYPE_CHECKING:
    from torch.optim import Optimizer

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
    told = [
        f"{words} ({len(sizes)} x, {format_bytes(sum(sizes))})"
        for words, sizes in sorted(found.items(), key=lambda item: -sum(item[1]))
    ]
    return [f"recipes: {'; '.join(told)}"] if told else []


def watch_optimizers(engine: native.Engine) -> None:
    """Have the recipes of an engine keep what any optimizer is about to change."""
    known = weakref.ref(engine)

    def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """A graph that is alive may read a parameter once more: its recipes are run now."""
        alive = known()
        if alive is not None and alive.recipes is not None:
            edited = [one for group in optimizer.param_groups for one in group["params"]]
            alive.recipes.before_edits(edited)

    handle = register_optimizer_step_pre_hook(before_step)
    weakref.finalize(engine, handle.remove).atexit = False
