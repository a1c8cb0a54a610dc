"""Unit: parameters that are gathered together, used, dropped, and whose gradients are reduced.

A unit has one state, ABSENT -> FETCHING -> READY -> ABSENT, and one collective for each direction.
Each of its parameters is a member. When to do what is the ShardContext's business (schedule.py),
which notes in the unit where it is in the step.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import ref

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.torch_version import TorchVersion

from memswap._native import native
from memswap.errors import UnitStateError
from memswap.hooks.module_hooks import ModuleHooks

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from memswap.parallel.comm import Comm, ReduceOp, Ticket
    from memswap.parallel.slots import Lease

#: Whether gradients are reduced in the dtype of the shards where MixedPrecisionPolicy names none,
#: and not in that of the gathered weights: torch 2.15 changed what its policy means.
REDUCES_AS_SHARDED = TorchVersion(torch.__version__) >= (2, 15)

#: Every gathered parameter begins at a multiple of so many bytes (as torch's allocators align).
ALIGNMENT = 512


class State(enum.Enum):
    """Where the gathered weights of a unit are."""

    ABSENT = "absent"
    FETCHING = "fetching"
    READY = "ready"


@dataclass(eq=False)
class Member:
    """One parameter of a unit: its shard, its gathered form, its gradient."""

    owners: list[tuple[nn.Module, str]]
    """Every module and name that it is registered under: more than one if it is tied."""
    sharded: nn.Parameter
    """A DTensor with Shard(dim), what the optimizer and state_dict see.

    On a 2-D mesh along its second dimension, and replicated along the first.
    """
    dim: int
    """The sharded dimension."""
    shape: torch.Size
    """Shape in gathered memory, which has the sharded dimension first."""
    rows: int
    """Rows on each rank, along the sharded dimension; the last ones are padding."""
    offset: int = 0
    nbytes: int = 0
    full: nn.Parameter | None = None
    """The gathered parameter: the same object at every use, and a leaf of the graph."""
    dtype: torch.dtype = torch.float32
    """The dtype of the gathered parameter."""
    grad: torch.Tensor | None = None
    """The gathered gradient, until it is reduced."""
    hooked: bool = False

    @property
    def padded_shape(self) -> tuple[int, ...]:
        """Shape of this rank's rows with padding, the sharded dimension first."""
        return (self.rows, *self.shape[1:])

    @property
    def local(self) -> torch.Tensor:
        """This rank's rows, without padding, the sharded dimension first."""
        tensor = self.sharded.to_local() if isinstance(self.sharded, DTensor) else self.sharded
        return tensor.detach().movedim(self.dim, 0)

    def gather_input(self) -> torch.Tensor:
        """This rank's rows in the gathered dtype, padded; the shard itself where that is it."""
        local = self.local
        if local.dtype == self.dtype and local.shape[0] == self.rows and local.is_contiguous():
            return local
        padded = local.new_zeros(self.padded_shape, dtype=self.dtype)
        padded[: local.shape[0]].copy_(local)
        return padded

    def version(self) -> int:
        """Changes whenever the shard is edited in place.

        Optimizers edit the DTensor, which torch notes in its version and not in its local part's;
        others edit the local part.
        """
        tensor = self.sharded
        local = tensor._local_tensor._version if isinstance(tensor, DTensor) else 0
        return int(tensor._version + local)


def shard_parameter(
    parameter: nn.Parameter,
    owners: list[tuple[nn.Module, str]],
    dim: int,
    mesh: DeviceMesh,
    comm: Comm,
) -> Member:
    """Put this rank's part of the parameter, as a DTensor, wherever the parameter is registered.

    Args:
        parameter: the whole parameter, with the same values on all ranks.
        owners: every module and name that it is registered under.
        dim: the dimension to shard.
        mesh: 1-D, or 2-D (replicate, shard).
        comm: the ranks of this rank's shards.
    """
    rank, size = comm.rank, comm.size
    length = parameter.shape[dim]
    rows = math.ceil(length / size)
    begin = min(rank * rows, length)
    local = parameter.detach().narrow(dim, begin, min(rows, length - begin))
    local = local.clone(memory_format=torch.contiguous_format)
    sharded = nn.Parameter(
        DTensor.from_local(
            local,
            mesh,
            [Replicate()] * (mesh.ndim - 1) + [Shard(dim)],
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        ),
        requires_grad=parameter.requires_grad,
    )
    sharded.__dict__.update(parameter.__dict__)
    for module, name in owners:
        module._parameters[name] = sharded
    shape = parameter.detach().movedim(dim, 0).shape
    return Member(owners, sharded, dim, shape, rows)


@dataclass(frozen=True, slots=True)
class Stay:
    """How long a unit's gathered weights stay, and what lets the next unit's go: see `shard`."""

    reshard_after_forward: bool = True
    residency: str = "use"
    unshard_in_backward: bool = True
    anchor: str | None = None
    own_memory: bool = False
    """Whether its weights have memory of their own, and no slot, since they stay for long."""

    def after_forward(self, backward_comes: bool) -> bool:
        """Whether weights stay when forward ends."""
        return self.residency == "step" or (backward_comes and not self.reshard_after_forward)


@dataclass
class Progress:
    """Where a unit is in the step."""

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
    in_backward: bool = False
    """Whether the unit's part of a backward has begun and not ended."""
    reached: bool = False
    """Whether this backward has computed a gradient of a parameter."""
    open_calls: int = 0
    """Calls of units with frozen parameters whose backward has begun and not ended."""


class Unit:
    """Parameters of one or more modules, each sharded along one dimension over a 1-D mesh.

    Or over the second dimension of a 2-D mesh, with a replica in each row: ``comm`` is this row's
    ranks, ``replicas`` those that hold the same shard.

    Between :meth:`fetch` and :meth:`drop` the gathered weights have memory, which is lent
    ([Note: Lent memory] in csrc/storage/lend.h); after :meth:`ready` they may be used.

    Args:
        name: for messages, logs and profiles.
        modules: whose parameters they are; their forward calls use the unit.
        parameters: with every module and name that each is registered under.
        dims: the dimension along which each is sharded.
        mesh: 1-D, or 2-D (replicate, shard).
        policy: dtypes of gathered parameters and of the reduction.
        comm: the ranks that have the other shards.
        replicas: the ranks that have the same shard; None: there are none.
        stay: how long its weights stay.
    """

    def __init__(
        self,
        name: str,
        modules: Sequence[nn.Module],
        parameters: dict[nn.Parameter, list[tuple[nn.Module, str]]],
        dims: Sequence[int],
        mesh: DeviceMesh,
        policy: MixedPrecisionPolicy,
        comm: Comm,
        replicas: Comm | None = None,
        stay: Stay | None = None,
    ) -> None:
        self.name = name
        self.modules = tuple(modules)
        self.mesh = mesh
        self.policy = policy
        self.comm = comm
        self.replicas = replicas
        self.state = State.ABSENT
        self.exposed = False
        """Whether the modules show gathered parameters, not shards."""
        self.lease: Lease | None = None
        self.nbytes = 0
        self.versions: tuple[int, ...] = ()
        """Versions of the shards when they were gathered."""
        self.arrived: set[Member] = set()
        """Members whose gradient this backward has computed."""
        self.divide_factor: float | None = None
        """What the sum of the ranks' gradients is divided by; None: the number of ranks."""
        self.on_gradient: Callable[[Unit], None] = lambda unit: None
        """Called when a gradient has arrived."""
        self.stay = Stay() if stay is None else stay
        self.calls = ModuleHooks()
        """The hooks on its modules."""
        self.sync = True
        """Whether backward reduces gradients."""
        self.pinned = False
        """Gathered by unshard(): stays until used or resharded."""
        self.progress = Progress()
        self._ticket: Ticket | None = None
        self.members = [
            shard_parameter(parameter, owners, dim, mesh, comm)
            for (parameter, owners), dim in zip(parameters.items(), dims, strict=True)
        ]
        self.lay_out()

    # --- shards -----------------------------------------------------------------------------------

    def lay_out(self) -> None:
        """Find room for each gathered parameter; needed again when dtypes or devices changed."""
        if self.state is not State.ABSENT:
            raise UnitStateError(f"unit {self.name!r} is {self.state.value}, expected absent")
        offset = 0
        for member in self.members:
            self._find_shard(member)
            kept = member.sharded.dtype
            castable = kept.is_floating_point and self.policy.param_dtype is not None
            member.dtype = self.policy.param_dtype if castable else kept
            member.offset = offset
            member.nbytes = math.prod(member.padded_shape) * self.comm.size * member.dtype.itemsize
            offset += -(-member.nbytes // ALIGNMENT) * ALIGNMENT
            member.full = None
            member.hooked = False
        self.nbytes = offset
        self.device = self.members[0].local.device
        self._shell = torch.empty(0, dtype=torch.uint8, device=self.device)
        self._shell_ref = native.StorageRef(self._shell)

    def _find_shard(self, member: Member) -> None:
        """load_state_dict(assign=True) and the like replace what is registered."""
        module, name = member.owners[0]
        current = module._parameters[name]
        if current is None or current is member.sharded or current is member.full:
            return
        if not isinstance(current, DTensor):
            raise UnitStateError(
                f"unit {self.name!r}: parameter {name!r} was replaced by a plain "
                f"{type(current).__name__}; expected a DTensor, as shard() made it"
            )
        for module, name in member.owners:
            module._parameters[name] = current
        member.sharded = current

    def shard_versions(self) -> tuple[int, ...]:
        """A number for each shard, which an edit in place changes."""
        return tuple(member.version() for member in self.members)

    @property
    def stale(self) -> bool:
        """Whether the shards were edited since they were gathered."""
        return self.versions != self.shard_versions()

    @property
    def idle(self) -> bool:
        """Whether its weights are there, or on their way, and nobody uses or has asked for them."""
        return self.state is not State.ABSENT and self.progress.depth == 0 and not self.pinned

    # --- gathered weights -------------------------------------------------------------------------

    def fetch(self, lease: Lease) -> None:
        """ABSENT -> FETCHING: launch the all-gather into the lease's memory."""
        self._expect(State.ABSENT, "fetch")
        self.lease = lease
        native.lend(self._shell_ref, native.StorageRef(lease.memory), 0, self.nbytes)
        self._launch()
        self.state = State.FETCHING

    def fetch_again(self) -> None:
        """The shards were edited: gather them once more, into the same memory."""
        self.ready()
        self._launch()
        self.state = State.FETCHING

    def _launch(self) -> None:
        assert self.lease is not None
        memory = self.lease.memory
        for member in self.members:
            self._find_shard(member)
        self.versions = self.shard_versions()
        outputs = [
            memory[m.offset : m.offset + m.nbytes]
            .view(m.dtype)
            .view(m.rows * self.comm.size, *m.shape[1:])
            for m in self.members
        ]
        with torch.no_grad():
            inputs = [member.gather_input() for member in self.members]
        self._ticket = self.comm.all_gather(outputs, inputs, label=self.name)

    def ready(self) -> None:
        """FETCHING -> READY: the weights are there, for what is launched from now on."""
        if self.state is State.FETCHING and self._ticket is not None:
            self._ticket.wait()
            self._ticket = None
            self.state = State.READY
        self._expect(State.READY, "ready")
        assert self.lease is not None
        self.lease.check()

    def drop(self) -> Lease | None:
        """-> ABSENT: the weights are not needed; what was lent, if anything, is given up."""
        if self.state is State.FETCHING:
            self.ready()
        if self.state is State.ABSENT:
            return None
        lease, self.lease = self.lease, None
        native.take_back(
            self._shell_ref,
            f"memswap: the weights of unit {self.name!r} are sharded now and were used outside of "
            "the unit's forward and backward. If this happened in backward, the unit's output has "
            "to be a tensor, or tensors in tuples, lists, dicts or dataclasses known to "
            "torch.utils._pytree; elsewhere, call unshard() on the module first",
        )
        self.state = State.ABSENT
        return lease

    def expose(self) -> None:
        """Let the modules show the gathered parameters."""
        self.ready()
        for member in self.members:
            full = self._full(member)
            if full.requires_grad != member.sharded.requires_grad:
                full.requires_grad_(member.sharded.requires_grad)
            if full.requires_grad and not member.hooked:
                full.register_post_accumulate_grad_hook(self._collector(member))
                member.hooked = True
            if not self.exposed:
                for module, name in member.owners:
                    module._parameters[name] = full
        self.exposed = True

    def hide(self) -> None:
        """Let the modules show the shards."""
        if self.exposed:
            for member in self.members:
                for module, name in member.owners:
                    module._parameters[name] = member.sharded
            self.exposed = False

    def _full(self, member: Member) -> nn.Parameter:
        if member.full is None:
            # Not in inference mode: the parameter will be trained as well. Through .data: it has
            # a version counter of its own, so that gathering is no edit of what autograd saved.
            with torch.inference_mode(False), torch.no_grad():
                flat = torch.empty(0, dtype=torch.uint8, device=self.device)
                flat.set_(self._shell.untyped_storage(), 0, (self.nbytes,), (1,))
                part = flat[member.offset : member.offset + member.nbytes].view(member.dtype)
                part = part[: math.prod(member.shape)].view(member.shape).movedim(0, member.dim)
                member.full = nn.Parameter(part.data, requires_grad=False)
                member.full.__dict__.update(member.sharded.__dict__)
        return member.full

    def _expect(self, state: State, move: str) -> None:
        if self.state is not state:
            raise UnitStateError(
                f"unit {self.name!r}: {move} while {self.state.value}, expected {state.value}"
            )

    # --- gradients --------------------------------------------------------------------------------

    @property
    def trainable(self) -> list[Member]:
        """The parameters that require gradients."""
        return [member for member in self.members if member.sharded.requires_grad]

    @property
    def frozen(self) -> bool:
        """Whether a parameter requires no gradient."""
        return any(not member.sharded.requires_grad for member in self.members)

    @property
    def has_gradients(self) -> bool:
        """Whether a gathered gradient has not been reduced."""
        return any(member.grad is not None for member in self.members)

    def _collector(self, member: Member) -> Callable[[torch.Tensor], None]:
        weak_unit, weak_member = ref(self), ref(member)  # torch holds hooks where gc cannot look

        def collect(full: torch.Tensor) -> None:
            unit, member = weak_unit(), weak_member()
            gradient, full.grad = full.grad, None
            if unit is None or member is None or gradient is None:
                return
            if member.grad is None:
                member.grad = gradient
            else:
                member.grad += gradient
            unit.arrived.add(member)
            unit.on_gradient(unit)

        return collect

    def keep_gradients(self) -> None:
        """Keep gradients for a later backward to reduce, in the dtype of the reduction."""
        for member in self.members:
            if member.grad is not None:
                member.grad = member.grad.to(self.reduce_dtype(member))
        self.arrived.clear()

    def reduce_dtype(self, member: Member) -> torch.dtype:
        """The policy's dtype; without one, what this torch's `MixedPrecisionPolicy` promises."""
        if self.policy.reduce_dtype is not None:
            return self.policy.reduce_dtype
        return member.sharded.dtype if REDUCES_AS_SHARDED else member.dtype

    @property
    def reduce_op(self) -> ReduceOp:
        """ "avg"; "sum" where `set_gradient_divide_factor` says what that is divided by."""
        return "avg" if self.divide_factor is None else "sum"

    def give_gradient(self, member: Member, reduced: torch.Tensor) -> None:
        """Add a reduced gradient, padded, to that of the shard."""
        sharded = member.sharded
        local = reduced[: member.local.shape[0]].movedim(0, member.dim)
        if self.divide_factor not in (None, 1):
            local = local / self.divide_factor
        local = local.to(sharded.dtype).contiguous()
        if sharded.grad is not None:
            sharded.grad.to_local().add_(local)
        else:
            sharded.grad = DTensor.from_local(
                local,
                self.mesh,
                sharded.placements,
                run_check=False,
                shape=sharded.shape,
                stride=sharded.stride(),
            )
        # Autograd does not accumulate into shards, so nobody else calls these.
        for hook in (sharded._post_accumulate_grad_hooks or {}).values():
            hook(sharded)

    def forget_gradients(self) -> None:
        """Drop what a backward that failed had computed so far."""
        self.arrived.clear()
        for member in self.members:
            member.grad = None
            if member.full is not None:
                member.full.grad = None


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
