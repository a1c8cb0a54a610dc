"""Causal attention of queries that hold some ranges of a sequence, against all its keys.

[Note: Placed queries] Where keys are gathered, attention gets a part of the queries and all keys.
What masks by the place of a query in its tensor (``is_causal=True``, ``torch.tril`` of scores) then
means another mask than it does on one process: it would put this rank's queries at the beginning of
the sequence. While such a module runs, :class:`PlacedQueries` is told of its calls and does them
for the positions at which the queries are: a causal ``scaled_dot_product_attention`` becomes one of
each range of queries against the keys up to that range's end, and ``tril`` and ``triu`` of a matrix
``[queries, keys]`` cut along the diagonal of the whole sequence. Every other call is passed on as
it is. What the mode cannot see, :mod:`memswap.parallel.proof` finds out. Kernels whose causal mask
takes the queries for the last ones of the keys, as flash attention's does, are right as they are if
the queries are one range and the keys end with it: where that is found out, keys are cut there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import CausalBias, CausalVariant
from torch.overrides import TorchFunctionMode

from memswap.engine.calls import is_running

if TYPE_CHECKING:
    from types import FrameType

#: Which half of a matrix each keeps; those with an underscore write to it.
_TRIANGLES: dict[Any, Callable[..., torch.Tensor]] = {
    torch.tril: torch.tril,
    torch.Tensor.tril: torch.tril,
    torch.Tensor.tril_: torch.tril,
    torch.triu: torch.triu,
    torch.Tensor.triu: torch.triu,
    torch.Tensor.triu_: torch.triu,
}
_IN_PLACE = (torch.Tensor.tril_, torch.Tensor.triu_)
_DROPOUTS = (F.dropout, torch.dropout, F.dropout1d, F.dropout2d, F.alpha_dropout)
_PLACED = (F.scaled_dot_product_attention, *_TRIANGLES, *_DROPOUTS)


def causal_mask(query_positions: torch.Tensor, key_positions: torch.Tensor) -> torch.Tensor:
    """Which keys each query sees: bool ``[queries, keys]``, True where the key is not later."""
    return query_positions[:, None] >= key_positions[None, :]


def causal_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    ranges: Sequence[tuple[int, int]],
    *,
    scale: float | None = None,
) -> torch.Tensor:
    """Causal attention where the queries are only some ranges of the keys' sequence.

    Each range of queries meets the keys up to its own end, so ranks with equally many tokens at
    equally late positions do equal work ("headtail").

    Args:
        query: ``[..., heads, queries, size]``, the tokens of ``ranges`` in that order.
        key: ``[..., kv_heads, keys, size]``, the whole sequence in its natural order; ``kv_heads``
            divides ``heads``.
        value: as ``key``.
        ranges: ``(start, stop)`` in the sequence: :meth:`AttentionExchanges.query_ranges`.
        scale: factor of the scores; None is ``1 / sqrt(size)``.

    Returns:
        ``[..., heads, queries, size]``.

    Raises:
        ValueError: the ranges do not make up the queries, or reach beyond the keys.
    """
    found, tokens = query.size(-2), sum(stop - start for start, stop in ranges)
    if found != tokens:
        raise ValueError(f"causal_attention: found {found} queries for ranges of {tokens} tokens")
    if any(stop > key.size(-2) for _, stop in ranges):
        raise ValueError(
            f"causal_attention: found {key.size(-2)} keys for queries of ranges {tuple(ranges)}; "
            "expected the keys of the whole sequence"
        )
    return attend_ranges(
        query, key, value, ranges, scale=scale, enable_gqa=query.size(-3) != key.size(-3)
    )


def attend_ranges(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    ranges: Sequence[tuple[int, int]],
    *,
    diagonal: int = 0,
    dropout_p: float = 0.0,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Causal attention range by range, each against the keys that it may see.

    Args:
        query: ``[..., heads, queries, size]``, the tokens of ``ranges`` in that order.
        key: ``[..., kv_heads, keys, size]``, the whole sequence in its natural order.
        value: as ``key``.
        ranges: ``(start, stop)`` in the sequence.
        diagonal: the query at position ``p`` of the sequence sees the keys up to ``p + diagonal``.
        dropout_p: share of the attention weights that are dropped.
        scale: factor of the scores; None is ``1 / sqrt(size)``.
        enable_gqa: whether there may be fewer heads of keys and values than of queries.

    Returns:
        ``[..., heads, queries, size]``.
    """
    outputs, offset = [], 0
    for start, stop in ranges:
        seen = max(1, min(stop + diagonal, key.size(-2)))
        # Queries that begin with the keys need no mask, which the fastest kernels refuse.
        plain = start + diagonal == 0 and seen == stop + diagonal
        device = query.device
        places = torch.arange(start + diagonal, stop + diagonal, device=device)
        outputs.append(
            F.scaled_dot_product_attention(
                query.narrow(-2, offset, stop - start),
                key.narrow(-2, 0, seen),
                value.narrow(-2, 0, seen),
                attn_mask=None if plain else causal_mask(places, torch.arange(seen, device=device)),
                dropout_p=dropout_p,
                is_causal=plain,
                scale=scale,
                enable_gqa=enable_gqa,
            )
        )
        offset += stop - start
    return torch.cat(outputs, dim=-2) if outputs else query.new_empty(query.shape)


@dataclass(frozen=True)
class Lengths:
    """What one call of attention gets, where keys are gathered.

    Args:
        ranges: ``(start, stop)`` in the sequence of its queries, in order.
        queries: length of the whole sequence of queries.
        keys: length of the whole sequence of keys.
    """

    ranges: tuple[tuple[int, int], ...]
    queries: int
    keys: int

    @property
    def count(self) -> int:
        """Number of queries that it gets."""
        return sum(stop - start for start, stop in self.ranges)

    @property
    def stop(self) -> int:
        """The position after its last query."""
        return max(stop for _, stop in self.ranges)

    @property
    def positions(self) -> torch.Tensor:
        """Where these are in the sequence: int64 ``[count]``, on the CPU."""
        return torch.cat([torch.arange(*one) for one in self.ranges])


class PlacedQueries(TorchFunctionMode):  # type: ignore[misc]
    """See [Note: Placed queries].

    Args:
        lengths: which queries attention gets.
        dropout: False drops nothing, so that two calls can be compared.
        call: the call of a module that it is for; None: a ``with`` block. After Ctrl-C nobody takes
            the mode off, and it does nothing more once the call has ended.
    """

    def __init__(
        self, lengths: Lengths, *, dropout: bool = True, call: FrameType | None = None
    ) -> None:
        super().__init__()
        self._call = call
        self._lengths = lengths
        self._count = lengths.count
        self._dropout = dropout

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _PLACED or self.is_over():
            return func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return self._attend(*args, **kwargs)
        if func in _TRIANGLES:
            return self._triangle(func, *args, **kwargs)
        if func in _DROPOUTS and not self._dropout:
            return args[0] if args else kwargs["input"]
        return func(*args, **kwargs)

    def is_over(self) -> bool:
        """Whether the call that it is for has ended."""
        return self._call is not None and not is_running(self._call)

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        options: dict[str, Any] = {
            "dropout_p": dropout_p if self._dropout else 0.0,
            "scale": scale,
            "enable_gqa": enable_gqa,
        }
        bias = attn_mask.variant if isinstance(attn_mask, CausalBias) else None
        causal = bias is not None or (is_causal and attn_mask is None)
        if not causal or self._count == self._lengths.queries:
            output: torch.Tensor = F.scaled_dot_product_attention(
                query, key, value, attn_mask, is_causal=is_causal, **options
            )
            return output
        if query.size(-2) != self._count:
            raise ValueError(
                f"ContextParallel: found a causal attention of {query.size(-2)} queries where "
                f"keys are gathered and this rank has {self._count} of {self._lengths.queries}; "
                "where in the sequence they are is not known"
            )
        lower = bias == CausalVariant.LOWER_RIGHT
        diagonal = key.size(-2) - self._lengths.queries if lower else 0
        ranges = self._lengths.ranges
        return attend_ranges(query, key, value, ranges, diagonal=diagonal, **options)

    def _triangle(self, func: Any, input: torch.Tensor, diagonal: int = 0, **kwargs: Any) -> Any:
        shape = tuple(input.shape[-2:])
        if shape != (self._count, self._lengths.keys) or self._count == self._lengths.queries:
            return func(input, diagonal, **kwargs)
        if abs(diagonal - (self._lengths.keys - self._count)) <= 1:
            # The queries were taken for the last ones, those of the whole sequence were meant.
            diagonal -= self._lengths.queries - self._count
        parts = input.split([stop - start for start, stop in self._lengths.ranges], dim=-2)
        keep = _TRIANGLES[func]
        whole = torch.cat(
            [
                keep(part, diagonal + start)
                for part, (start, _) in zip(parts, self._lengths.ranges, strict=True)
            ],
            dim=-2,
        )
        return input.copy_(whole) if func in _IN_PLACE else whole
