"""Step: what the planner knows of one training step. It touches no tensor and reads no clock.

A step is made from a record (observed.py), read from a file (cli/step_file.py), or written by hand,
for a machine that is not here. Marks are those of [Note: Marks] in csrc/engine/recorder.h.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from memswap.engine.action import Action


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a storage is computed again, by the operator that made it."""

    words: str
    """For people: ``"silu of gate"``."""
    sources: tuple[int, ...]
    """Storages of the step that it reads. They are there when it runs."""
    seconds: float
    made_nbytes: int = 0
    """The most that its operators have made at once, what they make on the way included."""


@dataclass(frozen=True, slots=True)
class SavedStorage:
    """One storage that autograd saves in the step."""

    unit: str
    ordinal: int
    """Place among the storages of one scope of the unit."""
    nbytes: int
    dtype: str
    actions: tuple[Action, ...] = ()
    """What may be done with it besides keeping it."""
    frame_nbytes: int = 0
    """Bytes of its frame; 0: not known, or it does not shrink."""
    held_frame_nbytes: int = 0
    """With spare capacity: what ENCODE takes of the device, and ENCODE_SWAP of link and pool."""
    held_until: int | None = None
    """The first mark at which the forward holds it no longer; None: leaving frees nothing."""
    last_demand: int | None = None
    """The mark in whose course it is demanded last; None: never."""
    kept_until: int | None = None
    """The last mark at which its graph has it, if that is later: what stays goes only then."""
    users: tuple[str, ...] = ()
    """Other units that save it too, later."""
    overflow_nbytes: int = 0
    """What its encode sets aside until the host has seen how long the frame became."""
    recipe: Recipe | None = None
    """None: it cannot be recomputed, whatever `actions` says."""
    for_recipe: bool = False
    """Autograd does not save it: it is saved for the recipes that read it, where one is planned."""

    @property
    def gone_after(self) -> int | None:
        """The last mark at which it is there if it stays; None: it is there to the end."""
        if self.last_demand is None or self.kept_until is None:
            return self.last_demand
        return max(self.last_demand, self.kept_until)

    def away_nbytes(self, action: Action) -> int:
        """Bytes that it takes while it is away: of the pool, or of the device for ENCODE."""
        if action in (Action.KEEP, Action.RECOMPUTE):
            return 0
        return self.nbytes if action is Action.SWAP else self.held_frame_nbytes

    @property
    def inner_nbytes(self) -> int:
        """Bytes that are there beside the storage and what its recipe reads, while that runs."""
        made_nbytes = 0 if self.recipe is None else self.recipe.made_nbytes
        return max(made_nbytes - self.nbytes, 0)

    @property
    def movable(self) -> bool:
        """Whether moving it frees anything."""
        return bool(self.actions) and self.held_until is not None


@dataclass(frozen=True, slots=True)
class Region:
    """A unit that may be recomputed instead of keeping what it saves."""

    unit: str
    inputs: tuple[int, ...] = ()
    """Storages of the step that it is called with: what a recomputed unit keeps."""
    other_nbytes: int = 0
    """Bytes of its other inputs, which nobody saves if the unit is not recomputed."""


@dataclass(frozen=True, slots=True)
class Step:
    """One forward and backward of the managed units."""

    storages: tuple[SavedStorage, ...]
    """In the order in which they are saved; mark i is the save of storage i."""
    order: tuple[int, ...]
    """Storages in the order of their first demands; mark len(storages) + j is demand j."""
    gaps_s: tuple[float, ...]
    """Seconds of work before each mark."""
    tail_s: float = 0.0
    """From the last mark to the next step."""
    regions: tuple[Region, ...] = ()
    """Units that are not recomputed in this step, and may be (planning/regions.py)."""
    extra_nbytes: tuple[int, ...] = ()
    """From each mark to the next, the most bytes that recomputed units have saved again. Empty:
    none."""
    windows_s: tuple[float, ...] = ()
    """Of each gap, the seconds in which encodes and decodes cost nothing. Empty: they do not wait
    for such seconds."""

    def __post_init__(self) -> None:
        saves, marks = len(self.storages), len(self.storages) + len(self.order)
        if len(self.gaps_s) != marks:
            raise ValueError(
                f"a step of {marks} marks needs as many gaps, found {len(self.gaps_s)}"
            )
        for name in ("extra_nbytes", "windows_s"):
            if (found := len(getattr(self, name))) not in (0, marks):
                raise ValueError(
                    f"a step of {marks} marks needs as many {name} or none, found {found}"
                )
        if sorted(set(self.order)) != sorted(self.order) or not all(
            0 <= index < saves for index in self.order
        ):
            raise ValueError("a step's order names each demanded storage once, by its index")
        demands = {index: saves + place for place, index in enumerate(self.order)}
        for index, storage in enumerate(self.storages):
            first, last = demands.get(index), storage.last_demand
            if (first is None) != (last is None) or (
                first is not None and last is not None and not first <= last < marks
            ):
                raise ValueError(
                    f"storage {index} is first demanded at mark {first} and last at {last}"
                )
            recipe = storage.recipe
            if recipe is not None and not all(0 <= one < saves for one in recipe.sources):
                raise ValueError(
                    f"the recipe of storage {index} reads {recipe.sources}, expected indices of "
                    f"{saves} storages"
                )

    @property
    def compute_s(self) -> float:
        """Seconds of the step if nothing moves."""
        return sum(self.gaps_s) + self.tail_s

    @property
    def saved_bytes(self) -> int:
        """Bytes of all storages."""
        return sum(storage.nbytes for storage in self.storages)

    @property
    def units(self) -> tuple[str, ...]:
        """Names, in the order of their first save."""
        return tuple(dict.fromkeys(storage.unit for storage in self.storages))

    def without_recipes(self, indices: Collection[int]) -> Step:
        """The same step where these storages cannot be recomputed."""
        storages = [
            replace(one, recipe=None) if index in indices else one
            for index, one in enumerate(self.storages)
        ]
        return replace(self, storages=tuple(storages))

    @property
    def sources(self) -> frozenset[int]:
        """Storages that are there for recipes alone."""
        return frozenset(i for i, one in enumerate(self.storages) if one.for_recipe)

    def unread(self, recomputed: Collection[int]) -> frozenset[int]:
        """Of these, those that nothing reads if just these storages are recomputed."""
        recipes = (self.storages[index].recipe for index in recomputed)
        read = {source for one in recipes if one is not None for source in one.sources}
        return self.sources - read

    def without(self, indices: Collection[int]) -> Step:
        """The same step where some of its `sources` are not saved, nor recomputed from."""
        if not indices:
            return self
        left = [index for index in range(len(self.storages)) if index not in indices]
        place = {index: new for new, index in enumerate(left)}
        saves, gone = len(self.storages), len(self.storages) - len(left)

        def new(mark: int) -> int:
            """The first mark from this one on that is left."""
            return bisect_left(left, mark) if mark < saves else mark - gone

        def moved(mark: int | None) -> int | None:
            return None if mark is None else new(mark)

        def merged(column: Sequence[Any], merge: Callable[[list[Any]], Any]) -> tuple[Any, ...]:
            rows: list[list[Any]] = [[] for _ in self.gaps_s[gone:]] if column else []
            for mark, value in enumerate(column):
                rows[new(mark)].append(value)
            return tuple(map(merge, rows))

        storages = []
        for index in left:
            one = with_recipe(self.storages[index], place)
            held, last, kept = map(moved, (one.held_until, one.last_demand, one.kept_until))
            storages.append(replace(one, held_until=held, last_demand=last, kept_until=kept))
        return replace(
            self,
            storages=tuple(storages),
            order=tuple(place[index] for index in self.order),
            gaps_s=merged(self.gaps_s, sum),
            windows_s=merged(self.windows_s, sum),
            extra_nbytes=merged(self.extra_nbytes, max),
            regions=tuple(
                replace(
                    one,
                    inputs=tuple(place[i] for i in one.inputs if i in place),
                    other_nbytes=one.other_nbytes
                    + sum(self.storages[i].nbytes for i in one.inputs if i not in place),
                )
                for one in self.regions
            ),
        )

    def forward_s(self) -> dict[str, float]:
        """Seconds of each unit's forward, as far as marks tell."""
        seconds: dict[str, float] = {}
        for storage, gap_s in zip(self.storages, self.gaps_s, strict=False):
            seconds[storage.unit] = seconds.get(storage.unit, 0.0) + gap_s
        return seconds

    def with_gaps(self, gaps_s: Sequence[float], tail_s: float) -> Step:
        """The same step with other times."""
        return replace(self, gaps_s=tuple(gaps_s), tail_s=tail_s)


def with_recipe(storage: SavedStorage, places: Mapping[int, int]) -> SavedStorage:
    """A storage whose recipe reads the same, by its new places; without, where some have none."""
    recipe = storage.recipe
    if recipe is None:
        return storage
    if not all(source in places for source in recipe.sources):
        return replace(storage, recipe=None)
    sources = tuple(places[source] for source in recipe.sources)
    return replace(storage, recipe=replace(recipe, sources=sources))
