"""A DiskPool against the disk itself: plain reads and writes by O_DIRECT, alone and both at once.

All write and read the same number of bytes in the same folder, in turns, in one process. "O_DIRECT"
is what `dd oflag=direct` does: one thread, aligned memory, requests of 8 MiB; io_uring could at
best reach what the disk gives. "pool" is memswap's lane in training: storages of 16 MiB. The last
row is the pool's rate over that of O_DIRECT.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import chosen_device, make_parser, summarize, write_result

import memswap
from memswap._native import native
from memswap.cli.table import render_table
from memswap.engine.lane import open_lane
from memswap.engine.units import format_bytes

REQUEST_BYTES = 8 << 20
STORAGE_BYTES = 16 << 20

#: What is compared, in this order.
WAYS = ("write", "read", "both")


class Direct:
    """Two files of so many bytes, past the page cache."""

    def __init__(self, folder: str, nbytes: int) -> None:
        self._nbytes = nbytes
        self._paths = [Path(folder) / f"memswap-bench-{os.getpid()}-{side}" for side in (0, 1)]
        self._files = []
        for path in self._paths:
            try:
                self._files.append(os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600))
            except OSError as error:
                path.unlink(missing_ok=True)
                raise SystemExit(
                    f"--path {folder}: no file there can be opened past the page cache, so there "
                    f"is nothing to compare with: {error.strerror}"
                ) from error
            os.posix_fallocate(self._files[-1], 0, nbytes)
        self._memory = [mmap.mmap(-1, REQUEST_BYTES) for _ in range(2)]
        for memory in self._memory:
            memory.write(os.urandom(REQUEST_BYTES))
        for side in (0, 1):
            self._write(side)

    def _write(self, side: int) -> None:
        for at in range(0, self._nbytes, REQUEST_BYTES):
            os.pwrite(self._files[side], self._memory[side], at)

    def _read(self, side: int) -> None:
        for at in range(0, self._nbytes, REQUEST_BYTES):
            os.preadv(self._files[side], [self._memory[side]], at)

    def go(self, way: str) -> None:
        if way == "write":
            self._write(0)
        elif way == "read":
            self._read(1)
        else:
            other = threading.Thread(target=self._read, args=(1,))
            other.start()
            self._write(0)
            other.join()

    def close(self) -> None:
        for file, path in zip(self._files, self._paths, strict=True):
            os.close(file)
            path.unlink()


class Pool:
    """Storages of so many bytes in all, in a DiskPool by the lane that training uses."""

    def __init__(self, folder: str, nbytes: int) -> None:
        self._pool = memswap.DiskPool(folder, budget=3 * nbytes)
        self._lane = open_lane(torch.device("cpu"))
        count = nbytes // STORAGE_BYTES
        data = torch.frombuffer(bytearray(os.urandom(STORAGE_BYTES)), dtype=torch.uint8)
        self._storages = [[native.StorageRef(data.clone()) for _ in range(2)] for _ in range(count)]
        self._blocks = [
            [self._pool.native.allocate(STORAGE_BYTES) for _ in range(2)] for _ in range(count)
        ]
        self.go("write")
        for pair, blocks in zip(self._storages, self._blocks, strict=True):
            self._lane.send(pair[1], blocks[1]).synchronize()

    def go(self, way: str) -> None:
        tickets = []
        for pair, blocks in zip(self._storages, self._blocks, strict=True):
            if way != "read":
                tickets.append(self._lane.send(pair[0], blocks[0]))
            if way != "write":
                tickets.append(self._lane.fetch_into(blocks[1], pair[1], 0))
        for ticket in tickets:
            ticket.synchronize()


def main() -> None:
    parser = make_parser(__doc__.splitlines()[0])
    parser.add_argument("--path", default=tempfile.gettempdir(), help="where the files are made")
    parser.add_argument("--mib", type=int, default=512, help="MiB that each way moves")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    nbytes = arguments.mib << 20
    direct, pool = Direct(arguments.path, nbytes), Pool(arguments.path, nbytes)
    go: dict[str, Callable[[str], None]] = {"O_DIRECT": direct.go, "pool": pool.go}
    seconds: dict[str, dict[str, list[float]]] = {name: {way: [] for way in WAYS} for name in go}
    for _ in range(arguments.rounds):
        for way in WAYS:
            for name, work in go.items():
                began = time.perf_counter()
                work(way)
                seconds[name][way].append(time.perf_counter() - began)
    direct.close()
    rows: list[list[str]] = []
    result: dict[str, Any] = {}
    for name, ways in seconds.items():
        found: dict[str, Any] = {way: summarize(times) for way, times in ways.items()}
        result[name] = found
        rates = [(2 if way == "both" else 1) * nbytes / found[way]["median"] for way in WAYS]
        rows.append([name, *(f"{rate / 1e9:.2f}" for rate in rates)])
    result["pool_over_direct"] = {
        way: result["O_DIRECT"][way]["median"] / result["pool"][way]["median"] for way in WAYS
    }
    rows.append(["pool / O_DIRECT", *(f"{result['pool_over_direct'][way]:.2f}" for way in WAYS)])
    print(f"GB/s for {format_bytes(nbytes)} in {arguments.path}, medians of {arguments.rounds}")
    print(render_table(["", *WAYS], rows))
    write_result(
        arguments.json,
        chosen_device(arguments.device),
        {"bytes": nbytes, "rounds": arguments.rounds, "seconds": result},
    )


if __name__ == "__main__":
    main()
