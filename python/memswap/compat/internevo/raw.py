"""Weight and gradient hooks for code that gathers and reduces by hand, tensor by tensor."""

from __future__ import annotations

import enum
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from memswap._native import native
from memswap.errors import RankMismatchError
from memswap.parallel.comm import Comm, ReduceOp, Ticket, ranks_that_differ

#: Makes the output of an all-gather of so many rows.
Allocate = Callable[[torch.Size, torch.Tensor], torch.Tensor]


class Done:
    """The handle of what needs no waiting."""

    def wait(self) -> None:
        """Returns at once."""


class WPCommunicator(ABC):
    """What a linear layer that gathers its own weight calls: each communicator is one."""

    def communication_mode(self) -> str:
        """``"wp"``: what callers ask for, to know which hooks to call."""
        return "wp"

    @abstractmethod
    def weight_hook(
        self,
        tensor: torch.Tensor,
        async_op: bool = False,
        module: nn.Module | None = None,
        is_bias: bool = False,
    ) -> torch.Tensor:
        """The whole weight, in forward and in backward, or ``tensor`` itself if that is whole.

        It is there when this returns, whatever ``async_op`` says: there is no handle to wait for.

        Args:
            tensor: ``[rows, ...]``, as many rows on every rank.
            async_op: taken and not needed.
            module: whose weight it is.
            is_bias: it is the module's bias.

        Returns:
            ``[ranks * rows, ...]``.
        """

    @abstractmethod
    def grad_hook(
        self,
        tensor: torch.Tensor,
        async_op: bool = False,
        module: nn.Module | None = None,
        reduce_op: Any = dist.ReduceOp.AVG,
        is_bias: bool = False,
    ) -> tuple[torch.Tensor, Ticket]:
        """What to return as the weight's gradient, and a handle to wait for before it is used.

        Args:
            tensor: the whole gradient, ``[ranks * rows, ...]``.
            async_op: return before the rows are there.
            module: whose weight it is of.
            reduce_op: AVG or SUM.
            is_bias: it is of the module's bias.

        Returns:
            ``[rows, ...]``: this rank's rows. Where a unit of :func:`memswap.parallel.shard` has
            gathered the weight and will reduce its gradient, ``tensor`` itself.
        """


def group_of(mode: Any) -> dist.ProcessGroup | None:
    """The process group that is meant; None: all ranks.

    Args:
        mode: a process group, a 1-D DeviceMesh, or a member of InternEvo's ``ParallelMode``, for
            which the context beside that class is asked. None: all ranks.

    Raises:
        TypeError: neither of these.
    """
    group: dist.ProcessGroup | None
    if isinstance(mode, DeviceMesh):
        group = mode.get_group()
        return group
    if mode is None or isinstance(mode, dist.ProcessGroup):
        return mode
    package = type(mode).__module__ if isinstance(mode, enum.Enum) else ""
    while package:
        context = getattr(sys.modules.get(package), "global_context", None)
        if context is not None and hasattr(context, "get_group"):
            group = context.get_group(mode)
            return group
        package = package.rpartition(".")[0]
    raise TypeError(
        f"found {mode!r}, expected a process group, a DeviceMesh, or a ParallelMode of InternEvo "
        "whose global_context knows the group"
    )


def compare_parts(comm: Comm, device: torch.device, what: str) -> None:
    """RankMismatchError: ranks hold other parts than this one. All of them call this.

    Args:
        comm: of the ranks.
        device: of the weights.
        what: this rank's parts are, in words.
    """
    if others := ranks_that_differ(comm, device, what):
        raise RankMismatchError(
            f"rank {comm.rank} holds other parts of weights than ranks {others} of its group: "
            "modules, shapes, dtypes and options of the communicator must agree on all ranks. "
            f"Here they are:\n{what}"
        )


class FirstUses:
    """Compares the ranks' parts when a weight is asked for the first time.

    Weights are told apart by their module, or by their shape where there is none.
    """

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._modules: WeakKeyDictionary[nn.Module, set[bool]] = WeakKeyDictionary()
        self._shapes: set[tuple[torch.Size, torch.dtype]] = set()

    def seen(self, module: nn.Module) -> None:
        """Its parts have been compared."""
        self._modules[module] = {False, True}

    def compare(self, tensor: torch.Tensor, module: nn.Module | None, is_bias: bool) -> None:
        """Compare a weight, or a bias, unless that was done before.

        Args:
            tensor: this rank's rows, ``[rows, ...]``.
            module: whose it is; None: the caller did not say.
            is_bias: whether it is the module's bias.

        Raises:
            ValueError: a scalar has no rows.
            RankMismatchError: another rank asks for another weight.
        """
        if tensor.ndim == 0:
            raise ValueError(
                "weight_hook(): found a scalar, expected a tensor of which each rank has as many "
                "rows"
            )
        known: set[Any] = (
            self._shapes if module is None else self._modules.setdefault(module, set())
        )
        key = (tensor.shape, tensor.dtype) if module is None else is_bias
        if key in known or self._comm.size == 1:
            return
        known.add(key)
        kind = "bias" if is_bias else "weight"
        compare_parts(self._comm, tensor.device, f"{kind}: {list(tensor.shape)} {tensor.dtype}")


def gather_rows(comm: Comm, part: torch.Tensor, allocate: Allocate | None = None) -> torch.Tensor:
    """The ranks' rows one after another. A gathered weight is whole already and passes.

    Args:
        comm: of the ranks.
        part: this rank's rows, ``[rows, ...]``.
        allocate: makes the memory for the result; None: torch's allocator.

    Returns:
        ``[ranks * rows, ...]``.
    """
    if native.is_lent(part) or comm.size == 1:
        return part
    shape = torch.Size((part.shape[0] * comm.size, *part.shape[1:]))
    output = part.new_empty(shape) if allocate is None else allocate(shape, part)
    comm.all_gather([output], [part.detach().contiguous()], label="weight").wait()
    return output


def reduce_rows(
    comm: Comm, whole: torch.Tensor, async_op: bool, reduce_op: Any
) -> tuple[torch.Tensor, Ticket]:
    """This rank's rows of the ranks' gradients, reduced, and when they are there.

    Args:
        comm: of the ranks.
        whole: this rank's gradient of all rows, ``[ranks * rows, ...]``.
        async_op: whether to return before the rows are there.
        reduce_op: AVG or SUM.

    Returns:
        ``[rows, ...]``, and what to wait for.
    """
    op = reduction_named(reduce_op)
    if comm.size == 1:
        return whole, Done()
    check_whole(comm, whole)
    output = whole.new_empty(whole.shape[0] // comm.size, *whole.shape[1:])
    ticket = comm.reduce_scatter([output], [whole.contiguous()], op=op, label="weight gradient")
    if not async_op:
        ticket.wait()
        return output, Done()
    return output, ticket


def reduction_named(reduce_op: Any) -> ReduceOp:
    """ValueError: neither the mean nor the sum."""
    ops: dict[Any, ReduceOp] = {dist.ReduceOp.AVG: "avg", dist.ReduceOp.SUM: "sum"}
    for one, name in ops.items():
        if one == reduce_op:
            return name
    raise ValueError(f"grad_hook(): found reduce_op {reduce_op}, expected AVG or SUM")


def check_whole(comm: Comm, whole: torch.Tensor, rows: torch.Size | None = None) -> None:
    """ValueError: this is no gradient of the whole weight.

    Args:
        comm: of the ranks that share the weight.
        whole: the gradient.
        rows: shape of this rank's part; None: not known.
    """
    size = comm.size
    if rows is not None and whole.shape != (rows[0] * size, *rows[1:]):
        raise ValueError(
            f"grad_hook(): found a gradient of shape {list(whole.shape)}, expected "
            f"{[rows[0] * size, *rows[1:]]}: {size} ranks with rows of shape {list(rows)} each"
        )
    if whole.ndim == 0 or whole.shape[0] % size:
        raise ValueError(
            f"grad_hook(): found a gradient of shape {list(whole.shape)}, expected rows that are "
            f"a multiple of {size} ranks; give the communicator a model with whole weights, "
            "which it pads where rows do not fit"
        )


def mesh_of(group: dist.ProcessGroup | None, module: nn.Module) -> Any:
    """The 1-D mesh of a process group, for the device that the module is on."""
    first = next(module.parameters(), None)
    device = torch.device("cpu") if first is None else first.device
    return DeviceMesh.from_group(dist.group.WORLD if group is None else group, device.type)
