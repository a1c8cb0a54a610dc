"""The layout that memswap.encode chooses: how far from the shortest, and what choosing costs.

A frame is made in every layout that the tensor's dtype has, and in the one that is chosen. The cost
is that of choosing beside an encode in the chosen layout, on one thread by its own clock, of 64 MiB
of the same blocks: medians of rounds that alternate, on an idle machine. ``--rounds 0`` leaves it
out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from common import make_parser, write_result

import memswap
from memswap import codec
from memswap.cli.bench.layouts import (
    DTYPES,
    FLOATS,
    INTEGERS,
    chosen_for,
    cost_of_choosing,
    kinds_of,
    sizes_of,
)

COST_BYTES = 64 << 20
#: Of which the cost is told, by preference: of others it is much the same.
COST_DTYPES = (torch.bfloat16, torch.int64, torch.bool)


@dataclass(frozen=True)
class Row:
    """One tensor."""

    kind: str
    dtype: str
    best: str
    chosen: str
    over_best: float
    """The chosen frame's bytes over those of the shortest."""
    cost: float | None
    """Of choosing, as a share of the encode."""


def cost_of(tensor: torch.Tensor, chosen: codec.LayoutName, rounds: int) -> float:
    """Of 64 MiB of these blocks."""
    large = tensor.flatten().repeat(max(1, COST_BYTES // tensor.nbytes))
    return cost_of_choosing(large, chosen, rounds)


def measure(dtype: torch.dtype, rounds: int) -> list[Row]:
    """A row for each kind of tensor of a dtype."""
    rows = []
    for kind, make in kinds_of(dtype).items():
        tensor = make()
        sizes = sizes_of(tensor)
        frame = memswap.encode(tensor)
        shortest = min(sizes.values())
        chosen = chosen_for(tensor)
        # Of layouts of one size, the chosen one.
        best = chosen if frame.nbytes == shortest else min(sizes, key=lambda one: sizes[one])
        timed = rounds and dtype in COST_DTYPES
        cost = cost_of(tensor, chosen, rounds) if timed else None
        name = str(dtype).removeprefix("torch.")
        rows.append(Row(kind, name, best, chosen, frame.nbytes / shortest, cost))
    return rows


def in_words(names: list[str]) -> str:
    """Dtypes, all or nearly all of a family by the family's name."""
    words = []
    for family, members in (("floats", FLOATS), ("integers", INTEGERS)):
        every = [str(dtype).removeprefix("torch.") for dtype in members]
        absent = [name for name in every if name not in names]
        if len(absent) <= 2:
            words.append(family + (f" but {' and '.join(absent)}" if absent else ""))
        else:
            words += [name for name in every if name in names]
    return ", ".join([*words, *(["bool"] if "bool" in names else [])])


def by_layout(rows: list[Row], layout_of: Callable[[Row], str]) -> str:
    """Layouts, each with the dtypes that have it."""
    groups = defaultdict(list)
    for row in rows:
        groups[layout_of(row)].append(row.dtype)
    if len(groups) == 1:
        return next(iter(groups))
    return "; ".join(f"{layout}: {in_words(names)}" for layout, names in groups.items())


def table(rows: list[Row]) -> str:
    """Markdown: a line for each kind."""
    kinds = defaultdict(list)
    for row in rows:
        kinds[row.kind].append(row)
    has_costs = any(row.cost is not None for row in rows)
    titles = ["kind", "dtypes", "best", "chosen", "over best"]
    titles += ["choosing, of an encode"] if has_costs else []
    lines = ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)]
    for kind, members in kinds.items():
        best = by_layout(members, lambda row: row.best)
        chosen = by_layout(members, lambda row: row.chosen)
        cells = [kind, in_words([row.dtype for row in members]), best]
        cells += ["the same" if chosen == best else chosen]
        cells += [f"{max(row.over_best for row in members) - 1:.2%}"]
        costs = [f"{row.cost:.1%} ({row.dtype})" for row in members if row.cost is not None]
        cells += [", ".join(costs)] if has_costs else []
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = make_parser(__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15, help="of what choosing costs; 0: untold")
    arguments = parser.parse_args()
    if arguments.device != "cpu":
        print("bench_layouts: the layouts of a CPU's tensors: nothing to do on", arguments.device)
        return
    rows = [row for dtype in DTYPES for row in measure(dtype, arguments.rounds)]
    print(table(rows))
    worst = max(rows, key=lambda row: row.over_best)
    print(f"\nfarthest from the best: {worst.kind}, {worst.dtype}: {worst.over_best:.4f}")
    write_result(arguments.json, torch.device("cpu"), {"results": [asdict(row) for row in rows]})


if __name__ == "__main__":
    main()
