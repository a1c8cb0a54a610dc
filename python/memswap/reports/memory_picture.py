"""Device memory over one step, plain and managed, above the lanes that make the difference."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from memswap.planning.replay import Timetable
from memswap.reports.trace import LANES

COLORS = {
    "compute": "0.75",
    "waits": "tab:red",
    "codec": "tab:purple",
    "copies away": "tab:orange",
    "copies back": "tab:green",
}


def draw(plain: Timetable, managed: Timetable, budget_bytes: int | None, file: Path) -> None:
    """Write the picture as a PNG.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    # Not pyplot, whose figures and way of showing them are the caller's: a notebook has its own.
    made: Any = importlib.import_module("matplotlib.figure")
    figure = made.Figure(figsize=(11, 6))
    memory, lanes = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    for replay, label, color in ((plain, "plain", "0.6"), (managed, "memswap", "tab:blue")):
        times = [0.0, *(second * 1e3 for second in replay.mark_s)]
        sizes = [0.0, *(nbytes / 2**20 for nbytes in replay.resident_bytes)]
        memory.step(times, sizes, where="post", color=color, label=label)
        memory.fill_between(times, sizes, step="post", color=color, alpha=0.15)
    if budget_bytes is not None:
        memory.axhline(budget_bytes / 2**20, color="tab:red", linewidth=1, linestyle="--")
        memory.annotate("budget", (0, budget_bytes / 2**20), color="tab:red", va="bottom")
    memory.set_ylabel("saved activations, MiB")
    memory.set_ylim(bottom=0)
    memory.legend(loc="upper right")
    for span in managed.spans:
        place = len(LANES) - 1 - LANES.index(span.lane)
        begin, width = span.begin_s * 1e3, (span.end_s - span.begin_s) * 1e3
        color = COLORS[span.lane]
        # A copy of microseconds in a step of seconds shows all the same.
        lanes.barh(place, width, left=begin, color=color, edgecolor=color, linewidth=0.5)
    lanes.set_yticks(range(len(LANES)), reversed(LANES))
    lanes.set_xlabel("ms from the begin of the step")
    figure.suptitle("One step as planned")
    figure.tight_layout()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=130)
