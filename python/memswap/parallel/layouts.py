"""Who holds what: dimensions of attention tensors, heads of ranks, ranges of the sequence."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

#: How work is spread where keys are gathered; "queries" cuts the batch as "contiguous" does.
Balance = Literal["contiguous", "headtail", "queries"]


@dataclass(frozen=True)
class Layout:
    """Where the sequence and the heads are in a tensor of attention."""

    seq_dim: int
    head_dim: int
    ndim: int
    batch_dim: int | None
    """Of its sequences; None: they are packed into one."""

    def packed(self) -> Layout:
        """The same with a dimension before the heads for q, k and v, or k and v, in one tensor."""
        return Layout(self.seq_dim, self.head_dim + 1, self.ndim + 1, self.batch_dim)


#: b batch, s sequence, h (or n) heads, d head size, t tokens of packed sequences (cu_seqlens).
LAYOUTS = {
    "bshd": Layout(seq_dim=1, head_dim=2, ndim=4, batch_dim=0),
    "bnsd": Layout(seq_dim=2, head_dim=1, ndim=4, batch_dim=0),
    "sbhd": Layout(seq_dim=0, head_dim=2, ndim=4, batch_dim=1),
    "thd": Layout(seq_dim=0, head_dim=1, ndim=3, batch_dim=None),
}


def even_cuts(length: int, parts: int) -> list[tuple[int, int]]:
    """``parts`` ranges that cover ``range(length)``; the first ``length % parts`` are longer."""
    base, extra = divmod(length, parts)
    stops = list(itertools.accumulate(base + (part < extra) for part in range(parts)))
    return list(zip([0, *stops[:-1]], stops, strict=True))


@dataclass(frozen=True)
class HeadPlan:
    """Which heads each of ``ranks`` ranks computes.

    The heads of the queries are cut evenly, as far as they go; each rank gets those heads of keys
    and values that its queries need, so one that is needed by two ranks goes to both.

    Args:
        heads: number of query heads.
        kv_heads: number of key/value heads; query head ``h`` uses ``h * kv_heads // heads``.
        ranks: size of the group.

    Raises:
        ValueError: ``kv_heads`` does not divide ``heads``, or there are fewer heads than ranks.
    """

    heads: int
    kv_heads: int
    ranks: int

    def __post_init__(self) -> None:
        if self.heads < self.ranks:
            raise ValueError(
                f"found {self.heads} query heads for {self.ranks} ranks; every rank needs one: "
                f"use ulysses={self.heads} or less, and gather keys and values over the rest of "
                "the mesh"
            )
        if self.kv_heads < 1 or self.heads % self.kv_heads:
            raise ValueError(
                f"found {self.heads} query heads and {self.kv_heads} key/value heads; the second "
                "number must divide the first"
            )

    def queries(self) -> tuple[tuple[int, ...], ...]:
        """The query heads of each rank: every head once."""
        return tuple(tuple(range(*cut)) for cut in even_cuts(self.heads, self.ranks))

    def keys(self) -> tuple[tuple[int, ...], ...]:
        """The key/value heads of each rank: every head at least once."""
        group = self.heads // self.kv_heads
        return tuple(tuple(sorted({head // group for head in own})) for own in self.queries())

    def expansion(self, rank: int) -> tuple[int, ...] | None:
        """For each query head of ``rank`` the place of its key/value head among those of ``rank``.

        None where each key/value head serves equally many, neighbouring, query heads, so that
        grouped-query attention on the rank's own heads is right as it is.
        """
        group = self.heads // self.kv_heads
        keys = self.keys()[rank]
        places = tuple(keys.index(head // group) for head in self.queries()[rank])
        each, rest = divmod(len(places), len(keys))
        uniform = tuple(place for place in range(len(keys)) for _ in range(each))
        return None if not rest and places == uniform else places


@dataclass(frozen=True)
class SequenceShards:
    """Which ranges of a sequence each rank holds, in the order in which it holds them.

    Args:
        ranges: per rank, ``(start, stop)`` pairs. Together they cover the sequence once.
    """

    ranges: tuple[tuple[tuple[int, int], ...], ...]

    @classmethod
    def cut(cls, length: int, ranks: int, balance: Balance = "contiguous") -> SequenceShards:
        """Cut a sequence; lengths differ by at most one token per range.

        Args:
            length: tokens of the sequence.
            ranks: number of parts.
            balance: "contiguous" and "queries" give each rank one range. "headtail" cuts the
                sequence into ``2 * ranks`` chunks, of which rank ``r`` has ``r`` and
                ``2 * ranks - 1 - r``, so that causal attention is equal work.
        """
        if balance != "headtail":
            return cls(tuple((cut,) for cut in even_cuts(length, ranks)))
        chunks = even_cuts(length, 2 * ranks)
        return cls(tuple(_joined([chunks[r], chunks[2 * ranks - 1 - r]]) for r in range(ranks)))

    @property
    def lengths(self) -> tuple[int, ...]:
        """Number of tokens of each rank."""
        return tuple(sum(stop - start for start, stop in own) for own in self.ranges)

    @property
    def length(self) -> int:
        """Number of tokens of the sequence."""
        return sum(self.lengths)

    def split(self, rank: int, parts: int) -> SequenceShards:
        """The tokens of ``rank``, in their order, cut evenly among ``parts``."""
        shards = []
        for first, last in even_cuts(self.lengths[rank], parts):
            own, offset = [], 0
            for start, stop in self.ranges[rank]:
                begin = max(start, start + first - offset)
                end = min(stop, start + last - offset)
                if begin < end:
                    own.append((begin, end))
                offset += stop - start
            shards.append(tuple(own))
        return SequenceShards(tuple(shards))

    def positions(self, rank: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """Where the tokens of ``rank`` are in the sequence: int64 ``[lengths[rank]]``."""
        parts = [torch.arange(*one, device=device) for one in self.ranges[rank]]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device=device)

    def positions_of(self, rank: int) -> Callable[[int], int]:
        """A function from a place in the sequence to that place among the tokens of ``rank``."""

        def place(position: int) -> int:
            offset = 0
            for start, stop in self.ranges[rank]:
                if start <= position < stop:
                    return offset + position - start
                offset += stop - start
            raise ValueError(f"found position {position}, expected one of {self.ranges[rank]}")

        return place


def _joined(ranges: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Without empty ranges, neighbours as one."""
    joined: list[tuple[int, int]] = []
    for start, stop in ranges:
        if start == stop:
            continue
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return tuple(joined)
