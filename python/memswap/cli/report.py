"""``python -m memswap report``: a picture and a trace of one step, plain and under a budget."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from memswap.cli import memory_picture
from memswap.cli.arguments import folder, write
from memswap.cli.plan import Planned, add_arguments, planned_from
from memswap.cli.trace import trace
from memswap.planning.replay import Timetable, timetable

__all__ = ["add_arguments", "add_output_argument", "run", "write_report"]


def add_output_argument(parser: argparse.ArgumentParser) -> None:
    """Declare where the files go."""
    parser.add_argument(
        "--out", type=folder, default="memswap-report", help="folder for trace.json and the PNG"
    )


def replays(planned: Planned) -> tuple[Timetable, Timetable]:
    """The step as it would be without memswap, and as it is planned."""
    plan, step, rates = planned
    actions = {index: storage.action for index, storage in enumerate(plan.storages)}
    return (
        timetable(step, rates, {}),
        timetable(plan.step, rates, actions, plan.limit_bytes),
    )


def write_report(planned: Planned, folder: Path) -> list[Path]:
    """Write the trace, and the picture where matplotlib is installed. Returns what was written."""
    plain, managed = replays(planned)
    written = [folder / "trace.json"]
    content = json.dumps(trace({"plain": plain, "memswap": managed}))
    write(written[0], content)
    budget = planned.plan.budget if isinstance(planned.plan.budget, int) else None
    try:
        memory_picture.draw(plain, managed, budget, folder / "memory.png")
    except ModuleNotFoundError:
        print("no picture: matplotlib is not installed (pip install matplotlib)")
    else:
        written.append(folder / "memory.png")
    return written


def run(arguments: argparse.Namespace) -> int:
    """Write the report; return the exit status."""
    planned = planned_from(arguments)
    print(planned.plan)
    written = write_report(planned, arguments.out)
    print("\nwritten: " + ", ".join(map(str, written)))
    print("trace.json opens in https://ui.perfetto.dev")
    return 0
