"""Worth: whether what moves without a budget pays, by measurement.

[Note: Little for its time]
Who gives no budget and names nothing asks for memory, and gets it at any cost, where there is
memory to get. A short sequence or a tiny model has next to none to give: what moves frees less
than `LEAST_BYTES`, which is about what memswap takes of a process itself, or less than
`LEAST_SHARE` of the model's own parameters, and hooks, recipes and copies take time all the same.
There, and only there, iterations are compared with plain ones, which is harmless: what these keep
beyond the others is just that little. If moving makes an iteration more than 1 % longer, as far as
that is sure, everything stays from then on. Where more is freed there is no plain iteration: it
would take the memory that was to be saved, and leave its mark on the peak of the process. On an
accelerator `LEAST_BYTES` alone says what is little. Plain iterations also need memory that was free
where the most was on the device (`free_bytes`).

What stays is what begins with inputs that are no larger than those of the iterations that were
found to free little. A longer sequence moves from its first iteration on, and so does what begins
while the graph of a plain iteration waits for its backward.
"""

from __future__ import annotations

import logging
from statistics import median
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple
from weakref import ref

import torch

from memswap._native import native
from memswap.engine.action import Action
from memswap.engine.autograd import nbytes_of, tensors_in
from memswap.engine.units import format_bytes
from memswap.planning.holding import MOST_BEGUN, Comparison, Sample
from memswap.planning.kinds import RETIME_AFTER
from memswap.planning.learner import free_bytes
from memswap.planning.plan import Plan, PlannedUnit
from memswap.planning.planner import AUTO_SLOWDOWN
from memswap.planning.step import Step

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from memswap._C import Iteration, Moment
    from memswap.engine.engine import Engine

#: Iterations before anything is compared: frames are expected, recipes are proven, pools are full.
WARM_UP = 8

#: Of these, how many the last ones are that show what moving frees.
SEEN = 4

#: What frees fewer bytes in an iteration frees little, whatever the model.
LEAST_BYTES = 16 * 2**20

#: And so does, on a CPU, what frees a smaller share of the bytes of the model's parameters.
LEAST_SHARE = 1 / 16

Clock, seconds_between = native.Clock, native.seconds_between

_NOWHERE: Mapping[int, tuple[int, ...]] = MappingProxyType({})

logger = logging.getLogger("memswap")


class Moved(NamedTuple):
    """What one iteration has moved, as counted."""

    storages: int = 0
    nbytes: int = 0
    freed: int = 0
    """Bytes that went away, less those of the frames that stand in their place."""


class _Graph:
    """The graph of a plain iteration, which holds this, until its backward has begun."""

    __slots__ = ("__weakref__", "waits")

    def __init__(self, node: torch.autograd.graph.Node) -> None:
        self.waits = True
        node.register_prehook(self._begins_backward)

    def _begins_backward(self, gradients: object) -> None:
        self.waits = False


class _Step:
    """An iteration that is compared."""

    def __init__(self, plain: bool, began: Moment) -> None:
        self.plain = plain
        self.began = began
        self.ended: Moment | None = None
        self.usable = True


class Worth:
    """Watches an engine's iterations, and says which of them are to be plain ones.

    See [Note: Little for its time]. The engine's lock serialises the calls.

    Args:
        engine: that moves what it saves, without a director.
        model_bytes: says how many bytes the model's parameters and buffers have.
        alone: whether the model is a single unit, whose every call is an iteration.
    """

    def __init__(self, engine: Engine, model_bytes: Callable[[], int], alone: bool) -> None:
        self._engine = engine
        self._model_bytes = model_bytes
        self._alone = alone
        #: What is to be told where everything stays; None: it moves.
        self.declined: Plan | None = None
        #: Whether nothing is watched any more: everything moves.
        self.over = False
        self._iterations = 0  # since anything was decided
        self._retries = 0
        self._last = Moved()  # as counted when it was looked at last
        self._moved = Moved()  # in this iteration
        self._seen: list[tuple[Moved, int]] = []  # in iterations before, and their inputs' bytes
        self._moving: list[Iteration] = []  # that moved something, and may be in flight
        self._plain_graphs: list[ref[_Graph]] = []  # of those in which everything stayed
        self._comparison: Comparison | None = None
        self._clock = Clock(torch.device("cpu"))  # of the accelerator, if there is one
        self._steps: list[_Step] = []
        self._wants_plain = False  # of this iteration
        self._plain: bool | None = None  # what it is; None: no unit was called yet
        self._calls = 0  # of units, in this iteration
        self._much_bytes = 0.0  # that an iteration frees where there are no plain ones
        self._bytes = 0  # of what the first unit was given
        self._most_bytes = 0  # of the same in the iterations that freed little

    def end(self) -> None:
        """Nothing is compared any more, and everything moves."""
        self.remove()
        self.declined = None

    def remove(self) -> None:
        """Nothing is watched any more. What was told last stays."""
        self.over, self._wants_plain, self._comparison = True, False, None
        self._steps.clear()
        self._moving.clear()
        self._plain_graphs.clear()
        self._engine.knows_operators = True

    # --- iterations -------------------------------------------------------------------------------

    def begins(self) -> None:
        """A forward begins. The engine's iteration is still that of the last one that moved."""
        if self.over:
            return
        if any(one.captures() for one in self._engine.open_transfers()):
            self.end()  # a moment would belong to the graph that is captured
            return
        self._end_iteration()
        self._go_on()
        self._choose()

    def _go_on(self) -> None:
        """From the iterations so far to what is done with the next one."""
        if self.over:
            return
        self._iterations += 1
        if self._comparison is not None:
            self._compare(self._comparison)
        elif self.declined is not None:
            if self._iterations >= RETIME_AFTER << self._retries:
                self._retries += 1
                self._iterations, self.declined = 1, None  # a machine may have become faster
        elif self._iterations > WARM_UP:
            self._look()

    def _choose(self) -> None:
        """Whether the iteration that begins is to be a plain one."""
        if self.over:
            return
        self._plain_graphs = [
            one for one in self._plain_graphs if (graph := one()) is not None and graph.waits
        ]
        in_flight = bool(self._moving or self._plain_graphs)  # a graph, or a part of one
        if self._comparison is not None:
            self._wants_plain = self._comparison.begin() and not in_flight
            self._steps.append(_Step(self._wants_plain, self._now()))
        else:
            self._wants_plain = self.declined is not None and not in_flight
        # What recipes of another forward in flight read may be edited by this one's operators.
        self._engine.knows_operators = not self._wants_plain

    def plain(self, inputs: object) -> bool:
        """A unit is called in a forward that has begun. Whether what it saves stays as it is."""
        if self.over:
            return False
        self._calls += 1
        if self._plain is None:
            self._bytes = sum(map(nbytes_of, tensors_in(inputs)))
            self._plain = self._wants_plain and self._bytes <= self._most_bytes
            if not self._plain:
                self._engine.knows_operators = True
                if self._steps and self._steps[-1].plain:
                    self._steps[-1].usable = False
        if self._alone and self._calls > 1 and not self._plain:
            self.end()  # calls are no iterations
            return False
        return self._plain

    def left(self, output: object) -> None:
        """A unit's call has ended in a plain iteration, whose backward nothing else will show."""
        if self.over or len(self._plain_graphs) > 0:
            return
        node = next((one.grad_fn for one in tensors_in(output) if one.grad_fn is not None), None)
        if node is not None:
            self._plain_graphs.append(ref(_Graph(node)))

    def _end_iteration(self) -> None:
        """What the last iteration has come to."""
        if self._moving:
            self._engine.departing.notice_gone()
            self._moving = [one for one in self._moving if not one.over]
        latest = self._engine.iteration
        if self._plain is False:
            self.look()
            if self.declined is None and latest.size and latest.mostly_alive:
                self.end()  # a plain one would share its time with others
                return
            if not latest.over:
                self._moving.append(latest)
            self._seen = [*self._seen[1 - SEEN :], (self._moved, self._bytes)]
            if self._comparison is not None and self._moved.freed >= self._much_bytes:
                self.end()
                return
        elif self._plain is None and self._steps:
            self._steps[-1].usable = False
        self._plain, self._calls, self._moved = None, 0, Moved()

    # --- what moving comes to ---------------------------------------------------------------------

    def look(self) -> None:
        """Take over what was counted since this was called last."""
        if self.over:
            return
        self._engine.departing.notice_gone()
        counted = self._counted()
        since = (now - before for now, before in zip(counted, self._last, strict=True))
        self._moved = Moved(*(sum(pair) for pair in zip(self._moved, since, strict=True)))
        self._last = counted

    def counts_anew(self) -> None:
        """The engine's statistics were reset."""
        self._last = self._counted()

    def _counted(self) -> Moved:
        found = self._engine.ledger.counters
        return Moved(found.moved_storages, found.moved_bytes, found.freed_bytes - found.frame_bytes)

    def _look(self) -> None:
        """Whether what moving frees is so little that its time is to be looked at."""
        freed = max((moved.freed for moved, _ in self._seen), default=0)
        self._most_bytes = max((nbytes for _, nbytes in self._seen), default=0)
        devices = [one.device for one in self._engine.open_transfers()]
        accelerators = [one for one in devices if one.type != "cpu"]
        share = 0.0 if accelerators else LEAST_SHARE
        self._much_bytes = max(LEAST_BYTES, share * self._model_bytes())
        if freed >= self._much_bytes:
            self.end()
            return
        room = [free_bytes(one) for one in accelerators or devices[:1]]
        if len(room) != 1 or room[0] is None or 2 * freed > room[0]:
            self.end()
            return
        if accelerators:
            self._clock = Clock(accelerators[0])
        self._comparison = Comparison()

    # --- what it costs ----------------------------------------------------------------------------

    def _now(self) -> Moment:
        moment = self._clock.now()
        assert moment is not None, "`begins` looks whether a graph is captured"
        return moment

    def _compare(self, comparison: Comparison) -> None:
        """One more iteration of a comparison has ended."""
        self._steps[-1].ended = self._now()
        comparison.planned.clear()
        comparison.plain.clear()
        for one in self._steps:
            if one.usable and one.ended is not None and one.ended.reached():
                sample = Sample(seconds_between(one.began, one.ended))
                (comparison.plain if one.plain else comparison.planned).append(sample)
        if comparison.complete:
            self._decide(comparison)
        elif comparison.begun >= MOST_BEGUN:
            self.end()  # they are not alike, or in flight together

    def _decide(self, comparison: Comparison) -> None:
        plain_s = median(one.total_s for one in comparison.plain)
        cost_s, (seen, _) = comparison.cost_s(), self._seen[-1]
        if cost_s <= AUTO_SLOWDOWN * plain_s:
            self.end()
            return
        words = (
            f"moving {format_bytes(seen.nbytes)} a step freed {format_bytes(max(seen.freed, 0))} "
            f"and made it {cost_s / plain_s:.1%} longer than the model's own (with a budget, or an "
            "action in the policy, it moves all the same)"
        )
        self.declined = _kept(seen, plain_s, words)
        self._comparison, self._iterations = None, 0
        self._steps.clear()
        logger.info("declined, everything stays: %s", words)


def _kept(moved: Moved, plain_s: float, words: str) -> Plan:
    """The plan under which what would move stays.

    Args:
        moved: what moved in an iteration before.
        plain_s: seconds of one in which nothing moves.
        words: why.
    """
    all_of_it = PlannedUnit(
        name="",
        nbytes=moved.nbytes,
        moved_nbytes=0,
        away_nbytes=0,
        actions={Action.KEEP: moved.storages},
        recompute=False,
        why="does not pay",
        exposed_s=0.0,
    )
    return Plan(
        budget="none",
        units=(all_of_it,),
        storages=(),
        recompute=(),
        exposed_s=0.0,
        peak_bytes=moved.nbytes,
        kept_peak_bytes=moved.nbytes,
        compute_s=plain_s,
        exact=True,
        step=Step((), (), ()),
        releases=_NOWHERE,
        departures=_NOWHERE,
        fetches=_NOWHERE,
        declined=words,
    )
