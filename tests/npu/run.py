"""Tests on the real torch_npu: makes its virtual environment, then runs pytest in it.

    python tests/npu/run.py --torch 2.13.0 [--venv .venv-npu] [--whole] [pytest arguments]

memswap._C is taken as it is built in place (`make build`), for the same version of torch. Prints
why and ends with success where the wheel of torch_npu cannot be had; fails for anything else.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "build" / "test-results"
TOOLS = ["pytest", "pytest-timeout", "hypothesis", "cmake", "ninja"]

#: Engine tests that hold for the simulator and not here, and why.
NOT_TORCH_NPU = {
    "tests/engine/test_views_of_storages.py::test_channels_last_stays_channels_last": "torch_npu "
    "knows no channels_last: its tensors are contiguous when they should not be, memswap or not",
}

#: Engine tests that reach the device in ways of their own, under the schedule that runs nothing
#: before it must. All the others see torch_npu's streams as they see the simulator's.
FEW = "selftest or (lazy and (swap or storages or failures or threads))"


def run(command: list[str], **environment: str) -> int:
    print("$ " + " ".join([f"{k}={v}" for k, v in environment.items()] + command), flush=True)
    return subprocess.run(command, cwd=ROOT, env=os.environ | environment, check=False).returncode


def installed(python: Path, torch: str) -> bool:
    """Whether the environment has both wheels, in this version, and the tools."""
    probe = (
        "import importlib.metadata as m, sys; "
        f"v = [m.version(n).split('+')[0] for n in ('torch', 'torch_npu')]; "
        f"[m.version(n) for n in {TOOLS!r}]; sys.exit(v != [{torch!r}] * 2)"
    )
    return (
        python.exists()
        and not subprocess.run(
            [str(python), "-c", probe], stderr=subprocess.DEVNULL, check=False
        ).returncode
    )


def make_environment(where: Path, torch: str) -> str:
    """Installs what is missing. Returns why torch_npu cannot be had; empty if it is there."""
    python = where / "bin" / "python"
    if installed(python, torch):
        return ""
    if not python.exists():
        venv.create(where, with_pip=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if run([*pip, f"torch=={torch}", "numpy", "pyyaml", *TOOLS]):
        raise SystemExit(f"make test-npu: torch {torch} could not be installed into {where}")
    if run([*pip, "--only-binary=:all:", f"torch_npu=={torch}"]):
        return f"no wheel of torch_npu {torch} for this machine (or no network); see docs/ascend.md"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torch", default="2.13.0", help="version of torch and of torch_npu")
    parser.add_argument("--venv", default=".venv-npu", type=Path)
    parser.add_argument("--whole", action="store_true", help="every engine test, every schedule")
    arguments, more = parser.parse_known_args()
    where = (ROOT / arguments.venv).resolve()
    if reason := make_environment(where, arguments.torch):
        print(f"make test-npu: skipped, {reason}")
        return 0
    environment = {
        "PATH": f"{where / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "python"), str(ROOT / "tests")]),
        "OMP_NUM_THREADS": "1",  # the machine's executor and OpenMP would fight for the cores
        # The tests of the queue choose for themselves (tests/npu/test_task_queue.py).
        "TASK_QUEUE_ENABLE": os.environ.get("TASK_QUEUE_ENABLE", "0"),
    }
    pytest = [str(where / "bin" / "python"), "-m", "pytest", "-p", "npu.plugin", "--device", "npu"]
    pytest += ["-q", "-p", "no:cacheprovider"]
    for test in NOT_TORCH_NPU:
        pytest += ["--deselect", test]
    status = run(
        [*pytest, "tests/npu", f"--junitxml={RESULTS / 'npu-pytest.xml'}", *more], **environment
    )
    engine = [
        "tests/engine",
        "--random-schedules",
        "0",
        *([] if arguments.whole else ["-k", FEW]),
    ]
    status |= run(
        [*pytest, *engine, f"--junitxml={RESULTS / 'npu-engine-pytest.xml'}", *more], **environment
    )
    return 1 if status else 0


if __name__ == "__main__":
    sys.exit(main())
