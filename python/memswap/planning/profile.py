"""Profile: how fast this machine copies and encodes, measured once and remembered.

The figures go to ``$XDG_CACHE_HOME/memswap`` (by default ``~/.cache/memswap``), one file per
device, which names what it was measured on. A file that is damaged, of another driver or of
another version is measured again.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from memswap._native import native
from memswap._warn import warn
from memswap.codec import Layout
from memswap.engine.lane import open_codec_lane, open_lane
from memswap.engine.pools import DiskPool, present_device
from memswap.planning.rates import Rates
from memswap.planning.sharing import measure_copy_share

AnyT = TypeVar("AnyT")

FORMAT = 3

#: Bytes of one measured transfer: long enough that latency is below a percent of a PCIe copy.
COPY_BYTES = 64 << 20
SMALL_BYTES = 4 << 10
CODEC_BYTES = 32 << 20
DISK_BYTES = 32 << 20

#: An accelerator encodes so many times as many: 32 MiB are done in the microseconds that launching
#: takes.
DEVICE_TIMES = 4

ROUNDS = 5

#: Fewer bytes say nothing about a rate.
LEAST_BYTES = 1 << 20


def profile(
    device: torch.device | str | None = None,
    *,
    refresh: bool = False,
    folder: str | os.PathLike[str] | None = None,
) -> Rates:
    """How fast a device's bytes are copied, encoded and decoded: measured, or remembered.

    Measuring takes one or two seconds, and 200 MiB (an accelerator's codec: 500), or less where
    there is not as much.

    Args:
        device: default: the current accelerator, or the CPU where there is none.
        refresh: measure again, whatever is remembered.
        folder: where a :class:`DiskPool` has its file. A CPU's copies are those to and from it;
            default: the system's folder for temporary files. Of an accelerator None means copies to
            host memory; a folder means those that go on to a file there, as fast as the slower of
            the two.

    Raises:
        ValueError: torch knows no such device, or it is not there.
    """
    chosen = present_device(device, "profile")
    if chosen.type != "cpu" and folder is not None:
        disk = profile("cpu", refresh=refresh, folder=folder)
        return by_way_of(profile(chosen, refresh=refresh), disk)
    known = None if refresh else remembered(chosen, folder)
    if known is not None:
        return known
    place = folder_of(folder)
    with torch._C._DisableTorchDispatch():  # a model's modes are not for what is measured
        rates = measure(chosen, place)
    # A codec that failed its self-check works some day, with another driver or another memswap.
    if rates.encodes or native.codec_name(chosen) is None:
        write(cache_file(chosen, place), describe(chosen, place), rates)
    return rates


def remembered(device: torch.device, folder: str | os.PathLike[str] | None = None) -> Rates | None:
    """What :func:`profile` would return without measuring; None: it would measure."""
    if device.type != "cpu" and folder is not None:
        link, disk = remembered(device), remembered(torch.device("cpu"), folder)
        return None if link is None or disk is None else by_way_of(link, disk)
    place = folder_of(folder)
    return read(cache_file(device, place), describe(device, place))


def by_way_of(link: Rates, disk: Rates) -> Rates:
    """Rates of an accelerator whose bytes go on to a file, through pinned memory.

    Threads write one storage while the next one is copied, so the slower of both sets the pace.
    """
    names = ("d2h", "h2d", "duplex_d2h", "duplex_h2d")
    slower = {
        f"{name}_bytes_per_s": min(
            getattr(link, f"{name}_bytes_per_s"), getattr(disk, f"{name}_bytes_per_s")
        )
        for name in names
    }
    return replace(link, **slower, copy_latency_s=link.copy_latency_s + disk.copy_latency_s)


def folder_of(folder: str | os.PathLike[str] | None) -> Path:
    """Where a DiskPool would have its file."""
    return Path(tempfile.gettempdir() if folder is None else folder).resolve()


def describe(device: torch.device, folder: Path | None = None) -> dict[str, Any]:
    """What a figure depends on. The folder is that of a CPU's disk."""
    module = None if device.type == "cpu" else torch.get_device_module(device)
    driver: Any = None
    if device.type == "cuda":
        driver = [torch.version.cuda, cuda_driver()]
    return {
        "format": FORMAT,
        "device": device.type,
        "name": name_of(device),
        "index": device.index or 0,
        "driver": driver if driver is not None else getattr(module, "__version__", None),
        "torch": torch.__version__,
        "host": platform.node(),
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
        "folder": str(folder or folder_of(None)) if device.type == "cpu" else None,
    }


def cuda_driver() -> str | None:
    """What the kernel says of NVIDIA's driver; None where it does not tell."""
    try:
        lines = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return lines[0] if lines else None


def name_of(device: torch.device) -> str:
    """The product's name."""
    if device.type != "cpu":
        module = torch.get_device_module(device)
        return str(module.get_device_name()) if hasattr(module, "get_device_name") else device.type
    return platform.processor() or platform.machine()


def cache_file(device: torch.device, folder: Path | None = None) -> Path:
    """Where a device's figures are remembered, or those of one folder's file system."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    name = re.sub(r"[^a-z0-9]+", "-", f"{name_of(device)} {device.index or 0}".lower()).strip("-")
    if device.type == "cpu" and folder is not None and folder != folder_of(None):
        name += "-" + hashlib.sha256(str(folder).encode()).hexdigest()[:12]
    return Path(root) / "memswap" / f"rates-{device.type}-{name}.json"


def read(file: Path, measured_on: dict[str, Any]) -> Rates | None:
    """The figures in a file, unless it is damaged or speaks of another machine."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if content["measured_on"] != measured_on:
            return None
        return Rates.from_dict(content["rates"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write(file: Path, measured_on: dict[str, Any], rates: Rates) -> None:
    """Remember figures. A folder that cannot be written is told, and costs a second next time.

    Args:
        file: where to.
        measured_on: what the figures depend on: machine, device, versions.
        rates: the figures.
    """
    content = {"measured_on": measured_on, "rates": rates.as_dict()}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        # Another process may read at the same time: it finds the old file or the new one.
        with tempfile.NamedTemporaryFile(
            "w", dir=file.parent, prefix=file.name, delete=False, encoding="utf-8"
        ) as draft:
            json.dump(content, draft, indent=1)
            draft.write("\n")
        os.replace(draft.name, file)
    except OSError as error:
        warn(
            f"memswap: measured rates cannot be remembered in {file.parent}: {error}. Set "
            "XDG_CACHE_HOME to a folder that can be written."
        )


# --- measuring ------------------------------------------------------------------------------------


def measure(device: torch.device, folder: Path | None = None) -> Rates:
    """Measure now."""
    on_host = device.type == "cpu"
    codec_bytes = CODEC_BYTES * (1 if on_host else DEVICE_TIMES)
    copies = (
        measure_disk(folder)
        if on_host
        else within_memory(lambda most: measure_link(device, most), COPY_BYTES)
    )
    return Rates(
        device=name_of(device),
        **copies,
        **within_memory(lambda most: measure_codec(device, most), codec_bytes),
        copy_share=measure_copy_share(folder) if on_host else 0.0,
        inline_codec=on_host,
    )


def within_memory(measured: Callable[[int], AnyT], most: int) -> AnyT:
    """What is measured with so many bytes, or with half of them where there is no memory for that.

    Raises:
        torch.OutOfMemoryError: there is none for `LEAST_BYTES` either.
    """
    while True:
        try:
            return measured(most)
        except torch.OutOfMemoryError:
            if most // 2 < LEAST_BYTES:
                raise
        most //= 2  # what was allocated is free by now


def measure_link(device: torch.device, most: int) -> dict[str, float]:
    """Copies of so many bytes between a device and pinned memory, alone and both ways at once."""
    there = [torch.empty(most, dtype=torch.uint8, device=device) for _ in range(2)]
    here = [torch.empty(most, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    streams = [torch.Stream(device=device) for _ in range(2)]
    here[1].fill_(1)
    torch.accelerator.synchronize(device)  # who had this memory before may still be at work

    def away(nbytes: int = most) -> None:
        here[0][:nbytes].copy_(there[0][:nbytes], non_blocking=True)

    def back(nbytes: int = most) -> None:
        there[1][:nbytes].copy_(here[1][:nbytes], non_blocking=True)

    def timed(stream: torch.Stream, work: Callable[[], None], times: int) -> tuple[Any, Any]:
        begin, end = (torch.Event(device, enable_timing=True) for _ in range(2))
        with stream:
            begin.record()
            for _ in range(times):
                work()
            end.record()
        return begin, end

    def seconds(*pairs: tuple[Any, Any]) -> list[float]:
        torch.accelerator.synchronize(device)
        return [begin.elapsed_time(end) * 1e-3 for begin, end in pairs]

    alone_away, alone_back, duplex_away, duplex_back, small = [], [], [], [], []
    for turn in range(ROUNDS + 1):  # the first warms up
        one = seconds(timed(streams[0], away, 1))[0]
        other = seconds(timed(streams[1], back, 1))[0]
        pair = seconds(timed(streams[0], away, 3), timed(streams[1], back, 3))
        tiny = seconds(timed(streams[0], lambda: away(SMALL_BYTES), 32))[0] / 32
        if turn:
            alone_away.append(one)
            alone_back.append(other)
            duplex_away.append(pair[0] / 3)
            duplex_back.append(pair[1] / 3)
            small.append(tiny)

    def rate(times: list[float]) -> float:
        return most / max(statistics.median(times), 1e-9)

    return {
        "d2h_bytes_per_s": rate(alone_away),
        "h2d_bytes_per_s": rate(alone_back),
        "duplex_d2h_bytes_per_s": min(rate(duplex_away), rate(alone_away)),
        "duplex_h2d_bytes_per_s": min(rate(duplex_back), rate(alone_back)),
        "copy_latency_s": statistics.median(small),
    }


def measure_codec(device: torch.device, most: int) -> dict[str, float]:
    """Encoding and decoding bfloat16 of a normal distribution, which shrinks to about 0.68.

    `most`: bytes of the longest tensor.
    """
    code = native.dtype_code(torch.bfloat16)
    # One that failed its self-check for such tensors refuses them.
    if native.codec_name(device) is None or native.codec_fault(device, code, Layout.DENSE):
        return {"encode_bytes_per_s": 0.0, "decode_bytes_per_s": 0.0}
    generator = torch.Generator().manual_seed(0)
    tensor = torch.randn(most // 2, generator=generator).bfloat16().to(device)
    lane = open_codec_lane(device)

    def seconds(nbytes: int) -> tuple[float, float]:
        storage = native.StorageRef(tensor[: nbytes // 2].clone())
        times: list[tuple[float, float]] = []
        for turn in range(ROUNDS + 1):  # the first warms up
            made: list[Any] = []

            def encode(made: list[Any] = made) -> None:
                made.append(lane.encode(storage, (code, Layout.DENSE, None)))
                made[0][1].wait()

            def decode(made: list[Any] = made) -> None:
                made.append(lane.decode(made[0][0]))
                made[1][1].wait()

            pair = (elapsed(encode, device), elapsed(decode, device))
            if turn:
                times.append(pair)
        encode_s, decode_s = (statistics.median(one[way] for one in times) for way in (0, 1))
        return max(encode_s, 1e-9), max(decode_s, 1e-9)

    long, short = seconds(most), seconds(SMALL_BYTES)
    # What launching takes is in both, and a latency of its own; at most half of the long one.
    encode_s, decode_s = (max(one - few, one / 2) for one, few in zip(long, short, strict=True))
    return {
        "encode_bytes_per_s": most / encode_s,
        "decode_bytes_per_s": most / decode_s,
        "codec_latency_s": sum(short) / 2,
    }


def measure_disk(folder: Path | None = None) -> dict[str, float]:
    """Writing to and reading from a DiskPool, by the lane that does it in training."""
    lane = open_lane(torch.device("cpu"))
    pool = DiskPool(folder, budget=4 * DISK_BYTES)

    def seconds(nbytes: int) -> tuple[float, float] | None:
        times: list[tuple[float, float]] = []
        for turn in range(ROUNDS + 1):  # the first warms up
            tensor = torch.full((nbytes,), turn, dtype=torch.uint8)
            block = pool.native.allocate(nbytes)
            if block is None:
                return None
            began = time.perf_counter()
            lane.send(native.StorageRef(tensor), block).synchronize()
            sent = time.perf_counter()
            _, ticket = lane.fetch(block)
            ticket.synchronize()
            times.append((sent - began, time.perf_counter() - sent))
        write_s, read_s = (statistics.median(one[way] for one in times[1:]) for way in (0, 1))
        return write_s, read_s

    long, short = seconds(DISK_BYTES), seconds(SMALL_BYTES)
    if long is None or short is None:
        zero = ("d2h", "h2d", "duplex_d2h", "duplex_h2d")
        return {f"{name}_bytes_per_s": 0.0 for name in zero}  # nothing can be swapped here
    write_s, read_s = long
    return {
        "d2h_bytes_per_s": DISK_BYTES / write_s,
        "h2d_bytes_per_s": DISK_BYTES / read_s,
        # One disk, not a link with two directions: what one gains the other loses.
        "duplex_d2h_bytes_per_s": DISK_BYTES / write_s / 2,
        "duplex_h2d_bytes_per_s": DISK_BYTES / read_s / 2,
        "copy_latency_s": sum(short) / 2,  # mostly handing work to a thread and back
    }


def elapsed(work: Callable[[], object], device: torch.device) -> float:
    """Seconds: of the host's clock on a CPU, else between two events."""
    if device.type == "cpu":
        began = time.perf_counter()
        work()
        return time.perf_counter() - began
    stream = torch.accelerator.current_stream(device)
    begin, end = (torch.Event(device=stream.device, enable_timing=True) for _ in range(2))
    begin.record(stream)
    work()
    end.record(stream)
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e-3
