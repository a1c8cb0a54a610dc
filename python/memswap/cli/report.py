"""``python -m memswap report``: a picture and a trace of one step, plain and under a budget."""

from __future__ import annotations

import argparse
from pathlib import Path

from memswap.cli import plan
from memswap.cli.arguments import folder
from memswap.cli.plan import Planned, planned_from
from memswap.reports.step_report import write_step_report

__all__ = ["add_arguments", "run", "write_report"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options: those of plan, and where the files go."""
    plan.add_step_arguments(parser)
    parser.add_argument(
        "--out", type=folder, default="memswap-report", help="folder for trace.json and the PNG"
    )


def write_report(planned: Planned, folder: Path) -> list[Path]:
    """Write the trace, and the picture where matplotlib is installed. Returns what was written."""
    written = write_step_report(planned.plan, planned.step, planned.rates, folder)
    if len(written) == 1:
        print("no picture: matplotlib is not installed (pip install matplotlib)")
    return written


def run(arguments: argparse.Namespace) -> int:
    """Write the report; return the exit status."""
    planned = planned_from(arguments)
    print(planned.plan)
    written = write_report(planned, arguments.out)
    print("\nwritten: " + ", ".join(map(str, written)))
    print("trace.json opens in https://ui.perfetto.dev")
    return 0
