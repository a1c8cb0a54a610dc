"""Holding: whether a plan under ``"auto"`` costs what it may, by measurement.

[Note: Never worse] ``"auto"`` promises that a step takes 1 % longer at most. A prediction does not
know what noting operators, caches and shared processors take, so the first iterations under such a
plan are all timed, some of them with everything kept, where the device has memory for that: they
are the model's own plain step. Both kinds are mixed in the order of Thue and Morse, in which
neither falls together with what the user's loop does every second or fourth time. What a plan costs
is what its own marks took beyond those of what stays, or what its iterations took longer than plain
ones, if that is more than chance. A plan that costs too much is made anew with a smaller share of
the 1 %, and if that does not help, everything stays. Ranks that plan together go by what the
slowest of them took, and so all give a plan up with the same forward, or none does.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import sqrt
from statistics import median
from types import MappingProxyType
from typing import TYPE_CHECKING

from memswap.engine.action import Action

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memswap._C import IterationRecord
    from memswap.planning.plan import Plan
    from memswap.planning.rates import Rates

#: Iterations of a kind that are compared: planned ones, and as many plain ones.
SAMPLES = 4

#: Iterations in which so many samples have to be found.
MOST_BEGUN = 8 * SAMPLES

#: A median of so many samples is known to so many of its standard errors.
SURE = 2.0

#: Times that a plan that costs too much is made anew before everything stays.
MOST_BACKOFFS = 3

#: Of what was measured to be allowed, the share that the next plan may take.
CAUTION = 0.8

_EMPTY: MappingProxyType[int, tuple[int, ...]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Sample:
    """What one iteration took, in seconds."""

    total_s: float
    """From its begin to its last mark, or to the next one's begin."""
    cost_s: float = 0.0
    """Of that, what the marks of a plan took beyond those of storages that stay."""


@dataclass(slots=True)
class Comparison:
    """Iterations in which something moves beside plain ones, mixed."""

    planned: list[Sample] = field(default_factory=list)
    plain: list[Sample] = field(default_factory=list)
    begun: int = 0
    """Iterations that were begun to be compared."""

    @property
    def has_plain(self) -> bool:
        """Whether some iterations are plain ones."""
        return True

    def begin(self) -> bool:
        """The next iteration begins. Whether everything stays in it."""
        plain = self.next_is_plain
        self.begun += 1
        return plain

    @property
    def next_is_plain(self) -> bool:
        """What `begin` will say."""
        return self.has_plain and self.begun.bit_count() % 2 == 1

    @property
    def complete(self) -> bool:
        """Whether there is enough to tell."""
        plain = not self.has_plain or len(self.plain) >= SAMPLES
        return plain and len(self.planned) >= SAMPLES

    def cost_s(self) -> float:
        """Seconds by which what moves makes a step longer, as far as that is sure."""
        direct_s = median(one.cost_s for one in self.planned)
        if not self.has_plain:
            return direct_s
        planned, plain = ([one.total_s for one in row] for row in (self.planned, self.plain))
        longer_s = median(planned) - median(plain)
        return max(direct_s, longer_s - SURE * sqrt(error_s(planned) ** 2 + error_s(plain) ** 2))


@dataclass(slots=True, kw_only=True)
class Holding(Comparison):
    """The comparison of one plan with the plain step."""

    kept: Plan | None
    """The plan under which everything stays; None: there is no memory for that."""
    rates: Rates | None = None
    """Of the machine, as the last planned one showed them."""

    @property
    def has_plain(self) -> bool:
        return self.kept is not None


def error_s(seconds: Sequence[float]) -> float:
    """The standard error of a median, from the median of the absolute deviations.

    1.4826 and 1.2533: of a normal distribution.
    """
    middle = median(seconds)
    deviation = 1.4826 * median(abs(one - middle) for one in seconds)
    return 1.2533 * deviation / sqrt(len(seconds))


def sample_of(record: IterationRecord, kept: Sequence[bool]) -> Sample:
    """What a recorded iteration took.

    Args:
        record: of the iteration.
        kept: for each of its storages whether it stays: what their marks cost is the recorder's.
    """
    costs = record.costs_s
    saves = len(record.nbytes)
    stay = [kept[index] for index in (*range(saves), *record.order)]
    own_s = median([cost for cost, one in zip(costs, stay, strict=True) if one] or [0.0])
    beyond_s = sum(max(cost - own_s, 0.0) for cost, one in zip(costs, stay, strict=True) if not one)
    return Sample(sum(record.gaps_s) + sum(costs), beyond_s)


def kept_plan(plan: Plan) -> Plan:
    """The plan under which everything that another one moves stays, and nothing is recomputed."""
    sources = plan.step.sources
    storages = tuple(
        replace(one, action=Action.KEEP, away_nbytes=0, exposed_s=0.0, recipe="")
        for index, one in enumerate(plan.storages)
        if index not in sources
    )
    return replace(
        plan,
        storages=storages,
        step=plan.step.without(sources),
        exposed_s=0.0,
        peak_bytes=plan.kept_peak_bytes,
        limit_bytes=plan.kept_peak_bytes,
        arena_bytes=0,
        releases=_EMPTY,
        departures=_EMPTY,
        fetches=_EMPTY,
    )
