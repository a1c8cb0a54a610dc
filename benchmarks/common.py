"""What every benchmark here shares: its options, alternating medians, and an honest result file.

A benchmark is a file ``bench_*.py`` that takes at least ``--device`` and ``--json`` and compares
in one run of one process. ``run.py`` finds it by its name.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from commit import commit

from memswap.cli.arguments import Help
from memswap.cli.bench.environment import describe_environment
from memswap.cli.measure import settle_math_library


def make_parser(description: str) -> argparse.ArgumentParser:
    """Return a parser with the options that all benchmarks have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=Help)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    parser.add_argument("--device", default="cpu" if accelerator is None else accelerator.type)
    parser.add_argument("--json", type=Path, help="write the result to this file as well")
    return parser


def stack_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a small stack of layers, and how many rounds it is timed for."""
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)


def chosen_device(name: str) -> torch.device:
    """Return the device of ``--device`` with its number: of an accelerator the current one.

    Trainings that the caller compares have the same bits from the first step on.
    """
    settle_math_library()
    device = torch.device(name)
    if device.type == "cpu" or device.index is not None:
        return device
    return torch.device(device.type, torch.accelerator.current_device_index())


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that was asked of it; nothing to do on a CPU."""
    if device.type != "cpu":
        torch.accelerator.synchronize()


def environment(device: torch.device) -> dict[str, Any]:
    """Return what a number means nothing without."""
    return {
        "commit": commit(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        **describe_environment(device),
        # Without the folders of the machine: the file says where it is itself.
        "command": [Path(argument).name for argument in sys.argv],
    }


def write_result(
    file: Path | None, device: torch.device, result: Mapping[str, Any], tell: bool = True
) -> None:
    """Write a result and its environment as JSON, where a file was asked for."""
    if file is None:
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    content = {"environment": environment(device), **result}
    file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    if tell:
        print(f"written: {file}")


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the nearest-rank percentile of the values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


def summarize(values: Sequence[float]) -> dict[str, float]:
    """Return median, 95th percentile, minimum and number of the values."""
    return {
        "median": statistics.median(values),
        "p95": percentile(values, 95),
        "min": min(values),
        "count": len(values),
    }


class PeakMemory:
    """The peak of memory between ``start`` and ``read``: of the device, or of a CPU process."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def start(self) -> None:
        """Give back what is cached and count from here."""
        gc.collect()
        if self._device.type != "cpu":
            torch.accelerator.synchronize()
            module = torch.get_device_module(self._device)
            module.empty_cache()
            module.reset_peak_memory_stats()
            return
        # The C library keeps freed memory, and the kernel the highest mark; both start afresh.
        libc = ctypes.CDLL(None)
        if hasattr(libc, "malloc_trim"):
            libc.malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")

    def read(self) -> dict[str, int]:
        """Return peak bytes by name: allocated and reserved, or resident on a CPU."""
        if self._device.type != "cpu":
            module = torch.get_device_module(self._device)
            return {
                "allocated_bytes": int(module.max_memory_allocated()),
                "reserved_bytes": int(module.max_memory_reserved()),
            }
        status = Path("/proc/self/status").read_text(encoding="ascii")
        mark = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
        return {"resident_bytes": int(mark.split()[1]) * 1024}


def pinned_bytes(device: torch.device) -> int | None:
    """Return the pinned host memory torch holds for the device; None where it does not tell."""
    if device.type == "cpu":
        return 0
    module = torch.get_device_module(device)
    if not hasattr(module, "host_memory_stats"):
        return None
    value = module.host_memory_stats().get("allocated_bytes.current")
    return None if value is None else int(value)
