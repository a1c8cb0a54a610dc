"""Runs the test suites, all of them whatever happened, and adds them up.

Each suite is a process of its own: a torch process has one accelerator, and the simulated one has
to be registered before anything else is. Three run at a time on two cores or more, as each sleeps
now and then, and print when they end. The last line printed is ``N passed, N failed, N skipped``;
the exit status is 0 only if nothing failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field

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
    without_slow: tuple[str, ...] = ()  # more arguments where the slow tests do not run
    options: tuple[str, ...] = ()  # more arguments


#: The tests of the engine run under this schedule with the device's name npu, and under the others
#: with the name sim: of the random ones under one, whose seed the test's name chooses. Tests marked
#: `one_schedule` run with the name npu, and those of tests/race that break an edge run under all
#: schedules of their own. With --slow both names have all schedules.
NPU_SCHEDULE = "lazy"

SUITES = (
    Suite(
        "unit",
        ("tests/unit", "tests/planning"),
        "unit and planning tests, emulators and examples, on the CPU",
    ),
    Suite("cpu", ("tests/engine",), "engine tests on the CPU"),
    # The simulator's executor and OpenMP's threads would fight for the cores. The suite npu runs on
    # the same accelerator, so what is tested there is left out here.
    Suite(
        "sim",
        ("tests/engine", "tests/compat_scripts"),
        "engine tests and other systems' scripts on the simulated accelerator",
        device="sim",
        environment={"OMP_NUM_THREADS": "1"},
        without_slow=(
            *("--without-schedule", NPU_SCHEDULE, "--random-in-turn"),
            *("-m", "not one_schedule"),
        ),
    ),
    # Nothing that memswap does may depend on the device's name: torch_npu registers for the same
    # dispatch key under another one.
    Suite(
        "npu",
        ("tests/engine", "tests/compat_scripts"),
        "engine tests and other systems' scripts on the simulated accelerator under the name npu",
        device="npu",
        environment={"OMP_NUM_THREADS": "1"},
        without_slow=("--schedule", NPU_SCHEDULE),
    ),
    Suite(
        "race",
        ("tests/race",),
        "the race laboratory",
        device="sim",
        environment={"OMP_NUM_THREADS": "1"},
        without_slow=("--random-in-turn",),
    ),
    # Everything that does not name another form, once more with recipes: what has one is run again.
    Suite(
        "recompute-cpu",
        ("tests/engine",),
        "engine tests with Action.RECOMPUTE as the policy, on the CPU",
        options=("--recompute",),
    ),
    Suite(
        "recompute-sim",
        ("tests/engine",),
        "engine tests with Action.RECOMPUTE as the policy, on the simulated accelerator",
        device="sim",
        environment={"OMP_NUM_THREADS": "1"},
        options=("--recompute",),
    ),
    Suite("simdev", ("tests/simdev/tests",), "tests of the simulated accelerator itself"),
    Suite(
        "parallel",
        ("tests/parallel",),
        "sharded weights and exchanges on several processes",
        environment={"OMP_NUM_THREADS": "1"},
    ),
    Suite(
        "compat",
        ("tests/compat_scripts",),
        "other systems' scripts on the CPU, and on several processes",
        environment={"OMP_NUM_THREADS": "1"},
    ),
)


#: The parts of the whole run, by the process that runs them in turn. Processes start in this order,
#: the longest first: what starts last should not run long beside an idle core. The kernels' tests
#: and the fuzzer may not run at a time, as they may build in the same folder.
PROCESSES = (
    ("unit",),
    ("cpu",),
    ("sim",),
    ("parallel",),
    ("race",),
    ("npu",),
    ("kernels", "fuzz"),
    ("cpp",),
    ("compat",),
    ("simdev",),
)

#: Those of `make test-all` alone.
SLOW_PROCESSES = (("recompute-sim",), ("recompute-cpu",))

COMPILED: dict[str, Callable[[bool], Sum]] = {
    "cpp": lambda slow: native.run_cpp(),
    "kernels": native.run_kernels,
    "fuzz": native.run_fuzzer,
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
    command += [*suite.options, *(["--slow"] if slow else suite.without_slow)]
    total = Sum(failed=len(missing))
    if len(missing) < len(suite.paths):
        total.add(run_and_count(command + more, report, suite.environment))
    return total


def run_here(names: Sequence[str], slow: bool, more: list[str]) -> dict[str, Sum]:
    """Run parts one after another in this process."""
    python = {one.name: one for one in SUITES}
    return {
        name: COMPILED[name](slow) if name in COMPILED else run_pytest(python[name], slow, more)
        for name in names
    }


def run_apart(names: Sequence[str], slow: bool, more: list[str]) -> dict[str, Sum]:
    """Run parts in a process of their own, and print what it said once it has ended."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    sums = RESULTS / f"{'-'.join(names)}-sums.json"
    sums.unlink(missing_ok=True)
    log = RESULTS / f"{'-'.join(names)}.log"
    command = [sys.executable, "-u", __file__, "--only", *names, "--sums", str(sums)]
    command += [*(["--slow"] if slow else []), *more]
    began = time.monotonic()
    print(f"started: {', '.join(names)} (follow it in {log.relative_to(ROOT)})", flush=True)
    with open(log, "w", encoding="utf-8") as file:
        subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=False)
    said = log.read_text(encoding="utf-8", errors="replace")
    print(f"{said}\nended after {time.monotonic() - began:.0f} s: {', '.join(names)}", flush=True)
    if not sums.exists():
        return {names[0]: Sum(failed=1)}
    return {name: Sum(**counts) for name, counts in json.loads(sums.read_text()).items()}


def jobs_at_a_time() -> int:
    """How many parts: one takes seven eighths of a core, as its processes wait for one another."""
    return 1 if (os.cpu_count() or 1) == 1 else 3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    known = [name for names in (*SLOW_PROCESSES, *PROCESSES) for name in names]
    parser.add_argument("--only", nargs="+", choices=known, help="these parts alone, in turn")
    parser.add_argument("--slow", action="store_true", help="run the tests marked slow as well")
    parser.add_argument(
        "--jobs", type=int, default=jobs_at_a_time(), help="parts that run at a time"
    )
    parser.add_argument("--sums", help="a file for what was counted")
    arguments, more = parser.parse_known_args()
    # OpenMP's threads that wait for one another do not spin: the other suite needs the core.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Or else each of these processes compiles all tests anew, and rewrites their assertions.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    processes = (*SLOW_PROCESSES, *PROCESSES) if arguments.slow else PROCESSES
    parts: dict[str, Sum] = {}
    if arguments.only is None and arguments.jobs > 1:
        with ThreadPoolExecutor(arguments.jobs) as pool:
            running = [pool.submit(run_apart, names, arguments.slow, more) for names in processes]
        for one in running:
            parts |= one.result()
    else:
        every = [name for names in processes for name in names]
        parts = run_here(arguments.only or every, arguments.slow, more)
    if arguments.sums:
        with open(arguments.sums, "w", encoding="utf-8") as file:
            json.dump({name: asdict(part) for name, part in parts.items()}, file)
    announce("summary")
    total = Sum()
    for name, part in parts.items():
        total.add(part)
        print(f"{name:13} {part}")
    print(total, flush=True)
    return 1 if total.failed or not total.passed else 0


if __name__ == "__main__":
    sys.exit(main())
