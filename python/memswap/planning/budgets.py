"""Budgets: what a user may ask for, and how many bytes that comes to."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from memswap.engine.units import parse_bytes
from memswap.planning.search import Search

if TYPE_CHECKING:
    from memswap.planning.rates import Rates
    from memswap.planning.step import Step


def parsed(budget: int | str, argument: str = "") -> int | str:
    """A budget that can be planned with: bytes, ``"auto"``, or a share such as ``"70%"``.

    Raises:
        ValueError: it is none; the message names the `argument`.
    """
    if budget == "auto" or (isinstance(budget, str) and share_of(budget) is not None):
        return budget
    if isinstance(budget, str) and budget.rstrip().endswith("%"):
        named = f"{argument}: " if argument else ""
        raise ValueError(
            f"{named}expected a size in bytes such as 24GiB, auto, or a share of what the step "
            f"saves, above 0% and up to 100%, found {budget!r}"
        )
    return parse_bytes(budget, argument, auto=True)


def share_of(budget: int | str) -> float | None:
    """The share that a budget names; None: it names none."""
    if not isinstance(budget, str) or not budget.rstrip().endswith("%"):
        return None
    try:
        share = float(budget.rstrip()[:-1]) / 100
    except ValueError:
        return None
    return share if math.isfinite(share) and 0 < share <= 1 else None


def bytes_of(budget: int | str, full: Step, rates: Rates) -> int:
    """Bytes of a budget that is not ``"auto"``.

    Args:
        budget: what :func:`parsed` returns.
        full: a step with nothing recomputed. A share is one of its peak if nothing moves.
        rates: any machine's; they make no difference to what stays.
    """
    share = share_of(budget)
    if share is None:
        return int(budget)
    return int(share * Search(full, rates).kept().found.peak_bytes)
