"""What `make gpu` runs on a machine with a GPU, which may be borrowed for minutes.

    make gpu                                  everything: tests, then what is worth most first
    make gpu PARTS="codec kernels"            these parts alone
    make gpu LIMIT_S=540                      no longer than that: what is left is named
    make gpu TESTS_S=240                      of these, no longer than that for tests
    make gpu HOST_MEMORY=64GiB                for what training benchmarks swap, where the system
                                              shows less memory than it gives (virtual machines)

Each part is a process with a limit of its own. Parts that test run beside each other, as many as
there are cores for; parts that measure run alone, after them. What a part found is on disk as soon
as it is known (tests one by one, benchmarks one by one), and after each part also in the folder
$OUT, if that is set: gpu-log.txt, gpu-summary.txt and gpu-results.tar.gz. No part keeps the next
from running.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from pathlib import Path

from progress import DEAD_DEVICE, read
from standalone import find_tool

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "gpu"
RESULTS = ROOT / "benchmarks" / "results"
SILENCE_S = 180  # of a test: then it hangs. The sanitizer's tests say how long they may take
GRACE_S = 15  # to write what it has, after an interrupt
LINES = 40  # of a benchmark, in the summary
FEW_LINES = 15  # of tests that did not all run
MOST_LOST = 8  # processes in a row that ended early and in which no test passed
NO_TIME = "no time"
CORES = os.cpu_count() or 1
MOST_SHARES = 8  # of a part's test files; each process has a context of some 500 MiB on the device


@dataclass(frozen=True)
class Part:
    """A process, or for tests as many as it takes."""

    says: str
    limit_s: int
    tests: tuple[str, ...] = ()  # pytest's arguments, or
    benchmark: tuple[str, ...] = ()  # a name in benchmarks/ and its arguments
    silence_s: int = SILENCE_S
    needs_module: bool = True
    swaps: bool = False  # as much as --host-memory allows
    is_shared: bool = False  # its test files are dealt to several processes


#: In the order of what is worth most. Limits are what a part may take, not what it should.
PARTS = {
    "codec": Part(
        "frames of the CUDA codec against the CPU's",
        300,
        tests=("tests/gpu/test_codec_gpu.py",),
        silence_s=90,  # seconds each, but the first loads everything
    ),
    "kernels": Part("rates of the kernels alone", 300, benchmark=("kernels",), needs_module=False),
    "engine": Part(
        "the engine's promises on the GPU",
        420,
        tests=(
            "tests/gpu/test_gradients_gpu.py",
            "tests/gpu/test_races_gpu.py",
            "tests/gpu/test_steady_step_gpu.py",
        ),
        silence_s=90,
    ),
    "bench-codec": Part("the codec on real activations", 240, benchmark=("codec",)),
    "bench-hooks": Part("host time of hooks", 120, benchmark=("hooks",)),
    "suite": Part(
        "the engine's own tests on the GPU",
        540,
        tests=("tests/engine", "tests/unit/test_host_pool.py"),
        is_shared=True,
    ),
    "sanitizer": Part(
        "compute-sanitizer on the codec's kernels",
        540,
        tests=("tests/gpu/test_sanitizer.py",),
        silence_s=500,
        needs_module=False,
    ),
    # As much of a model as fits the minutes: their own defaults take half an hour.
    "bench-step": Part(
        "a training step",
        300,
        benchmark=("step", "--batch", "2", "--rounds", "2"),
        swaps=True,
    ),
    "bench-plan": Part(
        "training under budgets",
        540,
        benchmark=("plan", "--sequence", "2048", "8192", "--rounds", "1"),
        swaps=True,
    ),
    "bench-plan-32k": Part(
        "the same at the longest sequence",
        560,
        benchmark=("plan", "--sequence", "32768", "--rounds", "1", "--steps", "2"),
        swaps=True,
    ),
    "bench-host_pool": Part("pinned memory", 180, benchmark=("host_pool",)),
}


@dataclass
class Found:
    """What a part came to."""

    seconds: float = 0.0
    counts: dict[str, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    tail: list[str] = field(default_factory=list)

    def line(self) -> str:
        counted = ", ".join(f"{count} {what}" for what, count in self.counts.items())
        return f"{counted or 'done'} in {self.seconds:.0f} s"

    def add(self, other: Found) -> None:
        """What another process of the same part, beside this one, came to."""
        self.seconds = max(self.seconds, other.seconds)
        for what, count in other.counts.items():
            self.counts[what] = self.counts.get(what, 0) + count
        self.failures += other.failures
        self.tail += other.tail


def environment() -> dict[str, str]:
    path = [str(ROOT / "python"), str(ROOT / "tests" / "gpu"), os.environ.get("PYTHONPATH", "")]
    nvcc = find_tool("nvcc")  # which need not be on PATH
    return {
        **({"CUDACXX": nvcc} if nvcc else {}),
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # deterministic products
        "OMP_WAIT_POLICY": "PASSIVE",
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "PYTHONUNBUFFERED": "1",
    }


def tail_of(log: Path, lines: int) -> list[str]:
    """The last lines of a log, each cut to what a screen shows."""
    said = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return [line[:200] for line in said[-lines:]]


def end(process: subprocess.Popen[bytes]) -> None:
    """Interrupt a process and its children; kill what does not listen."""
    for number in (signal.SIGINT, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            continue


def run(
    command: list[str], log: Path, limit_s: float, alive: Callable[[], float] = lambda: 0.0
) -> tuple[int, str]:
    """Run a command with its output in a log. Its exit status, and why it was ended, if it was.

    Args:
        limit_s: it is ended then.
        alive: seconds for which it has said nothing beyond what it may.
    """
    began = time.monotonic()
    with log.open("ab") as file:
        file.write(f"\n$ {' '.join(command)}\n".encode())
        file.flush()
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment(),
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        why = ""
        try:
            while process.poll() is None and not why:
                time.sleep(0.2)
                if time.monotonic() - began > limit_s:
                    why = f"ended after {limit_s:.0f} s"
                elif alive() > 0:
                    why = "ended because a test hung"
        finally:  # an interrupt of our own must not leave it behind
            if process.poll() is None:
                end(process)
    return process.wait(), why


def run_tests(name: str, part: Part, limit_s: float) -> Found:
    """Run tests, in a new process after each that took its process or the device with it."""
    found, began = Found(), time.monotonic()
    progress, log = FOLDER / f"{name}.jsonl", FOLDER / f"{name}.log"
    progress.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", *part.tests, "--device", "cuda", "--tb=short"]
    command += ["-v", "-p", "progress", "--progress", str(progress), "-p", "no:cacheprovider"]
    command += ["-o", "faulthandler_timeout=120", "--continue-on-collection-errors"]
    if importlib.util.find_spec("pytest_timeout"):  # else `silence_s` below ends what hangs
        command += ["--timeout", str(part.silence_s)]
    problem = ""
    lost = passed = 0
    while True:
        started = time.time()

        def silence_s(since: float = started) -> float:
            last = progress.stat().st_mtime if progress.exists() else since
            return time.time() - max(last, since) - part.silence_s - GRACE_S

        status, why = run(command, log, limit_s - (time.monotonic() - began), silence_s)
        ended, running = read(progress)
        before, passed = passed, sum(one["outcome"] == "passed" for one in ended.values())
        lost = lost + 1 if passed == before else 0
        if running is not None and why != "" and "hung" not in why:
            problem = f"{why}, in {running}; later tests did not run"
            break
        if running is not None:
            reason = why or f"its process ended with status {status}"
            event = {"test": running, "outcome": "failed", "seconds": 0.0, "message": reason}
            with progress.open("a", encoding="utf-8") as file:
                file.write(json.dumps(event) + "\n")
        if running is not None or status == DEAD_DEVICE:
            if lost < MOST_LOST:
                continue
            problem = f"no test passed in {lost} processes in a row; later tests did not run"
            break
        if status not in (0, 1) or why or not ended:
            problem = why or f"pytest ended with status {status}; see {log.name}"
        break
    ended, _ = read(progress)
    for outcome in ("passed", "failed", "skipped"):
        found.counts[outcome] = sum(one["outcome"] == outcome for one in ended.values())
    for test, one in ended.items():
        if one["outcome"] == "failed":
            words = [line for line in one["message"].splitlines() if line.startswith("E ")]
            said = (words or one["message"].splitlines()[-1:] or [""])[0]
            found.failures.append(f"{test}: {said.removeprefix('E').strip()[:600]}")
    if problem:
        found.failures.append(problem)
        found.tail = tail_of(log, FEW_LINES)
    found.seconds = time.monotonic() - began
    return found


def run_benchmark(
    name: str, part: Part, limit_s: float, more_options: tuple[str, ...] = ()
) -> Found:
    """Run a benchmark; its tables are what it printed last."""
    found, began = Found(), time.monotonic()
    log = FOLDER / f"{name}.log"
    benchmark, *options = part.benchmark
    command = [sys.executable, str(ROOT / "benchmarks" / f"bench_{benchmark}.py")]
    command += [
        "--device",
        "cuda",
        "--json",
        str(RESULTS / f"cuda-{name.removeprefix('bench-')}.json"),
        *options,
        *more_options,
    ]
    status, why = run(command, log, limit_s)
    found.tail = tail_of(log, LINES)
    if status or why:
        found.failures.append(why or f"ended with status {status}")
    found.seconds = time.monotonic() - began
    return found


def shares(part: Part, count: int) -> list[Part]:
    """The part's test files, dealt to `count` processes by length."""
    files: list[Path] = []
    for one in part.tests:
        path = ROOT / one
        files += path.glob("test_*.py") if path.is_dir() else [path]
    files.sort(key=lambda file: (-file.stat().st_size, file.name))
    dealt = [tuple(str(file.relative_to(ROOT)) for file in files[i::count]) for i in range(count)]
    return [replace(part, tests=tests) for tests in dealt if tests]


def run_beside(parts: dict[str, Part], limit_s: float) -> Iterator[tuple[str, Found]]:
    """Run test parts beside each other. What each part came to, as it ends."""
    dealt = {
        name: shares(part, max(1, min(MOST_SHARES, CORES // 2))) if part.is_shared else [part]
        for name, part in parts.items()
    }
    waiting = {name: len(pieces) for name, pieces in dealt.items()}
    results = {name: Found() for name in parts}
    with ThreadPoolExecutor(max(1, CORES - 1)) as threads:
        running: dict[Future[Found], str] = {}
        for name, pieces in dealt.items():
            for number, piece in enumerate(pieces):
                label = name if len(pieces) == 1 else f"{name}-{number}"
                limited = min(piece.limit_s, limit_s)
                running[threads.submit(run_tests, label, piece, limited)] = name
        for done in as_completed(running):
            name = running[done]
            results[name].add(done.result())
            waiting[name] -= 1
            if not waiting[name]:
                yield name, results[name]


def describe(results: dict[str, Found], left: dict[str, str]) -> str:
    """The summary: numbers first, then what failed, and at the end a line for each part."""
    lines: list[str] = []
    for name, found in results.items():
        if found.tail:
            lines += [f"--- {name}", *found.tail, ""]
    for name, found in results.items():
        lines += [f"FAILED {name}: {failure}" for failure in found.failures]
    lines += ["", *(f"{name:16} {found.line()}" for name, found in results.items())]
    lines += [f"{name:16} not run ({why}): make gpu PARTS={name}" for name, why in left.items()]
    failed = sum(len(found.failures) for found in results.values())
    lines.append(f"{len(results)} parts, {failed} failures, {len(left)} parts not run")
    return "\n".join(lines) + "\n"


def hand_over(results: dict[str, Found], left: dict[str, str], out: Path | None) -> None:
    """Leave everything found so far in build/gpu, and in `out`."""
    summary = FOLDER / "gpu-summary.txt"
    summary.write_text(describe(results, left), encoding="utf-8")
    archive, log = FOLDER / "gpu-results.tar.gz", FOLDER / "gpu-log.txt"
    with log.open("wb") as whole:
        for one in sorted(FOLDER.glob("*.log"), key=lambda path: path.stat().st_mtime):
            whole.write(one.read_bytes())
    with tarfile.open(archive, "w:gz") as files:
        for one in [*RESULTS.glob("cuda-*"), *FOLDER.glob("*.jsonl"), summary]:
            files.add(one, one.name)
    if out is not None:
        for one in (summary, archive, log):
            shutil.copy(one, out / one.name)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", nargs="*", choices=list(PARTS), help="default: all")
    parser.add_argument("--limit-s", type=float, default=None, help="for all of them")
    parser.add_argument("--tests-s", type=float, default=float("inf"), help="for all that test")
    parser.add_argument("--host-memory", help="budget of the pools of benchmarks that swap")
    parser.add_argument("--build", nargs=argparse.REMAINDER, help="and what builds the module")
    arguments = parser.parse_args()
    began = time.monotonic()
    out = Path(os.environ["OUT"]) if os.environ.get("OUT") else None
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    results: dict[str, Found] = {}
    left = dict.fromkeys(arguments.parts or PARTS, NO_TIME)

    def rest_s() -> float:
        limit_s = arguments.limit_s
        return float("inf") if limit_s is None else limit_s - (time.monotonic() - began)

    is_built = True
    if arguments.build:
        print(f"started: build (follow it in {FOLDER.relative_to(ROOT)}/build.log)", flush=True)
        status, why = run(arguments.build, FOLDER / "build.log", rest_s())
        is_built = status == 0
        results["build"] = Found(time.monotonic() - began)
        if not is_built:
            results["build"].failures.append(why or f"ended with status {status}")
            results["build"].tail = tail_of(FOLDER / "build.log", LINES)
        print(f"  {results['build'].line()}", flush=True)
    if not is_built:
        for name in list(left):
            if PARTS[name].needs_module:
                left[name] = "the module was not built"
    waiting = {name: PARTS[name] for name, why in left.items() if why == NO_TIME}
    tests = {name: part for name, part in waiting.items() if part.tests}
    if tests and rest_s() > 2 * GRACE_S:
        print(f"started: {', '.join(tests)}, beside each other (build/gpu/*.log)", flush=True)
        for name, found in run_beside(tests, min(arguments.tests_s, rest_s() - GRACE_S)):
            results[name] = found
            del left[name]
            print(f"  {name}: {found.line()}", flush=True)
            hand_over(results, left, out)
    for name, part in waiting.items():
        if part.tests or rest_s() <= 2 * GRACE_S:
            continue
        print(f"started: {name}: {part.says} (build/gpu/{name}.log)", flush=True)
        limit_s = min(part.limit_s, rest_s() - GRACE_S)
        memory = arguments.host_memory
        more_options = ("--host-memory", memory) if part.swaps and memory else ()
        results[name] = run_benchmark(name, part, limit_s, more_options)
        del left[name]
        print(f"  {results[name].line()}", flush=True)
        hand_over(results, left, out)
    hand_over(results, left, out)
    print("\n" + (FOLDER / "gpu-summary.txt").read_text(encoding="utf-8"), flush=True)
    return 1 if not is_built or any(found.failures for found in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
