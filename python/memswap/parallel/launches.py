"""What a ShardContext (schedule.py) has to know to launch: units, their order, their reductions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch

from memswap.errors import RankMismatchError
from memswap.hooks.module_hooks import ModuleHooks
from memswap.parallel.comm import Comm, Ticket
from memswap.parallel.selftest import ranks_that_differ
from memswap.parallel.unit import Member, State, Unit


class Launch(NamedTuple):
    """One collective, and why it was launched when it was."""

    collective: str
    unit: str
    cause: str


@dataclass(eq=False)
class Scheduled:
    """A unit in its context: how long its weights stay, and where it is in the step."""

    unit: Unit
    reshard_after_forward: bool
    residency: str
    unshard_in_backward: bool
    own_memory: bool
    """Whether its weights have memory of their own, and no slot, since they stay for long."""
    anchor: str | None
    calls: ModuleHooks = field(default_factory=ModuleHooks)
    """The hooks on its modules."""
    anchored: bool = False
    """Whether this forward has passed the anchor."""
    exchanges: int = 0
    """Exchanges that have arrived in this forward."""
    expected_exchanges: int = 0
    """Exchanges of the last forward. Without ``anchor``, the next unit is gathered when the last
    of them has arrived."""
    depth: int = 0
    """Forward calls, also those of a recompute, that have begun and not ended."""
    left: set[int] = field(default_factory=set)
    """Modules of the unit that this forward has been through, by id."""
    sync: bool = True
    """Whether backward reduces gradients."""
    pinned: bool = False
    """Gathered by unshard(): stays until used or resharded."""
    in_backward: bool = False
    """Whether the unit's part of a backward has begun and not ended."""
    reached: bool = False
    """Whether this backward has computed a gradient of a parameter."""
    open_calls: int = 0
    """Calls of units with frozen parameters whose backward has begun and not ended."""

    @property
    def idle(self) -> bool:
        """Whether its weights are there, or on their way, and nobody uses or has asked for them."""
        return self.unit.state is not State.ABSENT and self.depth == 0 and not self.pinned


def compare_ranks(units: Iterable[Scheduled], settings: object) -> None:
    """Compare units in their order, and settings by their ``repr``; every rank calls this.

    Raises:
        RankMismatchError: another rank's differ; with this rank's.
    """
    texts: dict[Comm, str] = {}
    for one in units:
        unit = one.unit
        own = (
            unit.name,
            [(m.dim, tuple(m.shape), str(m.dtype), m.sharded.requires_grad) for m in unit.members],
            (one.reshard_after_forward, one.residency, one.unshard_in_backward),
            (one.own_memory, one.anchor, str(unit.policy.reduce_dtype), unit.divide_factor),
            settings,
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


class Order:
    """Successors of units in one direction, from the last time that each was visited.

    Pairs, and not one list: chunks of a pipeline, branches and repeated layers each keep their own
    neighbours, and an order that changes is relearnt where it changed.
    """

    def __init__(self) -> None:
        self._after: WeakKeyDictionary[Unit, Unit] = WeakKeyDictionary()
        self._before: WeakKeyDictionary[Unit, Unit] = WeakKeyDictionary()
        self._last: Unit | None = None
        self._opener: Unit | None = None

    def scope(self, unit: Unit) -> None:
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


@dataclass(eq=False)
class Reduction:
    """Gradients being reduced: over the shards, and then over the replicas if there are any."""

    unit: Unit
    ticket: Ticket
    members: list[Member]
    outputs: list[torch.Tensor]
    used: torch.Tensor
    """For each member, zero if no rank had a gradient."""
    missing: list[bool] = field(default_factory=list)
    """Members without a gradient on this rank."""
    replicated: bool = False
    """Whether the all-reduce over the replicas was launched."""

    @classmethod
    def launch(cls, unit: Unit) -> Reduction:
        """Launch the reduce-scatter of all gradients.

        A member that this rank has no gradient for takes part with zeros, so ranks that took
        different branches launch the same collective. How many had one travels with it: a
        parameter that no rank used gets no gradient, as in a single process.
        """
        size = unit.comm.size
        members = unit.trainable
        missing = [member.grad is None for member in members]
        inputs, outputs = [], []
        with torch.no_grad():
            for member in members:
                kind = unit.reduce_dtype(member)
                rows = member.rows * size
                gradient, member.grad = member.grad, None
                gradient = None if gradient is None else gradient.movedim(member.dim, 0)
                if gradient is not None and member.shape[0] == rows:
                    gradient = gradient.to(kind).contiguous()
                else:
                    padded = torch.zeros(rows, *member.shape[1:], dtype=kind, device=unit.device)
                    if gradient is not None:
                        padded[: member.shape[0]].copy_(gradient)
                    gradient = padded
                inputs.append(gradient)
                outputs.append(gradient.new_empty(member.padded_shape))
            # Made on the device: a copy from pageable host memory would block the host.
            flags = torch.ones(size, len(members), dtype=inputs[0].dtype, device=unit.device)
            for i, absent in enumerate(missing):
                if absent:
                    flags[:, i] = 0
            inputs.append(flags.view(-1))
            outputs.append(inputs[-1].new_empty(len(members)))
        unit.arrived.clear()
        ticket = unit.comm.reduce_scatter(outputs, inputs, op=unit.reduce_op, label=unit.name)
        return cls(unit, ticket, members, outputs[:-1], outputs[-1], missing)

    def replicate(self) -> bool:
        """Wait for the reduce-scatter and launch the all-reduce; whether one was to be launched."""
        comm = self.unit.replicas
        if comm is None or self.replicated:
            return False
        self.ticket.wait()
        self.replicated = True
        tensors = [*self.outputs, self.used]
        self.ticket = comm.all_reduce(tensors, op=self.unit.reduce_op, label=self.unit.name)
        return True

    def finish(self) -> None:
        """Wait, and add the reduced gradients to those of the shards."""
        self.replicate()
        self.ticket.wait()
        with torch.no_grad():
            for i, (member, output) in enumerate(zip(self.members, self.outputs, strict=True)):
                # Read back only where this rank knows no better: it blocks the host.
                if self.missing[i] and self.used[i].item() == 0:
                    continue
                self.unit.give_gradient(member, output)
