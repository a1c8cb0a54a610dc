"""Member: one parameter of a unit, and how it becomes a shard."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from memswap.parallel.comm import Comm


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
    """As it lies in gathered memory: the sharded dimension first."""
    rows: int
    """Rows on each rank, along the sharded dimension; the last ones are padding."""
    offset: int = 0
    nbytes: int = 0
    full: nn.Parameter | None = None
    """The gathered parameter: the same object at every use, and a leaf of the graph."""
    dtype: torch.dtype = torch.float32
    """That of the gathered parameter."""
    grad: torch.Tensor | None = None
    """The gathered gradient, until it is reduced."""
    hooked: bool = False

    @property
    def padded_shape(self) -> tuple[int, ...]:
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
    """Put this rank's part of the parameter, as a DTensor, wherever the parameter is registered."""
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
