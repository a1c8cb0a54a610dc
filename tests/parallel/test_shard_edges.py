"""The ends of a model: embedding and head with the sequence cut over the ranks."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import loss_parallel

from memswap.parallel import ShardContext, shard
from ranks import Rank, distributed

BATCH, LENGTH, WIDTH, VOCABULARY = 2, 8, 6, 12


class Ends(nn.Module):
    """An embedding, a layer and a head."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.layer(self.embed(tokens)).tanh())
        return logits


@distributed(2, 4)
@pytest.mark.parametrize("late", [False, True], ids=["async", "late"])
@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize("by_vocabulary", [False, True], ids=["by sequence", "by vocabulary"])
def test_head_and_loss_over_a_cut_sequence(
    rank: Rank, late: bool, tied: bool, by_vocabulary: bool
) -> None:
    torch.manual_seed(11)
    start = Ends(tied).double()
    tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH))
    targets = torch.randint(0, VOCABULARY, (BATCH, LENGTH))
    reference = copy.deepcopy(start)
    expected = F.cross_entropy(reference(tokens).flatten(0, 1), targets.flatten())
    expected.backward()

    context = ShardContext(
        slots=2, open_comm=lambda group: rank.open_comm(group, late=late), debug=True
    )
    net = copy.deepcopy(start)
    shard(net.layer, rank.mesh, context=context)
    ends = [net.embed, net.head]
    for unit in [ends] if tied else [[one] for one in ends]:
        shard(unit, rank.mesh, context=context)
    for module in (net.layer, *ends):
        module.set_gradient_divide_factor(1)
    part = slice(rank.rank * LENGTH // rank.size, (rank.rank + 1) * LENGTH // rank.size)
    logits = net(tokens[:, part])
    if by_vocabulary:
        # From a part of the sequence with all of the vocabulary, to the whole sequence with a part.
        whole = DTensor.from_local(logits, rank.mesh, [Shard(1)], run_check=False)
        cut = whole.redistribute(placements=[Shard(2)]).flatten(0, 1)
        assert cut.to_local().shape == (BATCH * LENGTH, VOCABULARY // rank.size)
        with loss_parallel():
            answers = DTensor.from_local(
                targets.flatten(), rank.mesh, [Replicate()], run_check=False
            )
            loss = F.cross_entropy(cut, answers)
            loss.backward()
        loss = loss.full_tensor()
    else:
        total = F.cross_entropy(logits.flatten(0, 1), targets[:, part].flatten(), reduction="sum")
        loss = total / targets.numel()
        loss.backward()
        torch.distributed.all_reduce(loss.detach_())
    torch.testing.assert_close(loss.detach(), expected.detach(), rtol=0, atol=1e-12)
    for (name, mine), theirs in zip(net.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(
            mine.grad.full_tensor(), theirs.grad, rtol=0, atol=1e-12, msg=name
        )


@distributed(2, 4)
@pytest.mark.parametrize("late", [False, True], ids=["async", "late"])
def test_an_embedding_sharded_by_its_width(rank: Rank, late: bool) -> None:
    torch.manual_seed(11)
    start = Ends(tied=False).double()
    reference, net = copy.deepcopy(start), copy.deepcopy(start)
    context = ShardContext(
        slots=1, open_comm=lambda group: rank.open_comm(group, late=late), debug=True
    )

    def by_width(parameter: nn.Parameter) -> Shard | None:
        return Shard(-1) if parameter.ndim > 1 else None

    for module in (net.embed, net.layer, net.head):
        shard(module, rank.mesh, context=context, shard_placement_fn=by_width)
    assert net.embed.weight.placements == (Shard(1),)
    assert net.embed.weight.to_local().shape[0] == VOCABULARY
    assert torch.equal(net.embed.weight.full_tensor(), start.embed.weight)
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.1) for one in (net, reference)]
    for _ in range(2):
        tokens = torch.randint(0, VOCABULARY, (rank.size, LENGTH))
        net(tokens[rank.rank]).pow(2).mean().backward()
        reference(tokens).pow(2).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (name, mine), theirs in zip(net.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.full_tensor(), theirs, rtol=0, atol=1e-12, msg=name)


@distributed(2)
def test_gradients_are_divided_by_what_was_said(rank: Rank) -> None:
    layer = nn.Linear(2, 2)
    plain = copy.deepcopy(layer)
    shard(layer, rank.mesh)
    layer.set_gradient_divide_factor(8)
    layer(torch.ones(1, 2)).sum().backward()
    plain(torch.ones(1, 2)).sum().backward()
    assert torch.equal(layer.weight.grad.full_tensor(), plain.weight.grad * 2 / 8)
