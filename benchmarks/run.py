"""Runs every benchmark, each in a process of its own, and keeps what they found.

Results go to ``benchmarks/results/<device>-<name>.json``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from common import make_parser

HERE = Path(__file__).resolve().parent


def main() -> int:
    parser = make_parser(__doc__.splitlines()[0])
    names = sorted(path.stem.removeprefix("bench_") for path in HERE.glob("bench_*.py"))
    parser.add_argument("--only", choices=names, action="append", help="this one alone")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    arguments = parser.parse_args()
    if arguments.json is not None:
        parser.error("each benchmark has a file of its own; choose the folder with --results")
    failed = []
    for name in arguments.only or names:
        file = arguments.results / f"{arguments.device.replace(':', '-')}-{name}.json"
        command = [sys.executable, str(HERE / f"bench_{name}.py"), "--device", arguments.device]
        command += ["--json", str(file)]
        print(f"\n=== {name}\n$ {' '.join(command)}", flush=True)
        source = os.pathsep.join(
            [str(HERE.parent / "python"), *filter(None, [os.environ.get("PYTHONPATH")])]
        )
        # Threads that wait asleep: on a busy machine spinning ones take the cores from the others.
        settings = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ, "PYTHONPATH": source}
        done = subprocess.run(command, env=settings, check=False)
        if done.returncode:
            failed.append(name)
    print(f"\n{len(arguments.only or names)} benchmarks, failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
