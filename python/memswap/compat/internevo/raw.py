"""Weight and gradient hooks for code that gathers and reduces by hand, tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from memswap._native import native
from memswap.parallel.comm import Comm, ReduceOp, Ticket

#: Makes the output of an all-gather of so many rows.
Allocate = Callable[[torch.Size, torch.Tensor], torch.Tensor]


class Done:
    """The handle of what needs no waiting."""

    def wait(self) -> None:
        """Returns at once."""


class WPCommunicator(Protocol):
    """What a linear layer that gathers its own weight calls."""

    def communication_mode(self) -> str:
        """``"wp"``: what callers ask for, to know which hooks to call."""

    def weight_hook(
        self, tensor: torch.Tensor, async_op: bool = False, **kwargs: Any
    ) -> torch.Tensor:
        """The whole weight, in forward and in backward."""

    def grad_hook(
        self, tensor: torch.Tensor, async_op: bool = False, **kwargs: Any
    ) -> tuple[torch.Tensor, Ticket]:
        """What to return as the weight's gradient, and a handle to wait for before it is used."""


def gather_rows(comm: Comm, part: torch.Tensor, allocate: Allocate | None = None) -> torch.Tensor:
    """The ranks' rows one after another. A gathered weight is whole already and passes."""
    if native.is_lent(part):
        return part
    shape = torch.Size((part.shape[0] * comm.size, *part.shape[1:]))
    output = part.new_empty(shape) if allocate is None else allocate(shape, part)
    comm.all_gather([output], [part.detach().contiguous()], label="weight").wait()
    return output


def reduce_rows(
    comm: Comm, whole: torch.Tensor, async_op: bool, reduce_op: Any
) -> tuple[torch.Tensor, Ticket]:
    """This rank's rows of the ranks' gradients, reduced, and when they are there."""
    ops: dict[Any, ReduceOp] = {dist.ReduceOp.AVG: "avg", dist.ReduceOp.SUM: "sum"}
    op = next((name for one, name in ops.items() if one == reduce_op), None)
    if op is None:
        raise ValueError(f"grad_hook(): found reduce_op {reduce_op}, expected AVG or SUM")
    if whole.shape[0] % comm.size:
        raise ValueError(
            f"grad_hook(): found a gradient of {whole.shape[0]} rows, expected a multiple of "
            f"{comm.size} ranks; give the communicator the model, which pads rows that do not fit"
        )
    output = whole.new_empty(whole.shape[0] // comm.size, *whole.shape[1:])
    ticket = comm.reduce_scatter([output], [whole.contiguous()], op=op, label="weight gradient")
    if not async_op:
        ticket.wait()
        return output, Done()
    return output, ticket


def mesh_of(group: dist.ProcessGroup | None, module: nn.Module) -> Any:
    """The 1-D mesh of a process group, for the device that the module is on."""
    first = next(module.parameters(), None)
    device = torch.device("cpu") if first is None else first.device
    return dist.device_mesh.DeviceMesh.from_group(
        dist.group.WORLD if group is None else group, device.type
    )
