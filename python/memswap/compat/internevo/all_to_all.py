"""_SeqAllToAll: one dimension scattered over the ranks of a group, another one gathered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from memswap.parallel.comm import Comm, ProcessGroupComm


class _SeqAllToAll(torch.autograd.Function):  # type: ignore[misc]
    """``_SeqAllToAll.apply(group, scatter_idx, gather_idx, *tensors)``, differentiable.

    Rank r gets part r along dimension ``scatter_idx`` of every rank's tensor, one after another
    along dimension ``gather_idx``. Several tensors have lists of dimensions; all of them are under
    way before the first is waited for. One tensor is returned as a tensor, several as a tuple.

    Raises:
        ValueError: the ranks do not divide a tensor's dimension ``scatter_idx``; as many dimensions
            as tensors were expected.
    """

    @staticmethod
    def forward(
        ctx: Any,
        group: dist.ProcessGroup | None,
        scatter_idx: Sequence[int] | int,
        gather_idx: Sequence[int] | int,
        *tensors: torch.Tensor,
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        comm = ProcessGroupComm(group)
        ctx.group, ctx.scatter_idx, ctx.gather_idx = group, scatter_idx, gather_idx
        scatters, gathers = _listed(scatter_idx, tensors), _listed(gather_idx, tensors)
        for tensor, scatter in zip(tensors, scatters, strict=True):
            if tensor.shape[scatter] % comm.size:
                raise ValueError(
                    f"_SeqAllToAll: found a tensor of shape {list(tensor.shape)} to scatter along "
                    f"dimension {scatter}, expected a multiple of {comm.size} ranks there; "
                    "memswap.parallel.exchange takes any length"
                )
        if comm.size == 1:
            outputs = [tensor.view_as(tensor) for tensor in tensors]
        else:
            outputs = _exchange(comm, tensors, scatters, gathers)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        back = _SeqAllToAll.apply(ctx.group, ctx.gather_idx, ctx.scatter_idx, *gradients)
        return (None, None, None, *(back if isinstance(back, tuple) else (back,)))


def _listed(dims: Sequence[int] | int, tensors: Sequence[torch.Tensor]) -> list[int]:
    found = [dims] if isinstance(dims, int) else list(dims)
    if len(found) != len(tensors):
        raise ValueError(
            f"_SeqAllToAll: found dimensions {found} for {len(tensors)} tensors, expected one each"
        )
    return [dim % tensor.ndim for dim, tensor in zip(found, tensors, strict=True)]


def _exchange(
    comm: Comm, tensors: Sequence[torch.Tensor], scatters: list[int], gathers: list[int]
) -> list[torch.Tensor]:
    under_way = []
    for tensor, scatter, gather in zip(tensors, scatters, gathers, strict=True):
        parts = tensor.unflatten(scatter, (comm.size, -1)).movedim(scatter, 0).contiguous()
        output = torch.empty_like(parts)
        ticket = comm.all_to_all(output, parts, label="sequence")
        under_way.append((ticket, output, gather))
    outputs = []
    for ticket, output, gather in under_way:
        ticket.wait()
        outputs.append(output.movedim(0, gather).flatten(gather, gather + 1))
    return outputs
