"""Collectives inside checkpointed regions: issued again only where nobody keeps them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from eventually import eventually
from torch.utils._python_dispatch import TorchDispatchMode

import memswap
from memswap.checkpoints.policy import is_collective
from ranks import Rank, distributed


class Issued(TorchDispatchMode):
    """Counts the collectives that are really issued."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_collective(op) and "wait" not in str(op) and "wrap" not in str(op):
            self.calls[str(op)] += 1
        return op(*args, **(kwargs or {}))


class Reduced(torch.autograd.Function):
    """All-reduce the way Megatron does it: in place, inside a Function."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, asynchronous: bool) -> torch.Tensor:
        x = x.clone()
        work = dist.all_reduce(x, async_op=asynchronous)
        if asynchronous:
            work.wait()
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None


def all_reduced(x: torch.Tensor) -> torch.Tensor:
    return Reduced.apply(x, False)


def all_reduced_async(x: torch.Tensor) -> torch.Tensor:
    return Reduced.apply(x, True)


def gathered(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty(dist.get_world_size() * x.shape[0], x.shape[1])
    dist.all_gather_into_tensor(out, x.detach())
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.detach())
    return x * out[: x.shape[0]] * sum(parts)


def exchanged(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x.detach().contiguous())
    broadcast = x.detach().clone()
    dist.broadcast(broadcast, src=0)
    return x * out * broadcast


def reduced(x: torch.Tensor) -> torch.Tensor:
    return x * funcol.all_reduce(x.detach(), "sum", dist.group.WORLD)


def edited_afterwards(x: torch.Tensor) -> torch.Tensor:
    """What the collective wrote is edited, so it is not there any more in backward."""
    h = x.detach().clone()
    dist.all_reduce(h)
    h.add_(1)
    return x * h


REGIONS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], int]] = {
    "all_reduce in place": (all_reduced, 1),
    "all_reduce in place, async": (all_reduced_async, 1),
    "all_gather": (gathered, 2),
    "all_to_all and broadcast": (exchanged, 2),
    "functional all_reduce": (reduced, 1),
}


def step(
    rank: Rank, region: Callable[[torch.Tensor], torch.Tensor], call: Callable[..., torch.Tensor]
) -> tuple[list[torch.Tensor], int, int]:
    """The gradients, and how many collectives forward and backward issued."""
    torch.manual_seed(rank.rank)
    x = torch.randn(4, 4, requires_grad=True)
    weight = torch.randn(4, 4, requires_grad=True)

    def fn(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (region((x @ weight).sin()).exp() @ weight).sin()

    with Issued() as forward:
        out = call(fn, x, weight).sum()
    with Issued() as backward:
        out.backward()
    return [x.grad, weight.grad], forward.calls.total(), backward.calls.total()


def swap_collectives(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> memswap.CheckpointPolicy:
    return memswap.CheckpointPolicy.MUST_SWAP if is_collective(op) else False


@distributed(2)
@pytest.mark.parametrize("name", list(REGIONS))
def test_collectives_are_issued_again_only_without_keep_collectives(rank: Rank, name: str) -> None:
    region, issued = REGIONS[name]
    plain, forward, backward = step(rank, region, lambda fn, *args: fn(*args))
    assert (forward, backward) == (issued, 0)
    for policy, again in ((None, issued), (memswap.keep_collectives, 0), (swap_collectives, 0)):
        shared = memswap.Checkpointing(policy, min_bytes=1)
        found, forward, backward = step(rank, region, shared.checkpoint)
        assert (forward, backward) == (issued, again), f"{policy}: collectives issued"
        for ours, expected in zip(found, plain, strict=True):
            assert torch.equal(ours, expected), f"{policy}: gradients differ"
        assert shared.stats().moved_storages == 0, "bytes were sent while a collective wrote them"
        assert ("collective" in shared.stats().kept) is (policy is swap_collectives)


@distributed(2)
def test_an_edit_of_what_a_collective_wrote_is_noticed(rank: Rank) -> None:
    with pytest.raises(memswap.InplaceEditError, match=r"c10d\.allreduce_"):
        step(
            rank,
            edited_afterwards,
            lambda fn, *args: memswap.checkpoint(fn, *args, policy_fn=memswap.keep_collectives),
        )


@distributed(2)
def test_dtensors_leave_and_come_back(rank: Rank) -> None:
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    torch.manual_seed(0)
    raw, weight = torch.randn(8, 8), torch.randn(8, 8)

    def run(call: Callable[..., Any]) -> torch.Tensor:
        x = distribute_tensor(raw, rank.mesh, [Shard(0)]).requires_grad_()
        w = distribute_tensor(weight, rank.mesh, [Replicate()])
        out = call(lambda x: ((x @ w).sin().redistribute(rank.mesh, [Replicate()]) @ w).sin(), x)
        out.sum().backward()
        assert isinstance(x.grad, DTensor)
        return x.grad.to_local()

    ops = (torch.ops.aten.mm.default,)

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        if op in ops:
            return memswap.CheckpointPolicy.MUST_SWAP
        return memswap.keep_collectives(ctx, op, *args, **kwargs)

    shared = memswap.Checkpointing(policy, min_bytes=1, swap_inputs=True)
    expected = run(lambda fn, x: fn(x))
    for _ in range(2):
        assert torch.equal(run(shared.checkpoint), expected)
    assert shared.stats().moved_storages > 0
    # A gloo thread that has just ended its collective holds the result, and the graph behind it,
    # until it is scheduled again.
    gone = eventually(lambda: shared.stats().resident_bytes == 0)
    assert gone, "a region's storages outlive its graph"


@distributed(2)
@pytest.mark.parametrize("wrapper", ["fully_shard, then checkpoint", "checkpoint, then", "DDP"])
def test_checkpointed_modules_under_data_parallelism(rank: Rank, wrapper: str) -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor
    from torch.nn.parallel import DistributedDataParallel

    def matmuls_leave(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        if op is torch.ops.aten.addmm.default:
            return memswap.CheckpointPolicy.MUST_SWAP
        return memswap.keep_collectives(ctx, op, *args, **kwargs)

    def train(checkpointed: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        layers = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(2)]
        model: torch.nn.Module = torch.nn.Sequential(*layers)
        if checkpointed and wrapper.startswith("checkpoint"):
            memswap.checkpoint_module(layers, matmuls_leave, swap_inputs=True, min_bytes=1)
        if wrapper == "DDP":
            if checkpointed:
                memswap.checkpoint_module(layers, matmuls_leave, swap_inputs=True, min_bytes=1)
            model = DistributedDataParallel(model)
        else:
            for layer in layers:
                fully_shard(layer, mesh=rank.mesh)
            fully_shard(model, mesh=rank.mesh)
        if checkpointed and wrapper.startswith("fully_shard"):
            memswap.checkpoint_module(layers, matmuls_leave, swap_inputs=True, min_bytes=1)
        for step in range(2):
            model.zero_grad()
            torch.manual_seed(10 * step + rank.rank)
            model(torch.randn(4, 8)).square().mean().backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        return [g.to_local() if isinstance(g, DTensor) else g for g in gradients]

    for ours, expected in zip(train(True), train(False), strict=True):
        assert torch.equal(ours, expected), f"{wrapper}: gradients differ"
