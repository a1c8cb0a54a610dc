"""Writes the tables of docs/alternatives.md that `bench_peers.py` has measured.

    python benchmarks/peers_page.py

For each result in benchmarks/results/*-peers.json there is a table between two marks in the page;
one that has no result yet says how to get it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "alternatives.md"
RESULTS = ROOT / "benchmarks" / "results"

#: A table's place: the name of its result, and whatever stood there.
MARKED = re.compile(
    r"<!-- (?P<name>[a-z]+)-peers.json -->\n.*?<!-- end -->", flags=re.MULTILINE | re.DOTALL
)

#: Ways that the page names more fully.
NAMES = {
    "checkpoint, inputs on the CPU": "checkpoint, inputs by save_on_cpu (transformers' `offload`, "
    "accelerate's flag)"
}

BITS = {True: "the same bits", False: "**DIFFER**", None: "of other kernels"}


def mib(nbytes: float) -> str:
    return f"{nbytes / 2**20:.1f} MiB"


def table(result: dict[str, Any]) -> str:
    """A result as a table, and a line about what it was measured with."""
    timed = not result["simulated"]
    header = ["way", "held when the forward ends", "peak of the step"]
    header += ["step, of a plain one"] if timed else []
    header += ["gradients"]
    lines = [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    missing: dict[str, list[str]] = {}
    for one in result["ways"]:
        if "absent" in one:
            missing.setdefault(one["absent"], []).append(one["way"])
            continue
        cells = [NAMES.get(one["way"], one["way"]), mib(one["held_bytes"]), mib(one["peak_bytes"])]
        cells += [f"{one['step_s'] / one['plain_step_s']:.2f}x"] if timed else []
        lines.append(f"| {' | '.join([*cells, BITS[one['same_bits']]])} |")
    about, sizes = result["environment"], result.get("sizes")
    said = f"{about['device']}, torch {about['torch']}, commit {about['commit'][:7]}"
    if sizes:
        said = (
            f"{sizes['layers']} Llama blocks of width {sizes['hidden']}, {sizes['batch']} x "
            f"{sizes['sequence']} tokens; {said}"
        )
    text = "\n".join([f"{said}.", "", *lines])
    left_out = "; ".join(f"{', '.join(ways)} ({why})" for why, ways in missing.items())
    return text + (f"\n\nNot here: {left_out}." if left_out else "")


def filled(page: str) -> str:
    """The page with each table as its result has it."""

    def one(match: re.Match[str]) -> str:
        name = match["name"]
        file = RESULTS / f"{name}-peers.json"
        if file.exists():
            text = table(json.loads(file.read_text("utf-8")))
        else:
            text = f"Not measured yet: `python benchmarks/run.py --device {name} --only peers`."
        return f"<!-- {name}-peers.json -->\n{text}\n<!-- end -->"

    return MARKED.sub(one, page)


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text("utf-8")), "utf-8")
