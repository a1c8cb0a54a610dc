"""Runs the test suites one after another, all of them whatever happened, and adds them up.

Each suite is a process of its own: a torch process has one accelerator, and the simulated one has
to be registered before anything else is. The last line printed is ``N passed, N failed, N
skipped``; the exit status is 0 only if nothing failed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "build" / "test-results"


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


def has_googletest() -> bool:
    probe = subprocess.run(
        [os.environ.get("CXX", "g++"), "-x", "c++", "-E", "-"],
        input="#include <gtest/gtest.h>\n",
        text=True,
        capture_output=True,
        check=False,
    )
    return probe.returncode == 0


def run_ctest() -> Sum:
    """Build the C++ tests beside the module, where its objects are compiled already."""
    announce("C++ tests")
    if not has_googletest():
        print(
            "skipped: GoogleTest's headers were not found. On Debian: apt-get install "
            "libgtest-dev (CONTRIBUTING.md). The Python tests run the same code through memswap._C."
        )
        return Sum(skipped=1)
    build = Path(os.environ.get("MEMSWAP_BUILD_DIR", ""))
    if not (build / "CMakeCache.txt").exists():
        print("memswap is not built; run this through make, which builds it first")
        return Sum(failed=1)
    cmake, ctest = shutil.which("cmake"), shutil.which("ctest")
    if cmake is None or ctest is None:
        print("skipped: cmake and ctest are not on PATH. pip install cmake brings both.")
        return Sum(skipped=1)
    steps = (
        [cmake, str(build), "-DMEMSWAP_CPP_TESTS=ON"],
        [cmake, "--build", str(build), "--parallel", str(os.cpu_count() or 1)],
    )
    for step in steps:
        print("$ " + " ".join(step), flush=True)
        if subprocess.run(step, cwd=ROOT, check=False).returncode:
            print("the C++ tests did not build: counted as one failure")
            return Sum(failed=1)
    report = RESULTS / "cpp-ctest.xml"
    command = [ctest, "--test-dir", str(build), "--output-on-failure", "--no-tests=error"]
    return run_and_count([*command, "--output-junit", str(report)], report, {})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--suite", choices=sorted(SUITES), default="default")
    parser.add_argument("--only", choices=["cpp", "cpu", "sim", "simdev"], help="one part alone")
    parser.add_argument("--slow", action="store_true", help="run the tests marked slow as well")
    arguments, more = parser.parse_known_args()
    total = Sum()
    parts: list[tuple[str, Sum]] = []
    if arguments.suite == "default" and arguments.only in (None, "cpp"):
        parts.append(("C++", run_ctest()))
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
