"""Counting what a test process found, from the JUnit report that it writes."""

from __future__ import annotations

import os
import subprocess
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "build" / "test-results"


@dataclass
class Sum:
    passed: int = 0
    failed: int = 0
    skipped: int = 0

    def add(self, other: Sum) -> None:
        self.passed += other.passed
        self.failed += other.failed
        self.skipped += other.skipped

    def __str__(self) -> str:
        return f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped"


def announce(sentence: str) -> None:
    print(f"\n=== {sentence}", flush=True)


def run_and_count(command: list[str], report: Path, environment: dict[str, str]) -> Sum:
    """Run a command that writes a JUnit report; a process that died counts as a failure."""
    print("$ " + " ".join([f"{k}={v}" for k, v in environment.items()] + command), flush=True)
    report.parent.mkdir(parents=True, exist_ok=True)
    report.unlink(missing_ok=True)
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}, check=False)
    total = Sum()
    if report.exists():
        for case in ElementTree.parse(report).iter("testcase"):
            if case.find("failure") is not None or case.find("error") is not None:
                total.failed += 1
            elif case.find("skipped") is not None:
                total.skipped += 1
            else:
                total.passed += 1
    if done.returncode and not total.failed:
        print(f"exit status {done.returncode} without a failed test: counted as one failure")
        total.failed += 1
    return total
