"""AttentionExchanges: which exchanges the tensors of one attention module make, and with whom.

[Note: Early launches] A projection's exchange is launched when the projection returns, before
anybody has said what attention will get. The launch is kept under the identity of the tensor that
the projection returned, weakly: several microbatches have one each, and one that attention never
saw before its tensor died is waited for at the next opportunity, since its buffers are in use until
then. Attention takes it only if it gets that very tensor in that version. A view, a rotated or
normalized copy, an edited tensor is another value, and using the launch for it would be silently
wrong; it takes the ordinary path. So does a recomputation of the attention alone, whose launch has
been used up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from memswap.parallel.attention import Lengths
from memswap.parallel.context_style import ROLES, ContextMesh, ContextStyle, Role
from memswap.parallel.exchange import Pending, exchange
from memswap.parallel.layouts import HeadPlan, Layout
from memswap.parallel.redistribute import (
    GatherSequence,
    MoveSequence,
    SequenceExchange,
    SequenceToHeads,
    take,
)


class ExchangeLaunch(NamedTuple):
    """One exchange of an attention module, as it was launched last."""

    collective: str
    label: str
    lane: str
    """The dimension of the mesh."""
    nbytes: int
    """What this rank gave, in bytes."""
    cause: str
    times: int
    """How often, so far."""


class AttentionExchanges:
    """The exchanges of one attention module: launched here, waited for by the caller.

    Tensors are ``[batch, tokens, heads, size]``, their dimensions in the order of the style's
    layout. Where keys and values, or all three, are one tensor, a dimension of 2 or 3 comes before
    that of the heads; packed sequences have no batch. Tokens are this rank's before an exchange,
    heads are after it.

    Args:
        style: says how tensors lie, and which lengths and heads there are.
        mesh: the ranks that take part.
        before: is called before each exchange, with the tensor and the exchange's label.

    Attributes:
        roles: the tensors that attention gets.
        heads: query heads of the whole model; None until they are given or seen.
        style: as given.
        mesh: as given.
        parts_ways: whether queries leave a packed tensor, since keys alone are gathered.
        cause: why the next exchange is launched when it is.
        launches: by collective and label, in the order in which they came first.
    """

    def __init__(
        self,
        style: ContextStyle,
        mesh: ContextMesh,
        before: Callable[[torch.Tensor, str], None],
    ) -> None:
        self.roles = ROLES[style.packing]
        self.heads = style.heads
        self.parts_ways = "qkv" in self.roles and mesh.gather is not None
        self.cause = "attention"
        self.launches: dict[tuple[str, str], ExchangeLaunch] = {}
        self.style = style
        self.mesh = mesh
        self._before = before

    # --- sizes ------------------------------------------------------------------------------------

    def layout(self, role: Role) -> Layout:
        """Of the tensor that attention gets in this role."""
        layout = self.style.dims
        return layout.packed() if role in ("kv", "qkv") else layout

    def fits(self, role: Role, tensor: torch.Tensor) -> bool:
        """Whether a tensor has the layout's dimensions; where no heads are exchanged, those of the
        heads and of their size may be one."""
        layout = self.layout(role)
        joined = self.mesh.heads is None and layout.head_dim == layout.ndim - 2
        return tensor.ndim == layout.ndim or (joined and tensor.ndim == layout.ndim - 1)

    def length(self, role: Role, tokens: int) -> int:
        """The whole sequence's length."""
        style, queries = self.style, role in ("q", "qkv")
        given = style.sequence_length if queries else style.kv_sequence_length
        return self.mesh.whole_length(tokens, given, f"ContextParallel, {role}")

    def query_ranges(self, tokens: int) -> tuple[tuple[int, int], ...]:
        """Which ranges of the sequence the queries are that attention gets.

        Args:
            tokens: how many of the sequence this rank holds outside attention.
        """
        length = self.length("q", tokens)
        return self.mesh.query_shards(length).ranges[self.mesh.row]

    def lengths(self, given: dict[Role, torch.Tensor]) -> Lengths:
        """Which queries attention will get, and the whole sequences.

        Args:
            given: this rank's tensors, before they are exchanged.
        """
        tokens = {role: tensor.size(self.layout(role).seq_dim) for role, tensor in given.items()}
        first, last = self.roles[0], self.roles[-1]
        return Lengths(
            self.query_ranges(tokens[first]),
            self.length(first, tokens[first]),
            self.length(last, tokens[last]),
        )

    def count_heads(self, given: dict[Role, torch.Tensor]) -> int | None:
        """Note the number of query heads. Returns that of keys; None if all are packed in one."""
        found = {role: tensor.size(self.layout(role).head_dim) for role, tensor in given.items()}
        heads = found[self.roles[0]]
        if self.heads not in (None, heads):
            raise ValueError(f"ContextParallel: found {heads} query heads, expected {self.heads}")
        others = [found[role] for role in self.roles[1:]]
        if len(set(others)) > 1:
            raise ValueError(
                f"ContextParallel: found {others[0]} key heads and {others[1]} value heads, "
                "expected as many"
            )
        self.heads = heads
        kv_heads = others[0] if others else None
        if self.mesh.heads is not None:
            self._plan(kv_heads)  # raises before anything is sent
        return kv_heads

    def own_heads(self, role: Role, heads: int) -> int:
        """How many heads of an input attention gets on this rank, of those that it has here."""
        if self.mesh.heads is None:
            return heads
        if role in ("q", "qkv"):
            return len(self._plan(None).queries()[self.mesh.column])
        plan = self._plan(heads)
        places = plan.expansion(self.mesh.column)
        return len(plan.keys()[self.mesh.column] if places is None else places)

    def _plan(self, kv_heads: int | None) -> HeadPlan:
        assert self.heads is not None and self.mesh.heads is not None
        return HeadPlan(self.heads, kv_heads or self.heads, self.mesh.heads.size)

    # --- launching --------------------------------------------------------------------------------

    def moves(self, role: Role) -> bool:
        """Whether an input is exchanged at all."""
        mesh = self.mesh
        return bool(mesh.heads or (mesh.gather and (role != "q" or mesh.moves_queries)))

    @property
    def moves_output(self) -> bool:
        """Whether attention's output is exchanged."""
        return self.mesh.heads is not None or self.mesh.moves_queries

    def first(self, role: Role, tensor: torch.Tensor) -> Pending | None:
        """Launch the first exchange of an input; None where it has none."""
        layout = self.layout(role)
        length = self.length(role, tensor.size(layout.seq_dim))
        spec = self._along_row(role, length, tensor.size(layout.head_dim))
        if spec is None:
            return self.gather(*self.apart(role, tensor)[-1], length)
        return self._exchange(tensor, spec, role)

    def apart(self, role: Role, tensor: torch.Tensor) -> list[tuple[Role, torch.Tensor]]:
        """An input as queries, and keys with values, where these two part ways."""
        if role != "qkv" or not self.parts_ways:
            return [(role, tensor)]
        dim = self.style.dims.head_dim
        return [("q", tensor.select(dim, 0)), ("kv", tensor.narrow(dim, 1, 2))]

    def gather(self, role: Role, tensor: torch.Tensor, length: int) -> Pending | None:
        """Launch the exchange along the column of the mesh; None where nothing is exchanged.

        Args:
            role: what the tensor is. Keys and values are gathered; queries are moved or stay.
            tensor: this row's tokens, in the layout of the role.
            length: tokens of the whole sequence.
        """
        spec = self._along_column(role, length)
        return None if spec is None else self._exchange(tensor, spec, role)

    def back(self, output: torch.Tensor, label: str = "o") -> Pending:
        """Launch what brings attention's output from this rank's heads, or others' queries, back.

        That is the way of the queries, backwards. Only where :attr:`moves_output`.
        """
        length = self.style.sequence_length
        if length is None:
            length = output.size(self.style.dims.seq_dim) * self.mesh.rows
        pending = None
        for spec in (self._along_column("q", length), self._along_row("q", length, None)):
            if spec is not None:
                output = output if pending is None else pending.wait()
                pending = self._exchange(output, spec.adjoint(), label)
        assert pending is not None  # or nothing is moved
        return pending

    def _along_row(self, role: Role, length: int, heads: int | None) -> SequenceToHeads | None:
        """From a rank's tokens to the row's, with a part of the heads, of which there are so many.

        None where no heads are exchanged.
        """
        comm, layout = self.mesh.heads, self.layout(role)
        if comm is None:
            return None
        queries = role in ("q", "qkv")
        own = self._plan(None).queries() if queries else self._plan(heads).keys()
        lengths = self.mesh.rank_shards(length).lengths
        return SequenceToHeads(comm, own, lengths, layout.seq_dim, layout.head_dim)

    def _along_column(self, role: Role, length: int) -> GatherSequence | MoveSequence | None:
        """From a row's tokens to all keys and values, or to other queries; None where they stay."""
        mesh, dim = self.mesh, self.layout(role).seq_dim
        if mesh.gather is None or (role == "q" and not mesh.moves_queries):
            return None
        shards = mesh.row_shards(length)
        if role == "q":
            return MoveSequence(mesh.gather, shards, mesh.query_shards(length), dim)
        return GatherSequence(mesh.gather, shards, dim)

    def _exchange(self, tensor: torch.Tensor, spec: SequenceExchange, label: str) -> Pending:
        self._before(tensor, label)
        lane, cause = self.mesh.name_of(spec.comm), self.cause

        def observe(spec: Any, label: str, sent: torch.Tensor) -> None:
            key = spec.collective, label
            times = self.launches[key].times + 1 if key in self.launches else 1
            why = "backward" if label.endswith("gradient") else cause
            self.launches[key] = ExchangeLaunch(*key, lane, sent.nbytes, why, times)

        return exchange(tensor, spec, label=label, observe=observe)

    def expanded(self, role: Role, tensor: torch.Tensor, kv_heads: int) -> torch.Tensor:
        """Keys or values, with a head for each of this rank's queries where they share unevenly.

        Args:
            role: which of them it is.
            tensor: as it arrived, in the layout of the role, with the heads of this rank.
            kv_heads: key/value heads of the whole model.
        """
        if self.mesh.heads is None:
            return tensor
        places = self._plan(kv_heads).expansion(self.mesh.heads.rank)
        return tensor if places is None else take(tensor, self.layout(role).head_dim, places)


#: Functions that wait for launches that are not used; each has to be called.
Orphans = list[Callable[[], object]]


class EarlyLaunches:
    """The early launches of one attention module, by role."""

    def __init__(self) -> None:
        self.orphans: Orphans = []
        self._launched: dict[str, Any] = {}

    def __len__(self) -> int:
        return sum(len(kept) for kept in self._launched.values())

    def keep(self, role: str, tensor: torch.Tensor, pending: Pending) -> None:
        """Keep a launch until attention takes it or its tensor dies.

        Args:
            role: what the tensor is.
            tensor: what a projection returned. It is referred to weakly.
            pending: its exchange.
        """
        kept = self._launched.setdefault(role, WeakTensorKeyDictionary())
        kept[tensor] = _Early(pending, tensor, self.orphans)

    def take(self, role: str, tensor: torch.Tensor) -> Pending | None:
        """The launch of this very tensor, if there is one: see [Note: Early launches]."""
        kept = self._launched.get(role)
        launched: _Early | None = None if kept is None else kept.pop(tensor, None)
        if launched is not None and launched.is_of(tensor):
            return launched.take()
        del launched  # an orphan now
        self.drop_orphans()
        return None

    def drop_orphans(self) -> None:
        """Wait for launches that are not used: their buffers are in use until then."""
        while self.orphans:
            self.orphans.pop(0)()


class _Early:
    """An early launch, with what the tensor was like; one that dies untaken is an orphan."""

    def __init__(self, pending: Pending, tensor: torch.Tensor, orphans: Orphans) -> None:
        self._pending: Pending | None = pending
        self._version = tensor._version
        self._had_grad = _wants_grad(tensor)
        self._orphans = orphans

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Whether this tensor was not edited since, nor wants a gradient that it did not want."""
        return tensor._version == self._version and self._had_grad >= _wants_grad(tensor)

    def take(self) -> Pending | None:
        """The launch, whose taker waits for it."""
        pending, self._pending = self._pending, None
        return pending

    def __del__(self) -> None:
        if self._pending is not None:
            self._orphans.append(self._pending.discard)


def _wants_grad(tensor: torch.Tensor) -> bool:
    return bool(tensor.requires_grad and torch.is_grad_enabled())
