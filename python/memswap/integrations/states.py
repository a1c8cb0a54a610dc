"""OptimizerStates: the optimizers of a training, whose state is away between their steps.

Their state stays away when the training ends: what does not fit beside activations may not fit
beside what comes after them either. `manage_optimizer` ties it to the optimizer, so another
training with the same one goes on with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memswap.engine.action import Action
from memswap.engine.transfers import check_pool
from memswap.optimizers import ManagedOptimizer, manage_optimizer, managed_optimizer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from memswap.engine.transfers import Pool


class OptimizerStates:
    """Manages the optimizers of a training, if that is asked for.

    Args:
        how: True, or an action or its name (``"swap"``, ``"encode"``, ``"encode_swap"``): their
            state is away between steps; True as suits the device. None or False: it stays.
        pool: where it goes; see :func:`memswap.manage_optimizer`.

    Raises:
        ValueError: ``how`` is none of these, or a pool without them.
    """

    def __init__(self, how: bool | str | Action | None, pool: Pool | None = None) -> None:
        check_pool(pool)
        self._off = how is False
        self._on = how is not None and not self._off
        self._action: Action | None = None
        if self._on and how is not True:
            known = {one.value: one for one in Action if one is not Action.RECOMPUTE}
            name = how.value if isinstance(how, Action) else how
            if not isinstance(name, str) or name not in known:
                found = repr(name) if isinstance(name, str) else type(name).__name__
                raise ValueError(
                    f"memswap: found optimizer={found}, expected True or one of "
                    f"{', '.join(known)}: where the state of the training's optimizer, which is "
                    "found by itself, waits between steps"
                )
            self._action = known[name]
        if pool is not None and not self._on:
            raise ValueError(
                "memswap: found optimizer_pool= without optimizer=, expected both: optimizer=True "
                "sends the optimizer's state there"
            )
        self._pool = pool
        self.managed: list[ManagedOptimizer] = []

    def begin(self, optimizers: Iterable[Any]) -> None:
        """A training with these begins.

        Args:
            optimizers: `torch.optim.Optimizer`s, or what accelerate or Lightning wraps around them.

        Raises:
            ValueError: there is none, or another error of :func:`memswap.manage_optimizer`.
        """
        self.managed = []
        if not self._on:
            return
        found = [unwrapped(one) for one in optimizers if one is not None]
        if not found:
            raise ValueError(
                "memswap: found no optimizer in this training, expected one whose state can be "
                "away: leave optimizer= out, or call memswap.manage_optimizer on the one you have"
            )
        for optimizer in found:
            managed = managed_optimizer(optimizer)
            if managed is None:
                managed = manage_optimizer(optimizer, self._action, self._pool)
            self.managed.append(managed)

    def under_one_budget(self, optimizers: Iterable[Any]) -> Any:
        """The optimizer that a budget for the whole device decides about as well; None: none.

        It is the training's only one, unless it was said where its state waits, or that it stays.
        (State that stays is counted under such a budget all the same.)
        """
        found = [unwrapped(one) for one in optimizers if one is not None]
        if self._off or self._action is not None or self._pool is not None or len(found) != 1:
            return None
        return found[0] if managed_optimizer(found[0]) is None else None

    def end(self) -> None:
        """The training has ended; the state stays where it is."""
        self.managed = []

    def report(self) -> list[str]:
        """Where the state is, a sentence or more for each optimizer."""
        return [managed.report() for managed in self.managed]

    def away_bytes(self) -> int:
        """Bytes of state that are away now."""
        return sum(managed.statistics().away_bytes for managed in self.managed)


def unwrapped(optimizer: Any) -> Any:
    """The optimizer that accelerate's or Lightning's wrapper holds, or itself."""
    while (inner := getattr(optimizer, "optimizer", None)) is not None:
        optimizer = inner
    return optimizer
