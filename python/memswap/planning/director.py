"""BudgetDirector: has an engine follow plans, and has taken down what they are made of.

[Note: Learning] (learner.py) says what is learnt when. Steps may follow a plan that was made for
other sizes ([Note: Other sizes]).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch

from memswap._native import native
from memswap.engine.action import ENCODE_SWAP, KEEP, SWAP
from memswap.engine.autograd import nbytes_of
from memswap.engine.director import Director
from memswap.planning.device import DevicePlan
from memswap.planning.in_flight import InFlight
from memswap.planning.kinds import Timing
from memswap.planning.learner import Learner
from memswap.planning.observed import Key
from memswap.planning.recipe_record import RecipeRecord
from memswap.planning.replay import CODED
from memswap.planning.shapes import Kinds

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from memswap._C import Iteration
    from memswap.engine.action import Action
    from memswap.engine.engine import Engine
    from memswap.engine.transfers import Transfers
    from memswap.planning.account import DeviceAccount
    from memswap.planning.background import Job
    from memswap.planning.kinds import StepKind
    from memswap.planning.plan import Plan
    from memswap.planning.policy import Policy
    from memswap.planning.rates import Rates
    from memswap.planning.step import Step


class BudgetDirector(Director):
    """Directs an engine under a memory budget.

    It is asked about storages for as long as there is no plan, and where one does not say what
    happens to a storage. What each iteration is like, the iteration's recorder takes down
    (csrc/engine/recorder.h).

    Args:
        engine: whose iterations it directs.
        policy: where it names actions, only whether a storage moves is left to the planner.
        pool: the user's, or None.
        budget: bytes, or ``"auto"``.
        rates: the machine's; None: measured when they are needed first.
        group: a process group whose ranks plan together.
        units: what is managed, by name; those that are checkpoint regions are switched on and off.
        device: what is on the device, where the budget is for all of it.
    """

    def __init__(
        self,
        engine: Engine,
        policy: Policy,
        pool: object,
        budget: int | str,
        rates: Rates | None = None,
        group: Any = None,
        units: Mapping[str, nn.Module] | None = None,
        device: DeviceAccount | None = None,
    ) -> None:
        self._engine = engine
        # What ranks have proven may differ, all marks of a device are known, and what a user's
        # function asks for follows no plan alone.
        engine.planning.set_plans_sources(group is None and device is None and policy.fn is None)
        self._fixed = policy.action is not None or policy.fn is not None
        self._bounded = budget != "auto"
        self._learner = Learner(engine, budget, rates, group, self._fixed, pool, device)
        self._units = WeakValueDictionary(units or {})  # a graph that a unit keeps leads here
        self._names = WeakKeyDictionary({module: name for name, module in self._units.items()})
        self._named: dict[str, Mapping[int, str]] = {}  # unit -> parameter -> its module
        self._device = device
        self._baseline_bytes = 0  # on the device when the latest forward began
        # Ranks that plan together count together, whatever each of them sees.
        self._kinds = Kinds(separate=group is None)
        self._latest: StepKind | None = None
        self._in_flight: list[InFlight] = []  # in the order in which they began
        # The first one of a streak of the engine's, which follows a plan of its kind by itself.
        self._offered: InFlight | None = None

    # --- what users see ---------------------------------------------------------------------------

    @property
    def plan(self) -> Plan | None:
        """The plan in force, with what was measured under it."""
        kind = self._latest
        if kind is None or kind.plan is None:
            return None
        self._engine.lock.run(self._look)
        return replace(
            kind.plan,
            measured_peak_bytes=kind.measured.peak_bytes,
            measured_exposed_s=kind.measured.exposed_s,
            held=kind.measured.held,
            over_budget_bytes=kind.measured.over_budget_bytes,
        )

    @property
    def planning(self) -> bool:
        """Whether a plan is being made, or is there and no forward has followed it yet."""
        return self._learner.background.current is not None

    @property
    def step(self) -> Step | None:
        """What was learnt of the step, all regions off."""
        return None if self._latest is None else self._latest.known.full

    @property
    def rates(self) -> Rates | None:
        """The machine's rates, once a plan has needed them."""
        return self._learner.machine.rates

    def _look(self) -> None:
        """See how all that are in flight go."""
        self._notice()
        for one in self._in_flight:
            one.look()

    def look(self) -> None:
        """Notice what is gone, without a mark."""
        self._engine.lock.run(self._engine.planning.sweep_in_use, True)

    def wait(self) -> None:
        """Have what the steps so far show planned with, and wait for that.

        Raises:
            BudgetError: no plan meets the budget.
        """
        lock, background = self._engine.lock, self._learner.background
        lock.run(self._end_iterations)
        while (job := background.current) is not None:
            job.wait()
            lock.run(self._learner.collect)
            if job is background.current:
                return  # ranks follow what it found from a forward on that has not begun

    def end(self) -> None:
        """Nothing follows a plan any more, and nothing is learnt.

        What is in flight is the policy's from here on: the engine no longer knows its director.
        """
        for job in self._engine.lock.run(self._end):
            job.wait()

    def _end(self) -> list[Job]:
        engine = self._engine
        engine.director = None
        self._look()
        for one in self._in_flight:
            one.iteration.set_recorder(None)
        self._in_flight.clear()
        for transfers in engine.open_transfers():
            engine.set_overflow_room(transfers, None)
        return self._learner.background.give_up()

    # --- what an engine asks (engine/director.py) -------------------------------------------------

    def begin(self, iteration: Iteration) -> int:
        """A new forward: end the books of those that are over, and follow plans that were made."""
        self._end_iterations()
        self._learner.begin()
        latest = self._latest
        knows = latest is None or any([kind.needs_operators for kind in self._kinds])
        if latest is not None and self._learner.keeps_next(latest):
            knows = False
        self._engine.knows_operators = knows
        if self._device is not None:
            self._look_at_device(self._device)
        limits = [kind.plan.limit_bytes for kind in self._kinds if kind.plan is not None]
        if latest is not None and latest.plan is not None:
            self._offer(iteration, latest, latest.plan, max(limits))
        return max(limits, default=0)

    def choose(
        self,
        tensor: torch.Tensor,
        unit: str,
        ordinal: int,
        nbytes: int,
        action: Action,
        insists: bool,
    ) -> Action | None:
        """The plan's action, or what learning needs, or None."""
        iteration = self._engine.iteration
        key = Key(unit, ordinal, nbytes, tensor.dtype)
        one = self._of(iteration) or self._begin(iteration, key, tensor.device)
        timing, chosen = one.timing, None
        if one.plan is not None:
            chosen = one.planned(key, action)
            if iteration.course.limit_bytes:
                self._make_room(one, nbytes)
        elif self._tries_codec(one, action, tensor.device):
            chosen = ENCODE_SWAP
        recorded = chosen or action
        if insists:
            # Nothing to plan: it counts as kept, which is the most that it can take.
            chosen, recorded = None, KEEP
        elif chosen is None and self._times_copies(one, action, tensor.device):
            chosen = SWAP
        if timing is not None:
            timing.recorder.choose(unit, ordinal, nbytes, tensor.dtype, recorded)
            if one.plan is None:
                timing.recipes.name(iteration.size, tensor, self._parameters(unit))
        return chosen

    def _parameters(self, unit: str) -> Mapping[int, str]:
        """What the modules of a unit's parameters are called."""
        if unit not in self._named:
            module = self._units.get(unit)
            named = () if module is None else module.named_parameters()
            self._named[unit] = {id(one): name.rpartition(".")[0] for name, one in named}
        return self._named[unit]

    def recomputes(self, module: nn.Module, args: tuple[Any, ...]) -> bool:
        """Whether a checkpoint region is one in the forward that begins now."""
        name = self._names.get(module)
        tensors = [one for one in args if isinstance(one, torch.Tensor)]
        engine = self._engine
        if name is None or not tensors or not self._bounded or not engine.policy.covers(name):
            return True
        if engine.transfers(tensors[0].device) is None:
            return True
        return engine.lock.run(self._is_on, name, tensors)

    def _is_on(self, name: str, tensors: list[torch.Tensor]) -> bool:
        """Whether a region that is called with these tensors is one in the current iteration."""
        engine = self._engine
        iteration = engine.iteration
        one = self._of(iteration)
        if one is None:
            nbytes = sum(map(nbytes_of, tensors))
            key = Key(name, -1, nbytes, tensors[0].dtype)
            one = self._begin(iteration, key, tensors[0].device)
        on = one.off is not None and name not in one.off
        if not on and one.timing is not None:
            plain = (one for one in tensors if not (one.is_leaf and one.requires_grad))
            inputs = [one for one in plain if not engine.is_persistent(native.storage_key(one))]
            one.timing.recorder.region(name, inputs, iteration, engine.policy.min_bytes)
        return on

    # --- iterations in flight ---------------------------------------------------------------------

    def _of(self, iteration: Iteration) -> InFlight | None:
        """What is known of an iteration that has begun and has not ended."""
        self._notice()
        return next((one for one in self._in_flight if one.iteration is iteration), None)

    def _offer(self, iteration: Iteration, kind: StepKind, plan: Plan, leaving_bytes: int) -> None:
        """Have an iteration follow a kind's plan by itself, if it saves first what these do.

        Nobody is asked about its first storage then, nor when those begin that come after it, for
        as long as each goes as planned and there is nothing else to look at. What they were is
        noticed later. Not where it is to be timed, or is in flight with others that are, or that
        are of other kinds.
        """
        followed, others = kind.ready(plan), self._in_flight
        if followed is None or followed.first != kind.known.first or self._learner.times(kind):
            return
        for one in others:
            if one.timing is not None or one.kind is not kind:
                return
        if self._bounded and plan.in_flight <= len(others):
            return
        self._offered = InFlight(iteration, kind, followed)
        self._offered.begin()
        self._set_overflow_room(followed.transfers)
        self._set_limit()
        forwards = 1 if others else self._learner.until_asked(kind)
        flights = min(kind.flights.number, plan.in_flight) if self._bounded else kind.flights.number
        self._engine.planning.begin_streak(forwards, flights, leaving_bytes)

    def _notice(self) -> None:
        """Take over what has followed a plan by itself since somebody was asked."""
        first, self._offered = self._offered, None
        streak = None if first is None else self._engine.planning.end_streak()
        if first is None or streak is None:
            return
        kind = first.kind
        self._learner.count(streak.forwards - 1)
        if begun := streak.ended + len(streak.in_flight):
            self._count(kind, streak.most_in_flight, begun)
            kind.count(begun)
        if streak.ended and first.plan is kind.plan:
            kind.went_as_planned(streak.ended, streak.peak_bytes)
        for one in streak.in_flight:
            self._in_flight.append(InFlight(one, kind, first.followed))

    def _begin(self, iteration: Iteration, first: Key, device: torch.device) -> InFlight:
        """What comes first says what kind of step it is."""
        if not first.nbytes:
            first = first._replace(nbytes=1)  # it is divided by
        kind, lender = self._kinds.of(first)
        if lender is not None and self._device is None:  # what else is there does not grow alike
            self._learner.lend(kind, lender, device)
            self._learner.collect()
        self._latest = kind
        self._count(kind)
        self._learner.collect()
        kind.device = device
        transfers = self._engine.transfers(device)
        assert transfers is not None  # or the engine would not have asked
        timing, plan, plain = None, kind.plan, False
        if self._learner.times(kind):
            recorder = native.Recorder(transfers.device)
            timing = Timing(first, device, recorder, RecipeRecord())
            kind.planning = kind.planning or self._learner.together
        kind.count()
        if self._bounded and plan is not None and plan.in_flight <= len(self._in_flight):
            plan = None  # it leaves the others no room; what leaves is safe
        if plan is not None and timing is not None and kind.holding is not None:
            plain = kind.holding.begin()
            plan = kind.holding.kept if plain else plan
        least_bytes = self._engine.policy.min_bytes
        followed = None if plan is None else kind.followed(plan, transfers, least_bytes)
        size = first.nbytes / kind.known.first.nbytes
        begun = InFlight(iteration, kind, followed, timing, plain)
        begun.begin(size)
        self._in_flight.append(begun)
        self._watch_device(begun)
        self._set_overflow_room(transfers)
        self._set_limit()
        return begun

    def _count(self, kind: StepKind, in_flight: int = 1, begun: int = 1) -> None:
        """Iterations of a kind begin.

        Args:
            kind: of which they are.
            in_flight: of them at a time, beside those that are known to be.
            begun: how many.
        """
        in_flight += len(self._in_flight)
        # All of them share the budget, those as well that so far began when nothing was in flight.
        if kind.flights.see(in_flight):
            self._learner.make_room(kind)
        for other in self._in_flight:
            if other.kind.flights.see(in_flight):
                self._learner.make_room(other.kind)
        if kind.flights.count(begun):
            self._learner.make_room(kind)

    def _end_iterations(self) -> None:
        """End the books of forwards whose backward is over; what they show is learnt from."""
        self._notice()
        waiting: list[InFlight] = []
        ended: list[InFlight] = []
        for one in self._in_flight:
            (waiting if one.iteration.mostly_alive else ended).append(one)
        self._in_flight = waiting
        self._engine.planning.sweep_in_use(bool(waiting))
        for one in ended:
            one.end()
            if self._device is not None and (workspace := one.workspace) is not None:
                self._device.end(workspace)
        for one in ended:
            self._learner.ended(one)

    def _planned(self) -> list[tuple[Iteration, Plan]]:
        """Those that follow a plan, or are offered one."""
        known = self._in_flight if self._offered is None else [*self._in_flight, self._offered]
        return [(one.iteration, one.plan) for one in known if one.plan is not None]

    def _set_limit(self) -> None:
        """What iterations in flight stay below although they save other sizes.

        A share of a short step's bytes is no bound for a long one that is in flight as well.
        """
        if not self._bounded:
            return
        planned, limit_bytes = self._planned(), 0
        for _, plan in planned:
            limit_bytes = max(limit_bytes, plan.limit_bytes * plan.in_flight)
        for iteration, _ in planned:
            if iteration.course.limit_bytes < limit_bytes:
                iteration.course.set_limit_bytes(limit_bytes)

    def _set_overflow_room(self, transfers: Transfers) -> None:
        """As much as the plans of the iterations in flight ask for; without one, none is set."""
        if not transfers.works_ahead:
            return  # a processor's frames do not overflow
        rooms = (plan.arena_bytes * plan.in_flight for _, plan in self._planned())
        room = max(rooms, default=None)
        self._engine.set_overflow_room(transfers, room)

    def _make_room(self, one: InFlight, nbytes: int) -> None:
        """Wait for what leaves, oldest first, until so many bytes more are within the budget."""
        engine, iteration = self._engine, one.iteration
        while (
            one.waited_for < iteration.size
            and engine.ledger.resident_bytes + nbytes > iteration.course.limit_bytes
        ):
            engine.planning.make_room(iteration, one.waited_for)
            one.waited_for += 1

    # --- the whole device -------------------------------------------------------------------------

    def _look_at_device(self, device: DeviceAccount) -> None:
        """A forward begins: what else is there by now?"""
        if over_bytes := device.over_bytes:
            self._engine.ledger.tell_once(
                "over device budget",
                f"{over_bytes} bytes more than the budget of {device.nbytes} were on the device "
                "under a plan: something was there that was not when the step was learnt. No bit "
                "differs. Where what a forward begins with has changed, the step is learnt again; "
                "manager.plan.measured_device_bytes says how it goes.",
            )
        step_is_new = device.step_is_new(self._device_plans())
        self._baseline_bytes = device.baseline(self._present_bytes)
        for kind in self._kinds:
            workspace = kind.known.workspace
            if kind.plan is None or workspace is None:
                continue
            if not (step_is_new or device.relearns(workspace, self._baseline_bytes)):
                continue
            if self._learner.together:
                kind.wants_again = True  # said with the next step that all ranks check
            else:
                kind.learn_again()
        # What is learnt again is learnt in this very forward: its peaks begin here.
        plans = self._device_plans()
        learns = len(plans) < len(self._kinds) or not plans
        if learns or device.follows_others(plans):
            for transfers in self._engine.open_transfers():
                transfers.trim_arena()
        device.begin(plans, learns)

    def _device_plans(self) -> list[DevicePlan]:
        """Those in force."""
        return [kind.plan for kind in self._kinds if isinstance(kind.plan, DevicePlan)]

    def _watch_device(self, begun: InFlight) -> None:
        """An iteration has begun: have what else is there taken down, if it is learnt."""
        device, iterations = self._device, [one.iteration for one in self._in_flight]
        if device is not None and begun.timing is not None and begun.plan is None:
            workspace = device.record(iterations, self._baseline_bytes)
            begun.timing.recorder.workspace = workspace
            return
        for one in self._in_flight:
            if one.workspace is not None:
                one.workspace.watch(begun.iteration)

    def _present_bytes(self, granularity: int) -> int:
        """What saved storages take of the device now, each rounded up, and frames' arenas."""
        self._engine.departing.notice_gone()
        found = sum(one.iteration.present_bytes(granularity) for one in self._in_flight)
        return found + sum(one.arena_bytes() for one in self._engine.open_transfers())

    # --- learning ---------------------------------------------------------------------------------

    def _tries_codec(self, one: InFlight, action: Action, device: torch.device) -> bool:
        """Whether a storage of this iteration shows how much it shrinks."""
        return (
            one.kind.learning.tries_codec
            and action is SWAP
            and not self._fixed
            and native.codec_name(device) is not None
        )

    def _times_copies(self, one: InFlight, action: Action, device: torch.device) -> bool:
        """Whether what is to be encoded is swapped, in an iteration that shows the model's times.

        Encodes beside compute would make the gaps between marks longer than they are.
        """
        learns = one.timing is not None and one.plan is None
        return learns and action in CODED and device.type != "cpu"
