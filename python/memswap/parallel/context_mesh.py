"""ContextMesh: the ranks of a sequence, those that share heads and those that gather."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
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
            ValueError: the mesh has other dimensions than ``ulysses`` asks for, or its ranks are in
                another order than those of its groups.
        """
        size = mesh.size()
        if mesh.ndim == 2 and ulysses in (None, mesh.size(1)):
            grid = mesh.mesh
        elif mesh.ndim in (1, 2) and ulysses in (None, 1, size):
            grid = mesh.mesh.reshape((-1, 1) if ulysses == 1 else (1, -1))
        elif mesh.ndim == 1 and ulysses is not None and ulysses > 0 and not size % ulysses:
            grid = mesh.mesh.reshape(-1, ulysses)
        elif mesh.ndim == 1:
            raise ValueError(
                f"ulysses={ulysses} on a 1-D mesh of {size} ranks: expected None or a divisor of "
                f"{size}"
            )
        else:
            raise ValueError(
                f"ulysses={ulysses} on a mesh of shape {tuple(mesh.shape)}: expected a 1-D mesh, "
                "or a 2-D mesh (gather, ulysses) whose second dimension is ulysses; 1 and the "
                "number of all ranks take any 2-D mesh"
            )
        place = (grid == dist.get_rank()).nonzero()
        if not len(place):
            raise ValueError(
                f"ContextParallel: found rank {dist.get_rank()} outside of the mesh of ranks "
                f"{mesh.mesh.flatten().tolist()}; apply the style on those ranks only"
            )
        row, column = place[0].tolist()
        groups = _groups_of(mesh, grid)
        gather, heads = (
            None if len(line) == 1 else open_comm(_group_of(line.tolist(), group))
            for line, group in zip((grid[:, column], grid[row]), groups, strict=True)
        )
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
        """Which dimension of the mesh: by its name, or its number; a part of one by its use."""
        mesh, size = self.device_mesh, comm.size
        dim = 1 if comm is self.heads and mesh.ndim == 2 else 0
        if size == mesh.size() and mesh.ndim == 2:
            return "_".join(mesh.mesh_dim_names or ("both", "dimensions"))
        if size != mesh.size(dim):
            return "heads" if comm is self.heads else "gather"
        return mesh.mesh_dim_names[dim] if mesh.mesh_dim_names else f"dimension {dim}"

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


def _groups_of(mesh: DeviceMesh, grid: torch.Tensor) -> list[dist.ProcessGroup | None]:
    """The mesh's own groups along the columns and the rows of a grid of its ranks, if it has them.

    Others are made with those ranks alone: not all ranks of a larger mesh need to come here.
    """
    if tuple(mesh.shape) == tuple(grid.shape):
        return [mesh.get_group(0), mesh.get_group(1)]
    if mesh.ndim == 1 and 1 in grid.shape:
        return [mesh.get_group(), mesh.get_group()]
    return [None, None]


def _group_of(ranks: list[int], group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """A group of these ranks: the one that there is, or a new one."""
    if ranks != sorted(ranks):
        raise ValueError(
            f"ContextParallel: found ranks in the order {ranks} in the mesh, expected ascending "
            "ones: a group has its ranks in that order"
        )
    made = group or dist.new_group(ranks, use_local_synchronization=True)
    assert made is not None
    return made
