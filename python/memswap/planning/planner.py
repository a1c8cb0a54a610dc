"""Planner: a step, a machine and a budget make a plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from math import ceil, inf
from types import MappingProxyType

from memswap.engine.action import RECOMPUTE, Action
from memswap.engine.units import format_bytes
from memswap.errors import BudgetError
from memswap.planning.budgets import bytes_of, share_of
from memswap.planning.plan import Plan, PlannedStorage, PlannedUnit, by_place
from memswap.planning.rates import Rates
from memswap.planning.regions import EXACT_REGIONS, chosen, smallest, under
from memswap.planning.search import Candidate, Search
from memswap.planning.step import Step

#: "auto" may make a step longer by this share: what a prediction cannot tell from nothing.
AUTO_SLOWDOWN = 0.01

#: How finely "auto" looks for the smallest peak: halvings between the least and everything kept.
AUTO_HALVINGS = 7


def make_plan(
    step: Step,
    rates: Rates,
    budget: int | str,
    at_least: bool = False,
    full: Step | None = None,
    recompute: Sequence[str] = (),
    room_bytes: float = inf,
    slowdown: float = AUTO_SLOWDOWN,
) -> Plan:
    """Decide what happens to each storage of a step.

    Args:
        step: what is saved when, and how long everything takes. Its regions are recomputed where
            that is the cheapest way to meet the budget.
        rates: how fast the machine copies and encodes.
        budget: most bytes of saved activations on the device at any moment; a share such as
            ``"70%"`` of those that are there if nothing moves and nothing is recomputed; or
            ``"auto"``: the smallest peak that makes the step longer by 1 % at most. Recomputing
            takes longer.
        at_least: for a budget that cannot be met, the plan that comes closest, and no error.
        full: of a step that was recorded with regions on, the step with all of them off.
        recompute: the regions that were on.
        room_bytes: most bytes that the pool has for the step.
        slowdown: the share of a step's time that ``"auto"`` may take.

    Raises:
        BudgetError: no plan stays within so few bytes; the message states the smallest budget.
    """
    if budget == "auto":
        search = Search(step, rates, room_bytes=room_bytes)
        return _planned(search, hidden(search, slowdown), budget, None, full or step, recompute)
    limit = bytes_of(budget, full or step, rates)
    least_bytes = None
    if step.regions:
        full, (recompute, least_bytes) = step, regions_for(step, rates, limit, room_bytes)
        step = under(step, recompute)
    search = Search(step, rates, room_bytes=room_bytes)
    best = search.best_within(limit)
    if best.over_bytes:
        least = search.smallest_bytes() if least_bytes is None else least_bytes
        if not at_least:
            raise too_small(limit, least, room_bytes, budget)
        best = search.best_within(least)
    return _planned(search, best, budget, limit, full or step, recompute)


def too_small(
    budget: int, smallest_bytes: int, room_bytes: float = inf, asked: int | str = 0
) -> BudgetError:
    """What is raised where no plan meets a budget, which may have been asked for as a share.

    Args:
        budget: bytes.
        smallest_bytes: the smallest budget that can be met.
        room_bytes: most bytes that the pool may hold.
        asked: the budget as it was asked for.
    """
    share = share_of(asked)
    least = "" if share is None else f", '{ceil(100 * share * smallest_bytes / budget)}%'"
    pool = f", with {format_bytes(room_bytes)} of room in the pool" if room_bytes < inf else ""
    return BudgetError(
        f"a budget of {format_bytes(budget)} ({budget} bytes) for saved activations cannot be met: "
        f"this step needs {format_bytes(smallest_bytes)} ({smallest_bytes} bytes) at least{pool}, "
        f"for what cannot move and for the storages in use at one time. Raise the budget to that"
        f"{least}, or use a smaller batch or shorter sequences",
        smallest_bytes,
    )


def regions_for(
    step: Step, rates: Rates, limit_bytes: int, room_bytes: float = inf
) -> tuple[tuple[str, ...], int | None]:
    """Which regions to recompute under a budget.

    Where no plan meets it: those that leave the smallest peak, and that peak.

    Args:
        step: with all regions on or off, as it was recorded.
        rates: of the machine.
        limit_bytes: most bytes at the peak.
        room_bytes: most bytes that the pool may hold.

    Returns:
        Units, and the smallest peak in bytes; None where the budget can be met.
    """
    best = chosen(step, rates, limit_bytes, room_bytes)
    return smallest(step, rates, room_bytes) if best.found.over_bytes else (best.units, None)


def hidden(search: Search, slowdown: float = AUTO_SLOWDOWN) -> Candidate:
    """The plan with the smallest peak among those that cost next to nothing.

    Args:
        search: of the step.
        slowdown: the share of the step's time that it may take. 0: everything stays.
    """
    allowed_s = slowdown * search.step.compute_s
    kept_bytes = search.kept().found.peak_bytes
    best = search.candidate({}, kept_bytes)
    if not slowdown:
        return best
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


def _planned(
    search: Search,
    best: Candidate,
    budget: int | str,
    limit: int | None,
    full: Step,
    recompute: Sequence[str],
) -> Plan:
    """A candidate as a plan, with the reasons."""
    exact, left_out = search.exact, search.step.unread(recomputed(best))
    if left_out:
        search, best = without(search, best, left_out)
    step, found = search.step, best.found
    choice, exposed_s = best.choice, found.exposed_s
    storages = []
    for index, storage in enumerate(step.storages):
        action = choice.get(index, Action.KEEP)
        away = storage.away_nbytes(action)
        storages.append(
            PlannedStorage(
                storage.unit,
                storage.ordinal,
                storage.nbytes,
                storage.dtype,
                action,
                _why(search, index, action, exposed_s[index], budget, bool(choice)),
                away,
                exposed_s[index],
                storage.recipe.words if action is RECOMPUTE and storage.recipe else "",
            )
        )
    kept = Search(full, search.rates).kept()
    again_s = max(step.compute_s - full.compute_s, 0.0)
    unit_s = full.forward_s()
    forward_s = sum(unit_s.get(unit, 0.0) for unit in recompute)
    units = []
    for name in dict.fromkeys((*full.units, *step.units)):
        one = _unit(name, [saved for saved in storages if saved.unit == name])
        if name in recompute:
            share = unit_s.get(name, 0.0) / forward_s if forward_s else 1 / len(recompute)
            units.append(_recomputed(one, full, again_s * share))
        else:
            units.append(one)
    return Plan(
        budget=budget,
        budget_bytes=limit,
        storages=tuple(storages),
        units=tuple(units),
        recompute=tuple(recompute),
        peak_bytes=found.peak_bytes,
        kept_peak_bytes=kept.found.peak_bytes,
        exposed_s=found.total_exposed_s + again_s,
        compute_s=full.compute_s,
        exact=exact and len(full.regions) <= EXACT_REGIONS,
        step=step,
        left_out=left_out,
        releases=by_place(found.releases),
        departures=by_place(found.departures),
        fetches=by_place(found.fetches),
        arena_bytes=found.arena_bytes,
        limit_bytes=max(int(best.limit_bytes), found.peak_bytes),
    )


def recomputed(candidate: Candidate) -> list[int]:
    """Storages that a candidate recomputes."""
    return [index for index, action in candidate.choice.items() if action is RECOMPUTE]


def without(search: Search, best: Candidate, left_out: Collection[int]) -> tuple[Search, Candidate]:
    """A candidate for the step in which what it does not use is not saved.

    Args:
        search: of the step.
        best: the candidate.
        left_out: storages, by their places.
    """
    left = [index for index in range(len(search.step.storages)) if index not in left_out]
    choice = {new: best.choice[old] for new, old in enumerate(left) if old in best.choice}
    search = Search(search.step.without(left_out), search.rates, room_bytes=search.room_bytes)
    return search, search.candidate(choice, best.limit_bytes)


def _why(
    search: Search,
    index: int,
    action: Action,
    exposed_s: float,
    budget: int | str,
    others_move: bool,
) -> str:
    storage = search.step.storages[index]
    if action is not Action.KEEP:
        if exposed_s == 0:
            return "hidden behind compute"
        return "costs next to nothing" if budget == "auto" else "the budget needs it"
    if storage.for_recipe:
        return "a recipe reads it"
    if not storage.actions:
        return "policy"
    if storage.held_until is None:
        return "never freed: the model itself holds it"
    if not search.menus[index]:
        return "does not shrink"
    if budget == "auto":
        return "cannot be hidden" if others_move else "nothing can be hidden"
    return "fits into the budget"


def _unit(name: str, storages: list[PlannedStorage]) -> PlannedUnit:
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
        recompute=False,
        why="; ".join(why for why, _ in whys[:2]),
        exposed_s=sum(one.exposed_s for one in storages),
    )


def _recomputed(unit: PlannedUnit, full: Step, again_s: float) -> PlannedUnit:
    """A unit that keeps its inputs alone, beside what it would save otherwise."""
    return replace(
        unit,
        nbytes=sum(one.nbytes for one in full.storages if one.unit == unit.name),
        recompute=True,
        why="the budget needs it",
        exposed_s=unit.exposed_s + again_s,
    )
