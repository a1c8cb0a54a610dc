"""What a ContextParallel is told, checked: its options, where ``forward`` takes what, its ranks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from memswap.parallel.comm import Comm, ProcessGroupComm
from memswap.parallel.layouts import LAYOUTS, Balance, Layout, SequenceShards

Role = Literal["q", "k", "v", "kv", "qkv"]
Packing = Literal["separate", "kv", "qkv"]

#: The tensors that attention gets, by packing.
ROLES: dict[Packing, tuple[Role, ...]] = {
    "separate": ("q", "k", "v"),
    "kv": ("q", "kv"),
    "qkv": ("qkv",),
}


@dataclass(kw_only=True, eq=False)
class ContextStyle:
    """The options of a :class:`ContextParallel`, which explains them.

    Raises:
        TypeError: an option of another kind, with what was expected.
        ValueError: an option, or two that do not go together, likewise.
    """

    ulysses: int | None = None
    layout: str = "bshd"
    balance: Balance = "contiguous"
    packing: Packing = "separate"
    qkv: Sequence[int | str] | None = None
    unpacked: Sequence[str] | None = None
    heads: int | None = None
    sequence_length: int | None = None
    kv_sequence_length: int | None = None
    ranges: str | None = None
    mask: str | None = None
    verify: bool = True
    model: nn.Module | None = field(default=None, repr=False)
    use_local_output: bool = True
    comm: Callable[[dist.ProcessGroup], Comm] = field(default=ProcessGroupComm, repr=False)

    def __post_init__(self) -> None:
        qkv, packing, unpacked = self.qkv, self.packing, self.unpacked
        for name in ("ulysses", "heads", "sequence_length", "kv_sequence_length"):
            number = getattr(self, name)
            if number is not None and (
                isinstance(number, bool) or not isinstance(number, int) or number < 1
            ):
                raise ValueError(f"{name}={number!r}: expected 1 or more, or None")
        for name in ("ranges", "mask"):
            if not isinstance(getattr(self, name), str | None):
                raise TypeError(
                    f"{name}={getattr(self, name)!r}: expected the name of an argument of "
                    "attention's forward, or None"
                )
        for name, several in (("qkv", qkv), ("unpacked", unpacked)):
            if several is not None and (
                isinstance(several, str) or not isinstance(several, Sequence)
            ):
                raise TypeError(f"{name}={several!r}: expected several, such as ('q', 'k', 'v')")
        if not isinstance(self.model, nn.Module | None):
            raise TypeError(
                f"model={self.model!r}: found {type(self.model).__name__}, expected an nn.Module"
            )
        if self.layout not in LAYOUTS:
            raise ValueError(f"layout={self.layout!r}: expected one of {sorted(LAYOUTS)}")
        if self.kv_sequence_length is None:
            self.kv_sequence_length = self.sequence_length
        if self.balance not in get_args(Balance):
            raise ValueError(f"balance={self.balance!r}: expected one of {get_args(Balance)}")
        if packing not in ROLES:
            raise ValueError(f"packing={packing!r}: expected one of {sorted(ROLES)}")
        if packing != "separate" and self.layout == "bnsd":
            raise ValueError("layout='bnsd' has no packed form; expected packing='separate'")
        tensors = len(ROLES[packing])
        if qkv is not None and len(qkv) != tensors:
            raise ValueError(f"qkv={tuple(qkv)}: expected {tensors} for packing={packing!r}")
        if qkv is not None and len(set(qkv)) != tensors:
            raise ValueError(f"qkv={tuple(qkv)}: expected {tensors} different places or names")
        if unpacked is not None and (packing != "qkv" or len(unpacked) not in (2, 3)):
            raise ValueError(
                f"unpacked={tuple(unpacked)} with packing={packing!r}: expected two names (q, kv) "
                "or three (q, k, v), with packing='qkv'"
            )
        uneven = self.balance == "headtail" or self.sequence_length is not None
        if not self.use_local_output and uneven:
            raise ValueError(
                "use_local_output=False: a DTensor cannot say how balance='headtail' or uneven "
                "parts cut the sequence; expected another balance and no sequence_length"
            )

    @property
    def dims(self) -> Layout:
        """Where the sequence and the heads are in the tensors of attention."""
        return LAYOUTS[self.layout]


class Arguments:
    """Where the tensors of attention are among the arguments of ``module``'s forward."""

    def __init__(self, module: nn.Module, style: ContextStyle) -> None:
        by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        self._module = type(module).__name__
        self._style = style
        self._names = [
            name
            for name, one in inspect.signature(module.forward).parameters.items()
            if one.kind in by_place
        ]

    def by_name(self, args: list[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        """All that have a name, however they were passed."""
        return {**dict(zip(self._names, args, strict=False)), **kwargs}

    def by_place(self, name: str, args: list[Any]) -> bool:
        """Whether an argument was passed by place."""
        return name in self._names[: len(args)]

    def places(self, args: list[Any], kwargs: dict[str, Any]) -> dict[Role, tuple[Any, Any]]:
        """Where each tensor was passed: in ``args`` at an index, or in ``kwargs`` by a name.

        Raises:
            TypeError: one was not passed.
        """
        roles = ROLES[self._style.packing]
        which = range(len(roles)) if self._style.qkv is None else self._style.qkv
        return {role: self._find(one, args, kwargs) for role, one in zip(roles, which, strict=True)}

    def hand_out(
        self, tensors: Mapping[Role, torch.Tensor], args: list[Any], kwargs: dict[str, Any]
    ) -> None:
        """Put the tensors that attention gets in the places of those that it was called with.

        Args:
            tensors: by their roles: q, and k and v or both as kv.
            args: of the module's forward, which is changed in place.
            kwargs: the same by name.
        """
        places = self.places(args, kwargs)
        if places.keys() <= tensors.keys():
            for role, (where, key) in places.items():
                where[key] = tensors[role]
            return
        where, key = places["qkv"]  # which is taken apart, since there are more keys than queries
        where[key] = None
        names = self._style.unpacked
        assert names is not None
        apart = [tensors["q"], tensors["kv"]]
        if len(names) == 3:
            apart[1:] = tensors["kv"].unbind(self._style.dims.head_dim)
        kwargs.update(zip(names, apart, strict=True))

    def _find(self, which: int | str, args: list[Any], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        if isinstance(which, int):
            place = which
        else:
            place = self._names.index(which) if which in self._names else len(args)
        if place < len(args):
            return args, place
        name: str | None
        if isinstance(which, str):
            name = which
        else:
            name = self._names[place] if place < len(self._names) else None
        if name in kwargs:
            return kwargs, name
        raise TypeError(
            f"ContextParallel: {self._module} was called without argument {which!r}; found "
            f"{len(args)} positional ones and {sorted(kwargs)}; say which with qkv=(...)"
        )


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
        """The grid of a mesh's ranks.

        Args:
            mesh: 1-D, or 2-D (gather, ulysses).
            ulysses: ranks of a row; None: all of a 1-D mesh, the second dimension of a 2-D one.
            balance: how the sequence is cut among the rows.
            open_comm: makes the Comm of a process group.

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
        """This rank's row."""
        return 0 if self.gather is None else self.gather.rank

    @property
    def column(self) -> int:
        """This rank's column."""
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
        """The length of the sequence of which this rank holds a part.

        Args:
            local: tokens of this rank.
            given: tokens of the sequence, if the style says so; None: ranks hold as many each.
            what: whose tokens they are, for the message.

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
