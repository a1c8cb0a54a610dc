"""ShardContext: when units are gathered, prefetched, dropped and reduced. One per model.

[Note: Order of collectives]
Every decision here depends on the order in which modules run, on the numbers of slots and of
reductions under way, and on nothing that differs between ranks or with time: so all ranks launch
the same collectives in the same order, whatever the network does. All of them are launched by the
thread that runs the modules, on its stream:
- the next unit's all-gather before the present unit's compute, so that it runs beside it;
- a unit's reduce-scatter when its last gradient is there, before the previous unit's backward;
- waiting only where the result is used: a unit's first use, the window of reductions, the end of
  backward.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import nn

from memswap.engine.autograd import in_backward
from memswap.engine.training import BackwardPass
from memswap.errors import InplaceEditError, RankMismatchError
from memswap.parallel.comm import Comm, ProcessGroupComm, ranks_that_differ
from memswap.parallel.slots import SlotPool, SlotStats
from memswap.parallel.unit import Reduction, State, Unit

if TYPE_CHECKING:
    import torch.distributed as dist

_log = logging.getLogger(__name__)

#: Is called with a unit's name before it is gathered; what it returns is waited for, unless None.
Prerequisite = Callable[[str], Any]


class Launch(NamedTuple):
    """One collective, and why it was launched when it was."""

    collective: str
    unit: str
    cause: str


class Order:
    """Successors of units in one direction, from the last time that each was used.

    Pairs, and not one list: chunks of a pipeline, branches and repeated layers each keep their own
    neighbours, and an order that changes is relearnt where it changed.
    """

    def __init__(self) -> None:
        self._after: WeakKeyDictionary[Unit, Unit] = WeakKeyDictionary()
        self._before: WeakKeyDictionary[Unit, Unit] = WeakKeyDictionary()
        self._last: Unit | None = None
        self._opener: Unit | None = None

    def use(self, unit: Unit) -> None:
        """``unit`` is used now."""
        if unit is self._opener:  # a new pass: its first unit does not follow the last one
            self._last = None
        if self._last is None:
            self._opener = unit
        elif self._last is not unit:
            self._after[self._last] = unit
            self._before[unit] = self._last
        self._last = unit

    def pause(self) -> None:
        """A pass has ended: the next unit is no successor of the last one."""
        self._last = self._opener = None

    def after(self, unit: Unit) -> Unit | None:
        """The unit that came after this one; None: that is not known."""
        return self._after.get(unit)

    def before(self, unit: Unit) -> Unit | None:
        """The unit that came before this one; None: that is not known."""
        return self._before.get(unit)


def compare_ranks(units: Iterable[Unit], settings: object) -> None:
    """Compare units in their order, and settings by their ``repr``; every rank calls this.

    Raises:
        RankMismatchError: another rank's differ; with this rank's.
    """
    texts: dict[Comm, str] = {}
    for unit in units:
        own = (
            unit.name,
            [(m.dim, tuple(m.shape), str(m.dtype), m.sharded.requires_grad) for m in unit.members],
            (unit.stay, str(unit.policy.reduce_dtype), unit.divide_factor, settings),
        )
        for comm in (unit.comm, unit.replicas):
            if comm is not None:
                texts[comm] = f"{texts.get(comm, '')}{own}\n"
        device = unit.device
    for comm, text in texts.items():
        if others := ranks_that_differ(comm, device, text):
            raise RankMismatchError(
                f"rank {comm.rank} has sharded its model in another way than ranks {others} "
                "of its group: modules, shapes, dtypes, options of shard() and of ShardContext "
                f"must agree on all ranks. Here they are:\n{text}"
            )


class ShardContext:
    """Units that are scheduled together: they prefetch each other and share slots.

    Args:
        slots: gathered weights live in so many fixed slots, each as big as the biggest unit that
            uses them; None: in memory of the caching allocator. Two are enough for one unit in
            use and one on its way. Units whose weights stay (``reshard_after_forward=False``,
            ``residency="step"``, units around other units) have memory of their own.
        debug: dropped weights become NaN, and free slots are checked for writes.
        prefetch: gather units ahead of their use; otherwise when they are used.
        max_reduces: gradients of so many units may be on their way at once.
        open_comm: makes the Comm of a process group.
    """

    def __init__(
        self,
        *,
        slots: int | None = None,
        debug: bool = False,
        prefetch: bool = True,
        max_reduces: int = 2,
        open_comm: Callable[[dist.ProcessGroup], Comm] = ProcessGroupComm,
    ) -> None:
        if max_reduces < 1:
            raise ValueError(f"max_reduces={max_reduces}: expected at least 1")
        self.explicit = True
        """Whether the user made this context, and not :func:`shard` by default."""
        self.pool = SlotPool(slots, debug=debug)
        self.units: list[Unit] = []
        self._prerequisites: list[tuple[Prerequisite, nn.Module | None]] = []
        self._reductions: deque[Reduction] = deque()
        self._max_reduces = max_reduces
        self._prefetches = prefetch
        self._settings = (slots, prefetch, max_reduces)
        self._open_comm = open_comm
        self._comms: dict[Any, Comm] = {}
        self._forward = Order()
        self._backward = Order()
        self._pass = BackwardPass(self._end_backward, self.reset)
        self._warned: set[Unit] = set()
        self._told_of_inputs = False
        self._compared = False
        self._launches: list[Launch] = []
        self.last_step: list[Launch] = []
        """Collectives of the last step, from the first after a backward to the end of the next."""

    def before_fetch(self, prerequisite: Prerequisite, *, of: nn.Module | None = None) -> None:
        """Have something done before a unit is gathered, whether ahead of its use or for it.

        For an optimizer that broadcasts updated shards, or copies them from the host.

        Args:
            prerequisite: ``prerequisite(name)`` is called before the all-gather of the unit of that
                name is launched. What it returns is None, or has ``wait()`` (a ticket, a ``Work``),
                which is called before that launch as well.
            of: a sharded module, for that module's unit only; None: for all units.

        Raises:
            ValueError: ``of`` belongs to no unit of this context.
        """
        if of is not None and all(of not in unit.modules for unit in self.units):
            raise ValueError(
                f"before_fetch(): found a {type(of).__name__} that this context has not sharded; "
                "call shard(module, ..., context=context) first"
            )
        self._prerequisites.append((prerequisite, of))

    def stats(self) -> SlotStats:
        """What the memory pool did; see :class:`SlotStats`."""
        return self.pool.stats

    def comm(self, group: dist.ProcessGroup) -> Comm:
        """The one Comm of a process group."""
        if group not in self._comms:
            self._comms[group] = self._open_comm(group)
        return self._comms[group]

    def add(self, unit: Unit) -> None:
        """Schedule a new unit, after those that are here."""
        self.units.append(unit)
        unit.on_gradient = self.gradient_arrived
        if not unit.stay.own_memory:
            self.pool.reserve(unit.nbytes)

    @property
    def reductions_under_way(self) -> tuple[Reduction, ...]:
        """The reductions of the present backward that were launched and not waited for."""
        return tuple(self._reductions)

    def finish_reductions(self) -> None:
        """Wait for reductions under way; all ranks call this at the same place of a backward.

        At the end of backward it happens by itself.
        """
        self._replicate()
        while self._reductions:
            self._reductions.popleft().finish()

    def recover(self) -> None:
        """Outside of backward: forget a step that raised, and forwards that were interrupted."""
        for unit in self.units:
            unit.calls.depth()  # abandons those that have ended without their hook
        self._pass.look()

    def reset(self) -> None:
        """Forget a step that failed: wait for what is under way, drop weights and gradients.

        Called by itself at the next forward after a backward that raised, or when a caller asks
        the model for its parameters.
        """
        while self._reductions:
            self._reductions.popleft().ticket.wait()
        for unit in self.units:
            at = unit.progress
            self.release(unit)
            unit.forget_gradients()
            at.depth = at.open_calls = 0
            at.left.clear()
            at.in_backward = at.reached = False
        self._forward.pause()
        self._backward.pause()

    # --- what hooks call --------------------------------------------------------------------------

    def enter_forward(self, unit: Unit) -> None:
        """A module of the unit is about to run, in forward or to be recomputed in backward."""
        at = unit.progress
        recomputed = self._pass.look()
        if not recomputed:
            if not self._compared:
                self._compared = True
                compare_ranks(self.units, self._settings)
            at.anchored = False
            at.exchanges = 0
            self._forward.use(unit)
        at.depth += 1
        self.use(unit)
        unit.expose()
        if recomputed:
            self._prefetch(self._expected_in_backward(unit), unit)
        elif unit.stay.anchor is None and at.expected_exchanges == 0:
            self.reach_anchor(unit)

    def exchange_arrived(self, unit: Unit) -> None:
        """An exchange of an attention in the unit has been waited for: the links are free again."""
        at = unit.progress
        if in_backward():
            return
        at.exchanges += 1
        if unit.stay.anchor is None and at.exchanges == at.expected_exchanges:
            self.reach_anchor(unit)

    def reach_anchor(self, unit: Unit) -> None:
        """This is where the unit's forward lets the next unit's all-gather go."""
        at = unit.progress
        if not in_backward() and at.depth > 0 and not at.anchored:
            at.anchored = True
            self._prefetch(self._expected_in_forward(unit), unit)

    def leave_forward(self, unit: Unit, module: nn.Module, backward_comes: bool) -> None:
        """A forward call has ended.

        Args:
            unit: whose call it is.
            module: of the unit's modules, the one that has run, or raised.
            backward_comes: whether its output requires a gradient.
        """
        at = unit.progress
        if at.depth == 0:
            return
        if not in_backward():
            if unit.stay.anchor is not None and not at.anchored:
                self._warn(unit, "unit %r did not pass its anchor; the next unit is gathered late")
            self.reach_anchor(unit)
            at.expected_exchanges = at.exchanges
        at.depth -= 1
        if at.depth == 0 and not at.in_backward:
            unit.hide()  # also where weights stay: an optimizer made now has to get the shards
        if in_backward():
            return
        at.left.add(id(module))
        if at.depth > 0 or len(at.left) < len(unit.modules):
            return  # grouped modules share one gather
        at.left.clear()
        unit.pinned = False
        if not unit.stay.after_forward(backward_comes):
            self.release(unit)

    def abandon_forward(self, unit: Unit) -> None:
        """A forward call was interrupted, and no hook has told its end."""
        at = unit.progress
        if at.depth == 0:
            return  # a reset has come before
        at.depth -= 1
        if at.depth == 0 and not at.in_backward:
            at.left.clear()
            self.release(unit)

    def enter_unit_backward(self, unit: Unit, versions: tuple[int, ...]) -> None:
        """A gradient of the unit's output is there: its backward begins."""
        at = unit.progress
        self._pass.look()
        at.in_backward = True
        if not unit.stay.unshard_in_backward:
            return
        if versions != unit.shard_versions():
            raise InplaceEditError(
                f"the weights of unit {unit.name!r} were changed (an optimizer step, load_state_"
                "dict) between its forward and its backward; run backward first"
            )
        self._backward.use(unit)
        self.use(unit)
        unit.expose()  # a checkpoint inside the unit runs parts of it again, without its hooks
        self._prefetch(self._expected_in_backward(unit), unit)

    def gradient_arrived(self, unit: Unit) -> None:
        """Once all gradients of a unit are there, nothing in this backward needs its weights.

        Every operator that reads a weight leads to a trainable parameter of the unit or, with
        frozen ones, to its inputs: when those have their gradients, it has run.
        """
        at = unit.progress
        self._pass.look()
        at.reached = at.reached or bool(unit.arrived)
        if at.open_calls == 0 and unit.arrived.issuperset(unit.trainable):
            self._finish(unit)

    # --- weights ----------------------------------------------------------------------------------

    def fetch(self, unit: Unit, ahead_of: Unit | None = None) -> None:
        """Launch a unit's all-gather, unless its weights are there or on their way.

        Args:
            unit: whose weights they are.
            ahead_of: the unit beside whose compute they travel: only if a slot is free. None: they
                are needed now.
        """
        if unit.state is not State.ABSENT:
            return
        lease = None
        if not unit.stay.own_memory:
            lease = self.pool.take(unit.name, unit.nbytes, unit.device)
            if lease is None and ahead_of is not None:
                return
            if lease is None and self._drop_unused():
                lease = self.pool.take(unit.name, unit.nbytes, unit.device)
            if lease is None:
                self.pool.stats.overflows += 1
                self._warn(
                    unit, "all slots are in use and unit %r needs one; it gets memory of its own"
                )
        if lease is None:
            lease = self.pool.allocate(unit.name, unit.nbytes, unit.device)
        self._run_prerequisites(unit)
        unit.fetch(lease)
        self._note(
            "all-gather", unit, "needed" if ahead_of is None else f"prefetched by {ahead_of.name}"
        )

    def use(self, unit: Unit) -> None:
        """Have a unit's weights ready, and in forward those of its shards as they are now."""
        if not self._pass.runs and unit.state is not State.ABSENT and unit.stale:
            self._run_prerequisites(unit)
            unit.fetch_again()
            self._note("all-gather", unit, "shards were edited")
        self.fetch(unit)
        unit.ready()

    def release(self, unit: Unit) -> None:
        """Drop a unit's weights."""
        unit.pinned = False
        unit.hide()
        lease = unit.drop()
        if lease is not None:
            self.pool.release(lease)

    def _drop_unused(self) -> bool:
        """Free the slot of a unit that was prefetched and not used: the guess was wrong."""
        for unit in self.units:
            at = unit.progress
            if unit.idle and not unit.stay.own_memory and not at.in_backward:
                self.release(unit)
                return True
        return False

    def _run_prerequisites(self, unit: Unit) -> None:
        for prerequisite, module in self._prerequisites:
            if module is not None and module not in unit.modules:
                continue
            awaited = prerequisite(unit.name)
            if awaited is None:
                continue
            if not hasattr(awaited, "wait"):
                raise TypeError(
                    f"before_fetch(): the callback returned {type(awaited).__name__} for unit "
                    f"{unit.name!r}; expected None or something with wait()"
                )
            awaited.wait()

    def _warn(self, unit: Unit, message: str) -> None:
        """Once for each unit."""
        if unit not in self._warned:
            self._warned.add(unit)
            _log.warning("memswap: " + message, unit.name)

    def _note(self, what: str, unit: Unit, cause: str) -> None:
        self._launches.append(Launch(what, unit.name, cause))

    # --- prefetch ---------------------------------------------------------------------------------

    def _prefetch(self, unit: Unit | None, ahead_of: Unit) -> None:
        if self._prefetches and unit is not None and unit in self.units:
            self.fetch(unit, ahead_of)

    def _expected_in_forward(self, unit: Unit) -> Unit | None:
        return self._forward.after(unit) or self._neighbour(unit, 1)

    def _expected_in_backward(self, unit: Unit) -> Unit | None:
        expected = (
            self._backward.after(unit) or self._forward.before(unit) or self._neighbour(unit, -1)
        )
        if expected is None or not expected.stay.unshard_in_backward:
            return None
        return expected

    def _neighbour(self, unit: Unit, step: int) -> Unit | None:
        """The unit that was sharded after or before this one: a guess for the first step."""
        place = self.units.index(unit) + step
        return self.units[place] if 0 <= place < len(self.units) else None

    # --- backward ---------------------------------------------------------------------------------

    def _finish(self, unit: Unit) -> None:
        """The unit's part of this backward is over: reduce its gradients, drop its weights."""
        at = unit.progress
        participated = at.in_backward or unit.has_gradients
        at.in_backward = False
        at.open_calls = 0
        if not unit.sync:
            unit.keep_gradients()
        elif participated and unit.trainable:
            self._reduce(unit)
        if unit.sync or unit.stay.residency != "step":
            self.release(unit)

    def _reduce(self, unit: Unit) -> None:
        """Reduce a unit's gradients; wait for the oldest reduction if too many are under way."""
        self._replicate()
        while len(self._reductions) >= self._max_reduces:
            self._reductions.popleft().finish()
        self._reductions.append(Reduction.launch(unit))
        self._note("reduce-scatter", unit, "gradients complete")

    def _replicate(self) -> None:
        """Reduce-scatters have had a unit's backward to arrive: let the replicas' part follow."""
        for reduction in self._reductions:
            if reduction.replicate():
                self._note("all-reduce", reduction.unit, "reduce-scatter arrived")

    def _end_backward(self) -> None:
        for unit in self.units:
            at = unit.progress
            if at.in_backward and unit.trainable and not at.reached:
                self._warn_of_inputs(unit)
            at.reached = False
            if at.in_backward or (unit.sync and unit.has_gradients):
                self._finish(unit)  # some of its parameters were not used
        self.finish_reductions()
        for unit in self.units:
            if unit.idle and (unit.sync or unit.stay.residency != "step"):
                self.release(unit)
        self.last_step, self._launches = self._launches, []
        self._forward.pause()
        self._backward.pause()

    def _warn_of_inputs(self, unit: Unit) -> None:
        """Say once that a backward computed no gradient of a unit's weights, which is legal."""
        if not self._told_of_inputs:
            self._told_of_inputs = True
            _log.warning(
                "memswap: a backward for inputs alone passed unit %r, so its weights have no "
                "gradients from it. Schedules that compute those in a second backward (zero "
                "bubble) will not find sharded weights: use one that calls backward() once",
                unit.name,
            )
