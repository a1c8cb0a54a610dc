"""The CPU codec's kernels alone: one thread, 64 MB, against a memcpy of the raw tensor."""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
from pathlib import Path
from typing import Any

#: Kernels, fastest first. A machine has those whose instructions it has.
KERNELS = ("avx512", "vector", "scalar")
MEGABYTES = 64
LEAST_S = 0.2  # for each case of a round
PARTS = {"family": "cpu family", "model": "model"}
COLUMNS = ("encode", "decode", "memcpy", "encode_x", "decode_x", "ratio", "bound")


def processor() -> str:
    """Name, family and model; a name alone is that of several."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return platform.machine()
    first = {line.partition(":")[0].strip(): line.partition(":")[2].strip() for line in lines[:12]}
    parts = [f"{part} {first[name]}" for part, name in PARTS.items() if name in first]
    return ", ".join([first.get("model name", platform.machine()), *parts])


def measure(program: Path, rounds: int) -> list[dict[str, Any]]:
    """Return each case with its medians over rounds, each of which is a process of its own.

    Where a stack begins and which pages a process gets is drawn by chance, and stays for its life.
    """
    cases: dict[str, list[dict[str, Any]]] = {}
    for _ in range(rounds):
        for one in one_round(program):
            cases.setdefault(one["name"], []).append(one)
    return [
        {
            "case": name.split(f"/{MEGABYTES}MB")[0],
            "megabytes": MEGABYTES,
            **{column: statistics.median(one[column] for one in found) for column in COLUMNS},
            "encode_x_of_rounds": [round(one["encode_x"], 3) for one in found],
            "decode_x_of_rounds": [round(one["decode_x"], 3) for one in found],
        }
        for name, found in cases.items()
    ]


def one_round(program: Path) -> list[dict[str, Any]]:
    """What the program says of the fastest kernels that run here."""
    for kernels in KERNELS:
        command = [
            str(program),
            f"--benchmark_filter={kernels}/.*/{MEGABYTES}MB/threads:1/",
            f"--benchmark_min_time={LEAST_S}",
            "--benchmark_format=json",
        ]
        said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        found = json.loads(said)["benchmarks"]
        if not any(one.get("error_occurred") for one in found):
            return found  # type: ignore[no-any-return]
    raise RuntimeError(f"{program}: no kernels run on this machine")


def table(results: list[dict[str, Any]]) -> str:
    """A line for each case."""
    lines = [f"{'case':34}{'encode':>8}{'decode':>8}{'memcpy GB/s':>13}  of memcpy: encode, decode"]
    lines += [
        f"{one['case']:34}{one['encode']:8.1f}{one['decode']:8.1f}{one['memcpy']:13.1f}"
        f"  {one['encode_x']:.2f}x, {one['decode_x']:.2f}x"
        for one in results
    ]
    return "\n".join(lines)
