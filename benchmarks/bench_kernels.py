"""The codec's kernels alone: rates of the CUDA ones by size, of a CPU's by kind of tensor.

Against a device-to-device copy, or a memcpy. Builds and runs the programs of kernels/bench; needs
neither torch nor memswap's module. On a GPU the result file is written anew with every line that
the program prints, so that whatever ends it early leaves what it had measured.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "gpu"))
import cpu_kernels
from commit import commit
from standalone import build_cpu_bench, build_cuda_bench

#: Yardsticks for bf16, dense: GB/s of uncompressed bytes from 64 MB on, and half of it at 4 MB.
YARDSTICKS = {"encode_gb_s": 1500, "decode_gb_s": 2000}
COLUMNS = {
    "case": "{:<19}",
    "megabytes": "{:>10.0f}",
    "max_processors": "{:>15}",
    "ratio": "{:>7.3f}",
    "copy_gb_s": "{:>10.0f}",
    "encode_gb_s": "{:>12.0f}",
    "decode_gb_s": "{:>12.0f}",
    "encode_row_gb_s": "{:>16.0f}",
    "decode_row_gb_s": "{:>16.0f}",
    "encode_us": "{:>10.1f}",
    "decode_us": "{:>10.1f}",
}


def environment(program: dict[str, Any]) -> dict[str, Any]:
    """What a number means nothing without."""
    return {
        **program,
        "commit": commit(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def table(results: list[dict[str, Any]]) -> str:
    """A line per measurement."""
    width = {name: len(form.format(results[0][name])) for name, form in COLUMNS.items()}
    lines = ["".join(name.removesuffix("_processors").rjust(width[name]) for name in COLUMNS)]
    lines += ["".join(form.format(one[key]) for key, form in COLUMNS.items()) for one in results]
    return "\n".join(lines)


def against_yardsticks(results: list[dict[str, Any]]) -> list[str]:
    """What dense bf16 is asked to reach, and whether it did."""
    lines = []
    for one in results:
        megabytes = round(one["megabytes"])
        if one["case"] != "bf16 dense" or one["max_processors"] or megabytes not in (4, 64):
            continue
        for what, wanted in YARDSTICKS.items():
            least = wanted / 2 if megabytes == 4 else wanted
            verdict = "reached" if one[what] >= least else "MISSED"
            lines.append(
                f"{one['case']}, {megabytes} MB, {what}: {one[what]:.0f}, wanted "
                f"{least:.0f}: {verdict}"
            )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path, help="write the result to this file as well")
    parser.add_argument("--repeats", type=int, default=51, help="medians are of so many; on a GPU")
    parser.add_argument("--rounds", type=int, default=3, help="the same on a CPU")
    arguments = parser.parse_args()
    if arguments.device.startswith("cuda"):
        on_gpu(arguments.json, arguments.repeats)
    elif arguments.device == "cpu":
        on_cpu(arguments.json, arguments.rounds)
    else:
        print(f"bench_kernels: runs on a CUDA device or a CPU, not on {arguments.device}")


def on_cpu(file: Path | None, rounds: int) -> None:
    """Measure and tell the kernels of this machine's processor."""
    try:
        program = build_cpu_bench()
    except FileNotFoundError as missing:
        print(f"bench_kernels: skipped: {missing}")
        return
    results = cpu_kernels.measure(program, rounds)
    print(cpu_kernels.table(results))
    if file is not None:
        write(file, environment({"device": cpu_kernels.processor()}), results)


def write(file: Path, said: dict[str, Any], results: list[dict[str, Any]]) -> None:
    """Write what was measured, and where."""
    file.parent.mkdir(parents=True, exist_ok=True)
    content = json.dumps({"environment": said, "results": results}, indent=1)
    file.write_text(content + "\n", encoding="utf-8")


def on_gpu(file: Path | None, repeats: int) -> None:
    """Measure and tell the CUDA kernels."""
    command = [str(build_cuda_bench()), "--repeats", str(repeats)]
    results: list[dict[str, Any]] = []
    said: dict[str, Any] = {}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        for line in running.stdout:
            if line.startswith('{"device"'):
                said = environment(json.loads(line.strip().removesuffix(', "results": [') + "}"))
            elif line.startswith("  {"):
                results.append(json.loads(line.strip().removesuffix(",")))
                print(line.strip(), flush=True)
                if file is not None:
                    write(file, said, results)
    if results:
        print("\n".join([table(results), *against_yardsticks(results)]))
    if running.returncode:
        raise SystemExit(f"the benchmark ended with status {running.returncode}")


if __name__ == "__main__":
    main()
