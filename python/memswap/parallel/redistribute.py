"""The redistributions of attention: sequence to heads and back, gather of the sequence and back.

Each is one collective on contiguous buffers of its own, and is the other's adjoint. Dimensions
other than the two named ones are carried along, whatever they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from memswap.parallel.comm import Comm, Ticket
from memswap.parallel.in_flight import InFlight, Redistribution
from memswap.parallel.layouts import SequenceShards


@dataclass(frozen=True)
class _HeadExchange(Redistribution):
    """What both directions between sequence and heads have in common."""

    collective = "all-to-all"

    comm: Comm
    heads: tuple[tuple[int, ...], ...]
    lengths: tuple[int, ...]
    seq_dim: int
    head_dim: int

    def __post_init__(self) -> None:
        for what, found in (("heads", self.heads), ("lengths", self.lengths)):
            if len(found) != self.comm.size:
                raise ValueError(
                    f"exchange: found {what} of {len(found)} ranks, expected one entry for each "
                    f"of the {self.comm.size} ranks of the group"
                )

    @property
    def all_heads(self) -> int:
        """Number of heads of the whole tensor."""
        return 1 + max(head for own in self.heads for head in own)

    def _check(self, tensor: torch.Tensor, tokens: int, heads: int, label: str) -> None:
        _check_size(tensor, self.seq_dim, tokens, label, "tokens")
        _check_size(tensor, self.head_dim, heads, label, "heads")

    def _shape(self, tensor: torch.Tensor, tokens: int, heads: int) -> list[int]:
        return _with_size(_with_size(tensor.shape, self.seq_dim, tokens), self.head_dim, heads)


class SequenceToHeads(_HeadExchange):
    """From a part of the sequence with all heads to the whole sequence with a part of the heads.

    ``[..., own tokens, ..., all heads, ...]`` becomes ``[..., all tokens, ..., own heads, ...]``,
    contiguous and of the same dtype. The sequence is the ranks' tokens one rank after another.

    Args:
        comm: the ranks.
        heads: per rank, the heads it computes (:meth:`HeadPlan.queries`, :meth:`HeadPlan.keys`). A
            head may be at several ranks.
        lengths: per rank, its number of tokens.
        seq_dim: the dimension of the tokens.
        head_dim: the dimension of the heads.

    Raises:
        ValueError: ``heads`` or ``lengths`` are of another number of ranks.
    """

    def launch(self, tensor: torch.Tensor, label: str) -> InFlight:
        rank = self.comm.rank
        self._check(tensor, self.lengths[rank], self.all_heads, label)
        parts = [take(tensor, self.head_dim, own) for own in self.heads]
        heads = len(self.heads[rank])
        shapes = [self._shape(tensor, length, heads) for length in self.lengths]
        ticket, arrived = _all_to_all(self.comm, parts, shapes, label)
        shape = self._shape(tensor, sum(self.lengths), heads)
        return InFlight(ticket, lambda: torch.cat(arrived(), dim=self.seq_dim), shape)

    def adjoint(self) -> HeadsToSequence:
        return HeadsToSequence(self.comm, self.heads, self.lengths, self.seq_dim, self.head_dim)


class HeadsToSequence(_HeadExchange):
    """From the whole sequence with a part of the heads to a part of the sequence with all heads.

    The way back from :class:`SequenceToHeads`, with its arguments. A head that is at several ranks
    becomes the sum of theirs, added in the order of the ranks.
    """

    def launch(self, tensor: torch.Tensor, label: str) -> InFlight:
        rank = self.comm.rank
        self._check(tensor, sum(self.lengths), len(self.heads[rank]), label)
        parts = tensor.split(list(self.lengths), dim=self.seq_dim)
        shapes = [self._shape(tensor, self.lengths[rank], len(own)) for own in self.heads]
        ticket, arrived = _all_to_all(self.comm, parts, shapes, label)
        shape = self._shape(tensor, self.lengths[rank], self.all_heads)

        def unpack() -> torch.Tensor:
            parts = arrived()
            if [head for own in self.heads for head in own] == list(range(self.all_heads)):
                return torch.cat(parts, dim=self.head_dim)
            output = parts[0].new_zeros(shape)
            for own, part in zip(self.heads, parts, strict=True):
                for place, head, count in _runs(own):
                    sent = part.narrow(self.head_dim, place, count)
                    output.narrow(self.head_dim, head, count).add_(sent)
            return output

        return InFlight(ticket, unpack, shape)

    def adjoint(self) -> SequenceToHeads:
        return SequenceToHeads(self.comm, self.heads, self.lengths, self.seq_dim, self.head_dim)


@dataclass(frozen=True)
class _SequenceGather(Redistribution):
    """What gathering a sequence and scattering it have in common.

    Ranks exchange their tokens one rank after another, shorter parts padded, so that any lengths
    are one collective.
    """

    comm: Comm
    shards: SequenceShards
    seq_dim: int

    def __post_init__(self) -> None:
        if len(self.shards.ranges) != self.comm.size:
            raise ValueError(
                f"exchange: found shards of {len(self.shards.ranges)} ranks, expected one for "
                f"each of the {self.comm.size} ranks of the group"
            )

    @property
    def own_length(self) -> int:
        """Tokens of this rank."""
        return self.shards.lengths[self.comm.rank]

    def _places(self) -> Iterator[tuple[int, int, int]]:
        """Ranges of the sequence, and where each begins among the padded parts."""
        for rank, own in enumerate(self.shards.ranges):
            place = rank * max(self.shards.lengths)
            for start, stop in own:
                yield start, stop, place
                place += stop - start


class GatherSequence(_SequenceGather):
    """From a part of the sequence to the whole one, in its natural order, at every rank.

    ``[..., own tokens, ...]`` becomes ``[..., all tokens, ...]``, contiguous, of the same dtype.

    Args:
        comm: the ranks.
        shards: which ranges of the sequence each rank holds.
        seq_dim: the dimension of the tokens.

    Raises:
        ValueError: ``shards`` are of another number of ranks.
    """

    collective = "all-gather"

    def launch(self, tensor: torch.Tensor, label: str) -> InFlight:
        _check_size(tensor, self.seq_dim, self.own_length, label, "tokens")
        tokens = tensor.movedim(self.seq_dim, 0)
        send = tokens.new_zeros((max(self.shards.lengths), *tokens.shape[1:]))
        send[: len(tokens)] = tokens
        received = send.new_empty((self.comm.size * len(send), *send.shape[1:]))
        ticket = self.comm.all_gather([received], [send], label=label)

        def unpack() -> torch.Tensor:
            parts = [
                received[place : place + stop - start]
                for start, stop, place in sorted(self._places())
            ]
            return torch.cat(parts).movedim(0, self.seq_dim).contiguous()

        return InFlight(ticket, unpack, _with_size(tensor.shape, self.seq_dim, self.shards.length))

    def adjoint(self) -> ReduceScatterSequence:
        return ReduceScatterSequence(self.comm, self.shards, self.seq_dim)


class ReduceScatterSequence(_SequenceGather):
    """From a whole sequence at every rank to a part of the ranks' sum.

    The way back from :class:`GatherSequence`, with its arguments.
    """

    collective = "reduce-scatter"

    def launch(self, tensor: torch.Tensor, label: str) -> InFlight:
        _check_size(tensor, self.seq_dim, self.shards.length, label, "tokens")
        tokens = tensor.movedim(self.seq_dim, 0)
        received = tokens.new_empty((max(self.shards.lengths), *tokens.shape[1:]))
        send = tokens.new_zeros((self.comm.size * len(received), *tokens.shape[1:]))
        for start, stop, place in self._places():
            send[place : place + stop - start] = tokens[start:stop]
        ticket = self.comm.reduce_scatter([received], [send], op="sum", label=label)

        def unpack() -> torch.Tensor:
            return received[: self.own_length].movedim(0, self.seq_dim).contiguous()

        return InFlight(ticket, unpack, _with_size(tensor.shape, self.seq_dim, self.own_length))

    def adjoint(self) -> GatherSequence:
        return GatherSequence(self.comm, self.shards, self.seq_dim)


@dataclass(frozen=True)
class MoveSequence(Redistribution):
    """From one cut of the sequence to another one, each rank holding a part of both.

    Args:
        comm: the ranks.
        source: which ranges of the sequence each rank holds.
        target: which ranges it gets.
        seq_dim: the dimension of the tokens.

    Raises:
        ValueError: the cuts are of other lengths or numbers of ranks.
    """

    collective = "all-to-all"

    comm: Comm
    source: SequenceShards
    target: SequenceShards
    seq_dim: int

    def __post_init__(self) -> None:
        for shards in (self.source, self.target):
            if len(shards.ranges) != self.comm.size or shards.length != self.source.length:
                raise ValueError(
                    f"exchange: found {len(shards.ranges)} parts of {shards.length} tokens, "
                    f"expected {self.comm.size} of {self.source.length}"
                )

    def launch(self, tensor: torch.Tensor, label: str) -> InFlight:
        rank, dim = self.comm.rank, self.seq_dim
        _check_size(tensor, dim, self.source.lengths[rank], label, "tokens")
        place_of = self.source.positions_of(rank)
        parts = []
        for other in range(self.comm.size):
            pieces = [
                tensor.narrow(dim, place_of(start), stop - start)
                for start, stop in self._pieces(rank, other)
            ]
            parts.append(torch.cat(pieces or [tensor.narrow(dim, 0, 0)], dim=dim))
        arriving = [self._pieces(other, rank) for other in range(self.comm.size)]
        sizes = [[stop - start for start, stop in pieces] for pieces in arriving]
        shapes = [_with_size(tensor.shape, dim, sum(each)) for each in sizes]
        ticket, arrived = _all_to_all(self.comm, parts, shapes, label)
        shape = _with_size(tensor.shape, dim, self.target.lengths[rank])

        def unpack() -> torch.Tensor:
            place_of = self.target.positions_of(rank)
            output = tensor.new_empty(shape)
            for part, pieces, each in zip(arrived(), arriving, sizes, strict=True):
                for piece, (start, stop) in zip(part.split(each, dim), pieces, strict=True):
                    output.narrow(dim, place_of(start), stop - start).copy_(piece)
            return output

        return InFlight(ticket, unpack, shape)

    def adjoint(self) -> MoveSequence:
        return MoveSequence(self.comm, self.target, self.source, self.seq_dim)

    def _pieces(self, sender: int, receiver: int) -> list[tuple[int, int]]:
        """What of the sequence goes from one rank to another, in the receiver's order."""
        return [
            (max(a, c), min(b, d))
            for a, b in self.target.ranges[receiver]
            for c, d in self.source.ranges[sender]
            if max(a, c) < min(b, d)
        ]


SequenceExchange = (
    SequenceToHeads | HeadsToSequence | GatherSequence | ReduceScatterSequence | MoveSequence
)


def take(tensor: torch.Tensor, dim: int, heads: Sequence[int]) -> torch.Tensor:
    """Some heads of a tensor. By slices: an index tensor would travel to the device each time.

    Args:
        tensor: with heads in dimension ``dim``.
        dim: the dimension of the heads.
        heads: which, in this order.
    """
    parts = [tensor.narrow(dim, head, count) for _, head, count in _runs(heads)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)


def _all_to_all(
    comm: Comm, parts: Sequence[torch.Tensor], shapes: Sequence[list[int]], label: str
) -> tuple[Ticket, Callable[[], list[torch.Tensor]]]:
    """Launch one all-to-all of tensors that need not have the same size.

    Args:
        comm: the ranks.
        parts: ``parts[j]`` goes to rank ``j``.
        shapes: ``shapes[j]`` is that of the part that comes from rank ``j``.
        label: names the collective.

    Returns:
        The ticket, and a function that gives the parts that came, once that was waited for.
    """
    send = torch.cat([part.reshape(-1) for part in parts])
    sizes = [torch.Size(shape).numel() for shape in shapes]
    received = send.new_empty(sum(sizes))
    ticket = comm.all_to_all(received, send, sizes, [part.numel() for part in parts], label=label)
    return ticket, lambda: [
        part.view(shape) for part, shape in zip(received.split(sizes), shapes, strict=True)
    ]


def _runs(heads: Sequence[int]) -> list[tuple[int, int, int]]:
    """Heads that follow one another, as ``(place in heads, first of them, how many)``."""
    found: list[tuple[int, int, int]] = []
    for place, head in enumerate(heads):
        if found and found[-1][1] + found[-1][2] == head:
            found[-1] = (*found[-1][:2], found[-1][2] + 1)
        else:
            found.append((place, head, 1))
    return found


def _with_size(shape: Sequence[int], dim: int, size: int) -> list[int]:
    changed = list(shape)
    changed[dim] = size
    return changed


def _check_size(tensor: torch.Tensor, dim: int, expected: int, label: str, what: str) -> None:
    """Refuse a part that does not fit: launched, it would hang or corrupt the other ranks."""
    if tensor.size(dim) != expected:
        raise ValueError(
            f"exchange {label!r}: found {tensor.size(dim)} {what} in dimension {dim} of "
            f"{list(tensor.shape)}, expected {expected} on this rank; check the layout, and that "
            "all ranks cut the sequence alike"
        )
