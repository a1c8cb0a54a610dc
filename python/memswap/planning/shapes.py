"""Shapes: which kind an iteration is of, and plans for shapes that were not seen.

[Note: Shapes]
An iteration is known by the storage that it saves first: who saves it, and its size, which tells
one input shape from another. The first few shapes have a plan each. Of more, those within a quarter
of one another share a plan, which is made for the largest of them: what takes less than planned
stays within the budget too.

Only the first shape has to learn. What is known of it is resized for the others, in proportion to
the first storage, and planned with at once; a shape for which that is wrong learns for itself after
all ([Note: Learning]). While nobody has a plan, iterations of all shapes that could borrow one
learn together.

[Note: Other sizes]
What a step saves may vary although it begins alike: a mixture of experts sends other tokens to
other experts each time. The plan is followed by place. Within a budget three rules hold besides:
what stays may be larger than planned only as far as others that stayed before it were smaller; what
is saved waits until something has left, if there is no room for it; and so does what starts back,
until there is room or it is demanded. Where other storages are saved than planned, from there on
all that the policy selects leaves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import ceil, log
from typing import TYPE_CHECKING

from memswap.planning.kinds import StepKind
from memswap.planning.observed import quantised

if TYPE_CHECKING:
    from memswap.planning.observed import Key
    from memswap.planning.step import Step

#: Shapes that have a plan each, before similar ones share it.
MOST_OWN = 8

#: Kinds of iterations that are remembered, the latest.
MOST_KINDS = 32

#: A plan serves shapes that are smaller by this factor at most.
CLASS = 1.25

#: What is known of a shape says something about others up to this factor.
LENDS = 4.0


class Kinds:
    """The kinds of one director's iterations.

    `separate`: whether shapes are told apart.
    """

    def __init__(self, separate: bool) -> None:
        self._separate = separate
        self._known: list[StepKind] = []  # the latest one last

    def __iter__(self) -> Iterator[StepKind]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)

    def of(self, first: Key) -> tuple[StepKind, StepKind | None]:
        """The kind of an iteration with this first storage, and who can lend a new one its plan."""
        if not self._separate:
            return (self._known[0] if self._known else self._add(first)), None
        if self._known and self._known[-1].known.first == first:  # as most are
            return self._known[-1], None
        alike = [kind for kind in self._known if place(kind.known.first) == place(first)]
        if kind := found(alike, first.nbytes):
            return self._used(kind), None
        if len(alike) >= MOST_OWN:
            serving = [
                kind
                for kind in alike
                if kind.plan is not None
                and first.nbytes <= kind.known.first.nbytes <= CLASS * first.nbytes
            ]
            if serving:
                return self._used(min(serving, key=lambda kind: kind.known.first.nbytes)), None
            first = first._replace(nbytes=largest_alike(first.nbytes))
            if kind := found(alike, first.nbytes):
                return self._used(kind), None
        near = [kind for kind in alike if distance(kind.known.first, first) <= log(LENDS)]
        lenders = [kind for kind in near if kind.plan is not None]
        if lenders:
            nearest = min(lenders, key=lambda kind: distance(kind.known.first, first))
            return self._add(first), nearest
        return (self._used(near[-1]) if near else self._add(first)), None

    def _add(self, first: Key) -> StepKind:
        self._known.append(StepKind(first))
        if len(self._known) > MOST_KINDS:
            self._known.pop(0)
        return self._known[-1]

    def _used(self, kind: StepKind) -> StepKind:
        self._known.remove(kind)
        self._known.append(kind)
        return kind


def place(first: Key) -> tuple[object, ...]:
    """Who saves a storage: the same whatever the shape."""
    return first.unit, first.ordinal, first.dtype


def found(kinds: list[StepKind], nbytes: int) -> StepKind | None:
    """The kind of exactly this size."""
    return next((kind for kind in kinds if kind.known.first.nbytes == nbytes), None)


def distance(one: Key, other: Key) -> float:
    """How far apart two shapes are: the logarithm of a factor."""
    return abs(log(max(one.nbytes, 1) / max(other.nbytes, 1)))


def largest_alike(nbytes: int) -> int:
    """The largest size that shares a plan with this one where shapes are many."""
    return max(ceil(CLASS ** ceil(log(max(nbytes, 1), CLASS))), nbytes)


def resized(step: Step, nbytes: int, of_nbytes: int) -> Step:
    """A step as it would be if what takes `of_nbytes` took `nbytes`.

    Args:
        step: as it was recorded.
        nbytes: of what the other one saves first.
        of_nbytes: of what this one saves first.
    """

    def grown(number: int) -> int:
        return -(-number * nbytes // of_nbytes)

    factor = nbytes / of_nbytes
    always = min(step.extra_nbytes, default=0)  # what is there throughout does not grow
    return replace(
        step,
        storages=tuple(
            replace(
                one,
                nbytes=grown(one.nbytes),
                frame_nbytes=grown(one.frame_nbytes),
                held_frame_nbytes=grown(one.held_frame_nbytes),
                overflow_nbytes=grown(one.overflow_nbytes),
                recipe=one.recipe
                and replace(
                    one.recipe,
                    seconds=quantised(factor * one.recipe.seconds),
                    made_nbytes=grown(one.recipe.made_nbytes),
                ),
            )
            for one in step.storages
        ),
        gaps_s=tuple(quantised(factor * gap_s) for gap_s in step.gaps_s),
        tail_s=quantised(factor * step.tail_s),
        regions=tuple(replace(one, other_nbytes=grown(one.other_nbytes)) for one in step.regions),
        extra_nbytes=tuple(always + grown(one - always) for one in step.extra_nbytes),
        windows_s=tuple(quantised(factor * window_s) for window_s in step.windows_s),
    )
