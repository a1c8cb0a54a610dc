"""What is launched when, from the log of events: never from the clock."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from comms import EventLog, FakeComm, Recording
from memswap.errors import RankMismatchError
from memswap.parallel import ContextParallel, ShardContext, describe, shard
from ranks import Rank, distributed
from sharding import Net, loss_of, make_net, sharded, tokens_of, train

GATHER, REDUCE = "all_gather layers.", "reduce_scatter layers."


def logged(rank: Rank, net: Net) -> Net:
    for layer in net.layers:
        layer.log = rank.log
    return net


def step_of(rank: Rank, net: Net, step: int = 1) -> list[str]:
    """The events of one step."""
    rank.log.events.clear()
    loss_of(net, tokens_of(step, rank.size)[rank.rank]).backward()
    return rank.log.events


@distributed(2)
@pytest.mark.parametrize("step", [0, 1], ids=["first step", "later"])
def test_the_next_units_gather_flies_during_forward(rank: Rank, step: int) -> None:
    net = logged(rank, sharded(rank, make_net())[0])
    for _ in range(step):
        step_of(rank, net)
    step_of(rank, net)
    log = rank.log
    for i in range(2):
        assert log.before(f"{GATHER}{i + 1}", f"F{i}"), "launched too late to overlap"
        assert log.before(f"F{i} ends", f"wait {GATHER}{i + 1}"), "waited before the compute"


@distributed(2)
@pytest.mark.parametrize("anchor", ["wo", "up"])
def test_the_anchor_says_where_the_next_gather_is_launched(rank: Rank, anchor: str) -> None:
    net = logged(rank, sharded(rank, make_net(), anchor=anchor)[0])
    for layer in net.layers:
        layer.qkv.register_forward_hook(lambda *_: rank.log("after qkv"))
        layer.up.register_forward_hook(lambda *_: rank.log("after up"))
    step_of(rank, net)
    log = rank.log
    for i in range(2):
        launched = log.index(f"{GATHER}{i + 1}")
        assert log.index("after qkv", i) < launched < log.index("after up", i)
        assert launched < log.index(f"wait {GATHER}{i + 1}")


class Attends(torch.nn.Module):
    """A block with attention over a cut sequence; ``skip`` leaves it out."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.wo, self.up = (torch.nn.Linear(4, n).double() for n in (12, 4, 4))
        self.core = Core()
        self.skip = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.skip:
            q, k, v = self.qkv(x).unflatten(-1, (3, 2, 2)).unbind(2)
            x = self.wo(self.core(q, k, v).flatten(2))
        return self.up(x)


class Core(torch.nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return (q + k + v).tanh()


@distributed(2)
@pytest.mark.parametrize("checkpointed", [False, True], ids=["", "checkpointed"])
def test_the_next_gather_is_launched_behind_attentions_exchange(
    rank: Rank, checkpointed: bool
) -> None:
    net = torch.nn.Sequential(*(Attends() for _ in range(3)))
    start = copy.deepcopy(net)
    context = ShardContext(slots=2, open_comm=rank.open_comm, debug=True)
    style = ContextParallel(comm=rank.open_comm)
    for i, block in enumerate(net):
        style.apply(block.core, rank.mesh)
        shard(block, rank.mesh, context=context)
        block.up.register_forward_hook(lambda *_, i=i: rank.log(f"F{i} ends"))
        block._memswap_hooks.unit.name = f"layers.{i}"
    x = torch.ones(1, 3, 4, dtype=torch.float64)
    # Where the gathers of layers 1 and 2 are launched, by the program of the pass before: layer 0
    # leaves its attention out in the last two steps.
    expected = [("start", "start"), ("behind", "behind"), ("late", "behind"), ("start", "behind")]
    for step, places in enumerate(expected):
        rank.log.events.clear()
        net[0].skip = skip = step >= 2
        y = x
        for block in net:
            y = checkpoint(block, y, use_reentrant=False) if checkpointed else block(y)
        y.sum().backward()
        assert rank.log.count(GATHER) == 6
        for i, place in enumerate(places):
            gather, end = rank.log.index(f"{GATHER}{i + 1}"), rank.log.index(f"F{i} ends")
            found = "start" if gather < end else "late"
            if i or not skip:
                exchanged = rank.log.index("wait all_to_all o", i - skip)
                found = "behind" if exchanged < gather < end else found
            assert found == place, f"step {step}, layer {i}: {rank.log.events}"
        z = x
        for i, block in enumerate(start):
            block.skip = skip and i == 0
            z = block(z)
        assert torch.equal(y, z), "each token attends to itself here: nothing may change"
    rank.same_everywhere(rank.log.events, "the order of collectives")


@distributed(2)
def test_an_anchor_that_is_not_passed_delays_the_gather_and_loses_nothing(rank: Rank) -> None:
    class Skips(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    net = torch.nn.Sequential(Skips(), Skips())
    context = ShardContext(open_comm=rank.open_comm)
    for part in net:
        shard(part, rank.mesh, anchor="unused", context=context)
    with pytest.MonkeyPatch.context() as patch:
        told: list[Any] = []
        patch.setattr(
            ShardContext, "_warn", lambda self, unit, text: told.append((unit.name, text))
        )
        net(torch.ones(1, 2)).sum().backward()
    assert rank.log.count("all_gather Skips") == 4
    assert [name for name, _ in told] == ["Skips.0", "Skips.1"], "nobody was told"


@distributed(2)
@pytest.mark.parametrize("step", [0, 1], ids=["first step", "later"])
def test_gathers_and_reductions_fly_during_backward(rank: Rank, step: int) -> None:
    net = logged(rank, sharded(rank, make_net())[0])
    for _ in range(step):
        step_of(rank, net)
    step_of(rank, net)
    log = rank.log
    for i in (2, 1):
        gather = log.index(f"{GATHER}{i - 1}", 1)
        assert gather < log.index(f"B{i} ends"), "the previous unit's gather was not prefetched"
        assert log.index(f"B{i} ends") < log.index(f"wait {GATHER}{i - 1}", 1)
        assert log.before(f"{REDUCE}{i}", f"B{i - 1}"), "launched too late to overlap"
        assert log.before(f"B{i - 1} ends", f"wait {REDUCE}{i}"), "waited before the compute"


@distributed(2)
@pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
def test_gathers_fly_during_the_backward_of_checkpointed_units(rank: Rank, reentrant: bool) -> None:
    net = logged(rank, sharded(rank, make_net())[0])
    net.checkpointed, net.reentrant = [0, 1, 2], reentrant
    step_of(rank, net)
    log = rank.log
    for i in (2, 1):
        gather = log.index(f"{GATHER}{i - 1}", 1)
        assert gather < log.index(f"F{i}", 1), "launched behind the recompute"
        assert log.index(f"B{i} ends") < log.index(f"wait {GATHER}{i - 1}", 1)


@distributed(2)
@pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
@pytest.mark.parametrize("checkpointed", [[], [0, 1, 2], [0, 1], [2]], ids=str)
def test_two_gathers_and_one_reduction_per_unit_checkpointed_or_not(
    rank: Rank, checkpointed: list[int], reentrant: bool
) -> None:
    net, _ = sharded(rank, make_net())
    net.checkpointed, net.reentrant = checkpointed, reentrant
    for step in range(3):
        step_of(rank, net, step)
        counts = (rank.log.count(GATHER), rank.log.count(REDUCE))
        assert counts == (6, 3), f"step {step}: {counts}, expected (6, 3); {rank.log.events}"
        extra = step == 0  # the ranks compare their configuration, once
        assert rank.log.count("all_gather") == 7 + extra
        assert rank.log.count("reduce_scatter") == 4


@distributed(2)
def test_one_gather_per_unit_where_weights_stay(rank: Rank) -> None:
    net, _ = sharded(rank, make_net(), reshard_after_forward=False)
    step_of(rank, net)
    assert (rank.log.count(GATHER), rank.log.count(REDUCE)) == (3, 3)


@distributed(2)
def test_the_first_unit_does_not_follow_the_last_one(rank: Rank) -> None:
    net = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(3)))
    context = ShardContext(slots=2, open_comm=rank.open_comm)
    for layer in net:
        shard(layer, rank.mesh, context=context)
    x = torch.ones(1, 2)
    with torch.no_grad():
        for _ in range(3):
            net(x)
    assert context.stats().lent == 0, "a pass that may never come was prefetched for"
    for _ in range(2):
        rank.log.events.clear()
        net(x).sum().backward()
        assert rank.log.count("all_gather") == 6


@distributed(2)
def test_reductions_wait_when_the_window_is_full(rank: Rank) -> None:
    net, _ = sharded(rank, make_net(layers=4), context={"max_reduces": 1})
    step_of(rank, net)
    for i in (3, 2, 1):
        assert rank.log.before(f"wait {REDUCE}{i}", f"{REDUCE}{i - 1}")


@distributed(2)
def test_no_more_slots_are_used_than_there_are(rank: Rank) -> None:
    net, context = sharded(rank, make_net(layers=5), context={"slots": 2})
    train(net, rank, steps=2)
    settled = context.stats().allocations
    train(net, rank, steps=2)
    stats = context.stats()
    assert stats.slots == 2 and stats.overflows == 0
    assert stats.peak_lent == 3, "two slots, and the memory of what is around the layers"
    # The root's weights come from the caching allocator: one gather a step, and nothing else.
    assert stats.allocations == settled + 2


@distributed(4)
def test_all_ranks_launch_in_the_same_order(rank: Rank) -> None:
    net, _ = sharded(rank, make_net(), context={"slots": 2}, anchor="wo")
    net.checkpointed = [0, 1]
    train(net, rank)
    rank.same_everywhere(rank.log.events, "the order of collectives")


def test_all_of_64_ranks_launch_in_the_same_order() -> None:
    logs = [_events_of(rank, 64) for rank in (0, 31, 63)]
    assert logs[0] and all(log == logs[0] for log in logs)


def _events_of(rank: int, size: int) -> list[str]:
    """A step of rank ``rank``, alone in this process."""
    log = EventLog()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        mesh = dist.device_mesh.init_device_mesh("cpu", (size,))
        context = ShardContext(
            slots=2, open_comm=lambda group: Recording(FakeComm(rank, size), log)
        )
        net = make_net()
        for layer in net.layers:
            shard(layer, mesh, context=context, anchor="wo")
        shard(net, mesh, context=context)
        for step in range(2):
            loss_of(net, tokens_of(step, 1)[0]).backward()
    finally:
        dist.destroy_process_group()
    return log.events


@distributed(2)
def test_prerequisites_run_before_every_gather_and_are_waited(rank: Rank) -> None:
    net, context = sharded(rank, make_net())

    class Broadcast:
        def __init__(self, name: str) -> None:
            self.name = name
            rank.log(f"before {name}")

        def wait(self) -> None:
            rank.log(f"waited {self.name}")

    context.before_fetch(Broadcast)
    only: list[str] = []
    context.before_fetch(only.append, of=net.layers[1])
    with pytest.raises(ValueError, match="a Linear that this context has not sharded"):
        context.before_fetch(only.append, of=net.layers[1].wo)
    step_of(rank, net)
    assert only == ["layers.1"] * 2
    log = rank.log
    for i in range(3):
        for nth in range(2):
            launched = log.index(f"{GATHER}{i}", nth)
            assert log.index(f"before layers.{i}", nth) < log.index(f"waited layers.{i}", nth)
            assert log.events[launched - 1] == f"waited layers.{i}"


@distributed(2)
def test_what_a_prerequisite_returns_is_never_ignored(rank: Rank) -> None:
    net, context = sharded(rank, make_net(layers=1))
    context.before_fetch(lambda name: False)  # type: ignore[arg-type, return-value]
    with pytest.raises(
        TypeError, match=r"returned bool for unit .*expected None or something with"
    ):
        net(tokens_of(0, 1)[0])


# --- for schedulers -----------------------------------------------------------------------------


@distributed(2)
@pytest.mark.parametrize("late", [False, True], ids=["async", "late"])
def test_unshard_ahead_shows_whole_parameters_until_reshard(rank: Rank, late: bool) -> None:
    start = make_net(layers=1)
    net, context = sharded(rank, start, late=late)
    layer = net.layers[0]
    handle = layer.unshard(async_op=True)
    assert rank.log.events == [f"{GATHER}0"]
    handle.wait()
    assert torch.equal(layer.wo.weight, start.layers[0].wo.weight)
    assert not hasattr(layer.wo.weight, "full_tensor")
    layer.reshard()
    assert hasattr(layer.wo.weight, "full_tensor")
    layer.unshard()
    loss_of(net, tokens_of(0, 2)[rank.rank]).backward()
    assert rank.log.count(GATHER) == 3, "a unit that was unsharded already was gathered again"
    assert context.stats().lent == 0


@distributed(2)
def test_step_residency_gathers_once_for_all_microbatches(rank: Rank) -> None:
    net, context = sharded(rank, make_net(), residency="step")
    for microbatch in range(4):
        net.set_requires_gradient_sync(microbatch == 3)
        loss_of(net, tokens_of(microbatch, 2)[rank.rank]).backward()
    assert rank.log.count(GATHER) == 3
    assert rank.log.count(REDUCE) == 3
    assert context.stats().lent == 0, "weights outlived the step"


@distributed(2)
def test_chunks_of_a_virtual_pipeline_share_slots(rank: Rank) -> None:
    # Three blocks a chunk: with slots by parity, block 2 and block 3 would claim the same one.
    start = make_net(layers=6)
    net, context = (
        copy.deepcopy(start),
        ShardContext(slots=2, debug=True, open_comm=lambda group: rank.open_comm(group, late=True)),
    )
    for layer in net.layers:
        shard(layer, rank.mesh, context=context)

    def chunk(model: Any, which: int, x: torch.Tensor) -> torch.Tensor:
        for layer in model.layers[3 * which : 3 * which + 3]:
            x = layer(x)
        return x

    for model in (net, start):
        torch.manual_seed(5 + rank.rank)
        xs = [torch.randn(1, 4, 8, dtype=torch.float64) for _ in range(4)]
        middles = [chunk(model, 0, x) for x in xs[:2]]
        cut = [middle.detach().requires_grad_() for middle in middles]
        ends = [chunk(model, 1, x) for x in cut]
        for x, middle, end in zip(cut, middles, ends, strict=True):
            middle2 = chunk(model, 0, xs[2])
            end.pow(2).sum().backward()
            middle.backward(x.grad)
            middle2.sum().backward()
    for (name, mine), theirs in zip(
        ((n, p) for n, p in net.named_parameters() if "layers" in n),
        start.layers.parameters(),
        strict=True,
    ):
        dist.all_reduce(theirs.grad)
        torch.testing.assert_close(
            mine.grad.full_tensor(), theirs.grad / 2, rtol=1e-12, atol=1e-12, msg=name
        )
    assert context.stats().slots == 2 and context.stats().overflows == 0
    rank.same_everywhere(rank.log.events, "the order of collectives")


# --- what is told -------------------------------------------------------------------------------


@distributed(2)
def test_describe_shows_units_memory_and_who_launched_what(rank: Rank) -> None:
    net, _ = sharded(rank, make_net(), context={"slots": 2})
    step_of(rank, net, 0)
    step_of(rank, net, 1)
    text = describe(net)
    assert "4 units in 2 slots" in text and "0 overflows" in text
    (line,) = [line for line in text.splitlines() if line.startswith("layers.1 ")]
    assert line.split()[-5:] == ["wp", "2", "slot", "2", "1"]
    assert "all-gather layers.2: prefetched by layers.1" in text
    assert "all-gather layers.0: prefetched by layers.1" in text
    assert "reduce-scatter layers.0: gradients complete" in text
    with pytest.raises(ValueError, match="found no sharded module"):
        describe(torch.nn.Linear(2, 2))


@distributed(2)
@pytest.mark.parametrize("what", ["anchor", "slots", "shape", "frozen"])
def test_ranks_that_are_set_up_differently_hear_so_at_once(rank: Rank, what: str) -> None:
    other = rank.rank == 1
    net = make_net(layers=2)
    if what == "shape" and other:
        net.layers[0].up = torch.nn.Linear(8, 19).double()
    if what == "frozen" and other:
        net.layers[1].wo.bias.requires_grad_(False)
    net, _ = sharded(
        rank,
        net,
        anchor="wo" if what == "anchor" and other else "up",
        context={"slots": 3 if what == "slots" and other else 2},
    )
    with pytest.raises(
        RankMismatchError, match=rf"rank {rank.rank} .* than ranks \[{1 - rank.rank}\]"
    ):
        net(tokens_of(0, 1)[0])
