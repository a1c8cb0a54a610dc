"""An encode that waits for a window: everything that may come between, and explicit windows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import (
    Remember,
    assert_nothing_left,
    collect,
    flush_autograd,
    let_sends_end,
    look,
    random,
)

import memswap
from memswap import Action, Policy, Windows
from memswap.engine.engine import Engine
from memswap.engine.hook_scope import HookScope
from memswap.engine.stats import WindowStats

pytestmark = pytest.mark.usefixtures("every_tensor_is_encoded")

ENCODE = Policy(action=Action.ENCODE, min_bytes=1)


SIDE = 64
NBYTES = SIDE * SIDE * 4


class Region:
    """A `with` block whose saved tensors wait for windows: what a managed layer is inside."""

    def __init__(self, device: torch.device, **options: Any) -> None:
        self.engine = Windows(leftovers="keep", **options).engine(ENCODE, None, 0)
        self.device = device
        self.seen: list[Any] = []
        self.scopes: list[HookScope] = []

    def __enter__(self) -> Region:
        self.scopes.append(HookScope(self.engine, ""))
        self.scopes[-1].enter()
        return self

    def __exit__(self, *_: object) -> None:
        self.scopes.pop().leave()

    def save(self, seed: int = 0, times: int = 1) -> torch.Tensor:
        """The output of an operator that saves a tensor which nobody else holds."""
        x = torch.zeros(4, device=self.device, requires_grad=True)
        made = random(self.device, SIDE, SIDE, seed=seed)
        return Remember.apply(x, self.seen, *times * [made])

    def expect(self, *seeds: int) -> None:
        assert self.seen == [look(random(self.device, SIDE, SIDE, seed=seed)) for seed in seeds]

    @property
    def waiting(self) -> int:
        return self.engine.window_stats().pending_bytes

    def settled(self) -> memswap.types.Stats:
        """The statistics when all that was started has ended."""
        let_sends_end(self, self.device)
        return self.engine.stats()

    # What `let_sends_end` asks for.
    @property
    def _engine(self) -> Engine:
        return self.engine

    def stats(self) -> memswap.types.Stats:
        return self.engine.stats()


@pytest.fixture
def region(device: torch.device) -> Region:
    return Region(device)


@pytest.mark.accelerator
def test_nothing_leaves_before_a_window_and_then_it_is_really_freed(region) -> None:
    with region:
        out = region.save()
    assert region.waiting == NBYTES and region.engine.stats().moved_storages == 0
    region.engine.open_window(1.0)
    assert region.waiting == 0
    assert region.settled().freed_bytes == NBYTES
    out.sum().backward()
    region.expect(0)


@pytest.mark.accelerator
def test_what_is_demanded_while_it_waits_stays_for_every_backward(region) -> None:
    with region:
        out = region.save()
    out.sum().backward(retain_graph=True)
    region.engine.open_window(1.0)
    out.sum().backward()
    region.expect(0, 0)
    stats = region.engine.window_stats()
    assert (stats.kept_storages, stats.encoded_bytes, stats.pending_bytes) == (1, 0, 0)


@pytest.mark.accelerator
def test_a_retained_graph_decodes_again(region) -> None:
    with region:
        out = region.save()
    region.engine.open_window(1.0)
    region.engine._transfers.settle()
    out.sum().backward(retain_graph=True)
    out.sum().backward()
    region.expect(0, 0)
    assert region.engine.stats().returned_storages >= 1


@pytest.mark.accelerator
def test_a_storage_that_is_saved_again_while_it_waits_is_encoded_once_and_freed(region) -> None:
    with region:
        out = region.save(times=3)
    assert region.waiting == NBYTES
    region.engine.open_window(1.0)
    stats = region.settled()
    assert stats.deduplicated_tensors == 2 and stats.moved_storages == 1
    assert stats.freed_bytes == NBYTES, "a second save held the storage"
    out.sum().backward()
    region.expect(0, 0, 0)


@pytest.mark.accelerator
@pytest.mark.parametrize("opened", [False, True])
def test_a_dropped_graph_leaves_nothing_waiting(region, device, opened) -> None:
    with region:
        out = region.save()
    if opened:
        region.engine.open_window(1.0)
    del out
    collect()
    flush_autograd(device)
    region.engine.open_window(1.0)
    assert region.waiting == 0
    assert_nothing_left(region.settled())


@pytest.mark.accelerator
@pytest.mark.parametrize("opened", [False, True])
def test_an_edit_of_what_waits_is_the_error_that_autograd_raises(region, device, opened) -> None:
    x = torch.zeros(4, device=device, requires_grad=True)
    made = random(device, SIDE, SIDE)
    with region:
        out = Remember.apply(x, region.seen, made)
    made.add_(1)
    if opened:
        region.engine.open_window(1.0)
    with pytest.raises(memswap.InplaceEditError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.accelerator
def test_somebody_elses_tensor_is_never_emptied(region, device) -> None:
    x = torch.zeros(4, device=device, requires_grad=True)
    mine = random(device, SIDE, SIDE)
    with region:
        out = Remember.apply(x, region.seen, mine)
    region.engine.open_window(1.0)
    region.settled()
    assert look(mine) == look(random(device, SIDE, SIDE))
    out.sum().backward()
    region.expect(0)


@pytest.mark.accelerator
def test_leftovers_of_one_microbatch_are_taken_by_windows_of_the_next(region) -> None:
    with region:
        first = region.save(seed=1)
    region.engine.lock.run(region.engine.begin_iteration)
    with region:
        second = region.save(seed=2)
    region.engine.open_window(1.0)
    assert region.engine.window_stats().encoded_in_windows == 2
    first.sum().backward()
    second.sum().backward()
    region.expect(1, 2)


@pytest.mark.accelerator
def test_one_microbatch_in_backward_does_not_keep_the_others(region) -> None:
    with region:
        first = region.save(seed=1)
    region.engine.lock.run(region.engine.begin_iteration)
    with region:
        second = region.save(seed=2)
    first.sum().backward()
    region.engine.open_window(1.0)
    stats = region.engine.window_stats()
    assert (stats.kept_storages, stats.encoded_in_windows) == (1, 1)
    second.sum().backward()
    region.expect(1, 2)


@pytest.mark.accelerator
def test_on_another_stream_nothing_of_this_one_starts(region, device) -> None:
    side = torch.Stream(device=device)
    with region:
        out = region.save()
    with side:
        region.engine.open_window(1.0)
    assert region.waiting == NBYTES
    region.engine.open_window(1.0)
    assert region.waiting == 0
    out.sum().backward()
    region.expect(0)


@pytest.mark.one_schedule
@pytest.mark.accelerator
@pytest.mark.filterwarnings("ignore:memswap. a storage")
def test_where_there_is_no_room_when_a_window_opens_the_storage_stays(region) -> None:
    with region:
        out = region.save()
    (transfers,) = region.engine.open_transfers()
    transfers.codec_lane.set_overflow_room(0)
    region.engine.open_window(1.0)
    stats = region.engine.stats()
    assert stats.moved_storages == 0 and stats.kept["codec room"].tensors == 1
    assert region.engine.window_stats().kept_storages == 1
    out.sum().backward()
    region.expect(0)


@pytest.mark.one_schedule
@pytest.mark.accelerator
def test_no_more_waits_than_the_bound(device) -> None:
    region = Region(device, max_pending_bytes=2 * NBYTES)
    with region:
        outs = [region.save(seed=seed) for seed in range(4)]
    assert region.waiting == 2 * NBYTES
    assert region.engine.window_stats().started_at_bound == 2
    for out in outs:
        out.sum().backward()
    region.expect(0, 1, 2, 3)


@pytest.mark.accelerator
def test_a_collective_opens_a_window_explicitly(region) -> None:
    with region:
        out = region.save()
        with memswap.window(seconds=1.0):
            assert region.waiting == 0
    out.sum().backward()
    region.expect(0)


@pytest.mark.one_schedule
@pytest.mark.accelerator
def test_operators_inside_an_explicit_window_open_none(region) -> None:
    with region:
        outs = [region.save(1)]
        with memswap.window(seconds=1.0):
            outs.append(region.save(2))
            region.engine.open_window(1.0)
            assert region.waiting == NBYTES
        region.engine.open_window(1.0)
    assert region.waiting == 0
    sum(out.sum() for out in outs).backward()


@pytest.mark.accelerator
def test_a_window_made_in_forward_opens_again_in_backward(region) -> None:
    class Exchange(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.window = memswap.window(seconds=1.0)
            with ctx.window:
                return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            with ctx.window:
                return gradient.clone()

    with region:
        out = Exchange.apply(region.save())
    out.sum().backward()
    assert region.engine.window_stats().windows == 2
    region.expect(0)


@pytest.mark.one_schedule
def test_outside_of_managed_layers_a_window_does_nothing(device) -> None:
    x = torch.zeros(4, device=device, requires_grad=True)
    saved = memswap.saved_tensors(memswap.Policy(action=Action.KEEP, min_bytes=1))
    with memswap.window(seconds=1.0), saved, memswap.window(name="a"):
        loss = (x + 1).exp().sum()
    loss.backward()
    assert saved.stats().kept["policy"].tensors == 1, "a window took a decision"
    assert torch.equal(x.grad, (x + 1).exp())


@pytest.mark.one_schedule
@pytest.mark.parametrize("wrong", [{}, {"seconds": -1.0}, {"seconds": float("nan")}])
def test_a_window_of_no_time_is_an_error(wrong) -> None:
    with pytest.raises(ValueError, match="window"):
        memswap.window(**wrong)


@pytest.mark.one_schedule
def test_statistics_of_windows_start_anew(region) -> None:
    region.engine.open_window(1.0)
    assert region.engine.window_stats().windows == 1
    region.engine.reset_stats()
    assert region.engine.window_stats() == WindowStats()
