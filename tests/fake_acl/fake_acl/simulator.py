"""simdev's laboratory around the machine under torch_npu."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

from . import machine

SIMDEV = Path(__file__).resolve().parents[2] / "simdev" / "simdev"


def _around_torch_npu() -> ModuleType:
    """The package `simdev`, its own modules, with torch_npu's machine in place of its extension."""
    if "simdev" in sys.modules:
        raise ImportError("a process has one accelerator: simdev is imported already")
    package = ModuleType("simdev")
    package.__path__ = [str(SIMDEV)]
    package.NAME = "npu"  # type: ignore[attr-defined]
    package._C = machine  # type: ignore[attr-defined]
    # The simulator has no kernels of its own and takes the CPU's.
    package.codec_on_streams = lambda host_codec: machine.ascend_codec()  # type: ignore[attr-defined]
    sys.modules["simdev"] = package
    sys.modules["simdev._C"] = machine
    laboratory = importlib.import_module("simdev.laboratory")
    package.mutations = importlib.import_module("simdev.mutations")  # type: ignore[attr-defined]
    for name in (
        "SCHEDULES",
        "LaboratoryError",
        "Schedule",
        "counters",
        "faults",
        "host_access",
        "laboratory",
        "run_in",
        "schedules",
        "virtual_time",
    ):
        setattr(package, name, getattr(laboratory, name))
    return package


simdev = _around_torch_npu()


def install_as_simdev() -> None:
    """Lets `import simdev` find this package: tests for the simulator then run on torch_npu."""
    sys.modules["simdev"] = simdev
