"""ContextMesh: the ranks of a sequence, those that share heads and those that gather."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from memswap.parallel.comm import Comm
from memswap.parallel.layouts import Balance, SequenceShards


@dataclass(frozen=True)
class ContextMesh:
    """A grid of ranks: a row shares the heads of its tokens, a column gathers keys and values.

    Args:
        device_mesh: where the groups come from.
        heads: the ranks of this row (Ulysses); None if there is only this one.
        gather: the ranks of this column; None if there is only this one.
        balance: how the sequence is cut among the rows.
    """

    device_mesh: DeviceMesh
    heads: Comm | None
    gather: Comm | None
    balance: Balance

    @classmethod
    def of(
        cls,
        mesh: DeviceMesh,
        ulysses: int | None,
        balance: Balance,
        open_comm: Callable[[dist.ProcessGroup], Comm],
    ) -> ContextMesh:
        """See :class:`ContextParallel`.

        Raises:
            ValueError: the mesh has other dimensions than ``ulysses`` asks for.
        """
        if mesh.ndim == 1:
            if ulysses not in (None, 1, mesh.size()):
                raise ValueError(
                    f"ulysses={ulysses} on a 1-D mesh of {mesh.size()} ranks: expected None, 1 or "
                    f"{mesh.size()}; for both at once pass a 2-D mesh whose second dimension has "
                    f"{ulysses} ranks"
                )
            comm = open_comm(mesh.get_group()) if mesh.size() > 1 else None
            if ulysses == 1:
                return cls(mesh, None, comm, balance)
            return cls(mesh, comm, None, balance)
        if mesh.ndim != 2 or ulysses not in (None, mesh.size(1)):
            raise ValueError(
                f"ulysses={ulysses} on a mesh of shape {tuple(mesh.shape)}: expected a 1-D mesh, "
                "or a 2-D mesh (gather, ulysses) whose second dimension is ulysses"
            )
        heads = open_comm(mesh.get_group(1)) if mesh.size(1) > 1 else None
        gather = open_comm(mesh.get_group(0)) if mesh.size(0) > 1 else None
        return cls(mesh, heads, gather, balance)

    @property
    def columns(self) -> int:
        """Ranks that share heads."""
        return 1 if self.heads is None else self.heads.size

    @property
    def rows(self) -> int:
        """Ranks that gather keys and values."""
        return 1 if self.gather is None else self.gather.size

    def name_of(self, comm: Comm) -> str:
        """Which dimension of the mesh: by its name, or its number."""
        dim = 1 if comm is self.heads and self.device_mesh.ndim == 2 else 0
        names = self.device_mesh.mesh_dim_names
        return names[dim] if names else f"dimension {dim}"

    @property
    def row(self) -> int:
        return 0 if self.gather is None else self.gather.rank

    @property
    def column(self) -> int:
        return 0 if self.heads is None else self.heads.rank

    def row_shards(self, length: int) -> SequenceShards:
        """Which tokens each row holds."""
        return SequenceShards.cut(length, self.rows, self.balance)

    def query_shards(self, length: int) -> SequenceShards:
        """Whose queries each row computes."""
        moved = self.balance == "queries"
        return SequenceShards.cut(length, self.rows, "headtail" if moved else self.balance)

    @property
    def moves_queries(self) -> bool:
        """Whether rows compute other queries than theirs."""
        return self.balance == "queries" and self.gather is not None

    def rank_shards(self, length: int) -> SequenceShards:
        """Which tokens each rank of this row holds."""
        return self.row_shards(length).split(self.row, self.columns)

    def whole_length(self, local: int, given: int | None, what: str) -> int:
        """The length of the sequence of which this rank holds ``local`` tokens.

        Raises:
            ValueError: ``local`` is not what this rank holds of such a sequence.
        """
        if given is None:
            length = local * self.rows * self.columns
            shards = [
                self.row_shards(length).split(row, self.columns).lengths for row in range(self.rows)
            ]
            if any(one != local for lengths in shards for one in lengths):
                raise ValueError(
                    f"{what}: {length} tokens do not cut evenly ({shards} tokens per rank); say "
                    "sequence_length=... and cut the batch with shard_batch"
                )
            return length
        expected = self.rank_shards(given).lengths[self.column]
        if local != expected:
            raise ValueError(
                f"{what}: found {local} tokens, expected this rank's {expected} of {given}; was "
                "the batch cut with shard_batch?"
            )
        return given
