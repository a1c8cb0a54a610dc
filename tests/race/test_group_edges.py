"""The edges of groups: broken on purpose, each is caught by the detector and as wrong data.

A group adds three things to the lanes' own edges (test_edges.py): small storages are gathered on
compute before they are sent, what returns is shared by several tensors that wait apart, and sends,
waits and loads come from whoever schedules, perhaps on another stream than the forward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from broken_edges import Breaking, Counter, drop
from helpers import EVERYTHING, new_input, new_stack, random
from race_workloads import (
    DEVICE,
    EAGER,
    MATRIX,
    Region,
    Workload,
    WrappedLane,
    assert_silent_and_right,
    compute_streams,
    expected,
    fetch_stream,
    lanes_opened,
    new_pool,
    observe,
    on_host,
    plain,
    send_stream,
)

import memswap
from memswap.engine import recipes
from simdev import mutations

pytestmark = [pytest.mark.own_laboratory, pytest.mark.one_schedule]


# ---------------------------------------------------------------- workloads
def microbatches(region: Region) -> list[torch.Tensor]:
    """Two microbatches in flight, in one group; memory of the first is used by the second."""
    model = new_stack(DEVICE, depth=1)
    group = None if region is plain else memswap.Group("mb", EVERYTHING, pool=new_pool())
    found: list[torch.Tensor] = []
    for step in range(2):
        waiting = []
        for number in range(2):
            x = new_input(DEVICE, seed=10 * step + number)
            with contextlib.nullcontext() if group is None else group as batch:
                loss = model(x)
            if batch is not None:
                batch.launch_offload()
                model(x + 1).detach()  # what a schedule computes meanwhile
                batch.wait_offload()
            waiting.append((batch, loss))
        for batch, loss in waiting:
            if batch is not None:
                batch.launch_load()
                batch.wait_load()
            loss.backward()
        del waiting, loss, batch
        found += [parameter.grad.clone() for parameter in model.parameters()]
        model.zero_grad(set_to_none=True)
    return on_host(found)


def scheduled_elsewhere(region: Region) -> list[torch.Tensor]:
    """The forward runs on one stream; another, which waits for it, launches the offload.

    What was gathered is let go of there, and the first stream uses its memory at once.
    """
    a, b = torch.Stream(device=DEVICE), torch.Stream(device=DEVICE)
    group = memswap.Group("elsewhere", EVERYTHING, pool=new_pool())
    with a:
        sent = [random(DEVICE, 900, seed=n) * 2 for n in range(3)]
    if region is plain:
        a.synchronize()
        return on_host(sent)
    with a:
        added = [group.add(tensor) for tensor in sent]
        ready = a.record_event()
        sent.clear()
    with b:
        b.wait_event(ready)
        group.launch_offload()
    with a:
        others = [torch.full((900,), 7.0, device=DEVICE) for _ in range(3)]
        on_host(others)  # a lazy machine runs this stream first
    with b:
        group.wait_offload()
        group.launch_load()
        group.wait_load()
        found = on_host([one.tensor().clone() for one in added])
    del others
    torch.accelerator.synchronize()
    return found


def scheduled_on_the_default_stream(region: Region) -> list[torch.Tensor]:
    """What a stream of the program's own has computed is launched, and let go of, on the default
    one, which was the only compute stream that transfers had been asked for on."""
    mine, default = torch.Stream(device=DEVICE), torch.accelerator.current_stream()
    found = []
    for length in (900, 100_000):  # gathered, and alone
        with mine:
            sent = [random(DEVICE, length, seed=n) * 2 for n in range(3)]
        if region is plain:
            mine.synchronize()
            found += on_host(sent)
            continue
        group = memswap.Group("default", EVERYTHING, pool=new_pool())
        with mine:
            added = [group.add(tensor) for tensor in sent]
            ready = mine.record_event()
            sent.clear()
        default.wait_event(ready)
        group.launch_offload()
        with mine:
            others = [torch.full((length,), 7.0, device=DEVICE) for _ in range(3)]
            on_host(others)
        group.wait_offload()
        group.launch_load()
        group.wait_load()
        found += on_host([one.tensor().clone() for one in added])
        del others, added
        torch.accelerator.synchronize()
    return found


def demanded_at_once(region: Region) -> list[torch.Tensor]:
    """Nobody waits for the load: each demand does, of its own part of what is fetched."""
    x = random(DEVICE, 700).requires_grad_()
    group = memswap.Group("demand", EVERYTHING, pool=new_pool())
    found = []
    for _ in range(3):
        with contextlib.nullcontext() if region is plain else group as batch:
            y = x
            for _ in range(4):
                y = (y * 1.5).sin()
        if batch is not None:
            batch.launch_offload()
            batch.wait_offload()
            batch.launch_load()
        y.sum().backward()
        del y
        found.append(x.grad.clone())
        x.grad = None
    return on_host(found)


def recomputed(region: Region) -> list[torch.Tensor]:
    """What is loaded is read by a recipe of the batch first, and by nobody else before."""
    policy = memswap.Policy(action="recompute", min_bytes=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipes, "PROOFS", 0)
        group = memswap.Group("gated", policy, pool=new_pool())
    into, out = (random(DEVICE, 24, 24, seed=n).requires_grad_() for n in range(2))
    found: list[torch.Tensor] = []
    for step in range(3):
        x = random(DEVICE, 40, 24, seed=step)
        with contextlib.nullcontext() if region is plain else group as batch:
            loss = (torch.nn.functional.silu(x @ into) @ out).sum()
        if batch is not None:
            batch.launch_offload()
            batch.wait_offload()
            on_host([torch.full((40, 24), 7.0, device=DEVICE) for _ in range(2)])
            batch.launch_load()
        found += torch.autograd.grad(loss, [into, out])
        del loss
    if region is not plain:
        assert group.stats().recipe_runs == 3
    return on_host(found)


# ---------------------------------------------------------------- mutations
@contextlib.contextmanager
def parts_do_not_wait() -> Iterator[Counter]:
    """A tensor that shares what was fetched takes it for there already."""
    counter = Counter()
    arrivals = []  # whoever drops a ticket is ordered behind its work

    class TakesItForThere(WrappedLane):
        """Its storages come with the ticket of a send that everybody has waited for."""

        def send(self, storage: Any, block: Any) -> Any:
            self.sent = self.lane.send(storage, block)
            return self.sent

        def fetch(self, block: Any) -> Any:
            storage, arrival = self.lane.fetch(block)
            arrivals.append(arrival)
            counter.own += 1
            return storage, self.sent

    with lanes_opened(TakesItForThere):
        yield counter


BROKEN: list[tuple[str, Breaking, tuple[Workload, ...]]] = [
    ("gathered -> sent", drop(send_stream, compute_streams), (microbatches, demanded_at_once)),
    ("sent -> gathered copy freed", drop(compute_streams, send_stream), (microbatches,)),
    ("allocated -> loaded", drop(fetch_stream, compute_streams), (microbatches, demanded_at_once)),
    ("loaded -> demanded", drop(compute_streams, fetch_stream), (microbatches, demanded_at_once)),
    ("loaded -> read by a recipe", drop(compute_streams, fetch_stream), (recomputed,)),
    ("loaded -> each part's demand", parts_do_not_wait, (microbatches, demanded_at_once)),
    (
        "gathered -> its source freed on the stream that owns it",
        mutations.drop_record_stream,
        (scheduled_elsewhere,),
    ),
]


@pytest.mark.parametrize(("name", "broken", "workloads"), BROKEN, ids=[one[0] for one in BROKEN])
def test_a_broken_edge_is_caught_by_the_detector_and_as_wrong_data(
    name: str, broken: Breaking, workloads: tuple[Workload, ...]
) -> None:
    reported_eagerly = False
    for workload in workloads:
        right = expected(workload)
        seen = {schedule: observe(schedule, workload, broken) for schedule in MATRIX}
        struck = [one for one in seen.values() if one.hits]
        where = f"{name} in {workload.__name__}"
        assert struck, f"{where}: the mutation never struck"
        assert any(one.reports for one in struck), f"{where}: the detector said nothing"
        assert any(one.differs_from(right) for one in struck), f"{where}: no wrong data anywhere"
        reported_eagerly |= bool(seen[EAGER].hits and seen[EAGER].reports)
    assert reported_eagerly, f"{name}: not reported under the eager schedule"


@pytest.mark.parametrize(
    "workload",
    [
        microbatches,
        scheduled_elsewhere,
        scheduled_on_the_default_stream,
        demanded_at_once,
        recomputed,
    ],
    ids=lambda w: w.__name__,
)
def test_unbroken_groups_are_silent_and_right_under_every_schedule(workload: Workload) -> None:
    assert_silent_and_right(workload)
