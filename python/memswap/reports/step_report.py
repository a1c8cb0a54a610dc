"""The files that show one step: trace.json, and memory.png where matplotlib is installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from memswap.planning.device import DevicePlan
from memswap.planning.replay import timetable
from memswap.reports import device_picture, memory_picture
from memswap.reports.trace import trace

if TYPE_CHECKING:
    from memswap.planning.plan import Plan
    from memswap.planning.rates import Rates
    from memswap.planning.step import Step


def write_step_report(plan: Plan, step: Step, rates: Rates, folder: Path) -> list[Path]:
    """Write what a step would be without memswap, and what it is as planned.

    Args:
        plan: what happens to each storage.
        step: the step that was measured, and that the plan was made of.
        rates: of the machine.
        folder: where the files go; it is made if it is missing.

    Returns:
        The files: ``trace.json`` for https://ui.perfetto.dev and chrome://tracing, and
        ``memory.png``, which is left out where matplotlib is not installed; under a budget for the
        whole device ``device.png`` as well, with everything on the device by kind.
    """
    actions = {index: storage.action for index, storage in enumerate(plan.storages)}
    plain = timetable(step, rates, {})
    managed = timetable(plan.step, rates, actions, plan.limit_bytes)
    folder.mkdir(parents=True, exist_ok=True)
    written = [folder / "trace.json"]
    content = json.dumps(trace({"plain": plain, "memswap": managed}))
    written[0].write_text(content + "\n", encoding="utf-8")
    budget = plan.budget if isinstance(plan.budget, int) else None
    try:
        memory_picture.draw(plain, managed, budget, folder / "memory.png")
        written.append(folder / "memory.png")
        if isinstance(plan, DevicePlan):
            device_picture.draw(plan, folder / "device.png")
            written.append(folder / "device.png")
    except ModuleNotFoundError:
        return written
    return written
