"""The files that show one step: trace.json, and memory.png where matplotlib is installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memswap.planning.device import DevicePlan
from memswap.planning.replay import timetable
from memswap.reports.pictures import LANES, draw_device, draw_step

if TYPE_CHECKING:
    from memswap.planning.plan import Plan
    from memswap.planning.rates import Rates
    from memswap.planning.replay import Timetable
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
        draw_step(plain, managed, budget, folder / "memory.png")
        written.append(folder / "memory.png")
        if isinstance(plan, DevicePlan):
            draw_device(plan, folder / "device.png")
            written.append(folder / "device.png")
    except ModuleNotFoundError:
        return written
    return written


def trace(replays: dict[str, Timetable]) -> dict[str, Any]:
    """Trace events of several replays of one step, each a process with its lanes and its memory.

    In Chrome's JSON format, for ui.perfetto.dev and chrome://tracing, whose times are microseconds.
    """
    lanes = list(LANES)
    events: list[dict[str, Any]] = []
    for process, (name, replay) in enumerate(replays.items(), start=1):
        events.append(_named("process_name", name, process, 0))
        for number, lane in enumerate(lanes, start=1):
            events.append(_named("thread_name", lane, process, number))
        for span in replay.spans:
            events.append(
                {
                    "name": span.name,
                    "ph": "X",
                    "pid": process,
                    "tid": lanes.index(span.lane) + 1,
                    "ts": span.begin_s * 1e6,
                    "dur": (span.end_s - span.begin_s) * 1e6,
                }
            )
        for moment_s, nbytes in zip(replay.mark_s, replay.resident_bytes, strict=True):
            events.append(
                {
                    "name": "saved activations on the device, bytes",
                    "ph": "C",
                    "pid": process,
                    "ts": moment_s * 1e6,
                    "args": {"bytes": nbytes},
                }
            )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _named(kind: str, name: str, process: int, thread: int) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}
