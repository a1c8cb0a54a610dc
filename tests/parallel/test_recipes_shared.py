"""Recipes together with what several processes share: no bit differs, nothing is sent twice."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import memswap
from cut_attention import Attention, make, open_comms, random
from memswap.engine import recipes
from memswap.parallel import ContextParallel
from ranks import Rank, distributed
from sharding import Net, assert_same, make_net, sharded, train

RECOMPUTE = memswap.Policy(action="recompute", min_bytes=1)


class Scaled(nn.Module):
    """Ends with its own weight: what the next layer saves is computed from this layer's."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.into = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.ones(width) * 1.25)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(self.into(x)) * self.scale + self.scale.double().exp().to(x.dtype)


def scaled_net() -> Net:
    net = make_net(torch.float32, layers=4)
    net.layers = nn.ModuleList(Scaled(8) for _ in range(4))
    return net


def managed(
    net: nn.Module,
    layers: Any,
    rank: Rank,
    monkeypatch_proofs: int,
    steps: int = 5,
    autocast: bool = False,
) -> tuple[list[torch.Tensor], memswap.types.Stats, set[str]]:
    """Losses of a training with recipes, statistics of its last step, and all recipes in words."""
    before, recipes.PROOFS = recipes.PROOFS, monkeypatch_proofs
    try:
        with memswap.manage(layers, RECOMPUTE) as manager:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                losses = train(net, rank, steps)
            known = manager._engine.recipes
            assert known is not None
            return losses, manager.stats(), {row[1][0] for row in known.learnt()}
    finally:
        recipes.PROOFS = before


def fully_sharded(rank: Rank, net: Net, **how: Any) -> Net:
    net = copy.deepcopy(net)
    for layer in net.layers:
        fully_shard(layer, mesh=rank.mesh, **how)
    return fully_shard(net, mesh=rank.mesh, **how)


HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
SHARDINGS: dict[str, Callable[[Rank, Net], nn.Module]] = {
    "shard": lambda rank, net: sharded(rank, net, context={"slots": 2})[0],
    "shard, late": lambda rank, net: sharded(rank, net, late=True, context={"slots": 2})[0],
    "FSDP2": fully_sharded,
    "FSDP2, bf16": lambda rank, net: fully_sharded(rank, net, mp_policy=HALF),
    "FSDP2, gathered once": lambda rank, net: fully_sharded(rank, net, reshard_after_forward=False),
    "DDP": lambda rank, net: DistributedDataParallel(copy.deepcopy(net)),
}


def combinations() -> Iterator[Any]:
    """All of them; those that are not slow have each pair of values at least once."""
    for place, name in enumerate(SHARDINGS):
        for flags in itertools.product((False, True), repeat=3):
            proven, scaled, autocast = flags
            others = (scaled, autocast) if proven else (not scaled, not autocast)
            first = others == ((True, True), (False, False), (False, True))[place % 3]
            yield pytest.param(
                name,
                recipes.PROOFS if proven else 0,
                "scaled" if scaled else "blocks",
                autocast,
                marks=() if first else pytest.mark.slow,
            )


@distributed(2)
@pytest.mark.parametrize(("name", "proofs", "kind", "autocast"), list(combinations()))
def test_sharded_training_has_the_same_bits(
    rank: Rank, name: str, proofs: int, kind: str, autocast: bool
) -> None:
    start = make_net(torch.float32) if kind == "blocks" else scaled_net()
    net, reference = (SHARDINGS[name](rank, start) for _ in range(2))
    layers = net.module.layers if name == "DDP" else net.layers  # type: ignore[union-attr]
    losses, stats, words = managed(net, layers, rank, proofs, autocast=autocast)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected = train(reference, rank, 5)
    for mine, theirs in zip(losses, expected, strict=True):
        assert torch.equal(mine, theirs)
    assert_same(net, reference, rank, bitwise=True)
    assert stats.recipe_runs > 0, words
    assert stats.resident_bytes == 0 and stats.away_bytes == 0
    if name.startswith("shard"):
        gathered = {one for one in words if "parameter" in one}
        assert not gathered, f"a recipe reads weights that come and go: {gathered}"


@distributed(2)
@pytest.mark.parametrize("proofs", [0, recipes.PROOFS])
@pytest.mark.parametrize("name", list(SHARDINGS))
def test_a_model_whose_embedding_stands_beside_its_layers(
    rank: Rank, name: str, proofs: int
) -> None:
    """Of a table that is whole, the first layer's input is looked up again; of a shard it stays."""
    net, reference = (SHARDINGS[name](rank, make_net(torch.float32)) for _ in range(2))
    losses, stats, words = managed(net, net, rank, proofs)
    for mine, theirs in zip(losses, train(reference, rank, 5), strict=True):
        assert torch.equal(mine, theirs)
    assert_same(net, reference, rank, bitwise=True)
    assert stats.recipe_runs > 0, words
    assert stats.resident_bytes == 0 and stats.away_bytes == 0
    assert any("embedding" in one for one in words) == (name == "DDP"), words


@distributed(2)
@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("name", ["shard", "FSDP2", "FSDP2, bf16", "FSDP2, gathered once"])
def test_gathered_weights_in_a_block(rank: Rank, name: str, autocast: bool) -> None:
    """Of a `with` block nobody has said which parameters a model has.

    Those that `shard` lends memory to are no sources; FSDP2's are looked at when they are read.
    """
    start = scaled_net()
    reference, net = (SHARDINGS[name](rank, start) for _ in range(2))
    context = None
    if name == "shard":
        net, context = sharded(rank, start)
    before, recipes.PROOFS = recipes.PROOFS, 0
    try:
        block = memswap.saved_tensors(RECOMPUTE)
        optimizers = [torch.optim.AdamW(one.parameters(), lr=1e-2) for one in (net, reference)]
        tokens = torch.arange(10).view(2, 5)
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                with block:
                    loss = net(tokens).float().square().mean()
                other = reference(tokens).float().square().mean()
            for one, optimizer in zip((loss, other), optimizers, strict=True):
                optimizer.zero_grad()
                one.backward()
                optimizer.step()
            assert torch.equal(loss, other)
    finally:
        recipes.PROOFS = before
    assert_same(net, reference, rank, bitwise=True)
    assert context is None or context.stats().lent == 0
    assert block.stats().recipe_runs > 0
    words = {row[1][0] for row in block._engine.recipes.learnt()}  # type: ignore[union-attr]
    assert words and (name != "shard" or not any("parameter" in one for one in words)), words


# --- collectives ----------------------------------------------------------------------------------


def reduced_in_place(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    dist.all_reduce(y.detach())
    return y


def reduced_under_way(x: torch.Tensor) -> torch.Tensor:
    y = (x * 2).exp().log()
    work = dist.all_reduce(y.detach(), async_op=True)
    assert work is not None
    work.wait()
    return y


def broadcast_in_place(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    dist.broadcast(y.detach(), 1)
    return y + 0 * x


def gathered_into(x: torch.Tensor) -> torch.Tensor:
    y = torch.cat([x, x])
    dist.all_gather_into_tensor(y.detach(), x.detach().contiguous())
    return y[: len(x)] + y[len(x) :]


def gathered_list(x: torch.Tensor) -> torch.Tensor:
    parts = [x * 1.0, x.neg()]
    dist.all_gather([one.detach() for one in parts], x.detach().contiguous())
    return parts[0] * parts[1]


def functional(x: torch.Tensor) -> torch.Tensor:
    return x + funcol.all_reduce(x.detach(), "sum", dist.group.WORLD)


def functional_gather(x: torch.Tensor) -> torch.Tensor:
    y = funcol.all_gather_tensor(x.detach(), 0, dist.group.WORLD)
    return x * y[: len(x)] * y[len(x) :]


def received(x: torch.Tensor) -> torch.Tensor:
    y = x * 3
    other = 1 - dist.get_rank()
    sent = x.detach().contiguous()
    for one in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, sent, other), dist.P2POp(dist.irecv, y.detach(), other)]
    ):
        one.wait()
    return y


COLLECTIVES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    one.__name__: one
    for one in (
        reduced_in_place, reduced_under_way, broadcast_in_place, gathered_into, gathered_list,
        functional, functional_gather, received,
    )
}  # fmt: skip


@distributed(2)
@pytest.mark.parametrize("name", list(COLLECTIVES))
def test_what_a_collective_filled_is_no_recipe(rank: Rank, name: str) -> None:
    """While memswap learns, the other rank adds nothing, and the collective is seen as a copy."""
    collective, weight = COLLECTIVES[name], torch.ones(8, 8, requires_grad=True)
    block = memswap.saved_tensors(RECOMPUTE)

    def gradient(step: int, saving: Any) -> torch.Tensor:
        scale = 1.0 if rank.rank == 0 or step >= 3 else 0.0
        x = (torch.arange(64.0).view(8, 8) + 1) * scale

        def forward() -> torch.Tensor:
            y = collective((x * weight).sin())
            return (y * weight).cos().sum() + (y.exp() * weight).sum()

        with saving:
            loss = forward()
        (found,) = torch.autograd.grad(loss, weight)
        return found

    for step in range(6):
        expected = gradient(step, contextlib.nullcontext())
        assert torch.equal(gradient(step, block), expected), f"step {step}"


@distributed(2)
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("proofs", [0, recipes.PROOFS])
def test_context_parallel_attention_sends_what_it_sends_without_recipes(
    rank: Rank, late: bool, proofs: int
) -> None:
    mesh = init_device_mesh("cpu", (2,))
    before, recipes.PROOFS = recipes.PROOFS, proofs

    def gradients(model: Attention, saving: Any) -> list[torch.Tensor]:
        x = random(2, 16, model.width).float().chunk(2, 1)[rank.rank].clone().requires_grad_()
        with saving:
            loss = F.silu(model(F.layer_norm(x, (model.width,)))).square().sum()
        return list(torch.autograd.grad(loss, [x, *model.parameters()]))

    try:
        model = make().float()
        style = ContextParallel(ulysses=2, heads=4, comm=open_comms(rank, late))
        style.apply(model.core, mesh)
        gradients(model, contextlib.nullcontext())  # the first one compares configurations
        rank.log.events.clear()
        expected = gradients(model, contextlib.nullcontext())
        sent = list(rank.log.events)
        block = memswap.saved_tensors(RECOMPUTE)
        for _ in range(4):
            rank.log.events.clear()
            for mine, theirs in zip(gradients(model, block), expected, strict=True):
                assert torch.equal(mine, theirs)
            assert rank.log.events == sent, "other exchanges than without recipes"
        assert block.stats().recipe_runs > 0
    finally:
        recipes.PROOFS = before


@distributed(2)
def test_a_unit_that_is_sharded_and_checkpointed(rank: Rank) -> None:
    start = make_net(torch.float32)
    reference, _ = sharded(rank, start)
    net, _ = sharded(rank, start)
    net.checkpointed = [0, 2]
    losses, stats, _ = managed(net, net.layers, rank, 0)
    for mine, theirs in zip(losses, train(reference, rank, 5), strict=True):
        assert torch.equal(mine, theirs)
    assert_same(net, reference, rank, bitwise=True)
    assert stats.recipe_runs > 0
