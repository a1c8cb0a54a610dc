"""manage_pipeline: activations of waiting microbatches are away, and back one slot before use.

[Note: Slots]
A rank of a pipeline runs one action after another: forwards of microbatches, and backwards, whole
or split into gradients of inputs and of weights. The saved tensors of one stage and microbatch are
a chunk. It is collected by the forward hooks of the stage's module, its backward begins when the
first of its tensors is demanded, so each action makes itself known and nothing of the schedule is
replaced. At the beginning of an action

- offloads that were launched before the last action are waited for: they have had its time, and
  their memory is free from here on;
- the load of the chunk that is needed `ahead` actions later is launched.

After a forward its chunk leaves, unless it is needed within `min_gap` actions: then its copies
would not be hidden. Which action comes next is what came next the last time. A period begins with a
forward while no chunk is alive and ends when none is; actions are matched by what they do and how
many of the kind there were in the period, and an order that is new (another number of microbatches,
the forward with which torch finds out shapes) costs stalls until it has been seen once, never more.
Where the schedule says its order (`pipeline_order`), that is known before the first step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import ref

from torch import nn

from memswap._native import native
from memswap.planning.policy import checked_policy
from memswap.schedules.scheduled import BatchSchedule, ScheduledModules

if TYPE_CHECKING:
    from memswap._C import Batch
    from memswap.engine.transfers import Pool
    from memswap.hooks.units import UnitCall
    from memswap.planning.policy import Policy


@dataclass(frozen=True)
class Step:
    """One action of a period: a forward, or the `reading`-th backward of a chunk."""

    stage: int
    chunk: int
    """Which of the stage's forwards in the period it belongs to."""
    reading: int
    """0: the forward; 1: its first backward; 2: the second, where they are split."""


Period = tuple[Step, ...]


class Itinerary:
    """The order of actions: as it happens, and what periods that were seen say about it."""

    def __init__(self, planned: Iterable[Period] = ()) -> None:
        self._known: deque[Period] = deque(planned, maxlen=16)  # the latest first
        self._steps: list[Step] = []
        self._counts: dict[int, int] = {}
        self._candidates: list[Period] = list(self._known)

    def begin(self) -> None:
        """A new period. What happened in the last one is what is expected first from now on."""
        if self._steps:
            period = tuple(self._steps)
            if period in self._known:
                self._known.remove(period)
            self._known.appendleft(period)
        self._steps = []
        self._counts = {}
        self._candidates = list(self._known)

    def forward(self, stage: int) -> Step:
        """A forward of a stage begins."""
        chunk = self._counts.get(stage, 0)
        self._counts[stage] = chunk + 1
        return self._happens(Step(stage, chunk, 0))

    def backward(self, step: Step, reading: int) -> Step:
        """The `reading`-th backward of a forward's chunk begins."""
        return self._happens(Step(step.stage, step.chunk, reading))

    def _happens(self, step: Step) -> Step:
        position = len(self._steps)
        self._steps.append(step)
        self._candidates = [
            period
            for period in self._candidates
            if len(period) > position and period[position] == step
        ]
        return step

    def ahead(self) -> Period:
        """The actions that come next, as far as they can be foreseen."""
        return self._candidates[0][len(self._steps) :] if self._candidates else ()

    def readings(self, step: Step, within: int) -> int:
        """How many backwards of a chunk come next, one at most `within` actions after another."""
        found = gap = 0
        for following in self.ahead():
            gap += 1
            if found and gap > within:
                break
            if following.reading and (following.stage, following.chunk) == (step.stage, step.chunk):
                found, gap = found + 1, 0
        return found

    def distance(self, step: Step) -> int | None:
        """How many actions away the next backward of a chunk is; None: not foreseen."""
        for distance, following in enumerate(self.ahead(), start=1):
            if following.reading and (following.stage, following.chunk) == (step.stage, step.chunk):
                return distance
        return None


class _Chunk:
    """The saved tensors of one stage and microbatch. Owned by its batch."""

    def __init__(self, schedule: Slots, batch: Batch, step: Step) -> None:
        self._schedule = ref(schedule)
        self.batch = ref(batch)
        self.step = step
        self.reading = 0
        batch.on_demand = self

    @property
    def alive(self) -> bool:
        """Whether backward may still come for it."""
        batch = self.batch()
        return batch is not None and batch.alive

    def __call__(self, batch: Batch) -> None:
        """A backward pass begins to read it.

        Gradients of weights are computed in several passes, one after another: still one action.
        """
        schedule = self._schedule()
        if schedule is None:
            return
        with schedule.turns:
            if self.reading < 2:
                self.reading += 1
                schedule.backward(self, batch)


class Slots(BatchSchedule):
    """The schedule of [Note: Slots].

    Args:
        modules: of this rank, by name.
        stages: numbers of the modules' stages, by the same names.
        planned: orders of actions that are known beforehand.
        ahead: how many actions before its backward a chunk is loaded.
        min_gap: a chunk whose backward is fewer actions away stays.
        policy: which saved tensors move, and how.
        pool: where they go; None: a default pool of each device.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        stages: Mapping[str, int],
        planned: Iterable[Period],
        *,
        ahead: int,
        min_gap: int,
        policy: Policy,
        pool: Pool | None,
    ) -> None:
        super().__init__(modules, policy, pool)
        self.ahead = ahead
        self.min_gap = min_gap
        self._stages = stages
        self._itinerary = Itinerary(planned)
        self._chunks: list[_Chunk] = []
        self._leaving: list[ref[Batch]] = []  # since the last action began
        self._waiting: list[ref[Batch]] = []  # since the one before

    def __repr__(self) -> str:
        return f"Slots(ahead={self.ahead}, min_gap={self.min_gap})"

    def begin(
        self, name: str, inputs: tuple[Any, Any], depth: Callable[[Collection[str]], int]
    ) -> UnitCall | None:
        call = super().begin(name, inputs, depth)
        if call is not None:
            with self.turns:
                self._slot()
        return call

    def opens(self, name: str) -> bool:
        self._chunks = [chunk for chunk in self._chunks if chunk.alive]
        if self._chunks:
            return False
        self._itinerary.begin()
        return True

    def began(self, name: str, batch: Batch) -> None:
        step = self._itinerary.forward(self._stages[name])
        self._chunks.append(_Chunk(self, batch, step))

    def ended(self, name: str, batch: Batch) -> None:
        assert isinstance(batch.on_demand, _Chunk)
        with self.turns:
            if not self._needs_soon(batch.on_demand.step):
                batch.launch_offload()
                self._leaving.append(ref(batch))

    def backward(self, chunk: _Chunk, batch: Batch) -> None:
        """A backward pass begins to read a chunk. `turns` is held."""
        step = self._itinerary.backward(chunk.step, chunk.reading)
        if batch.phase in (native.Phase.OFFLOADING, native.Phase.OFFLOADED):
            soon = self._needs_soon(step)
            more = self._itinerary.readings(step, self.min_gap) if soon else 0
            batch.launch_load(1 + more)  # it waits for the backwards that follow soon
        self._slot()

    def _needs_soon(self, step: Step) -> bool:
        """Whether a chunk's next backward is so near that its copies would not be hidden."""
        distance = self._itinerary.distance(step)
        return distance is not None and distance < self.min_gap

    def _slot(self) -> None:
        """An action begins: what left before is waited for, what comes next is asked for."""
        waiting, self._waiting, self._leaving = self._waiting, self._leaving, []
        for reference in waiting:
            batch = reference()
            if batch is not None and batch.phase is native.Phase.OFFLOADING:
                batch.wait_offload()
        for step in self._itinerary.ahead()[: self.ahead]:
            batch = self._batch(step) if step.reading else None
            if batch is not None and batch.phase is not native.Phase.COLLECTED:
                batch.launch_load(self._itinerary.readings(step, self.min_gap))

    def _batch(self, step: Step) -> Batch | None:
        for chunk in self._chunks:
            if (chunk.step.stage, chunk.step.chunk) == (step.stage, step.chunk):
                return chunk.batch()
        return None


def manage_pipeline(
    stages: Any,
    schedule: Any = None,
    *,
    policy: Policy | None = None,
    pool: Pool | None = None,
    ahead: int = 1,
    min_gap: int = 4,
) -> ScheduledModules:
    """Swap or encode the activations of microbatches that wait for their backward.

    For stages of :mod:`torch.distributed.pipelining`, under any schedule: GPipe, 1F1B, interleaved,
    zero bubble, V-shaped. Adds forward hooks to the stages' modules; stages and schedule stay as
    they are, and nothing has to be called in a step.

    Args:
        stages: this rank's ``PipelineStage``, or several.
        schedule: the schedule that will run them. Where it says its order (``pipeline_order``),
            that is known before the first step; otherwise the first step teaches it.
        policy: which saved tensors move, and how; default ``Policy()``.
        pool: where they go; see :class:`memswap.saved_tensors`.
        ahead: how many actions before its backward a chunk is loaded.
        min_gap: a chunk whose backward is fewer actions away stays.

    Returns:
        Statistics, pause and resume, and the way to end it.

    Raises:
        TypeError: ``stages`` are no pipeline stages.
        ValueError: no stages, one of them twice, ``ahead`` below 0 or ``min_gap`` below 1.
    """
    several = list(stages) if isinstance(stages, Sequence) else [stages]
    modules: dict[int, nn.Module] = {}
    for stage in several:
        module, index = getattr(stage, "submod", None), getattr(stage, "stage_index", None)
        if not isinstance(module, nn.Module) or not isinstance(index, int):
            raise TypeError(
                f"manage_pipeline(): found {type(stage).__name__}, expected a "
                "torch.distributed.pipelining.PipelineStage or several of them"
            )
        if index in modules:
            raise ValueError(f"manage_pipeline(): stage {index} was given twice")
        modules[index] = module
    if not modules:
        raise ValueError("manage_pipeline(): found no stages; pass this rank's stage or stages")
    if not isinstance(ahead, int) or ahead < 0:
        raise ValueError(f"manage_pipeline(ahead={ahead!r}): expected 0 or more actions")
    if not isinstance(min_gap, int) or min_gap < 1:
        raise ValueError(f"manage_pipeline(min_gap={min_gap!r}): expected 1 or more actions")
    order = getattr(schedule, "pipeline_order", None) if schedule is not None else None
    planned = periods(order, set(modules)) if order else []
    names = {f"stage {index}": index for index in modules}
    named = {name: modules[index] for name, index in names.items()}
    slots = Slots(
        named,
        names,
        planned,
        ahead=ahead,
        min_gap=min_gap,
        policy=checked_policy(policy),
        pool=pool,
    )
    return ScheduledModules(named, slots, "manage_pipeline()")


def periods(order: Mapping[int, Sequence[Any]], stages: set[int]) -> list[Period]:
    """What a schedule's `pipeline_order` says about the rank that has these stages."""
    for actions in order.values():
        flat = [one for action in actions if action is not None for one in leaves(action)]
        if {action.stage_index for action in flat} == stages:
            return split(flat)
    return []


def leaves(action: Any) -> Iterable[Any]:
    """The actions that an action overlaps, or itself."""
    several = getattr(action, "sub_actions", None)
    return (one for part in several for one in leaves(part)) if several else (action,)


def split(actions: Iterable[Any]) -> list[Period]:
    """Actions of one rank, as periods in which chunks are alive."""
    found: list[Period] = []
    steps: list[Step] = []
    chunks: dict[tuple[int, int], int] = {}
    counts: dict[int, int] = {}
    readings: dict[tuple[int, int], int] = {}
    waiting: set[tuple[int, int]] = set()
    for action in actions:
        kind, key = action.computation_type.name, (action.stage_index, action.microbatch_index)
        if kind == "FORWARD":
            if not waiting and steps:
                found.append(tuple(steps))
                steps, chunks, counts, readings = [], {}, {}, {}
            chunks[key] = counts.get(key[0], 0)
            counts[key[0]] = chunks[key] + 1
            steps.append(Step(key[0], chunks[key], 0))
            waiting.add(key)
        elif kind == "BACKWARD_INPUT" and key[0] == 0:
            continue  # the first stage needs no gradients of inputs, and does both at once
        elif kind in ("FULL_BACKWARD", "BACKWARD_INPUT", "BACKWARD_WEIGHT") and key in chunks:
            readings[key] = readings.get(key, 0) + 1
            steps.append(Step(key[0], chunks[key], readings[key]))
            if kind != "BACKWARD_INPUT":
                waiting.discard(key)
    if steps:
        found.append(tuple(steps))
    return list(dict.fromkeys(found))
