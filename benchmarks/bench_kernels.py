"""The CUDA codec's kernels alone: rates by size, against a device-to-device copy.

Builds and runs kernels/bench/cuda_bench.cu; needs neither torch nor memswap's module. The result
file is written anew with every line that the program prints, so that whatever ends it early leaves
what it had measured.
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
from commit import commit
from standalone import build_cuda_bench

#: Yardsticks for bf16, dense: GB/s of uncompressed bytes from 64 MB on, and half of it at 4 MB.
YARDSTICKS = {"encode_gb_s": 1300, "decode_gb_s": 1800}
COLUMNS = {
    "case": "{:<19}",
    "megabytes": "{:>10}",
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
        if one["case"] != "bf16 dense" or one["max_processors"] or one["megabytes"] not in (4, 64):
            continue
        for what, wanted in YARDSTICKS.items():
            least = wanted / 2 if one["megabytes"] == 4 else wanted
            verdict = "reached" if one[what] >= least else "MISSED"
            lines.append(
                f"{one['case']}, {one['megabytes']} MB, {what}: {one[what]:.0f}, wanted "
                f"{least:.0f}: {verdict}"
            )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path, help="write the result to this file as well")
    parser.add_argument("--repeats", type=int, default=51, help="medians are of so many")
    arguments = parser.parse_args()
    if not arguments.device.startswith("cuda"):
        print("bench_kernels: runs on a CUDA device only (on a CPU: memswap_codec_cpu_bench)")
        return
    command = [str(build_cuda_bench()), "--repeats", str(arguments.repeats)]
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
                if arguments.json is not None:
                    arguments.json.parent.mkdir(parents=True, exist_ok=True)
                    content = json.dumps({"environment": said, "results": results}, indent=1)
                    arguments.json.write_text(content + "\n", encoding="utf-8")
    if results:
        print("\n".join([table(results), *against_yardsticks(results)]))
    if running.returncode:
        raise SystemExit(f"the benchmark ended with status {running.returncode}")


if __name__ == "__main__":
    main()
