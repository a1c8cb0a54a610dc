"""Compute really runs while a slow peer keeps a collective waiting: by events, not by the clock.

Rank 1 joins a collective only when rank 0 has said that it got past a certain compute. If rank 0
waited for the collective first, nobody would ever say so.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from memswap.parallel import ShardContext, shard
from memswap.parallel.comm import ProcessGroupComm, ReduceOp, Ticket
from ranks import Rank, distributed
from sharding import loss_of, make_net, tokens_of

#: Where the other rank is to pass, for as long as a busy machine may take; where it cannot, not.
PATIENCE = {False: timedelta(seconds=15), True: timedelta(seconds=1)}


class SlowPeer(ProcessGroupComm):
    """Joins one collective only when the other rank has passed a point, if it does."""

    def __init__(self, group: dist.ProcessGroup, which: str, synchronous: bool) -> None:
        super().__init__(group)
        self.which = which
        self.synchronous = synchronous
        self.store = dist.distributed_c10d._get_default_store()
        self.passed: bool | None = None

    def _meet(self, collective: str) -> None:
        if self.rank == 1 and collective == self.which and self.passed is None:
            try:
                self.store.wait(["passed"], PATIENCE[self.synchronous])
                self.passed = True
            except RuntimeError:  # nobody passed
                self.passed = False

    def _done(self, ticket: Ticket) -> Ticket:
        if self.synchronous:
            ticket.wait()
        return ticket

    def all_gather(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], *, label: str = ""
    ) -> Ticket:
        self._meet(f"all_gather {label}")
        return self._done(super().all_gather(outputs, inputs, label=label))

    def reduce_scatter(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        *,
        op: ReduceOp = "avg",
        label: str = "",
    ) -> Ticket:
        self._meet(f"reduce_scatter {label}")
        return self._done(super().reduce_scatter(outputs, inputs, op=op, label=label))


class _Log:
    """Says so when a certain event happens."""

    def __init__(self, event: str) -> None:
        self.event = event

    def __call__(self, event: str) -> None:
        if event == self.event:
            dist.distributed_c10d._get_default_store().set("passed", "")


@distributed(2)
@pytest.mark.parametrize(
    ("collective", "compute", "synchronous"),
    [
        ("all_gather layers.1", "F0 ends", False),
        ("all_gather layers.2", "F1 ends", False),
        ("reduce_scatter layers.2", "B1 ends", False),
        ("reduce_scatter layers.1", "B0 ends", False),
        # Controls: the test can tell the difference.
        ("all_gather layers.1", "F0 ends", True),
        ("reduce_scatter layers.1", "B0 ends", True),
    ],
)
def test_compute_goes_on_while_a_peer_is_late(
    rank: Rank, collective: str, compute: str, synchronous: bool
) -> None:
    net = make_net()
    comms: list[SlowPeer] = []

    def open_comm(group: dist.ProcessGroup) -> SlowPeer:
        comms.append(SlowPeer(group, collective, synchronous))
        return comms[0]

    context = ShardContext(slots=2, open_comm=open_comm)
    for layer in net.layers:
        shard(layer, rank.mesh, context=context)
        if rank.rank == 0:
            layer.log = _Log(compute)  # type: ignore[assignment]
    shard(net, rank.mesh, context=context)
    loss_of(net, tokens_of(0, 2)[rank.rank]).backward()
    if rank.rank == 1:
        assert comms[0].passed is not synchronous
