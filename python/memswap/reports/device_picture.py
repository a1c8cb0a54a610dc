"""Everything on a device over one forward and backward as planned, by kind, and in the step."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from memswap.planning.device import KINDS, DevicePlan

COLORS = ("tab:blue", "tab:green", "tab:purple", "tab:orange", "0.7")


def draw(plan: DevicePlan, file: Path) -> None:
    """Write the picture as a PNG.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    # Not pyplot, whose figures and way of showing them are the caller's: a notebook has its own.
    made: Any = importlib.import_module("matplotlib.figure")
    figure = made.Figure(figsize=(11, 5))
    time, peak = figure.subplots(1, 2, sharey=True, width_ratios=(5, 1))
    marks = range(len(plan.timeline))
    mib = [[nbytes / 2**20 for nbytes in kind] for kind in zip(*plan.timeline, strict=True)]
    if mib:
        time.stackplot(marks, *mib, labels=KINDS, colors=COLORS, step="post")
        time.axvline(len(plan.storages), color="black", linewidth=0.5)
        time.legend(loc="upper left")
    time.set_xlabel("saves of the forward, then demands of the backward")
    time.set_ylabel("on the device, MiB")
    below = 0.0
    for (_, nbytes), color in zip(plan.peak_by_kind, COLORS, strict=True):
        peak.bar(0, nbytes / 2**20, bottom=below, color=color)
        below += nbytes / 2**20
    peak.set_xticks([0], [f"at the peak,\n{plan.moment}"])
    for axes in (time, peak):
        axes.axhline(plan.device_budget_bytes / 2**20, color="tab:red", linestyle="--", linewidth=1)
    figure.suptitle(f"budget {plan.budget}")
    figure.tight_layout()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=130)
