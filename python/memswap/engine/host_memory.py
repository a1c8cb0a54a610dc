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
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from memswap._native import native
from memswap.engine.units import format_bytes

if TYPE_CHECKING:
    from memswap._C import HostLimits

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
class HostShare:
    """What this process may take of host memory. Bytes."""

    limits: HostLimits
    """What the system leaves to all processes."""
    ranks: int
    """Processes that share the machine."""

    @property
    def pool_bytes(self) -> int:
        """What a pool of this process takes at most by default."""
        return int(self.limits.free_bytes * SHARE) // self.ranks

    def __str__(self) -> str:
        limits = self.limits
        parts = [f"{format_bytes(limits.available)} available"]
        if limits.group is not None:
            parts.append(f"{format_bytes(limits.group)} left by the control group")
        if limits.lockable is not None:
            parts.append(f"{format_bytes(limits.lockable)} may be locked (ulimit -l)")
        if self.ranks > 1:
            parts.append(f"shared by {self.ranks} ranks")
        return ", ".join(parts)


def host_share(root: Path = Path("/"), environment: Mapping[str, str] = os.environ) -> HostShare:
    """What this process may take of host memory now.

    Args:
        root: where ``proc`` and ``sys`` are, for tests.
        environment: variables; those of `LAUNCHERS` say how many ranks share the machine.
    """
    return HostShare(native.host_limits(str(root)), ranks_of_machine(environment))


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
