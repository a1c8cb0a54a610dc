"""Host time that memswap's hooks cost per saved tensor, pack and unpack together.

Every mode builds the same graph: a chain of nodes that each save one fresh tensor and read it back
in backward. What a node costs without hooks is measured as well and taken off, so a row is the
price of its hooks. On an accelerator the device works behind the host and is not waited for inside
the measured time; on a CPU copying is the host's own work and is in it.

What moves costs two things, which are told apart. Rows "copies left out" go over a lane that moves
nothing: its `send` and `fetch` return at once. Rows "no books" are hooks that do for each tensor
what a transfer needs, a share of its storage, a block of a pool, a send, a fetch and a wait, and
nothing else. So the bookkeeping is memswap with copies left out less no books with copies left out,
and starting a copy costs what no books take more with copies than without. On a CPU that is more:
the calling thread shares its processors with those that copy.

With `manage` a step costs something as well, however much it saves: each call of a layer installs
the hooks, and under a plan a forward begins to follow it and the books of the last one are closed.
A chain that is longer tells that from what each tensor costs, of `manage` without a plan and under
one: the difference of these two is the plan's.

Recipes have to know which operator made a storage. What that costs each call of an operator, saved
or not, is told of calls that save nothing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from common import chosen_device, make_parser, summarize, synchronize, write_result
from torch import nn

import memswap
from memswap._native import native
from memswap.cli.bench.timing import alternate
from memswap.cli.table import format_ratio, render_table
from memswap.engine import transfers
from memswap.engine.lane import open_lane
from memswap.engine.units import format_bytes

BASELINE = "identity hook"
SWAPPED = "memswap, SWAP, copies left out"
MANAGED = "manage, SWAP, copies left out"
PLANNED = "manage, SWAP under a plan, copies left out"
NOTHING = "no books, copies left out"
LONGER = "no hooks, a longer chain"
LONGER_OF = {name: f"{name}, a longer chain" for name in (MANAGED, PLANNED)}

#: Calls of an operator that saves nothing, in one run.
CALLS = 500

#: So many times as many tensors.
LONGER_BY = 4

#: Under a plan this share of the bytes may stay. Two iterations learn, one is timed; then it is
#: timed once more, and then every now and then.
PLANNED_SHARE = 1 / 10
PLANNED_AFTER = 8


class SaveOne(torch.autograd.Function):
    """Saves one tensor, passes the gradient through and computes nothing."""

    @staticmethod
    def forward(ctx: Any, chain: torch.Tensor, payload: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(payload)
        return chain.view_as(chain)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        assert len(ctx.saved_tensors) == 1
        return gradient, None


class Chain(nn.Module):
    """A forward of such nodes, each with a tensor of its own."""

    def __init__(self, tensors: int, elements: int, device: torch.device) -> None:
        super().__init__()
        self.tensors, self.elements = tensors, elements
        self.leaf = nn.Parameter(torch.zeros((), device=device))

    def forward(self) -> torch.Tensor:
        chain = self.leaf
        for _ in range(self.tensors):
            payload = torch.empty(self.elements, dtype=torch.bfloat16, device=self.leaf.device)
            chain = SaveOne.apply(chain, payload)
        return chain


def left_out(lane: Any, nbytes: int, device: torch.device) -> Any:
    """A lane that moves nothing. Everything else is the lane's that it stands for."""
    storage = native.StorageRef(torch.empty(nbytes, dtype=torch.uint8, device=device))
    block = memswap.HostPool(device=device).native.allocate(nbytes)
    ticket = lane.send(storage, block)
    ticket.wait()
    ticket.synchronize()
    return native.StillLane(lane, storage, ticket)


class NoBooks:
    """Hooks that move each tensor and know nothing of it: what they return is not of the graph."""

    def __init__(self, pool: Any, lane: Any, device: torch.device) -> None:
        self._pool, self._lane = pool.native, lane
        self._lane.set_max_leaving_bytes(0)
        self._returned = torch.empty(1, device=device)

    def send(self, tensor: torch.Tensor) -> tuple[Any, Any]:
        storage = native.StorageRef(tensor)
        block = self._pool.allocate(storage.nbytes)
        return block, self._lane.send(storage, block)

    def fetch(self, packed: tuple[Any, Any]) -> torch.Tensor:
        _, ticket = self._lane.fetch(packed[0])
        ticket.wait()
        return self._returned

    def __call__(self) -> AbstractContextManager[Any]:
        return torch.autograd.graph.saved_tensors_hooks(self.send, self.fetch)


def leave_copies_out(engine: Any, nbytes: int, device: torch.device) -> None:
    """Give an engine a lane that moves nothing."""
    opened = transfers.open_lane
    transfers.open_lane = lambda *arguments, **options: left_out(
        opened(*arguments, **options), nbytes, device
    )
    try:
        assert isinstance(engine.transfers(device).lane, native.StillLane)
    finally:
        transfers.open_lane = opened


def run_once(
    context: Callable[[], AbstractContextManager[Any]], model: nn.Module, device: torch.device
) -> float:
    """Return the host seconds of one forward and one backward."""
    synchronize(device)
    began = time.perf_counter()
    with context():
        chain = model()
    chain.backward()
    elapsed_s = time.perf_counter() - began
    synchronize(device)
    return elapsed_s


def price_of_knowing(rounds: int, device: torch.device) -> dict[str, float]:
    """Microseconds that a call of an operator takes longer where recipes know it: median, least."""
    policy = memswap.Policy(action=memswap.Action.RECOMPUTE)
    contexts = {"unknown": nullcontext(), "known": memswap.saved_tensors(policy)}
    element = torch.ones(1, device=device)

    def run(context: AbstractContextManager[Any]) -> float:
        synchronize(device)
        with context:
            began = time.perf_counter()
            for _ in range(CALLS):
                torch.neg(element)
            elapsed_s = time.perf_counter() - began
        return elapsed_s / CALLS * 1e6

    measures = {name: lambda context=context: run(context) for name, context in contexts.items()}
    collected = alternate(measures, rounds, warm_up=2)
    pairs = zip(collected["known"], collected["unknown"], strict=True)
    return {
        "median_us": statistics.median(one - other for one, other in pairs),
        "least_us": min(collected["known"]) - min(collected["unknown"]),
    }


def main() -> None:
    parser = make_parser(__doc__.splitlines()[0])
    # Few, so that a run ends before a busy machine's scheduler takes the processor away.
    parser.add_argument("--tensors", type=int, default=50, help="saved per graph")
    parser.add_argument("--tensor-bytes", type=int, default=4 << 10)
    parser.add_argument("--rounds", type=int, default=200)
    arguments = parser.parse_args()
    device = chosen_device(arguments.device)
    nbytes = arguments.tensor_bytes

    def new_model() -> Chain:
        return Chain(arguments.tensors, nbytes // 2, device)

    keep = memswap.Policy(action=memswap.Action.KEEP, min_bytes=0)
    swap = memswap.Policy(action=memswap.Action.SWAP, min_bytes=0)

    def new_pool() -> memswap.HostPool:
        return memswap.HostPool(device=device)

    hooks = torch.autograd.graph.saved_tensors_hooks
    kept = memswap.saved_tensors(keep)
    swapped = memswap.saved_tensors(swap, pool=new_pool())
    booked = memswap.saved_tensors(swap, pool=new_pool())
    leave_copies_out(booked._engine, nbytes, device)
    plain = new_model()

    def new_managed(times: int, plans: bool) -> tuple[Chain, memswap.types.Manager]:
        """A chain of so many times as many tensors; it follows its plan, if there is one."""
        model = Chain(times * arguments.tensors, nbytes // 2, device)
        budget = int(PLANNED_SHARE * model.tensors * nbytes) if plans else None
        rates = memswap.profile(device) if plans else None
        manager = memswap.manage(model, swap, pool=new_pool(), budget=budget, rates=rates)
        leave_copies_out(manager._engine, nbytes, device)
        for _ in range(PLANNED_AFTER):
            run_once(nullcontext, model, device)
            if plans:
                manager.wait_for_plan()
        manager.reset_stats()
        return model, manager

    managed, _managed_by = new_managed(1, plans=False)
    planned, manager = new_managed(1, plans=True)
    longer_managed, _longer_managed_by = new_managed(LONGER_BY, plans=False)
    longer_planned, _longer_planned_by = new_managed(LONGER_BY, plans=True)
    longer = Chain(longer_planned.tensors, nbytes // 2, device)

    pin = device.type != "cpu"
    save_on_cpu = "save_on_cpu(pin_memory=True)" if pin else "save_on_cpu (no copy on a CPU)"
    contexts: dict[str, tuple[Callable[[], AbstractContextManager[Any]], nn.Module]] = {
        "no hooks": (nullcontext, plain),
        BASELINE: (lambda: hooks(lambda tensor: tensor, lambda tensor: tensor), plain),
        "memswap, KEEP": (lambda: kept, plain),
        SWAPPED: (lambda: booked, plain),
        MANAGED: (nullcontext, managed),
        PLANNED: (nullcontext, planned),
        "memswap, SWAP": (lambda: swapped, plain),
        "no books": (NoBooks(new_pool(), open_lane(device), device), plain),
        NOTHING: (NoBooks(new_pool(), left_out(open_lane(device), nbytes, device), device), plain),
        save_on_cpu: (lambda: torch.autograd.graph.save_on_cpu(pin_memory=pin), plain),
        LONGER: (nullcontext, longer),
        LONGER_OF[MANAGED]: (nullcontext, longer_managed),
        LONGER_OF[PLANNED]: (nullcontext, longer_planned),
    }
    measures = {
        name: lambda context=context, model=model: run_once(context, model, device)
        for name, (context, model) in contexts.items()
    }
    collected = alternate(measures, arguments.rounds, warm_up=2)
    longer_bare = collected.pop(LONGER)
    longer_seconds = {name: collected.pop(of) for name, of in LONGER_OF.items()}

    stats = manager.stats()
    moved = stats.moved_storages / (stats.offered_tensors or 1)
    assert stats.kept.keys() <= {"planned"}, stats.kept

    # Differences within a round: both saw the same machine, however busy it was. On a busy one the
    # difference of the least times says more: the rest is what others did meanwhile.
    bare = collected["no hooks"]
    price = {
        name: statistics.median(one - other for one, other in zip(seconds, bare, strict=True))
        / arguments.tensors
        for name, seconds in collected.items()
    }
    least = {
        name: (min(seconds) - min(bare)) / arguments.tensors for name, seconds in collected.items()
    }
    baseline_us = statistics.median(collected[BASELINE]) / arguments.tensors * 1e6
    rows, result = [], {}
    for name, seconds in collected.items():
        whole_us = statistics.median(seconds) / arguments.tensors * 1e6
        result[name] = {
            "hooks_us_per_tensor": price[name] * 1e6,
            "least_hooks_us_per_tensor": least[name] * 1e6,
            "node_us": {
                key: value if key == "count" else value / arguments.tensors * 1e6
                for key, value in summarize(seconds).items()
            },
        }
        told = ["", ""]
        if name != "no hooks":
            told = [f"{price[name] * 1e6:.2f}", f"{least[name] * 1e6:.2f}"]
        rows.append([name, f"{whole_us:.2f}", format_ratio(whole_us, baseline_us), *told])
    print(
        f"{device}: {arguments.tensors} saved tensors of {format_bytes(nbytes)}, medians of "
        f"{arguments.rounds} alternating runs; under the plan {moved:.0%} of them move"
    )
    header = ["", "us per node", f"against {BASELINE}", "of it hooks, us", "least, us"]
    print(render_table(header, rows))
    for name in (SWAPPED, MANAGED, PLANNED):
        books = (price[name] - price[NOTHING]) * 1e6
        fewest = (least[name] - least[NOTHING]) * 1e6
        print(f"bookkeeping, us per tensor: {name}: {books:.2f}, least {fewest:.2f}")
        result[name]["bookkeeping_us_per_tensor"] = books
        result[name]["least_bookkeeping_us_per_tensor"] = fewest
    # What all tensors of a longer chain cost more than those of a short one, and the rest. Of the
    # least times: a longer run loses the processor more often.
    for name, seconds in longer_seconds.items():
        short_s = least[name] * arguments.tensors
        longer_s = min(seconds) - min(longer_bare)
        each_s = (longer_s - short_s) / (longer.tensors - arguments.tensors)
        step_s = short_s - each_s * arguments.tensors
        result[name]["least_each_tensor_us"] = each_s * 1e6
        result[name]["least_each_step_us"] = step_s * 1e6
        print(
            f"{name}, least: {each_s * 1e6:.2f} us for each tensor and {step_s * 1e6:.0f} us for "
            "each step"
        )
    known = price_of_knowing(arguments.rounds, device)
    print(
        f"an operator that recipes know: {known['median_us']:.2f} us a call, least "
        f"{known['least_us']:.2f}"
    )
    options = {"tensors": arguments.tensors, "tensor_bytes": nbytes, "moved_under_plan": moved}
    result = {
        "baseline": BASELINE,
        "options": options,
        "modes": result,
        "operator_that_recipes_know": known,
    }
    write_result(arguments.json, device, result)


if __name__ == "__main__":
    main()
