"""Verdicts: whether a plan is still the right one, and what another one is made with if not.

docs/planning.md has all of it in a table. What an iteration came to, or what it took where it was
timed, goes in; whether there is to be another plan comes out. Who makes it is the learner.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from memswap.engine.recipes import PROOFS
from memswap.engine.units import format_bytes
from memswap.planning.checking import differs, settled
from memswap.planning.device import DevicePlan
from memswap.planning.holding import (
    CAUTION,
    MOST_BACKOFFS,
    MOST_BEGUN,
    Holding,
    Sample,
    kept_plan,
)
from memswap.planning.kinds import MOST_DOUBTS, REFRAME_AFTER, Costs
from memswap.planning.planner import AUTO_SLOWDOWN

if TYPE_CHECKING:
    from memswap.planning.agreement import Basis
    from memswap.planning.in_flight import InFlight
    from memswap.planning.kinds import StepKind
    from memswap.planning.rates import Rates
    from memswap.planning.step import Step


@dataclass(frozen=True, slots=True)
class Anew:
    """There is to be another plan, made with what the one in force was, but for what is given."""

    learns: bool = False
    """Whether the step is learnt again first, from the next iteration on."""
    step: Step | None = None
    all_off: bool = False
    """Whether all regions are off in `step`."""
    rates: Rates | None = None
    """Of the machine, which has become another one."""
    flights: int = 0
    """Forwards at a time; 0: as many as were seen."""
    costs: Costs | None = None
    reframes: bool = False
    """Whether it is made with frames as they are expected by now, and not if these are no others.
    Nothing is learnt again for that, which would take an iteration without a budget."""


def followed(one: InFlight) -> Anew | None:
    """What an iteration has come to under the plan in force; None: the plan stays."""
    kind, outcome = one.kind, one.outcome
    measured, known = kind.measured, kind.known
    assert known.in_force is not None
    # A shape that follows another one's plan has to prove the recipes in its first steps.
    measured.unproven = measured.unproven + 1 if outcome.no_recipe else 0
    if measured.unproven > PROOFS:
        return Anew(step=known.in_force.step.without_recipes(outcome.no_recipe))
    # An evaluation begins like a step and saves less; there is nothing to learn from it.
    if outcome.began_backward and kind.looked(not outcome.changed):
        return Anew(learns=True)
    measured.unfit = measured.unfit + 1 if outcome.unfit else 0
    if outcome.refused and outcome.pooled_bytes < known.room_bytes:
        kind.follow(replace(known, room_bytes=outcome.pooled_bytes))
        return Anew()
    over = not outcome.changed and (outcome.over_budget_bytes > 0 or outgrown(one))
    if over or (measured.unfit >= 2 and measured.iterations >= REFRAME_AFTER):
        measured.unfit = 0
        return Anew(reframes=True)
    return None


def outgrown(one: InFlight) -> bool:
    """Whether frames became so long that a plan for the whole device is no longer exact."""
    return isinstance(one.plan, DevicePlan) and one.plan.outgrown_by(one.outcome.peak_bytes)


def judged(kind: StepKind, found: Basis, exposed_s: float | None) -> Anew | None:
    """What an iteration shows that was timed under the plan; None: it stays, or is looked at again.

    Args:
        kind: of the iteration.
        found: what it took, agreed on by ranks that plan together.
        exposed_s: what it was longer by; None: it was not timed.
    """
    measured, known, now = kind.measured, kind.known, kind.known.in_force
    assert now is not None and found.rates is not None
    if exposed_s is not None and not measured.held:
        measured.exposed_s = exposed_s
    if found.again:
        return Anew(learns=True)
    compared = kind.holding is not None
    # Of ranks whose steps differ, the times say nothing.
    if found.step is not None and found.sample is not None:
        anew = sampled(kind, found.sample, found.rates)
        if anew is not None:
            return anew
    if now.plan.declined and kind.tries_again():
        return Anew(costs=Costs())
    if compared:
        return None  # timed to be compared with plain steps: whether times differ is seen later
    if found.flights not in {0, now.plan.in_flight}:
        return Anew(flights=found.flights)
    # The first timing follows the plan at once: it is there to be told, not to change it.
    if found.step is None or measured.iterations <= 2:
        return None
    rates = settled(found.rates, now.rates)
    if not differs(found.step, now.step) and rates == now.rates:
        measured.doubts = 0
        return None
    measured.doubts += 1
    if measured.doubts < MOST_DOUBTS:
        measured.checks_again = True  # one slow iteration is no reason
        return None
    measured.doubts = 0
    if known.full is not None and known.full.regions:
        return Anew(learns=True, rates=rates)
    # What a plan cost was in other times.
    return Anew(step=found.step, all_off=True, rates=rates, flights=found.flights, costs=Costs())


# --- plans that are held to what they may cost ([Note: Never worse] in holding.py) ----------------


def comparison(kind: StepKind) -> Holding | None:
    """That of a kind's plan with the plain step; None: nothing bounds its time."""
    plan = kind.plan
    if plan is None or plan.budget != "auto" or not plan.moved_bytes:
        return None
    more_bytes = (plan.kept_peak_bytes - plan.peak_bytes) * plan.in_flight
    room = kind.free_bytes is not None and 2 * more_bytes <= kind.free_bytes
    return Holding(kept=kept_plan(plan) if room else None)


def sampled(kind: StepKind, sample: Sample, rates: Rates) -> Anew | None:
    """One more iteration under the plan was timed. What follows if that costs too much.

    Args:
        kind: of the step.
        sample: what the iteration took.
        rates: of the machine, as the iteration has shown them.
    """
    if kind.holding is None and kind.measured.held and sample.cost_s > allowed_s(kind):
        kind.holding = comparison(kind)
    if kind.holding is None:
        return None
    kind.holding.planned.append(sample)
    kind.holding.rates = rates
    return weighed(kind)


def weighed(kind: StepKind) -> Anew | None:
    """Compare the plan with the plain step once there is enough. What follows if it is given up."""
    holding, known, now = kind.holding, kind.known, kind.known.in_force
    assert now is not None
    if holding is not None and holding.begun > MOST_BEGUN:
        holding = kind.holding = None  # steps that are seldom as planned cannot be compared
    if holding is None or not holding.complete:
        return None
    kind.holding = None
    cost_s, allowed = holding.cost_s(), allowed_s(kind)
    kind.measured.exposed_s, kind.measured.held = max(cost_s, 0.0), cost_s <= allowed
    if kind.measured.held:
        return None
    share, backoffs = known.costs.share, known.costs.backoffs + 1
    rates = settled(holding.rates or now.rates, now.rates)
    slower = rates != now.rates  # which explains it
    if not slower:
        share *= min(CAUTION * allowed / cost_s, 0.5)
    if backoffs >= MOST_BACKOFFS:
        share = 0.0
    words = (
        f"moving {format_bytes(now.plan.moved_bytes)} a step made it "
        f"{cost_s / now.step.compute_s:.1%} longer, where {AUTO_SLOWDOWN:.0%} is allowed"
    )
    return Anew(rates=rates if slower else None, costs=Costs(share, backoffs, words))


def allowed_s(kind: StepKind) -> float:
    """Seconds by which a plan for ``"auto"`` may make a step longer."""
    assert kind.known.in_force is not None
    return AUTO_SLOWDOWN * kind.known.in_force.step.compute_s
