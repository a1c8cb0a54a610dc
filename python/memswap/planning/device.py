"""Device plans: optimizer state and saved activations under one number of bytes.

[Note: One number]
What a training has on the device at any moment is weights, gradients, optimizer state, saved
activations, and workspace: what operators allocate for themselves, and everything else. Weights,
gradients and workspace are as they are; they were measured with the step, mark by mark ([Note:
Workspace] in csrc/engine/workspace.h), and the replay counts them as there whatever is planned.
What is decided is how much of the state stays on the device between optimizer steps, which takes
room from activations all the time, and then which activations move. State that stays saves its way
over the link in `step()`; the room that it takes costs activations their ways in forward and
backward. Both are seconds of the same model, so they are added up for some shares of the state, and
the cheapest sum is the plan.

In `step()` itself no activation is there, but two chunks of the state, and what the step allocates:
the most of that was measured as well, and bounds what stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate
from typing import TYPE_CHECKING

from memswap.engine.units import format_bytes
from memswap.errors import BudgetError
from memswap.planning.plan import Plan, beyond
from memswap.planning.planner import make_plan
from memswap.planning.replay import replay
from memswap.planning.search import Search

if TYPE_CHECKING:
    from memswap._C import Recorder, WorkspaceRecord
    from memswap.planning.rates import Rates
    from memswap.planning.step import Step

#: Allocators of accelerators round up to this.
GRANULARITY_BYTES = 512

#: More may be there than when a step was learnt, as a share of the budget, before that changes
#: anything: when a forward begins, before its step is learnt again; of saved activations, before a
#: plan is made with frames of the length that they have by now.
GROWN_SHARE = 1 / 400

#: What a plan leaves free for that. On a CPU frames may grow by as much again from one step to the
#: next, and the last huge page of theirs is there as a whole.
SPARE_SHARE, SPARE_SHARE_OF_CPU = GROWN_SHARE, 2 * GROWN_SHARE

#: Shares of the state that are compared, beside none and as much as fits.
STATE_SHARES = 8

#: Kinds of bytes, in the order in which they are drawn.
KINDS = ("weights", "gradients", "optimizer state", "activations", "workspace")

#: Characters of a bar that is as long as the budget.
BAR = 60


@dataclass(frozen=True, slots=True)
class StateTerms:
    """What is known of optimizer state that may be away between steps."""

    sizes: tuple[int, ...]
    """Bytes of each parameter's state, in the order in which they would stay."""
    step_peak_bytes: int
    """The most on the device in a step from chunk to chunk, without state that stays."""
    step_state_bytes: int
    """Of these, what the chunks took."""
    forwards: int = 1
    """Forwards for each step of the optimizer."""
    most_bytes: int | None = None
    """What stays at most, because other plans that are followed have no room for more."""
    coded: bool = False
    """Whether state that is away is encoded where it is, and no link carries it."""

    @property
    def nbytes(self) -> int:
        """Of all of it."""
        return sum(self.sizes)

    @property
    def most_step_bytes(self) -> int:
        """What `step_peak_bytes` may come to in another step.

        When a chunk's memory is free depends on when its send has ended: the longest parameter's
        state may be there for longer than it was.
        """
        return self.step_peak_bytes + max(self.sizes, default=0)

    def away_s(self, stays_bytes: int, rates: Rates) -> float:
        """Seconds that a step of the optimizer takes longer, for what does not stay.

        Chunks leave and arrive at the same time, at the link's duplex rates, and the kernels of a
        step are short beside that.
        """
        away = self.nbytes - stays_bytes
        if not away:
            return 0.0
        if self.coded:
            if not rates.encodes:
                return 0.0
            return away / rates.encode_bytes_per_s + away / rates.decode_bytes_per_s
        slowest = min(rates.duplex_d2h_bytes_per_s, rates.duplex_h2d_bytes_per_s)
        return away / slowest if slowest else 0.0

    def candidates(self, limit_bytes: int) -> list[int]:
        """Numbers of bytes that may stay, whole parameters each, least first.

        Args:
            limit_bytes: of the device.
        """
        sums = [0, *accumulate(self.sizes)]
        room = limit_bytes - self.most_step_bytes
        most = room if self.most_bytes is None else min(room, self.most_bytes)
        fitting = [nbytes for nbytes in sums if nbytes <= most]
        if self.nbytes <= min(
            room + self.step_state_bytes,
            self.nbytes if self.most_bytes is None else self.most_bytes,
        ):
            fitting = sums  # with all of it there, no chunk comes or goes
        if not fitting:
            return [0]
        last = len(fitting) - 1
        places = {round(last * share / STATE_SHARES) for share in range(STATE_SHARES + 1)}
        return sorted({fitting[place] for place in places})


@dataclass(frozen=True, slots=True)
class DeviceTerms:
    """What a plan for a whole device has to meet."""

    nbytes: int
    """Most bytes on the device."""
    weights_bytes: int
    """Of parameters and buffers."""
    gradients_bytes: int
    """Of all gradients of the parameters, once they are there."""
    state: StateTerms | None
    """None: no optimizer was given, or it has made no step yet."""
    spare_share: float = SPARE_SHARE
    """What plans leave free of it."""

    @property
    def limit_bytes(self) -> int:
        """What plans stay below."""
        return int(self.nbytes * (1 - self.spare_share))

    def room(self, base_bytes: int, stays_bytes: int, flights: int) -> int:
        """What one of several forwards in flight may have of the device.

        Args:
            base_bytes: what is there all the time, once for all of them.
            stays_bytes: optimizer state that is there all the time as well.
            flights: forwards.
        """
        return (self.limit_bytes - stays_bytes - base_bytes) // flights + base_bytes


@dataclass(frozen=True, slots=True)
class DevicePlan(Plan):
    """A plan for everything on a device. ``str(plan)`` ends with what is there at the peak.

    `peak_bytes` and `kept_peak_bytes` are those of forward and backward, with weights, gradients
    and workspace, and without the optimizer's state.
    """

    device_budget_bytes: int = 0
    """Most bytes on the device."""
    device_peak_bytes: int = 0
    """Predicted: the most on the device at any moment of a step, the optimizer's included."""
    moment: str = ""
    """When that is."""
    peak_by_kind: tuple[tuple[str, int], ...] = ()
    """Bytes of each kind then."""
    state_bytes: int = 0
    """All optimizer state that may be away."""
    state_stays_bytes: int = 0
    """Of it, what stays on the device."""
    knows_step: bool = False
    """Whether the optimizer's step was measured."""
    state_s: float = 0.0
    """Predicted: how much longer the optimizer's step takes."""
    timeline: tuple[tuple[int, ...], ...] = field(default=(), repr=False)
    """At each mark of forward and backward, the most bytes of each of `KINDS`, as planned."""
    measured_device_bytes: int | None = None
    """The most on the device since this plan is followed, by the device's allocator (of a CPU: the
    process' resident memory); None before its first step."""

    def outgrown_by(self, saved_bytes: int) -> bool:
        """Whether so many bytes of saved activations at a time are clearly more than planned."""
        activations = KINDS.index("activations")
        most = max((amounts[activations] for amounts in self.timeline), default=0)
        grown = saved_bytes - most * self.in_flight
        return grown > GROWN_SHARE * self.device_budget_bytes

    def _predicted(self) -> list[str]:
        scale = BAR / max(self.device_budget_bytes, self.device_peak_bytes, 1)
        lines = [
            f"budget {self.budget}: {format_bytes(self.device_budget_bytes)}; the most on the "
            f"device is {format_bytes(self.device_peak_bytes)}, {self.moment}:"
        ]
        width = max(map(len, KINDS))
        for name, nbytes in self.peak_by_kind:
            bar = "#" * round(nbytes * scale)
            lines.append(f"  {name.ljust(width)} {format_bytes(nbytes).rjust(10)}  {bar}".rstrip())
        if self.state_bytes:
            away = self.state_bytes - self.state_stays_bytes
            lines.append(
                f"optimizer state: {format_bytes(away)} away between steps, "
                f"{format_bytes(self.state_stays_bytes)} on the device; predicted cost "
                f"{self.state_s * 1e3:.2f} ms a step of the optimizer"
            )
        return [*lines, f"activations: {self._moves()}"]

    def _measured(self) -> list[str]:
        measured = self.measured_device_bytes
        if measured is None:
            return []
        over = beyond(measured - self.device_budget_bytes)
        return [f"{format_bytes(measured)} on the device{over}"]


def workspace_of(recorder: Recorder, marks: int) -> WorkspaceRecord | None:
    """What a recorder has seen beside saved activations; None: it did not look."""
    found = recorder.workspace
    return None if found is None else found.record(marks)


def with_workspace(step: Step, workspace: WorkspaceRecord) -> Step:
    """A step with what was on the device beside its storages, in the allocator's own units.

    What recomputed units saved again is part of that.
    """

    def rounded(nbytes: int) -> int:
        return -(-nbytes // GRANULARITY_BYTES) * GRANULARITY_BYTES

    return replace(
        step,
        storages=tuple(
            replace(
                one,
                nbytes=rounded(one.nbytes),
                held_frame_nbytes=rounded(one.held_frame_nbytes),
            )
            for one in step.storages
        ),
        extra_nbytes=tuple(workspace.extra_nbytes),
    )


def plan_for_device(
    step: Step,
    rates: Rates,
    budget: str,
    terms: DeviceTerms,
    workspace: WorkspaceRecord,
    flights: int,
    full: Step | None,
    recompute: Sequence[str],
    room_bytes: float,
) -> DevicePlan:
    """The cheapest plan under one number, or the one that comes closest.

    Args:
        step: its `extra_nbytes` are the workspace's.
        rates: of the machine.
        budget: as it was asked for.
        terms: what has to be met.
        workspace: what is on the device beside saved activations.
        flights: forwards that wait for their backward at a time.
        full: of a step that was recorded with regions on, the step with all of them off.
        recompute: the regions that were on.
        room_bytes: most bytes that the pool has for the step.
    """
    base = min(step.extra_nbytes, default=0)
    state = terms.state
    options = [0] if state is None else state.candidates(terms.limit_bytes)
    search = Search(step, rates, room_bytes=room_bytes)

    def cost(stays: int) -> tuple[int, float, int]:
        found = search.best_within(terms.room(base, stays, flights), thorough=False)
        seconds = found.found.total_exposed_s
        if state is not None:
            seconds += state.away_s(stays, rates) / state.forwards
        return found.over_bytes, round(seconds, 9), -stays

    stays = min(options, key=cost)
    limit = terms.room(base, stays, flights)
    plan = make_plan(step, rates, limit, True, full, recompute, room_bytes)
    return device_plan(plan, rates, budget, terms, workspace, flights, stays)


def device_plan(
    plan: Plan,
    rates: Rates,
    budget: str,
    terms: DeviceTerms,
    workspace: WorkspaceRecord,
    flights: int,
    stays_bytes: int,
) -> DevicePlan:
    """A plan for activations, and what else is on the device under it.

    Args:
        plan: for the activations alone.
        rates: of the machine.
        budget: as it was asked for: ``"device:70GiB"``.
        terms: what a plan for the device has to meet.
        workspace: bytes that were on the device beside saved storages, mark by mark.
        flights: forwards that wait for their backward at a time.
        stays_bytes: of optimizer state, between steps.
    """
    actions = {index: one.action for index, one in enumerate(plan.storages)}
    resident = replay(plan.step, rates, actions, plan.limit_bytes).resident_bytes
    extra = plan.step.extra_nbytes or (0,) * len(resident)
    timeline = []
    for now, beside, gradients in zip(resident, extra, workspace.gradient_nbytes, strict=True):
        weights, gradients, rest = _apart(beside, terms.weights_bytes, gradients)
        timeline.append((weights, gradients, stays_bytes, now - beside, rest))
    base = min(extra, default=0)
    peaks = []
    if timeline:
        mark = max(range(len(timeline)), key=lambda one: sum(timeline[one]))
        amounts = list(timeline[mark])
        amounts[KINDS.index("activations")] += (flights - 1) * (resident[mark] - base)
        where = "forward" if mark < len(plan.storages) else "backward"
        peaks.append((f"in {where}{_unit_at(plan, mark)}", tuple(amounts)))
    state = terms.state
    if state is not None:
        peaks.append(("in the optimizer's step", in_step(terms, state, stays_bytes)))
    moment, amounts_then = max(peaks, key=lambda one: sum(one[1]))
    values = {one.name: getattr(plan, one.name) for one in fields(Plan)}
    values |= {"budget": budget, "budget_bytes": terms.nbytes, "in_flight": flights}
    return DevicePlan(
        **values,
        device_budget_bytes=terms.nbytes,
        device_peak_bytes=sum(amounts_then),
        moment=moment,
        peak_by_kind=tuple(zip(KINDS, amounts_then, strict=True)),
        state_bytes=0 if state is None else state.nbytes,
        state_stays_bytes=stays_bytes,
        knows_step=state is not None,
        state_s=0.0 if state is None else state.away_s(stays_bytes, rates),
        timeline=tuple(timeline),
    )


def in_step(terms: DeviceTerms, state: StateTerms, stays_bytes: int) -> tuple[int, ...]:
    """What is on the device in a step of the optimizer, by kind.

    Args:
        terms: what a plan for the device has to meet.
        state: what is known of the optimizer's state.
        stays_bytes: of that state, between steps.

    Returns:
        Bytes, in the order of `KINDS`.
    """
    chunks = 0 if stays_bytes == state.nbytes else state.step_state_bytes
    beside = state.step_peak_bytes - state.step_state_bytes
    weights, gradients, rest = _apart(beside, terms.weights_bytes, terms.gradients_bytes)
    return weights, gradients, stays_bytes + chunks, 0, rest


def _apart(beside_bytes: int, weights_bytes: int, gradients_bytes: int) -> tuple[int, int, int]:
    """What was measured beside activations and state, as weights, gradients and the rest."""
    weights = min(weights_bytes, beside_bytes)
    gradients = min(gradients_bytes, beside_bytes - weights)
    return weights, gradients, beside_bytes - weights - gradients


def _unit_at(plan: Plan, mark: int) -> str:
    saves = len(plan.storages)
    place = mark if mark < saves else plan.step.order[mark - saves]
    unit = plan.storages[place].unit if place < saves else ""
    return f" of {unit}" if unit else ""


def smallest_of_device(terms: DeviceTerms, plan: DevicePlan, flights: int) -> tuple[int, str]:
    """The smallest budget that could be met, and where it is needed.

    Args:
        terms: what no plan meets.
        plan: the one that comes closest, with all state away.
        flights: forwards that wait for their backward at a time.
    """
    base = min(plan.step.extra_nbytes, default=0)
    needed = (plan.peak_bytes - base) * flights + base, "forward and backward"
    if terms.state is not None:
        needed = max(needed, (terms.state.most_step_bytes, "the optimizer's step"))
    nbytes, where = needed
    return int(nbytes / (1 - terms.spare_share)) + 1, where


def too_small_for_device(terms: DeviceTerms, smallest_bytes: int, where: str) -> BudgetError:
    """What is raised where no plan meets a budget for the whole device.

    Args:
        terms: what no plan meets.
        smallest_bytes: the smallest budget that can be met.
        where: what needs that much, in words.
    """
    rest = smallest_bytes - terms.weights_bytes - terms.gradients_bytes
    return BudgetError(
        f"a budget of {format_bytes(terms.nbytes)} ({terms.nbytes} bytes) for everything on the "
        f"device cannot be met: {where} needs {format_bytes(smallest_bytes)} ({smallest_bytes} "
        f"bytes) at least. Weights are {format_bytes(terms.weights_bytes)} of that, gradients "
        f"{format_bytes(terms.gradients_bytes)}; {format_bytes(max(rest, 0))} are for what cannot "
        "move, is in use at one time, or is allocated by operators for themselves. Raise the "
        "budget to that, use a smaller batch or shorter sequences, or spread the weights over "
        "several devices with memswap.parallel.shard",
        smallest_bytes,
    )
