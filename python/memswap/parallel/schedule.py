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
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import nn

from memswap.engine.autograd import graph_task
from memswap.errors import InplaceEditError
from memswap.parallel.comm import Comm, ProcessGroupComm
from memswap.parallel.launches import Launch, Order, Reduction, Scheduled, compare_ranks
from memswap.parallel.slots import SlotPool, SlotStats
from memswap.parallel.unit import State, Unit

if TYPE_CHECKING:
    import torch.distributed as dist

_log = logging.getLogger(__name__)

#: Is called with a unit's name before it is gathered; what it returns is waited for, unless None.
Prerequisite = Callable[[str], Any]


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
        self.scheduled: dict[Unit, Scheduled] = {}
        self._prerequisites: list[tuple[Prerequisite, nn.Module | None]] = []
        self._reductions: deque[Reduction] = deque()
        self._max_reduces = max_reduces
        self._prefetches = prefetch
        self._settings = (slots, prefetch, max_reduces)
        self._open_comm = open_comm
        self._comms: dict[Any, Comm] = {}
        self._forward = Order()
        self._backward = Order()
        self._in_backward = False
        self._ending: Callable[[], object] = lambda: None
        """What torch calls at the end of the present backward; None once torch has dropped it."""
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
        if of is not None and all(of not in unit.modules for unit in self.scheduled):
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

    def add(self, scheduled: Scheduled) -> None:
        """Schedule a new unit, after those that are here."""
        unit = scheduled.unit
        self.scheduled[unit] = scheduled
        unit.on_gradient = self.gradient_arrived
        if not scheduled.own_memory:
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
        for one in self.scheduled.values():
            one.calls.depth()  # abandons those that have ended without their hook
        if self._in_backward and graph_task() == -1:
            self.reset()

    def reset(self) -> None:
        """Forget a step that failed: wait for what is under way, drop weights and gradients.

        Called by itself at the next forward after a backward that raised, or when a caller asks
        the model for its parameters.
        """
        while self._reductions:
            self._reductions.popleft().ticket.wait()
        for one in self.scheduled.values():
            self.release(one.unit)
            one.unit.forget_gradients()
            one.depth = one.open_calls = 0
            one.left.clear()
            one.in_backward = one.reached = False
        self._forward.pause()
        self._backward.pause()
        self._in_backward = False

    # --- what hooks call --------------------------------------------------------------------------

    def enter_forward(self, unit: Unit) -> None:
        """A module of the unit is about to run, in forward or to be recomputed in backward."""
        one = self.scheduled[unit]
        recomputed = graph_task() != -1
        if recomputed:
            self._enter_backward()
        else:
            if self._in_backward:
                self.reset()
            if not self._compared:
                self._compared = True
                compare_ranks(self.scheduled.values(), self._settings)
            one.anchored = False
            one.exchanges = 0
            self._forward.scope(unit)
        one.depth += 1
        self.use(unit)
        unit.expose()
        if recomputed:
            self._prefetch(self._expected_in_backward(unit), unit)
        elif one.anchor is None and one.expected_exchanges == 0:
            self.reach_anchor(unit)

    def exchange_arrived(self, unit: Unit) -> None:
        """An exchange of an attention in the unit has been waited for: the links are free again."""
        one = self.scheduled[unit]
        if graph_task() != -1:
            return
        one.exchanges += 1
        if one.anchor is None and one.exchanges == one.expected_exchanges:
            self.reach_anchor(unit)

    def reach_anchor(self, unit: Unit) -> None:
        """This is where the unit's forward lets the next unit's all-gather go."""
        one = self.scheduled[unit]
        if graph_task() == -1 and one.depth > 0 and not one.anchored:
            one.anchored = True
            self._prefetch(self._expected_in_forward(unit), unit)

    def leave_forward(self, unit: Unit, module: nn.Module, backward_comes: bool) -> None:
        """A forward call has ended.

        Args:
            unit: whose call it is.
            module: of the unit's modules, the one that has run, or raised.
            backward_comes: whether its output requires a gradient.
        """
        one = self.scheduled[unit]
        if one.depth == 0:
            return
        if graph_task() == -1:
            if one.anchor is not None and not one.anchored:
                self._warn(unit, "unit %r did not pass its anchor; the next unit is gathered late")
            self.reach_anchor(unit)
            one.expected_exchanges = one.exchanges
        one.depth -= 1
        if one.depth == 0 and not one.in_backward:
            unit.hide()  # also where weights stay: an optimizer made now has to get the shards
        if graph_task() != -1:
            return
        one.left.add(id(module))
        if one.depth > 0 or len(one.left) < len(unit.modules):
            return  # grouped modules share one gather
        one.left.clear()
        one.pinned = False
        stays = one.residency == "step" or (backward_comes and not one.reshard_after_forward)
        if not stays:
            self.release(unit)

    def abandon_forward(self, unit: Unit) -> None:
        """A forward call was interrupted, and no hook has told its end."""
        one = self.scheduled[unit]
        if one.depth == 0:
            return  # a reset has come before
        one.depth -= 1
        if one.depth == 0 and not one.in_backward:
            one.left.clear()
            self.release(unit)

    def enter_unit_backward(self, unit: Unit, versions: tuple[int, ...]) -> None:
        """A gradient of the unit's output is there: its backward begins."""
        one = self.scheduled[unit]
        self._enter_backward()
        one.in_backward = True
        if not one.unshard_in_backward:
            return
        if versions != unit.shard_versions():
            raise InplaceEditError(
                f"the weights of unit {unit.name!r} were changed (an optimizer step, load_state_"
                "dict) between its forward and its backward; run backward first"
            )
        self._backward.scope(unit)
        self.use(unit)
        unit.expose()  # a checkpoint inside the unit runs parts of it again, without its hooks
        self._prefetch(self._expected_in_backward(unit), unit)

    def gradient_arrived(self, unit: Unit) -> None:
        """Once all gradients of a unit are there, nothing in this backward needs its weights.

        Every operator that reads a weight leads to a trainable parameter of the unit or, with
        frozen ones, to its inputs: when those have their gradients, it has run.
        """
        one = self.scheduled[unit]
        self._enter_backward()
        one.reached = one.reached or bool(unit.arrived)
        if one.open_calls == 0 and unit.arrived.issuperset(unit.trainable):
            self._finish(one)

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
        if not self.scheduled[unit].own_memory:
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
        if not self._in_backward and unit.state is not State.ABSENT and unit.stale:
            self._run_prerequisites(unit)
            unit.fetch_again()
            self._note("all-gather", unit, "shards were edited")
        self.fetch(unit)
        unit.ready()

    def release(self, unit: Unit) -> None:
        """Drop a unit's weights."""
        self.scheduled[unit].pinned = False
        unit.hide()
        lease = unit.drop()
        if lease is not None:
            self.pool.release(lease)

    def _drop_unused(self) -> bool:
        """Free the slot of a unit that was prefetched and not used: the guess was wrong."""
        for one in self.scheduled.values():
            if one.idle and not one.own_memory and not one.in_backward:
                self.release(one.unit)
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
        if self._prefetches and unit is not None and unit in self.scheduled:
            self.fetch(unit, ahead_of)

    def _expected_in_forward(self, unit: Unit) -> Unit | None:
        return self._forward.after(unit) or self._neighbour(unit, 1)

    def _expected_in_backward(self, unit: Unit) -> Unit | None:
        expected = (
            self._backward.after(unit) or self._forward.before(unit) or self._neighbour(unit, -1)
        )
        if expected is None or not self.scheduled[expected].unshard_in_backward:
            return None
        return expected

    def _neighbour(self, unit: Unit, step: int) -> Unit | None:
        """The unit that was sharded after or before this one: a guess for the first step."""
        units = list(self.scheduled)
        place = units.index(unit) + step
        return units[place] if 0 <= place < len(units) else None

    # --- backward ---------------------------------------------------------------------------------

    def _enter_backward(self) -> None:
        # The first event of a backward is always in the outermost graph task: a reentrant
        # checkpoint runs its recompute there before it starts a backward of its own.
        if self._in_backward and self._ending() is None:
            self.reset()  # the last one raised, and its graph is tried again
        if not self._in_backward:
            self._in_backward = True
            self._forward.pause()
            end = self._end_backward  # torch alone owns it, as long as this backward lasts
            self._ending = ref(end)
            torch.autograd.Variable._execution_engine.queue_callback(end)

    def _finish(self, one: Scheduled) -> None:
        """The unit's part of this backward is over: reduce its gradients, drop its weights."""
        unit = one.unit
        participated = one.in_backward or unit.has_gradients
        one.in_backward = False
        one.open_calls = 0
        if not one.sync:
            unit.keep_gradients()
        elif participated and unit.trainable:
            self._reduce(unit)
        if one.sync or one.residency != "step":
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
        for one in self.scheduled.values():
            if one.in_backward and one.unit.trainable and not one.reached:
                self._warn_of_inputs(one.unit)
            one.reached = False
            if one.in_backward or (one.sync and one.unit.has_gradients):
                self._finish(one)  # some of its parameters were not used
        self.finish_reductions()
        for one in self.scheduled.values():
            if one.idle and (one.sync or one.residency != "step"):
                self.release(one.unit)
        self.last_step, self._launches = self._launches, []
        self._backward.pause()
        self._in_backward = False

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
