"""Report: statistics as text, which a notebook shows as a table."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

from memswap.engine.stats import Stats

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

#: What the rows of a report count: docs/choosing.md has the same table, and a notebook shows it
#: where the mouse rests.
MEANINGS = {
    "offered by autograd": "what the managed modules saved for backward",
    "same storage again": "saved before, by another operator or as another view: it moves once",
    "moved": "storages that left, or became frames",
    "of these, encoded": "those that became frames; beside it their bytes before",
    "their frames": "the bytes of these frames",
    "of these, as recipes": "those whose operator is run again in backward",
    "operators run again": "how many runs that took",
    "really freed": "what nobody else held, so that its memory was free",
    "returned": "storages that backward got back",
    "of these, when backward asked": "those that were not on their way yet: all of them in the "
    "first step, and where the thread that asks decodes, as on a CPU",
    "peak resident": "the most bytes of saved activations on the device at a time, frames "
    "included; in the steps that learnt as well, until reset_stats()",
    "peak away": "the most bytes in the pool at a time; frames on the device are not away",
    "host blocked, seconds": "how long the calling thread waited for a transfer or for room",
}

#: The same of the most common reasons why tensors are kept; docs/choosing.md has all of them.
REASONS = {
    "parameter": "parameters, views of them, weights that are sharded and gathered",
    "small": "below Policy.min_bytes (64 KiB)",
    "policy": "the policy says KEEP, or leaves the unit out",
    "planned": "the plan keeps it",
    "needed at once": "backward begins with it: leaving would be a detour",
    "held at the peak": "the forward still uses it at its peak, which its frame would raise",
    "never freed": "somebody else holds the storage (a residual stream, a module's output), so "
    "leaving frees nothing",
    "does not shrink": "its frame was longer than 0.95 of it; looked at again later",
}


class Report(str):
    """Statistics as text for a terminal, which a notebook shows as a table."""

    __slots__ = ("_above", "_rows")

    _above: tuple[str, ...]
    _rows: tuple[tuple[str, str, str], ...]

    def __new__(cls, above: tuple[str, ...], rows: Iterable[tuple[str, str, str]]) -> Report:
        """A report of a table, and the lines above it.

        Args:
            above: sentences.
            rows: a label, a number of tensors and a size (MiB, or seconds); without any there is
                no table.
        """
        rows = tuple(rows)
        lines = [*above]
        if rows:
            lines.append(f"{'':<42}{'tensors':>10}{'MiB':>12}")
        lines += [f"{label:<42}{tensors:>10}{size:>12}" for label, tensors, size in rows]
        made = super().__new__(cls, "\n".join(lines))
        made._above, made._rows = above, rows
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return Report, (self._above, self._rows)

    def below(self, *lines: str) -> Report:
        """The same report under more lines."""
        return Report((*lines, *self._above), self._rows)

    def _repr_html_(self) -> str:
        """The table as notebooks show it; a label that begins with blanks is part of another."""
        above = "".join(f"<p>{escape(line)}</p>" for line in self._above)
        rows = "".join(
            f'<tr title="{escape(_meaning(label.strip()))}">'
            f'<td style="text-align:left{";padding-left:2em" if label[:1] == " " else ""}">'
            f"{escape(label.strip())}</td><td>{tensors}</td><td>{size}</td></tr>"
            for label, tensors, size in self._rows
        )
        if not rows:
            return above
        return (
            f"{above}<table><thead><tr><th></th><th>tensors</th><th>MiB</th></tr></thead>"
            f"<tbody>{rows}</tbody></table>"
        )


def report(stats: Stats | Mapping[str, Stats]) -> Report:
    """Statistics as a text table, bytes in MiB; several by name, one after another."""
    if isinstance(stats, Stats):
        return Report((), _rows(stats)) if stats.offered_tensors else Report((NOTHING_YET,), ())
    rows: list[tuple[str, str, str]] = []
    for name, one in stats.items():
        rows += [(name, "", ""), *(_rows(one) if one.offered_tensors else ())]
    return Report((), rows)


def _meaning(label: str) -> str:
    """What a row counts; empty where only docs/choosing.md says it."""
    reason = label.removeprefix("kept: ")
    return MEANINGS.get(label, "") if reason == label else REASONS.get(reason, "")


NOTHING_YET = (
    "nothing yet: none of these modules has run with gradients enabled, unless in code "
    "that torch.compile had compiled before: it leaves out hooks that are added later"
)


def _rows(stats: Stats) -> list[tuple[str, str, str]]:
    rows = [
        ("offered by autograd", stats.offered_tensors, stats.offered_bytes),
        ("same storage again", stats.deduplicated_tensors, stats.deduplicated_bytes),
        *((f"kept: {reason}", count.tensors, count.bytes) for reason, count in stats.kept.items()),
        ("moved", stats.moved_storages, stats.moved_bytes),
        ("  of these, encoded", stats.encoded_storages, stats.encoded_bytes),
        ("  their frames", "", stats.frame_bytes),
        *(
            [
                ("  of these, as recipes", stats.recipe_storages, stats.recipe_bytes),
                ("  operators run again", stats.recipe_runs, ""),
            ]
            if stats.recipe_storages
            else []
        ),
        ("really freed", "", stats.freed_bytes),
        ("returned", stats.returned_storages, stats.returned_bytes),
        ("  of these, when backward asked", stats.stalls, ""),
        ("peak resident", "", stats.peak_resident_bytes),
        ("peak away", "", stats.peak_away_bytes),
    ]
    sized = [
        (label, str(tensors), f"{nbytes / 2**20:.1f}" if isinstance(nbytes, int) else "")
        for label, tensors, nbytes in rows
    ]
    return [*sized, ("host blocked, seconds", "", f"{stats.exposed_wait_s:.3f}")]
