"""Tests with other stacks: installs their libraries beside this environment, then runs pytest.

    python tests/integrations/run.py [--venv .venv-integrations] [pytest arguments]

The environment of its own sees the packages of the one that runs this, with its torch and the
memswap._C that `make build` made for it, and adds the libraries. Prints why and ends with success
where they cannot be had; fails for anything else.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
import venv
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "build" / "test-results"

#: Versions that were tested together.
LIBRARIES = (
    "transformers==5.24.0",
    "accelerate==1.15.0",
    "trl==1.16.0",
    "peft==0.21.2",
    "lightning==2.6.6",
    "diffusers==0.42.1",
    "datasets==5.2.0",
)

#: Its requirements name services that no test uses; this is what its models import.
TORCHTITAN = (
    "torchtitan==0.3.0",
    "torch_checkpointing",
    "spmd_types==0.2.3",
    "torchdata",
    "tyro",
    "docstring_parser",
    "typeguard",
    "einops",
    "tensorboard",
    "triton",
)

#: Optimizers, which would bring another torch along.
OPTIMIZERS = (
    "bitsandbytes==0.50.2",
    "lion-pytorch==0.2.5",
    "pytorch_optimizer==4.1.0",
    "torchao==0.18.0",
)

#: In a folder of their own, which only one test sees: its torchvision is a build with CUDA, and
#: where torch is none, whatever imports it fails.
VISION = ("timm==1.0.31", "torchvision")


def run(command: list[str], **environment: str) -> int:
    print("$ " + " ".join([f"{k}={v}" for k, v in environment.items()] + command), flush=True)
    return subprocess.run(command, cwd=ROOT, env=os.environ | environment, check=False).returncode


def make_environment(where: Path) -> str:
    """Installs what is missing. Returns why the libraries cannot be had; empty if they are."""
    wanted = "\n".join((*LIBRARIES, *TORCHTITAN, *OPTIMIZERS, *VISION))
    done = where / "installed.txt"
    if done.exists() and done.read_text("utf-8") == wanted:
        return ""
    venv.create(where, with_pip=True)
    python = str(where / "bin" / "python")
    packages = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    shared = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    Path(packages, "shared.pth").write_text("\n".join(sorted(shared)), "utf-8")
    # Another torch would need another memswap._C, and take gigabytes.
    constraints = where / "constraints.txt"
    constraints.write_text(f"torch=={version('torch').split('+')[0]}\n", "utf-8")
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if run([*pip, "-c", str(constraints), *LIBRARIES]):
        return "the libraries could not be installed (no network?)"
    if run([*pip, "--no-deps", *TORCHTITAN]):
        return "torchtitan could not be installed (no network?)"
    if run([*pip, "--no-deps", *OPTIMIZERS]):
        return "the optimizers could not be installed (no network?)"
    if run([*pip, "-c", str(constraints), "--target", str(where / "vision"), "--no-deps", *VISION]):
        return "timm could not be installed (no network?)"
    done.write_text(wanted, "utf-8")
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--venv", default=".venv-integrations", type=Path)
    arguments, more = parser.parse_known_args()
    where = (ROOT / arguments.venv).resolve()
    if reason := make_environment(where):
        print(f"make test-integrations: skipped, {reason}")
        return 0
    environment = {
        "PYTHONPATH": os.pathsep.join([str(ROOT / "python"), str(ROOT / "tests")]),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",  # no test loads anything from a hub
        "HF_DATASETS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "MEMSWAP_TEST_VISION": str(where / "vision"),
    }
    pytest = [str(where / "bin" / "python"), "-m", "pytest", "tests/integrations", "-q"]
    pytest += ["-p", "no:cacheprovider", f"--junitxml={RESULTS / 'integrations-pytest.xml'}"]
    return 1 if run([*pytest, *more], **environment) else 0


if __name__ == "__main__":
    sys.exit(main())
