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
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import nn

from memswap.engine.autograd import graph_task
from memswap.errors import InplaceEditError
from memswap.parallel.comm import Comm, ProcessGroupComm
from memswap.parallel.launches import (
    Gathering,
    Launch,
    Order,
    Prerequisite,
    Reducing,
    Reduction,
    Scheduled,
    compare_ranks,
)
from memswap.parallel.slots import SlotPool, SlotStats
from memswap.parallel.unit import State, Unit

if TYPE_CHECKING:
    import torch.distributed as dist

_log = logging.getLogger(__name__)


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
        """Made by the user, not for want of one."""
        self.pool = SlotPool(slots, debug=debug)
        self.scheduled: dict[Unit, Scheduled] = {}
        self._gathering = Gathering(self.pool, self.scheduled, self._note, self._warn)
        self._reducing = Reducing(max_reduces, self._note)
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
        self._gathering.after(prerequisite, of)

    def stats(self) -> SlotStats:
        """What the memory pool did; see :class:`SlotStats`."""
        return self.pool.stats

    def comm(self, group: dist.ProcessGroup) -> Comm:
        """The one Comm of a process group."""
        if group not in self._comms:
            self._comms[group] = self._open_comm(group)
        return self._comms[group]

    def add(self, scheduled: Scheduled) -> None:
        """A new unit, after those that are here."""
        unit = scheduled.unit
        self.scheduled[unit] = scheduled
        unit.on_gradient = self._gradient_arrived
        if not scheduled.own_memory:
            self.pool.reserve(unit.nbytes)

    @property
    def reductions_under_way(self) -> tuple[Reduction, ...]:
        """Those of the present backward that were launched and not waited for."""
        return self._reducing.under_way

    def finish_reductions(self) -> None:
        """Wait for reductions under way; all ranks call this at the same place of a backward.

        At the end of backward it happens by itself.
        """
        self._reducing.finish()

    def recover(self) -> None:
        """Outside of backward: forget a step that raised, and forwards that were interrupted."""
        for one in self.scheduled.values():
            one.calls.depth()  # abandons those that have ended without their hook
        self._recover_backward()

    def _recover_backward(self) -> None:
        if self._in_backward and graph_task() == -1:
            self.reset()

    def reset(self) -> None:
        """Forget a step that failed: wait for what is under way, drop weights and gradients.

        Called by itself at the next forward after a backward that raised, or when a caller asks
        the model for its parameters.
        """
        self._reducing.abandon()
        for one in self.scheduled.values():
            self._gathering.release(one)
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
        if graph_task() != -1:
            self._enter_backward()
            one.depth += 1
            self.use(one)
            unit.expose()
            self._prefetch(self._expected_in_backward(unit), unit)
            return
        self._recover_backward()
        if not self._compared:
            self._compared = True
            compare_ranks(self.scheduled.values(), self._settings)
        one.depth += 1
        one.anchored = False
        one.exchanges = 0
        self._forward.scope(unit)
        self.use(one)
        unit.expose()
        if one.anchor is None and one.expected_exchanges == 0:
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
            self._gathering.release(one)

    def abandon_forward(self, unit: Unit) -> None:
        """A forward call was interrupted, and no hook has told its end."""
        one = self.scheduled[unit]
        if one.depth == 0:
            return  # a reset has come before
        one.depth -= 1
        if one.depth == 0 and not one.in_backward:
            one.left.clear()
            self._gathering.release(one)

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
        self.use(one)
        unit.expose()  # a checkpoint inside the unit runs parts of it again, without its hooks
        self._prefetch(self._expected_in_backward(unit), unit)

    def call_began_backward(self, unit: Unit) -> None:
        """The backward of one call of a module of the unit has begun."""
        self.scheduled[unit].open_calls += 1

    def call_ended_backward(self, unit: Unit) -> None:
        """The backward of one call has ended: its gradients are there."""
        self.scheduled[unit].open_calls -= 1
        self._gradient_arrived(unit)

    # --- weights ----------------------------------------------------------------------------------

    def fetch(self, one: Scheduled) -> None:
        """Launch the unit's all-gather, unless its weights are there or on their way."""
        self._gathering.fetch(one)

    def use(self, one: Scheduled) -> None:
        """Have the unit's weights ready, and in forward those of its shards as they are now."""
        self._gathering.use(one, refresh=not self._in_backward)

    def release(self, unit: Unit) -> None:
        """Drop the unit's weights."""
        self._gathering.release(self.scheduled[unit])

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
            self._gathering.fetch(self.scheduled[unit], ahead_of)

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
        """The one that was sharded after or before it: all that is known in a first step."""
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

    def _gradient_arrived(self, unit: Unit) -> None:
        """Once all gradients of a unit are there, nothing in this backward needs its weights.

        Every operator that reads a weight leads to a trainable parameter of the unit or, with
        frozen ones, to its inputs: when those have their gradients, it has run.
        """
        one = self.scheduled[unit]
        self._enter_backward()
        one.reached = one.reached or bool(unit.arrived)
        if one.open_calls == 0 and unit.arrived.issuperset(unit.trainable):
            self._finish(one)

    def _finish(self, one: Scheduled) -> None:
        """The unit's part of this backward is over: reduce its gradients, drop its weights."""
        unit = one.unit
        participated = one.in_backward or unit.has_gradients
        one.in_backward = False
        one.open_calls = 0
        if not one.sync:
            unit.keep_gradients()
        elif participated and unit.trainable:
            self._reducing.launch(unit)
        if one.sync or one.residency != "step":
            self._gathering.release(one)

    def _tell_of_inputs(self, unit: Unit) -> None:
        """Legal, and what a schedule that splits a backward in two does: say it once."""
        if not self._told_of_inputs:
            self._told_of_inputs = True
            _log.warning(
                "memswap: a backward for inputs alone passed unit %r, so its weights have no "
                "gradients from it. Schedules that compute those in a second backward (zero "
                "bubble) will not find sharded weights: use one that calls backward() once",
                unit.name,
            )

    def _end_backward(self) -> None:
        for one in self.scheduled.values():
            if one.in_backward and one.unit.trainable and not one.reached:
                self._tell_of_inputs(one.unit)
            one.reached = False
            if one.in_backward or (one.sync and one.unit.has_gradients):
                self._finish(one)  # some of its parameters were not used
        self.finish_reductions()
        for one in self.scheduled.values():
            prefetched = one.unit.state is not State.ABSENT and one.depth == 0 and not one.pinned
            if prefetched and (one.sync or one.residency != "step"):
                self._gathering.release(one)
        self.last_step, self._launches = self._launches, []
        self._backward.pause()
        self._in_backward = False
