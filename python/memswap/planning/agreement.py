"""Agreement: ranks that measured different times make one plan and follow it from one forward on.

[Note: Ranks agree beside training] Nothing here is a collective: a rank that is late, whose graphs
live longer or that trains no more would be waited for in one, and where training's own collectives
stand among them, for ever. What ranks tell each other goes through the store that their group was
made with, from the threads that plan (planning/background.py), in rounds that each rank counts for
itself.

In each round the group's first rank takes what all ranks have and answers all of them. When every
rank has its plan, each names a forward that it will not begin before it has heard the answer, a few
from now; the latest of these is when all of them follow the plan. So no forward waits, unless
a store takes longer to answer than so many forwards.
"""

from __future__ import annotations

import pickle
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

import torch.distributed as dist

from memswap.engine.action import Action
from memswap.planning.rates import Rates
from memswap.planning.step import SavedStorage

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from torch.distributed import ProcessGroup

    from memswap.planning.background import Job
    from memswap.planning.device import DeviceTerms
    from memswap.planning.holding import Sample
    from memswap.planning.step import Recipe, Step


AnyT = TypeVar("AnyT")
DataT = TypeVar("DataT", bound="DataclassInstance")

#: Forwards that a rank may begin while ranks agree when to follow a plan.
MARGIN = 4

#: Seconds between two looks into the store.
PAUSE_S = 2e-3


class Basis(NamedTuple):
    """What a plan is made from: one rank's own, or what all ranks have agreed on (`agreed`)."""

    step: Step | None
    """The step that was recorded; None: no plan can be made of what was."""
    rates: Rates | None
    """Of the machine; None: they could not be measured, and there is no step."""
    room_bytes: float = inf
    """Bytes that the pool holds."""
    flights: int = 1
    """Forwards that wait for their backward at a time."""
    device: DeviceTerms | None = None
    """What is on the rank's device, where the budget is for all of it."""
    gradient_nbytes: tuple[int, ...] = ()
    """Of a device's workspace, the gradients at each mark."""
    again: bool = False
    """Whether a rank's device is no longer as it was when the step was learnt."""
    sample: Sample | None = None
    """What the iteration took, to compare a plan with the plain step; None: that is not known."""
    free_bytes: float | None = None
    """Of the rank's device, for a plain step; None: nobody can say."""


def check_group(group: object) -> None:
    """Check who plans together.

    Raises:
        TypeError: no process group, ``"world"`` or None.
    """
    if group is not None and group != "world" and not hasattr(group, "size"):
        raise TypeError(
            f"group={group!r}: found {type(group).__name__}, expected a ProcessGroup "
            "(mesh.get_group()), 'world' for all ranks of this training, or None"
        )


def group_of(group: ProcessGroup | str | None) -> ProcessGroup | None:
    """The ranks that a checked ``group`` names; None: this one alone."""
    if group != "world":
        return group
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


class NotWantedError(Exception):
    """Whoever was to take an agreement has gone."""


class Ranks:
    """The ranks of one group that plan together.

    Every rank makes as many of these, and in the same order.

    Args:
        group: a process group with a store.
    """

    def __init__(self, group: Any) -> None:
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        #: The number of the latest forward of this rank.
        self.forwards = 0
        self._store = group.get_group_store()
        made = self._store.add(f"memswap/planners/{self._rank}", 1)
        self._prefix = f"memswap/planner/{made}"
        self._rounds: Counter[str] = Counter()

    def plan_by(self, job: Job, own: Basis) -> Basis:
        """What all ranks plan by: :func:`agreed` of what they have.

        Without a step it is this rank's own, but for what leads to another plan, which ranks make
        together: the forwards in flight, whether the step is to be learnt again, and what an
        iteration took.

        Raises:
            NotWantedError: nobody wants the job any more.
        """
        found: Basis = self._reduced(job, "basis", own, agreed)
        if found.step is None:
            return own._replace(
                step=None,
                flights=found.flights,
                again=found.again,
                sample=found.sample,
                free_bytes=found.free_bytes,
            )
        return found

    def settle(self, job: Job) -> None:
        """Agree with which forward what a job has found takes effect, once all ranks have it: its
        `at` and `before` are set."""
        self._reduced(job, "planned", None, len)
        while True:
            before = self.forwards + MARGIN
            job.before = before
            if self.forwards < before:
                break
        job.at = self._reduced(job, "forward", before, max)

    def _reduced(
        self, job: Job, what: str, value: Any, reduction: Callable[[list[Any]], AnyT]
    ) -> AnyT:
        """The reduction of what all ranks have, which the first rank makes."""
        number = self._rounds[what]
        self._rounds[what] += 1
        prefix = f"{self._prefix}/{what}/{number}"
        if self._rank == 0:
            others = [self._get(job, f"{prefix}/{rank}") for rank in range(1, self._size)]
            answer = reduction([value, *others])
            self._store.set(f"{prefix}/answer", pickle.dumps(answer))
            for rank in range(1, self._size):
                self._store.delete_key(f"{prefix}/{rank}")
            if number:  # all ranks are in this round, so they have had the last answer
                self._store.delete_key(f"{self._prefix}/{what}/{number - 1}/answer")
            return answer
        self._store.set(f"{prefix}/{self._rank}", pickle.dumps(value))
        found: AnyT = self._get(job, f"{prefix}/answer")
        return found

    def _get(self, job: Job, key: str) -> Any:
        while not self._store.check([key]):
            if not job.wanted:
                raise NotWantedError
            time.sleep(PAUSE_S)
        return pickle.loads(self._store.get(key))


# --- what ranks have, as one ----------------------------------------------------------------------

#: From what each rank has to what all of them go by.
Reduction: TypeAlias = Callable[[Sequence[Any]], Any]


def merged(found: Sequence[DataT], reductions: Mapping[str, Reduction]) -> DataT:
    """What ranks have, as one: the first rank's, with the fields that are named reduced."""
    values = {
        name: reduction([getattr(one, name) for one in found])
        for name, reduction in reductions.items()
    }
    return replace(found[0], **values)


def if_known_by_all(reduction: Reduction) -> Reduction:
    """A reduction that answers None where one of the ranks has None."""
    return lambda found: None if any(one is None for one in found) else reduction(found)


def place_by_place(reduction: Reduction) -> Reduction:
    """A reduction of rows of numbers, at each place by itself."""
    return lambda rows: tuple(map(reduction, zip(*rows, strict=True)))


def longest_frame(nbytes: Sequence[int]) -> int:
    """The longest that any rank saw; 0 if one of them saw none."""
    return max(nbytes) if all(nbytes) else 0


def recipe_of_all(recipes: Sequence[Recipe]) -> Recipe | None:
    """What every rank has proven, with the longest time of any; None where they are not one."""
    alike = len({(one.words, one.sources) for one in recipes}) == 1
    return merged(recipes, OF_RECIPES) if alike else None


#: The slowest of all ranks: how each field that was measured becomes one. In all others the ranks
#: whose steps are `alike` agree.
OF_RATES: Mapping[str, Reduction] = {
    **{field.name: min for field in fields(Rates) if field.type == "float"},
    **dict.fromkeys(("copy_latency_s", "codec_latency_s", "copy_share"), max),  # more is worse
}
OF_SAMPLES: Mapping[str, Reduction] = {"total_s": max, "cost_s": max}
OF_RECIPES: Mapping[str, Reduction] = {"seconds": max, "made_nbytes": max}
OF_STATES: Mapping[str, Reduction] = {
    "sizes": place_by_place(max),
    "step_state_bytes": min,
    "forwards": min,
    "coded": any,
}
OF_STORAGES: Mapping[str, Reduction] = {
    "frame_nbytes": longest_frame,
    "held_frame_nbytes": longest_frame,
    "overflow_nbytes": max,
    "held_until": if_known_by_all(max),  # None is the end of the step, and the latest of all marks
    "last_demand": if_known_by_all(max),
    "kept_until": if_known_by_all(max),
    "recipe": if_known_by_all(recipe_of_all),
}


def agreed(gathered: list[Basis]) -> Basis:
    """What the slowest of all ranks would plan by.

    Returns:
        The step with the longest times that any rank measured, for each mark, and with storages
        that are there for as long as on any rank; the lowest rates, the least room in a pool and
        the most forwards in flight; of devices, what meets each rank's own budget (`agreed_terms`);
        and no step if any rank has none, or if their steps differ in more than what was measured.
        Of a plain or planned iteration, what the slowest rank took.
    """
    rates = [one.rates for one in gathered if one.rates is not None]
    slowest = if_known_by_all(lambda samples: merged(samples, OF_SAMPLES))
    found = Basis(
        None,
        merged(rates, OF_RATES) if rates else None,
        min(one.room_bytes for one in gathered),
        max(one.flights for one in gathered),
        again=any(one.again for one in gathered),
        sample=slowest([one.sample for one in gathered]),
        free_bytes=if_known_by_all(min)([one.free_bytes for one in gathered]),
    )
    steps = [one.step for one in gathered if one.step is not None]
    if len(steps) < len(gathered) or any(not alike(one, steps[0]) for one in steps):
        return found
    devices = [one.device for one in gathered if one.device is not None]
    if 0 < len(devices) < len(gathered):
        return found  # some have another kind of budget
    terms = agreed_terms(devices) if devices else None
    extra = [one.extra_nbytes for one in steps if one.extra_nbytes]
    if terms is not None:
        extra = [
            tuple(max(nbytes - beyond(own, terms), 0) for nbytes in one)
            for own, one in zip(devices, extra, strict=True)
        ]
    windows = [one.windows_s for one in steps]
    most, storages = place_by_place(max), zip(*(one.storages for one in steps), strict=True)
    step = replace(
        steps[0],
        storages=tuple(merged(saved, OF_STORAGES) for saved in storages),
        gaps_s=most([one.gaps_s for one in steps]),
        tail_s=max(one.tail_s for one in steps),
        extra_nbytes=most(extra),
        windows_s=place_by_place(min)(windows) if all(windows) else (),
    )
    gradients = most([one.gradient_nbytes for one in gathered])
    return found._replace(step=step, device=terms, gradient_nbytes=gradients)


def beyond(own: DeviceTerms, terms: DeviceTerms) -> int:
    """By how many bytes a rank's own limit is above the one that all of them plan by."""
    return own.limit_bytes - terms.limit_bytes


def agreed_terms(devices: list[DeviceTerms]) -> DeviceTerms:
    """What a plan has to meet so that each rank's device meets its own budget.

    All plan by the smallest budget. A rank with a larger one has as many bytes more for what is on
    its device besides: so many are taken off before the largest of all ranks' is taken.

    Returns:
        For each parameter the longest state of any rank, and the highest peak in a step; no state
        if a rank has made no step yet, or if their optimizers have other numbers of parameters.
    """
    smallest = min(devices, key=lambda one: one.nbytes)
    states = [one.state for one in devices if one.state is not None]
    state = None
    if len(states) == len(devices) and len({len(one.sizes) for one in states}) == 1:
        peaks = [
            one.step_peak_bytes - beyond(own, smallest)
            for own, one in zip(devices, states, strict=True)
        ]
        most = [one.most_bytes for one in states if one.most_bytes is not None]
        state = replace(
            merged(states, OF_STATES),
            step_peak_bytes=max(0, *peaks),
            most_bytes=min(most, default=None),
        )
    return replace(
        smallest,
        weights_bytes=max(one.weights_bytes for one in devices),
        gradients_bytes=max(one.gradients_bytes for one in devices),
        state=state,
    )


def alike(one: Step, other: Step) -> bool:
    """Whether two steps differ in nothing but what was measured: times, frames, and how long
    storages were there, which goes by when a worker thread let go of them."""
    given = [field.name for field in fields(SavedStorage) if field.name not in OF_STORAGES]

    def essence(step: Step) -> tuple[Any, ...]:
        storages = [
            {
                **{name: getattr(saved, name) for name in given},
                "actions": [one for one in saved.actions if one is not Action.RECOMPUTE],
            }
            for saved in step.storages
        ]
        return storages, step.order, step.regions

    return essence(one) == essence(other)
