"""Writes each test's outcome down as soon as it is known, so that nothing is lost with the process.

A plugin of pytest's: ``-p progress --progress FILE``. Lines of JSON: a test that begins, and a test
that has ended. What the file knows already is not run again: an error on the device spoils every
later test of its process, so the process ends (DEAD_DEVICE) and tests/gpu/session.py starts another
one for the rest.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

DEAD_DEVICE = 86
MESSAGE_CHARACTERS = 4000


def read(file: Path) -> tuple[dict[str, dict[str, Any]], str | None]:
    """What the tests in a file came to, by name, and the one that began and never ended."""
    ended: dict[str, dict[str, Any]] = {}
    running: str | None = None
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    for line in lines:
        event = json.loads(line)
        running = event.get("begins")
        if "test" in event:
            ended[event["test"]] = event
    return ended, running


class Progress:
    """Collects the reports of a test's phases; the worst of them is its outcome."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.reports: list[pytest.TestReport] = []

    def write(self, **event: Any) -> None:
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(event) + "\n")

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        known, _ = read(self.file)
        done = [item for item in items if item.nodeid in known]
        if done:
            config.hook.pytest_deselected(items=done)
            items[:] = [item for item in items if item.nodeid not in known]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.reports.clear()
        self.write(begins=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.reports.append(report)

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        outcomes = [report.outcome for report in self.reports]
        outcome = next((o for o in ("failed", "skipped") if o in outcomes), "passed")
        said = [r.longreprtext for r in self.reports if r.outcome == outcome and r.longrepr]
        self.write(
            test=nodeid,
            outcome=outcome,
            seconds=round(sum(report.duration for report in self.reports), 3),
            message="\n".join(said)[-MESSAGE_CHARACTERS:] if outcome != "passed" else "",
        )
        if outcome == "failed":
            import torch  # here: session.py needs none

            try:
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
            except RuntimeError as error:
                self.write(device_is_lost=str(error).splitlines()[0])
                os._exit(DEAD_DEVICE)  # an ordinary end would wait for the device


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--progress", type=Path, help="file for outcomes, as they come")


def pytest_configure(config: pytest.Config) -> None:
    file = config.getoption("--progress")
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        config.pluginmanager.register(Progress(file), "memswap-progress")


@pytest.hookimpl(wrapper=True)
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    yield
    if session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = pytest.ExitCode.OK  # they all ran in an earlier process
