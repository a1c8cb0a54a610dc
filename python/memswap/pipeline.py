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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import nn

from memswap.activations import checked_policy, persistent_tensors
from memswap.engine.autograd import in_backward
from memswap.engine.group import Generation, Phase
from memswap.groups import Groups
from memswap.hooks.managed import Managed
from memswap.layer_chain import CollectedCall

if TYPE_CHECKING:
    from memswap.engine.transfer import Pool
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
    """The saved tensors of one stage and microbatch. Owned by its generation."""

    def __init__(self, manager: PipelineManager, generation: Generation, step: Step) -> None:
        self._manager = ref(manager)
        self.generation = ref(generation)
        self.step = step
        self.reading = 0
        generation.on_demand = self

    def __call__(self, generation: Generation) -> None:
        """A backward pass begins to read it.

        Gradients of weights are computed in several passes, one after another: still one action.
        """
        manager = self._manager()
        if manager is not None and self.reading < 2:
            self.reading += 1
            manager._backward(self, generation)


class PipelineManager(Managed):
    """What :func:`manage_pipeline` returns: its statistics, and the way to end it."""

    def __init__(
        self,
        modules: Mapping[int, nn.Module],
        planned: Iterable[Period],
        ahead: int,
        min_gap: int,
        policy: Policy,
        pool: Pool | None,
    ) -> None:
        shared = Groups(policy, pool=pool)
        super().__init__(shared.engine)
        self._modules = dict(modules)
        self._ahead = ahead
        self._min_gap = min_gap
        self._groups = {stage: shared.new(f"stage {stage}") for stage in self._modules}
        self._group_engine = shared.engine
        self._itinerary = Itinerary(planned)
        self._chunks: list[_Chunk] = []
        self._leaving: list[ref[Generation]] = []  # since the last action began
        self._waiting: list[ref[Generation]] = []  # since the one before
        self._add(self._modules, "manage_pipeline()")

    def _begin(
        self, key: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> CollectedCall | None:
        if not torch.is_grad_enabled() or in_backward():
            return None
        engine = self._group_engine
        with engine.lock:
            self._chunks = [chunk for chunk in self._chunks if alive(chunk)]
            if not self._chunks:
                self._itinerary.begin()
                engine.set_persistent(persistent_tensors(self._modules.values()))
            generation = self._groups[key].begin()
            chunk = _Chunk(self, generation, self._itinerary.forward(key))
            self._chunks.append(chunk)
        self._slot()
        return CollectedCall(engine, generation, self._collected)

    def _collected(self, generation: Generation) -> None:
        """The forward of a stage has ended."""
        assert isinstance(generation.on_demand, _Chunk)
        step = generation.on_demand.step
        distance = self._itinerary.distance(step)
        if distance is None or distance >= self._min_gap:
            generation.launch_offload()
            self._leaving.append(ref(generation))

    def _backward(self, chunk: _Chunk, generation: Generation) -> None:
        """A backward pass begins to read a chunk. The engine's lock is held."""
        step = self._itinerary.backward(chunk.step, chunk.reading)
        if generation.phase in (Phase.OFFLOADING, Phase.OFFLOADED):
            generation.launch_load(1 + self._readings_after(step))
        self._slot()

    def _readings_after(self, step: Step) -> int:
        """How many more backwards follow one that begins now, soon enough to wait for them."""
        distance = self._itinerary.distance(step)
        if distance is None or distance >= self._min_gap:
            return 0
        return self._itinerary.readings(step, self._min_gap)

    def _slot(self) -> None:
        """An action begins: what left before is waited for, what comes next is asked for."""
        waiting, self._waiting, self._leaving = self._waiting, self._leaving, []
        for reference in waiting:
            generation = reference()
            if generation is not None and generation.phase is Phase.OFFLOADING:
                generation.wait_offload()
        for step in self._itinerary.ahead()[: self._ahead]:
            generation = self._generation(step) if step.reading else None
            if generation is not None and generation.phase is not Phase.COLLECTED:
                generation.launch_load(self._itinerary.readings(step, self._min_gap))

    def _generation(self, step: Step) -> Generation | None:
        for chunk in self._chunks:
            if (chunk.step.stage, chunk.step.chunk) == (step.stage, step.chunk):
                return chunk.generation()
        return None


def alive(chunk: _Chunk) -> bool:
    """Whether backward may still come for a chunk."""
    generation = chunk.generation()
    return generation is not None and generation.alive


def manage_pipeline(
    stages: Any,
    schedule: Any = None,
    *,
    policy: Policy | None = None,
    pool: Pool | None = None,
    ahead: int = 1,
    min_gap: int = 4,
) -> PipelineManager:
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
    return PipelineManager(modules, planned, ahead, min_gap, checked_policy(policy), pool)


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
