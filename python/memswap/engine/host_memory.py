"""Host memory: how much of it a pool of this process may take by default.

What the system leaves is read natively (csrc/pool/host_limits.h), and asked again before each slab
([Note: What ends a process] in csrc/pool/spare_slabs.h). Here it is divided among the ranks of this
machine: each has the same share from the beginning, so that a plan can count on it, and a rank that
dies leaves nothing behind that others would have to clear up. Should all of them take more than
there is (budgets of their own, another job), each finds less left before its next slab.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from memswap._native import native
from memswap.engine.units import format_bytes

#: What a pool takes at most of what is available.
SHARE = 1 / 2

#: Variables in which launchers tell how many processes they have started on a machine: torchrun and
#: accelerate, Open MPI, MVAPICH, MPICH and Intel MPI, Slurm's srun ("8(x2),4": two machines with 8
#: and one with 4, of which the largest number is taken).
LAUNCHERS = (
    "LOCAL_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MV2_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "SLURM_STEP_TASKS_PER_NODE",
)


@dataclass(frozen=True, slots=True)
class HostLimits:
    """What the system leaves of host memory. Bytes."""

    available: int
    """What it would give now without swapping."""
    group: int | None
    """What the control groups above this process leave; None: they set no limit."""
    locked: int | None
    """Most bytes that may be locked (``ulimit -l``); None: no limit for this process. Drivers that
    pin for a device mostly do not count there; a pool notices whether one does."""
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
        environment: variables; those of `LAUNCHERS` say how many ranks share the machine.
    """
    found = native.host_limits(str(root))
    return HostLimits(
        available=found.available,
        group=found.group,
        locked=found.lockable,
        ranks=ranks_of_machine(environment),
    )


def ranks_of_machine(environment: Mapping[str, str]) -> int:
    """How many processes of this training are on this machine, as its launcher says.

    Where none says it and torch.distributed is in use (processes that were spawned by hand), as
    many as there are ranks, or accelerators here if they are fewer.
    """
    for name in LAUNCHERS:
        if numbers := re.findall(r"(?<!\(x)\b\d+", environment.get(name, "")):
            return max(1, *map(int, numbers))
    if not (dist.is_available() and dist.is_initialized()):
        return 1
    world: int = dist.get_world_size()
    if torch.accelerator.is_available():
        return max(1, min(world, int(torch.accelerator.device_count())))
    return world
