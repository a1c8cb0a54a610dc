"""Causal attention of queries that hold some ranges of a sequence, against all its keys."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F


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
        key, value: ``[..., kv_heads, keys, size]``, the whole sequence in its natural order;
            ``kv_heads`` divides ``heads``.
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
        query, key, value, ranges: as :func:`causal_attention` takes them.
        diagonal: the query at position ``p`` of the sequence sees the keys up to ``p + diagonal``.
        dropout_p, scale, enable_gqa: of ``scaled_dot_product_attention``.

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
