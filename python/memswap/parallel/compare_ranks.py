"""Whether all ranks have sharded the same: ranks that differ would hang, or mix up their data."""

from __future__ import annotations

from collections.abc import Iterable

from memswap.errors import RankMismatchError
from memswap.parallel.comm import Comm
from memswap.parallel.scheduled import Scheduled
from memswap.parallel.selftest import ranks_that_differ


def compare_ranks(units: Iterable[Scheduled], settings: object) -> None:
    """Compare units in their order, and settings by their ``repr``; every rank calls this.

    Raises:
        RankMismatchError: another rank's differ; with this rank's.
    """
    texts: dict[Comm, str] = {}
    for one in units:
        unit = one.unit
        own = (
            unit.name,
            [(m.dim, tuple(m.shape), str(m.dtype), m.sharded.requires_grad) for m in unit.members],
            (one.reshard_after_forward, one.residency, one.unshard_in_backward),
            (one.own_memory, one.anchor, str(unit.policy.reduce_dtype), unit.divide_factor),
            settings,
        )
        for comm in (unit.comm, unit.replicas):
            if comm is not None:
                texts[comm] = f"{texts.get(comm, '')}{own}\n"
        device = unit.device
    for comm, text in texts.items():
        if others := ranks_that_differ(comm, device, text):
            raise RankMismatchError(
                f"rank {comm.rank} has sharded its model in another way than ranks {others} "
                "of its group: modules, shapes, dtypes, options of shard() and of ShardContext "
                f"must agree on all ranks. Here they are:\n{text}"
            )
