"""Pictures of one step as planned: its memory above its lanes, and what is on a whole device."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from memswap.planning.device import KINDS, DevicePlan
from memswap.planning.replay import Timetable

#: What a step does, by lane, and how it is drawn.
LANES = {
    "compute": "0.75",
    "waits": "tab:red",
    "codec": "tab:purple",
    "recomputing": "tab:olive",
    "copies away": "tab:orange",
    "copies back": "tab:green",
}

#: How what is on a device is drawn, by kind.
KIND_COLORS = ("tab:blue", "tab:green", "tab:purple", "tab:orange", "0.7")


def draw_step(plain: Timetable, managed: Timetable, budget_bytes: int | None, file: Path) -> None:
    """Write device memory over one step, plain and managed, above the lanes, as a PNG.

    Args:
        plain: the step without memswap.
        managed: the step as planned.
        budget_bytes: where a line is drawn; None: nowhere.
        file: the PNG.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    figure = _figure(height=6)
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
        place = len(LANES) - 1 - list(LANES).index(span.lane)
        begin, width = span.begin_s * 1e3, (span.end_s - span.begin_s) * 1e3
        color = LANES[span.lane]
        # A copy of microseconds in a step of seconds shows all the same.
        lanes.barh(place, width, left=begin, color=color, edgecolor=color, linewidth=0.5)
    lanes.set_yticks(range(len(LANES)), reversed(LANES))
    lanes.set_xlabel("ms from the begin of the step")
    figure.suptitle("One step as planned")
    _write(figure, file)


def draw_device(plan: DevicePlan, file: Path) -> None:
    """Write everything on a device over one step as planned, by kind, and at its peak, as a PNG.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    figure = _figure(height=5)
    time, peak = figure.subplots(1, 2, sharey=True, width_ratios=(5, 1))
    marks = range(len(plan.timeline))
    mib = [[nbytes / 2**20 for nbytes in kind] for kind in zip(*plan.timeline, strict=True)]
    if mib:
        time.stackplot(marks, *mib, labels=KINDS, colors=KIND_COLORS, step="post")
        time.axvline(len(plan.storages), color="black", linewidth=0.5)
        time.legend(loc="upper left")
    time.set_xlabel("saves of the forward, then demands of the backward")
    time.set_ylabel("on the device, MiB")
    below = 0.0
    for (_, nbytes), color in zip(plan.peak_by_kind, KIND_COLORS, strict=True):
        peak.bar(0, nbytes / 2**20, bottom=below, color=color)
        below += nbytes / 2**20
    peak.set_xticks([0], [f"at the peak,\n{plan.moment}"])
    for axes in (time, peak):
        axes.axhline(plan.device_budget_bytes / 2**20, color="tab:red", linestyle="--", linewidth=1)
    figure.suptitle(f"budget {plan.budget}")
    _write(figure, file)


def _figure(height: int) -> Any:
    # Not pyplot, whose figures and way of showing them are the caller's: a notebook has its own.
    made: Any = importlib.import_module("matplotlib.figure")
    return made.Figure(figsize=(11, height))


def _write(figure: Any, file: Path) -> None:
    figure.tight_layout()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=130)
