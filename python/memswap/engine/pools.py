"""Memory that swapped bytes and frames go to: host memory, or a file.

A pool takes large slabs from the system, cuts them into blocks of exact size and uses them again
and again. It never takes more than its budget, and when it cannot serve a request it says no
instead of raising: the tensor then stays where it is.
"""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from memswap._native import native
from memswap.engine.host_memory import host_share
from memswap.engine.uncopied import Uncopied
from memswap.engine.units import format_bytes, is_size, parse_bytes

__all__ = ["DiskPool", "HostPool", "PoolStatistics"]


#: What is told once where a pool goes on with memory that is not pinned.
PAGEABLE = (
    "no more host memory could be pinned, so some of what leaves goes to ordinary memory, whose "
    "copies the host waits for: {} (pool.statistics().pageable_bytes says how much)"
)


#: What is told of a file whose bytes are no longer away from memory than they were.
IN_MEMORY = "which is memory itself (tmpfs): what goes there frees none of a CPU's"

#: What to write for a pool's default budget.
HALF = "None for half of what is free"


class Endurance:
    """What files have taken of their drive's life since this was made.

    Args:
        pool: that was there before; None: none was.
    """

    def __init__(self, pool: HostPool | DiskPool | None) -> None:
        self._before_bytes = 0 if pool is None else pool.written_bytes()
        self._since_s = time.perf_counter()
        self._steps = 0

    def count(self) -> None:
        """One more step has ended."""
        self._steps += 1

    def line(self, written_bytes: int, step: str) -> list[str]:
        """What is told: one line, or none where nothing was written.

        Args:
            written_bytes: to files, by now.
            step: what a step is, in words that follow the number of bytes.
        """
        written_bytes -= self._before_bytes
        if not written_bytes or not self._steps:
            return []
        seconds = max(time.perf_counter() - self._since_s, 1e-9)
        return [
            f"disk: {format_bytes(written_bytes / self._steps)} written to the file {step}, "
            f"{format_bytes(written_bytes / seconds * 86_400)} a day at this rate (a drive is "
            "rated for so many bytes in its life: docs/optimizers.md)"
        ]


@dataclass(frozen=True)
class PoolStatistics:
    """What a pool holds and has done. Bytes and counts since the pool was made."""

    in_use_bytes: int
    """Bytes that live blocks were asked for."""
    peak_bytes: int
    """Highest ``in_use_bytes``."""
    waste_bytes: int
    """Bytes that live blocks take up beyond what was asked (alignment)."""
    pending_bytes: int
    """Bytes of dropped blocks that a transfer still uses."""
    free_bytes: int
    """Bytes ready to be handed out, in pieces."""
    largest_free_bytes: int
    """The longest of these pieces."""
    reserved_bytes: int
    """Bytes taken from the system: in use, waste, pending and free."""
    slabs: int
    blocks: int
    """Live blocks."""
    pending: int
    """Dropped blocks that a transfer still uses."""
    waits: int
    """Blocks handed out behind a transfer of their previous owner."""
    refusals: int
    """Requests that were not served."""
    last_refusal: str
    """Why, in the words of the budget or the system; empty if there never was a refusal."""
    slabs_acquired: int
    """Slabs taken from the system so far; stands still in a steady state."""
    grown_in_background: int
    """How many of them nobody had to wait for."""
    acquire_s: float
    """Seconds that the system took to give slabs."""
    pageable_bytes: int
    """Of ``reserved_bytes``, those that were to be pinned and are not: copies are slower."""
    why_pageable: str
    """Why, in the words of the system or of what memswap leaves to it."""
    written_bytes: int
    """Bytes written to a file; 0 of memory. A drive is rated for so many in its life."""


class _Pool(Uncopied):
    """What pools have in common. ``native`` is the ``memswap._C.Pool`` behind it."""

    def __init__(self, pool: Any, budget_bytes: int) -> None:
        self._native = pool
        self._budget_bytes = budget_bytes
        #: Lanes to it, by device, of who sends tensor by tensor. They live as long as the pool.
        self.lanes: dict[torch.device, Any] = {}

    @property
    def native(self) -> Any:
        """The native pool; its ``allocate(nbytes)`` returns a block or None."""
        return self._native

    @property
    def budget_bytes(self) -> int:
        """Most bytes that this pool takes from the system."""
        return self._budget_bytes

    def statistics(self) -> PoolStatistics:
        """What the pool holds and has done up to now."""
        return PoolStatistics(**self._native.statistics())

    def written_bytes(self) -> int:
        """Bytes written to files by this pool, and by the one that it overflows into."""
        return self.statistics().written_bytes

    def reserve(self, nbytes: int | str | None = None, *, wait: bool = True) -> bool:
        """Take memory from the system before it is needed, on a thread of the pool's own.

        ``nbytes`` is the total that the pool should hold then (to within 1 MiB); None means the
        whole budget. Returns False if less was to be had; ``statistics().last_refusal`` says why.
        With ``wait=False`` returns True at once.
        """
        total = self._budget_bytes if nbytes is None else parse_bytes(nbytes, "reserve(nbytes=...)")
        self._native.reserve(total)
        return bool(self._native.wait_reserved()) if wait else True

    def trim(self) -> int:
        """Return slabs that nothing uses to the system. Returns their bytes.

        The cache of torch's own pinned allocator is emptied with them.
        """
        return int(self._native.trim())

    def __repr__(self) -> str:
        now = self.statistics()
        return (
            f"<{type(self).__name__} {format_bytes(now.in_use_bytes)} in use, "
            f"{format_bytes(now.reserved_bytes)} reserved, "
            f"budget {format_bytes(self._budget_bytes)}>"
        )


class HostPool(_Pool):
    """Host memory for swapped storages.

    Pinned (page-locked) for an accelerator, from the allocator of its own torch backend; ordinary
    memory when ``device`` is the CPU.

    Before it takes memory, a pinned pool asks the system what is left, and leaves a sixteenth of
    the machine, or of the control group that the process is in, to everybody else (at most 8 GiB).
    Where no more can be pinned it goes on with ordinary memory, whose copies the host waits for;
    that is told once, and ``statistics()`` has the bytes and the reason. docs/host-memory.md.

    Args:
        budget: most bytes to take, as an int or such as ``"64GiB"``. A hard limit. None: half of
            the memory that is available when the pool is made, within the limits of the control
            groups that the process is in, divided among the ranks that were started on this machine
            (torchrun, MPI and Slurm tell how many).
        slab: bytes that the pool takes from the system at a time, rounded up to a power of two; a
            longer request gets a longer slab, and slabs grow with the pool.
        numa: ``"auto"`` takes the memory from the NUMA node that the device hangs on, where the
            machine has several and the node is known; an int names the node; None leaves it to the
            system. A preference: a full node never makes an allocation fail.
        device: the device that copies to and from the pool; None: the current accelerator, or the
            CPU where there is none.
        overflow: where requests go that this pool has no room for: a third tier. Its bytes pass
            through pinned memory of the lane's own.
        pageable: whether ordinary memory serves where none can be pinned. False: such requests are
            refused, and tensors stay where they are.

    Raises:
        TypeError: the overflow is no DiskPool, or ``pageable`` no bool.
        ValueError: a size that cannot be read, or is 0 bytes; a device or a NUMA node that does not
            exist.
    """

    def __init__(
        self,
        budget: int | str | None = None,
        slab: int | str = "64MiB",
        numa: Literal["auto"] | int | None = "auto",
        device: torch.device | str | None = None,
        overflow: DiskPool | None = None,
        pageable: bool = True,
    ) -> None:
        if not isinstance(pageable, bool):
            raise TypeError(f"HostPool(pageable={pageable!r}): expected True or False")
        if overflow is not None and not isinstance(overflow, DiskPool):
            raise TypeError(
                f"HostPool(overflow=...): found {type(overflow).__name__}, expected a "
                "memswap.DiskPool or None"
            )
        self.device: torch.device = present_device(device, "HostPool")
        self.numa_node = _numa_node(numa, self.device)
        if budget is None:
            budget_bytes = host_share().pool_bytes
        else:
            budget_bytes = _some_bytes(budget, "HostPool(budget=...)", HALF)
        slab_bytes = _some_bytes(slab, "HostPool(slab=...)", "nothing for 64MiB")
        super().__init__(
            native.make_host_pool(self.device, budget_bytes, slab_bytes, self.numa_node, pageable),
            budget_bytes,
        )
        self.overflow = overflow
        self._pageable_told = False
        if overflow is not None:
            self.native.set_overflow(overflow.native)

    def written_bytes(self) -> int:
        """Bytes written to files by this pool, and by the one that it overflows into."""
        own = super().written_bytes()
        return own if self.overflow is None else own + self.overflow.written_bytes()

    @property
    def pinned(self) -> bool:
        """Whether the pool's memory is pinned for an accelerator."""
        return bool(self.device.type != "cpu")

    def describe(self) -> str:
        """What the pool has taken of host memory, how much of it is pinned, and where it lies."""
        now = self.statistics()
        parts = [f"{format_bytes(now.reserved_bytes)} of {format_bytes(self.budget_bytes)}"]
        if self.pinned:
            parts.append(f"{format_bytes(now.reserved_bytes - now.pageable_bytes)} pinned")
        if self.numa_node is not None:
            parts.append(f"on NUMA node {self.numa_node}")
        line = "host memory: " + ", ".join(parts)
        if now.pageable_bytes:
            line += (
                f"; {format_bytes(now.pageable_bytes)} not pinned, with slower copies: "
                f"{now.why_pageable}"
            )
        return line

    def take_pageable(self) -> str:
        """Why some of the memory is not pinned, once; empty where all of it is."""
        if self._pageable_told or not self.pinned or not self._native.pageable_bytes:
            return ""
        self._pageable_told = True
        return self.statistics().why_pageable


class DiskPool(_Pool):
    """One file for swapped storages, without a name: whatever happens, nothing stays on the disk.

    Serves a CPU, and accelerators through pinned memory: a copy, then a write by a thread, and the
    reverse (csrc/lane/staged_lane.h). What a disk cannot take stays in that memory.

    Space is set aside before it is used, so a full disk is a refusal and never an error in the
    middle of a transfer. Transfers go past the page cache where the file system allows it.

    Args:
        path: a directory, or the beginning of a file name in one. None: the system's directory for
            temporary files (``tempfile.gettempdir()``).
        budget: most bytes to take, as an int or such as ``"500GiB"``. None: half of what is free on
            that file system when the pool is made.
        extent: bytes that the pool takes from the disk at a time, rounded up to a power of two.

    Raises:
        OSError: no file can be made there: the folder is missing, or is a file.
        TypeError: the path is none.
        ValueError: a size that cannot be read, or is 0 bytes; a size in the place of the path.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        budget: int | str | None = None,
        extent: int | str = "256MiB",
    ) -> None:
        place = _place(path)
        if budget is None:
            system = os.statvfs(place if place.is_dir() else place.parent)
            budget_bytes = system.f_bavail * system.f_frsize // 2
        else:
            budget_bytes = _some_bytes(budget, "DiskPool(budget=...)", HALF)
        extent_bytes = _some_bytes(extent, "DiskPool(extent=...)", "nothing for 256MiB")
        pool = native.make_disk_pool(str(place), budget_bytes, extent_bytes)
        super().__init__(pool, budget_bytes)
        self.path = place
        #: Whether the folder is memory itself, such as a tmpfs.
        self.in_memory: bool = is_in_memory(place)

    def describe(self) -> str:
        """What the pool has taken of a disk, and where."""
        line = (
            f"file: {format_bytes(self.statistics().reserved_bytes)} of "
            f"{format_bytes(self.budget_bytes)}, in {self.path}"
        )
        return f"{line}, {IN_MEMORY}" if self.in_memory else line


def _some_bytes(size: int | str, argument: str, otherwise: str) -> int:
    """Bytes of a size that is more than nothing: a pool of 0 bytes would refuse every tensor.

    Args:
        otherwise: what to write for the default.
    """
    nbytes = parse_bytes(size, argument)
    if not nbytes:
        raise ValueError(
            f"{argument}: found {size!r}, expected 1 byte or more, such as 64MiB, or {otherwise}; "
            "where no tensor is to move, memswap.Policy(action='keep') says so"
        )
    return nbytes


def is_in_memory(place: Path) -> bool:
    """Whether files of a folder are in memory; False where the system does not tell."""
    device = os.stat(place if place.is_dir() else place.parent).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = Path("/proc/self/mountinfo").read_text("utf-8").splitlines()
    except OSError:
        return False
    kinds = [line.partition(" - ")[2].split() for line in mounts if line.split()[2] == number]
    return any(kind[:1] in (["tmpfs"], ["ramfs"]) for kind in kinds)


def _place(path: str | os.PathLike[str] | None) -> Path:
    """Where a file without a name can be made: a folder, or the beginning of a name in one."""
    if path is None:
        return Path(tempfile.gettempdir())
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(
            f"DiskPool({path!r}): found {type(path).__name__}, expected a folder; for its size "
            f"write DiskPool(budget={path!r})"
        )
    place = Path(path)
    if place.is_dir():
        return place
    if isinstance(path, str) and is_size(path):
        raise ValueError(
            f"DiskPool({path!r}): found a size, expected a folder; write DiskPool(budget={path!r})"
        )
    if place.exists():
        raise NotADirectoryError(
            f"DiskPool({str(path)!r}): found a file, expected a folder, in which the pool makes a "
            f"file without a name; write DiskPool({str(place.parent)!r})"
        )
    if not place.parent.is_dir():
        raise FileNotFoundError(
            f"DiskPool({str(path)!r}): found no directory {place.parent}; make it or name another"
        )
    return place


def present_device(device: torch.device | str | None, caller: str) -> torch.device:
    """A device of this machine, with its index; None: the current accelerator, or else the CPU.

    Raises:
        ValueError: torch knows no such device, or it is not there.
    """
    present = torch.accelerator.current_accelerator(check_available=True)
    here = "the CPU alone" if present is None else f"the CPU and {present.type}"
    try:
        found = torch.device((present or "cpu") if device is None else device)
    except (RuntimeError, TypeError):
        found = None
    if found is None or (found.type != "cpu" and (present is None or present.type != found.type)):
        raise ValueError(
            f"{caller}(device={str(device)!r}): this torch sees {here}; name one of these"
        )
    if found.type != "cpu" and found.index is None:
        return torch.device(found.type, torch.accelerator.current_device_index())
    return found


def _numa_node(numa: Literal["auto"] | int | None, device: torch.device) -> int | None:
    nodes: int = native.numa_nodes()
    if numa is None:
        return None
    if numa == "auto":
        return node_of(device) if nodes > 1 else None
    if isinstance(numa, bool) or not isinstance(numa, int) or not 0 <= numa < nodes:
        raise ValueError(
            f'numa is "auto", None or a node of this machine (0 to {nodes - 1}), found {numa!r}'
        )
    return numa


def node_of(device: torch.device) -> int | None:
    """NUMA node of a device's PCI slot; None where torch or the system does not tell."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    address = (
        f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}"
        f":{properties.pci_device_id:02x}.0"
    )
    node: int | None = native.numa_node_of_pci(address)
    return node
