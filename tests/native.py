"""The parts of the test run that are C++: memswap's own tests, the kernels' project, fuzzing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from tally import RESULTS, ROOT, Sum, announce, run_and_count

FUZZ_SECONDS = 20
FUZZ_RUNS = 10_000_000  # with --slow, in all processes together
FUZZ_SLOW_SECONDS = 3600  # of our own mutator
#: With --slow. The scalar code has no stores of its own for what is larger than the caches.
LONG_IN_KERNELS = "TensorsLargerThanTheCachesComeBack/scalar"
FUZZ_MAX_BYTES = 8448  # kMaxFuzzBytes of kernels/tests/fuzz_input.h


def has_googletest() -> bool:
    probe = subprocess.run(
        [os.environ.get("CXX", "g++"), "-x", "c++", "-E", "-"],
        input="#include <gtest/gtest.h>\n",
        text=True,
        capture_output=True,
        check=False,
    )
    return probe.returncode == 0


def missing_tools() -> str:
    """Why C++ tests cannot be built here; empty where they can."""
    if not has_googletest():
        return (
            "GoogleTest's headers were not found. On Debian: apt-get install libgtest-dev "
            "(CONTRIBUTING.md). The Python tests run the same code through memswap._C."
        )
    if shutil.which("cmake") is None or shutil.which("ctest") is None:
        return "cmake and ctest are not on PATH. pip install cmake brings both."
    return ""


def run_steps(steps: list[list[str]], environment: dict[str, str] | None = None) -> bool:
    for step in steps:
        print("$ " + " ".join(step), flush=True)
        settings = {**os.environ, **(environment or {})}
        if subprocess.run(step, cwd=ROOT, env=settings, check=False).returncode:
            print("this did not build: counted as one failure", flush=True)
            return False
    return True


def build_step(build: Path, *targets: str) -> list[str]:
    named = ["--target", *targets] if targets else []
    return ["cmake", "--build", str(build), "--parallel", str(os.cpu_count() or 1), *named]


def run_ctest(build: Path, name: str, more: tuple[str, ...]) -> Sum:
    report = RESULTS / f"{name}-ctest.xml"
    command = ["ctest", "--test-dir", str(build), "--output-on-failure", "--no-tests=error", *more]
    return run_and_count([*command, "--output-junit", str(report)], report, {})


def run_cpp() -> Sum:
    """Build memswap's C++ tests beside the module, where its objects are compiled already."""
    announce("C++ tests")
    if reason := missing_tools():
        print(f"skipped: {reason}")
        return Sum(skipped=1)
    build = Path(os.environ.get("MEMSWAP_BUILD_DIR", ""))
    if not (build / "CMakeCache.txt").exists():
        print("memswap is not built; run this through make, which builds it first")
        return Sum(failed=1)
    configure = ["cmake", str(build), "-DMEMSWAP_CPP_TESTS=ON"]
    if not run_steps([configure, build_step(build)]):
        return Sum(failed=1)
    # Each program once: ctest would start one for each test, and torch is loaded for longer than
    # most of them take. One that does not come to its end leaves no report, which is a failure.
    total = Sum()
    for name in ("memswap_cpp_tests", "memswap_lane_tests"):
        report = RESULTS / f"{name}.xml"
        program = str(build / "tests" / "cpp" / name)
        total.add(
            run_and_count([program, "--gtest_brief=1", f"--gtest_output=xml:{report}"], report, {})
        )
    return total


def run_kernels(slow: bool) -> Sum:
    """Build and test kernels/ by CMake alone, as somebody without torch would."""
    announce("the codec's own tests: kernels/ alone, without torch or Python")
    if reason := missing_tools():
        print(f"skipped: {reason}")
        return Sum(skipped=1)
    build = ROOT / "build" / "kernels"
    configure = ["cmake", "-S", "kernels", "-B", str(build), "-G", "Ninja"]
    configure += ["-DMEMSWAP_KERNELS_TESTS=ON", "-DMEMSWAP_CUDA=OFF", "-DMEMSWAP_WERROR=ON"]
    # The fuzzer's own build of the codec takes minutes; libFuzzer's is made below.
    configure += [f"-DMEMSWAP_KERNELS_FUZZER={'OFF' if find_libfuzzer() else 'ON'}"]
    if not run_steps([configure, build_step(build)]):
        return Sum(failed=1)
    return run_ctest(build, "kernels", () if slow else ("--exclude-regex", LONG_IN_KERNELS))


def run_fuzzer(slow: bool) -> Sum:
    """Fuzz the decoder under ASAN and UBSAN: libFuzzer where clang has it, else our own mutator."""
    announce("fuzzing the decoder")
    if shutil.which("cmake") is None:
        print("skipped: cmake is not on PATH. pip install cmake brings it.")
        return Sum(skipped=1)
    corpus = ROOT / "kernels" / "tests" / "corpus"
    configure = ["cmake", "-S", "kernels", "-G", "Ninja"]
    configure += ["-DMEMSWAP_KERNELS_TESTS=ON", "-DMEMSWAP_CUDA=OFF", "-DMEMSWAP_WERROR=ON"]
    environment: dict[str, str] = {}
    if clang := find_libfuzzer():
        build = ROOT / "build" / "fuzz"
        target = "memswap_libfuzzer_decode"
        configure += [f"-DCMAKE_CXX_COMPILER={clang}", "-DCMAKE_BUILD_TYPE=Release"]
        found = build / "found"
        found.mkdir(parents=True, exist_ok=True)
        arguments = [f"-max_len={FUZZ_MAX_BYTES}", "-entropic=0", "-print_final_stats=1"]
        arguments += [f"-artifact_prefix={build}/", str(found), str(corpus)]
        processes = (os.cpu_count() or 1) if slow else 1
        limit = f"-runs={FUZZ_RUNS // processes}" if slow else f"-max_total_time={FUZZ_SECONDS}"
        more = [[limit, f"-seed={time.time_ns() % 2**31 + n}"] for n in range(processes)]
    else:
        print(
            "no clang++ with libFuzzer: our own mutator instead"
            " (Debian: clang, libfuzzer-14-dev, libclang-rt-14-dev)"
        )
        build = ROOT / "build" / "kernels"
        target = "memswap_fuzz_decode"
        arguments = [str(corpus)]
        environment["MEMSWAP_FUZZ_SECONDS"] = str(FUZZ_SLOW_SECONDS if slow else FUZZ_SECONDS)
        more = [[]]
    if not run_steps([[*configure, "-B", str(build)], build_step(build, target)]):
        return Sum(failed=1)
    program = str(build / "tests" / target)
    return run_fuzz_processes(build, [[program, *own, *arguments] for own in more], environment)


def run_fuzz_processes(build: Path, commands: list[list[str]], environment: dict[str, str]) -> Sum:
    """Run all commands at a time, and count each as one test."""
    logs = [RESULTS / f"fuzz-{n}.log" for n in range(len(commands))]
    RESULTS.mkdir(parents=True, exist_ok=True)
    running: list[subprocess.Popen[bytes]] = []
    for command, log in zip(commands, logs, strict=True):
        print("$ " + " ".join(command), flush=True)
        with open(log, "wb") as file:
            running.append(
                subprocess.Popen(
                    command,
                    cwd=build,
                    env={**os.environ, **environment},
                    stdout=file,
                    stderr=subprocess.STDOUT,
                )
            )
    total = Sum()
    for process, log in zip(running, logs, strict=True):
        status = process.wait()
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        print("\n".join(lines[-12 if status == 0 else -80 :]), flush=True)
        total.add(Sum(passed=1) if status == 0 else Sum(failed=1))
    return total


def find_libfuzzer() -> str | None:
    """A clang++ that has libFuzzer."""
    clang = shutil.which("clang++")
    if clang is None:
        return None
    probe = subprocess.run(
        [clang, "-fsanitize=fuzzer,address", "-x", "c++", "-", "-o", os.devnull],
        input='extern "C" int LLVMFuzzerTestOneInput(const char*, unsigned long) { return 0; }\n',
        text=True,
        capture_output=True,
        check=False,
    )
    return clang if probe.returncode == 0 else None


if __name__ == "__main__":
    sys.exit("run tests/run.py")
