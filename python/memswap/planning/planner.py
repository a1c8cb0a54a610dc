"""Planner: a step, a machine and a budget make a plan."""

from __future__ import annotations

from collections import Counter
from types import MappingProxyType

from memswap.engine.action import Action
from memswap.engine.units import format_bytes
from memswap.errors import BudgetError
from memswap.planning.plan import Plan, PlannedStorage, PlannedUnit, frozen
from memswap.planning.rates import Rates
from memswap.planning.search import Candidate, Search
from memswap.planning.step import Step

#: "auto" may make a step longer by this share: what a prediction cannot tell from nothing.
AUTO_SLOWDOWN = 0.01

#: How finely "auto" looks for the smallest peak: halvings between the least and everything kept.
AUTO_HALVINGS = 7


def make_plan(step: Step, rates: Rates, budget: int | str, at_least: bool = False) -> Plan:
    """Decide what happens to each storage of a step.

    Args:
        step: what is saved when, and how long everything takes.
        rates: how fast the machine copies and encodes.
        budget: most bytes of saved activations on the device at any moment; or ``"auto"``: the
            smallest peak that makes the step longer by 1 % at most.
        at_least: for a budget that cannot be met, the plan that comes closest, and no error.

    Raises:
        BudgetError: no plan stays within so few bytes; the message states the smallest budget.
    """
    search = Search(step, rates)
    if budget == "auto":
        return _planned(search, hidden(search), budget)
    limit = int(budget)
    best = search.best_within(limit)
    if best.over_bytes:
        smallest = search.smallest_bytes()
        if not at_least:
            raise BudgetError(
                f"a budget of {format_bytes(limit)} ({limit} bytes) for saved activations cannot "
                f"be met: this step needs {format_bytes(smallest)} ({smallest} bytes) at least, "
                "for what cannot move and for the storages in use at one time. Raise the budget "
                "to that, or use a smaller batch or shorter sequences",
                smallest,
            )
        best = search.best_within(smallest)
    return _planned(search, best, limit)


def hidden(search: Search) -> Candidate:
    """The plan with the smallest peak among those that cost next to nothing."""
    allowed_s = AUTO_SLOWDOWN * search.step.compute_s
    kept_bytes = search.kept().found.peak_bytes
    best = search.candidate({}, kept_bytes)
    low, high = search.smallest_bytes(), kept_bytes
    for halving in range(AUTO_HALVINGS):
        if low >= high:
            break
        middle = (low + high) // 2
        tried = search.best_within(middle, thorough=halving >= AUTO_HALVINGS - 2)
        if tried.over_bytes or tried.found.total_exposed_s > allowed_s:
            low = middle + 1
        else:
            best, high = tried, tried.found.peak_bytes
    return best


def _planned(search: Search, best: Candidate, budget: int | str) -> Plan:
    """A candidate as a plan, with the reasons."""
    step, found = search.step, best.found
    recomputed = set(best.recompute)
    storages = []
    for index, storage in enumerate(step.storages):
        action = best.choice.get(index, Action.KEEP)
        away = 0
        if action is not Action.KEEP:
            away = {
                Action.SWAP: storage.nbytes,
                Action.ENCODE: storage.held_frame_nbytes,
                Action.ENCODE_SWAP: storage.frame_nbytes,
            }[action]
        storages.append(
            PlannedStorage(
                storage.unit,
                storage.ordinal,
                storage.nbytes,
                storage.dtype,
                action,
                "recomputed" if storage.unit in recomputed else _why(search, best, index, budget),
                away,
                found.exposed_s.get(index, 0.0),
            )
        )
    kept = search.kept().found
    return Plan(
        budget=budget,
        storages=tuple(storages),
        units=tuple(
            _unit(
                name,
                [one for one in storages if one.unit == name],
                name in recomputed,
                found.recompute_s.get(name, 0.0),
            )
            for name in step.units
        ),
        recompute=best.recompute,
        peak_bytes=found.peak_bytes,
        kept_peak_bytes=kept.peak_bytes,
        exposed_s=found.total_exposed_s,
        compute_s=step.compute_s,
        exact=search.exact,
        releases=frozen(found.releases),
        fetches=frozen(found.fetches),
        limit_bytes=max(int(best.limit_bytes), found.peak_bytes),
    )


def _why(search: Search, best: Candidate, index: int, budget: int | str) -> str:
    storage, action = search.step.storages[index], best.choice.get(index)
    exposed_s = best.found.exposed_s.get(index, 0.0)
    if action is not None:
        return "hidden behind compute" if exposed_s == 0 else "the budget needs it"
    if not storage.actions:
        return "policy"
    if storage.held_until is None:
        return "never freed: the model itself holds it"
    if not search.menus[index]:
        return "does not shrink"
    if budget == "auto":
        return "cannot be hidden" if best.choice else "nothing can be hidden"
    return "fits into the budget"


def _unit(
    name: str, storages: list[PlannedStorage], recomputed: bool, recompute_s: float
) -> PlannedUnit:
    moved = [one for one in storages if one.action is not Action.KEEP]
    reasons: Counter[str] = Counter()
    for one in storages:
        reasons[one.why] += one.nbytes
    whys = sorted(reasons.items(), key=lambda item: (-item[1], item[0]))
    return PlannedUnit(
        name=name,
        nbytes=sum(one.nbytes for one in storages),
        moved_nbytes=sum(one.nbytes for one in moved),
        away_nbytes=sum(one.away_nbytes for one in moved),
        actions=MappingProxyType(Counter(one.action for one in storages)),
        recompute=recomputed,
        why="; ".join(why for why, _ in whys[:2]),
        exposed_s=recompute_s + sum(one.exposed_s for one in storages),
    )
