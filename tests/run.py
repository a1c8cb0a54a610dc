"""Runs the test suites one after another, all of them whatever happened, and adds them up.

Each suite is a process of its own: a torch process has one accelerator, and the simulated one has
to be registered before anything else is. The last line printed is ``N passed, N failed, N
skipped``; the exit status is 0 only if nothing failed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

import native
from tally import RESULTS, ROOT, Sum, announce, run_and_count


@dataclass(frozen=True)
class Suite:
    """One pytest process."""

    name: str
    paths: tuple[str, ...]
    says: str
    device: str | None = None
    environment: dict[str, str] = field(default_factory=dict)


SUITES = {
    "default": (
        Suite("cpu", ("tests/unit", "tests/engine"), "unit and engine tests on the CPU"),
        Suite(
            "sim",
            ("tests/engine", "tests/race"),
            "engine tests and the race laboratory on the simulated accelerator",
            device="sim",
            # Its executor and OpenMP's threads would fight for the cores.
            environment={"OMP_NUM_THREADS": "1"},
        ),
        Suite("simdev", ("tests/simdev/tests",), "tests of the simulated accelerator itself"),
    ),
    "gpu": (
        Suite(
            "gpu",
            ("tests/unit", "tests/engine", "tests/gpu"),
            "unit, engine and GPU tests on the CUDA device",
            device="cuda",
        ),
    ),
}


def run_pytest(suite: Suite, slow: bool, more: list[str]) -> Sum:
    announce(suite.says)
    missing = [path for path in suite.paths if not (ROOT / path).exists()]
    if missing:
        print(f"not there: {', '.join(missing)}; counted as one failure")
    report = RESULTS / f"{suite.name}-pytest.xml"
    command = [sys.executable, "-m", "pytest", *[p for p in suite.paths if p not in missing]]
    command += ["-q", f"--junitxml={report}"]
    command += ["--device", suite.device] if suite.device else []
    command += ["--slow"] if slow else []
    total = Sum(failed=len(missing))
    if len(missing) < len(suite.paths):
        total.add(run_and_count(command + more, report, suite.environment))
    return total


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--suite", choices=sorted(SUITES), default="default")
    parser.add_argument(
        "--only", choices=["cpp", "kernels", "fuzz", "cpu", "sim", "simdev"], help="one part alone"
    )
    parser.add_argument("--slow", action="store_true", help="run the tests marked slow as well")
    arguments, more = parser.parse_known_args()
    total = Sum()
    parts: list[tuple[str, Sum]] = []
    compiled: dict[str, Callable[[], Sum]] = {
        "cpp": native.run_cpp,
        "kernels": native.run_kernels,
        "fuzz": lambda: native.run_fuzzer(arguments.slow),
    }
    for name, run in compiled.items():
        if arguments.suite == "default" and arguments.only in (None, name):
            parts.append((name, run()))
    for suite in SUITES[arguments.suite]:
        if arguments.only in (None, suite.name):
            parts.append((suite.name, run_pytest(suite, arguments.slow, more)))
    announce("summary")
    for name, part in parts:
        total.add(part)
        print(f"{name:8} {part}")
    print(total, flush=True)
    return 1 if total.failed or not total.passed else 0


if __name__ == "__main__":
    sys.exit(main())
