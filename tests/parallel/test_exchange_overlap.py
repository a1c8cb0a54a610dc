"""exchange: the launch waits for nobody; and the tests notice what breaks it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.distributed_c10d import _get_default_store

from memswap.parallel import GatherSequence, HeadsToSequence, SequenceShards, SequenceToHeads
from memswap.parallel import exchange as launch
from memswap.parallel.in_flight import InFlight
from ranks import Rank, distributed


@distributed(2)
def test_a_late_peer_keeps_nobody_from_computing(rank: Rank) -> None:
    """Rank 1 launches only after rank 0 said that it has passed its own launch, both ways.

    A launch that waited for its peer would hang here, however fast the machine.
    """
    store = _get_default_store()
    comm = rank.open_comm()
    shards = SequenceShards.cut(4, 2)
    for name, spec in (
        ("heads", SequenceToHeads(comm, ((0,), (1,)), shards.lengths, 0, 1)),
        ("gather", GatherSequence(comm, shards, 0)),
    ):
        x = torch.ones(2, 2, requires_grad=True)
        if rank.rank == 1:
            store.wait([f"{name} launched"])
        pending = launch(x, spec)
        if rank.rank == 0:
            store.set(f"{name} launched", "")
            assert pending._token is not None
            pending._token.register_hook(lambda _, name=name: store.set(f"{name} back", ""))
        y = pending.wait()
        if rank.rank == 1:
            y.register_hook(lambda _, name=name: store.wait([f"{name} back"]))
        y.sum().backward()
        assert x.grad is not None
        assert torch.equal(x.grad, torch.full((2, 2), 2.0 if name == "gather" else 1.0))


class Unwaited(SequenceToHeads):
    """Uses what has not arrived."""

    def launch(self, tensor: torch.Tensor, label: str) -> InFlight:
        return InFlight(_NoTicket(), super().launch(tensor, label)._unpack)


class _NoTicket:
    def wait(self) -> None:
        return None


class Aliased(GatherSequence):
    """Sends the tensor itself instead of a copy of it."""

    def launch(self, tensor: torch.Tensor, label: str) -> InFlight:
        received = tensor.new_empty(2 * len(tensor), *tensor.shape[1:])
        return InFlight(self.comm.all_gather([received], [tensor], label=label), lambda: received)


class Overwritten(HeadsToSequence):
    """Takes one of a replicated head's gradients instead of their sum."""

    def launch(self, tensor: torch.Tensor, label: str) -> InFlight:
        whole = super().launch(tensor, label)
        return InFlight(whole._ticket, lambda: whole._unpack() / len(self.heads))


class Unsummed(SequenceToHeads):
    def adjoint(self) -> HeadsToSequence:
        return Overwritten(self.comm, self.heads, self.lengths, self.seq_dim, self.head_dim)


def arrives(rank: Rank, to_heads: Any = SequenceToHeads, gather: Any = GatherSequence) -> bool:
    """Whether values and gradients are right over the worst legal network."""
    comm = rank.open_comm(late=True)
    shards = SequenceShards.cut(4, 2)
    x = torch.full((2, 1), 1.0 + rank.rank, requires_grad=True)
    y = launch(x, to_heads(comm, ((0,), (0,)), shards.lengths, 0, 1)).wait()
    if not torch.equal(y, torch.tensor([[1.0], [1.0], [2.0], [2.0]])):
        return False
    y.sum().backward()
    z = torch.full((2, 1), 1.0 + rank.rank)
    pending = launch(z, gather(comm, shards, 0))
    z.zero_()
    gathered = bool((pending.wait() > 0).all())
    return gathered and x.grad is not None and torch.equal(x.grad, torch.full((2, 1), 2.0))


@distributed(2)
@pytest.mark.parametrize(
    "broken",
    [{}, {"to_heads": Unwaited}, {"gather": Aliased}, {"to_heads": Unsummed}],
    ids=["nothing", "used-before-wait", "input-not-copied", "replicas-not-summed"],
)
def test_each_broken_part_is_noticed(rank: Rank, broken: dict[str, Any]) -> None:
    assert arrives(rank, **broken) == (not broken)
