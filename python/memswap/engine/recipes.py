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

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.optim import Optimizer

    from memswap.planning.policy import Policy

#: Times that a place has to give the same bits before its storage becomes a recipe.
PROOFS: int = native.RECIPE_PROOFS


def wants_recipes(policy: Policy, directed: bool) -> bool:
    """Whether a policy may ask for Action.RECOMPUTE, or a director to whom it leaves the choice."""
    if policy.fn is not None or policy.action is RECOMPUTE:
        return True
    return directed and policy.recipes and policy.action is None


def open_recipes(engine: native.Engine, operators: Sequence[str] = ()) -> native.Recipes:
    """The recipes of an engine, which keep what an optimizer is about to change.

    Args:
        engine: who owns them.
        operators: of the user's, as ``"namespace::name"``, beside those of the table
            (csrc/engine/operator_rules.cpp).

    Raises:
        ValueError: an operator's name is not of that form.
    """
    known = weakref.ref(engine)

    def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """A graph that is alive may read a parameter once more: its recipes are run now."""
        alive = known()
        if alive is not None and alive.recipes is not None:
            edited = [one for group in optimizer.param_groups for one in group["params"]]
            alive.recipes.before_edits(edited)

    handle = register_optimizer_step_pre_hook(before_step)
    weakref.finalize(engine, handle.remove).atexit = False
    return native.Recipes(engine, operators, PROOFS)
