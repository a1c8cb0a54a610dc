"""Host memory: how much of it this process may take, so that the system kills nobody.

[Note: What ends a process]
Linux refuses hardly any allocation; it ends a process when pages are touched that are not there. A
pool therefore has a limit of its own, from what the system says when the pool is made: what is
available now (`MemAvailable`), what every control group above this process leaves of its limit
(version 2: `memory.max` and `memory.current`; version 1: `memory.limit_in_bytes` and
`memory.usage_in_bytes`), the same for all processes of a node that a launcher has started together
(`LOCAL_WORLD_SIZE`), each of which would otherwise take half of it.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from memswap.engine.units import format_bytes

#: What a pool takes at most of what is available.
SHARE = 1 / 2


@dataclass(frozen=True, slots=True)
class HostLimits:
    """What the system leaves of host memory. Bytes."""

    available: int
    """What it would give now without swapping."""
    group: int | None
    """What the control groups above this process leave; None: they set no limit."""
    locked: int | None
    """Most bytes that may be locked (``ulimit -l``); None: no limit. Drivers that pin for a device
    mostly do not count there."""
    ranks: int
    """Processes that share the machine."""

    @property
    def free_bytes(self) -> int:
        """What this machine, or the group that the process is in, has left."""
        return self.available if self.group is None else min(self.available, self.group)

    @property
    def pool_bytes(self) -> int:
        """What a pool of this process takes at most by default."""
        return int(self.free_bytes * SHARE) // self.ranks

    def __str__(self) -> str:
        parts = [f"{format_bytes(self.available)} available"]
        if self.group is not None:
            parts.append(f"{format_bytes(self.group)} left by the control group")
        if self.locked is not None:
            parts.append(f"{format_bytes(self.locked)} may be locked (ulimit -l)")
        if self.ranks > 1:
            parts.append(f"shared by {self.ranks} ranks")
        return ", ".join(parts)


def host_limits(root: Path = Path("/"), environment: Mapping[str, str] = os.environ) -> HostLimits:
    """What the system leaves of host memory now.

    Args:
        root: where ``proc`` and ``sys`` are, for tests.
        environment: variables; LOCAL_WORLD_SIZE says how many ranks share the machine.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return HostLimits(
        available=_available(root),
        group=min(_left_by_groups(root), default=None),
        locked=None if soft == resource.RLIM_INFINITY else soft,
        ranks=_ranks(environment),
    )


def _available(root: Path) -> int:
    try:
        for line in (root / "proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")  # free pages have to do


def _ranks(environment: Mapping[str, str]) -> int:
    found = environment.get("LOCAL_WORLD_SIZE", "1")
    return max(int(found), 1) if found.isdigit() else 1


def _left_by_groups(root: Path) -> Iterator[int]:
    """What each control group that this process is in leaves of its limit."""
    for folder, most, now in _groups(root):
        try:
            limit = (folder / most).read_text(encoding="ascii").strip()
            if limit == "max":
                continue
            used = int((folder / now).read_text(encoding="ascii"))
        except (OSError, ValueError):
            continue  # no such group here: a container sees its own one as the root
        if int(limit) < 1 << 60:  # version 1 says "none" with a number as large as there is
            yield max(int(limit) - used, 0)


def _groups(root: Path) -> Iterator[tuple[Path, str, str]]:
    """Folders of this process' groups and of those above them, and the names of two files."""
    second = (root / "sys/fs/cgroup", "memory.max", "memory.current")
    first = (root / "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes")
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="ascii").splitlines()
    except OSError:
        lines = []
    yield second
    yield first
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        top, most, now = first if controllers else second
        folder = top / path.lstrip("/")
        while folder != top and top in folder.parents:
            yield folder, most, now
            folder = folder.parent
