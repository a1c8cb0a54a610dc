"""One step as a trace in Chrome's JSON format, for ui.perfetto.dev and chrome://tracing."""

from __future__ import annotations

from typing import Any

from memswap.planning.replay import Timetable

LANES = ("compute", "waits", "codec", "copies away", "copies back")


def trace(replays: dict[str, Timetable]) -> dict[str, Any]:
    """Trace events of several replays of one step, each a process with its lanes and its memory.

    Times are microseconds, as the format wants them.
    """
    events: list[dict[str, Any]] = []
    for process, (name, replay) in enumerate(replays.items(), start=1):
        events.append(_named("process_name", name, process, 0))
        for number, lane in enumerate(LANES, start=1):
            events.append(_named("thread_name", lane, process, number))
        for span in replay.spans:
            events.append(
                {
                    "name": span.name,
                    "ph": "X",
                    "pid": process,
                    "tid": LANES.index(span.lane) + 1,
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
