"""What goes into and comes out of a model whose sequence is cut: batches and the loss."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from memswap.parallel.context_mesh import ContextMesh


def shard_batch(
    batch: Mapping[str, Any],
    mesh: ContextMesh,
    sequence_length: int | None,
    seq_dim: int,
    labels: str | None,
    ignore_index: int,
    whole: Collection[str],
) -> dict[str, Any]:
    """See :meth:`ContextParallel.shard_batch`."""
    if "positions" in batch:
        raise ValueError("shard_batch: found 'positions' in the batch, which is what it adds")
    cut = {
        name: value
        for name, value in batch.items()
        if isinstance(value, torch.Tensor) and value.ndim > seq_dim and name not in whole
    }
    if labels is not None and labels not in cut:
        raise ValueError(f"shard_batch(labels={labels!r}): found {sorted(cut)} to cut")
    lengths = {name: value.size(seq_dim) for name, value in cut.items()}
    if len(set(lengths.values())) != 1:
        raise ValueError(
            f"shard_batch: found tokens {lengths} in dimension {seq_dim}, expected tensors of one "
            "length; name those that have no such dimension in whole=(...)"
        )
    (length,) = set(lengths.values())
    ranks = mesh.rows * mesh.columns
    if length != sequence_length and (sequence_length is not None or length % ranks):
        raise ValueError(
            f"shard_batch: found {length} tokens for {ranks} ranks and sequence_length="
            f"{sequence_length}; a length that the ranks do not divide has to be said: "
            "ContextParallel(sequence_length=...)"
        )
    if sequence_length is None:
        mesh.whole_length(length // ranks, None, "shard_batch")
    parts: dict[str, Any] = dict(batch)
    device = next(iter(cut.values())).device
    places = mesh.rank_shards(length).positions(mesh.column, device)
    for name, value in cut.items():
        if name == labels:
            last = torch.full_like(value.narrow(seq_dim, 0, 1), ignore_index)
            value = torch.cat([value.narrow(seq_dim, 1, length - 1), last], dim=seq_dim)
        parts[name] = value.index_select(seq_dim, places.to(value.device))
    parts["positions"] = places
    return parts


class _MeanOfAll(torch.autograd.Function):  # type: ignore[misc]
    """The mean as value, this rank's share as gradient."""

    @staticmethod
    def forward(
        ctx: Any, total: torch.Tensor, value: torch.Tensor, factor: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(factor)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (factor,) = ctx.saved_tensors
        return gradient * factor, None, None


def mean_loss(
    total: torch.Tensor, tokens: int | torch.Tensor, mesh: ContextMesh, gradients: str
) -> torch.Tensor:
    """See :meth:`ContextParallel.mean_loss`."""
    if gradients not in ("sum", "avg"):
        raise ValueError(f"mean_loss(gradients={gradients!r}): expected 'sum' or 'avg'")
    if total.ndim:
        raise ValueError(
            f"mean_loss: found a loss of shape {list(total.shape)}, expected the scalar sum of "
            "this rank's losses"
        )
    wide = torch.float64
    sums = torch.stack(
        [
            total.detach().to(wide),
            torch.as_tensor(tokens, device=total.device).detach().to(wide),
        ]
    )
    for comm in (mesh.heads, mesh.gather):
        if comm is not None:
            everyone = sums.new_empty(comm.size * 2)
            comm.all_gather([everyone], [sums], label="mean_loss").wait()
            sums = everyone.view(comm.size, 2).sum(0)
    ranks = mesh.rows * mesh.columns if gradients == "avg" else 1
    factor = (ranks / sums[1]).to(total.dtype)
    mean: torch.Tensor = _MeanOfAll.apply(total, (sums[0] / sums[1]).to(total.dtype), factor)
    return mean
