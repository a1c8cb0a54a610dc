"""Time on a CPU or an accelerator, in rounds that alternate between the contenders."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping

import torch

from memswap.planning.profile import elapsed


def alternate(
    measures: Mapping[str, Callable[[], float]], rounds: int, warm_up: int = 1
) -> dict[str, list[float]]:
    """Run each measure once a round, in an order that rotates, and collect what they return.

    Alternation spreads a slow moment of a shared machine over all of them, instead of charging it
    to the one that happened to run.

    Args:
        measures: what is run, by name; each returns a number.
        rounds: that count.
        warm_up: rounds before them that do not.
    """
    names = list(measures)
    collected: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(warm_up + rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            value = measures[name]()
            if turn >= warm_up:
                collected[name].append(value)
    return collected


def median_ratio(over: list[float], under: list[float]) -> float:
    """The median of the rounds' own ratios: a slow round was slow for both."""
    return statistics.median(a / b for a, b in zip(over, under, strict=True))


def times_s(
    work: Mapping[str, Callable[[], object]], device: torch.device, rounds: int
) -> dict[str, list[float]]:
    """Seconds that each took, round by round; the rounds alternate between all of them.

    Args:
        work: what is timed, by name.
        device: that is waited for before and after.
        rounds: that count.
    """
    measures = {name: (lambda w=w: elapsed(w, device)) for name, w in work.items()}
    return alternate(measures, rounds)


def median_rates(
    work: Mapping[str, Callable[[], object]], nbytes: int, device: torch.device, rounds: int
) -> dict[str, float]:
    """Median bytes per second of each, over rounds that alternate between all of them.

    Args:
        work: what is timed, by name.
        nbytes: that each run handles.
        device: that is waited for before and after.
        rounds: that count.
    """
    return {
        name: nbytes / statistics.median(values)
        for name, values in times_s(work, device, rounds).items()
    }
