"""Groups: what a block saved leaves and returns when it is told to, and in no other moment."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
import torch
from helpers import (
    EVERYTHING,
    assert_nothing_left,
    assert_pool_empty,
    assert_same_gradients,
    descriptor_under,
    files_no_longer_than,
    flush_autograd,
    gradients,
    new_input,
    new_stack,
    random,
    same_bits,
    train_step,
)

import memswap
from memswap.engine import buckets, transfer

pytestmark = pytest.mark.every_action

SWAP = pytest.mark.every_action("swap")  # counts what the raw bytes do


def settle(group: Any, device: torch.device) -> memswap.Stats:
    """Everything that leaves has left, on the host's clock too."""
    engine = getattr(group, "_groups", group)
    engine.settle()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return engine.stats()


def assert_released(group: Any, pool: Any, device: torch.device) -> None:
    flush_autograd(device)
    assert_nothing_left(group.stats())
    assert_pool_empty(pool)


def sines(x: torch.Tensor, count: int = 4) -> torch.Tensor:
    """A loss whose graph saves `count` tensors that nobody else holds."""
    for _ in range(count):
        x = (x * 1.5).sin()
    return x.sum()


# --- the four calls -----------------------------------------------------------------------------


def test_a_group_that_leaves_and_returns_gives_the_same_gradients(device, new_pool):
    model, x = new_stack(device), new_input(device)
    expected = train_step(model, lambda: model(x))
    pool = new_pool()
    group = memswap.Group("everything", EVERYTHING, pool=pool)
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        with group:
            loss = model(x)
        group.launch_offload()
        group.wait_offload()
        group.launch_load()
        group.wait_load()
        loss.backward()
        del loss
        assert_same_gradients(gradients(model), expected)
    stats = group.stats()
    assert stats.moved_storages >= stats.returned_storages > 0
    assert stats.stalls == 0, "something was not back although it was loaded and waited for"
    assert_released(group, pool, device)


def test_nothing_moves_by_itself(device, new_pool):
    pool = new_pool()
    group = memswap.Group("idle", EVERYTHING, pool=pool)
    x = random(device, 64).requires_grad_()
    sines(x).backward()
    expected, x.grad = x.grad, None
    with group:
        loss = sines(x)
    loss.backward()
    assert_same_gradients([x.grad], [expected])
    stats = group.stats()
    assert (stats.moved_storages, stats.returned_storages, stats.stalls) == (0, 0, 0)
    del loss
    assert_released(group, pool, device)


@SWAP
def test_memory_is_free_once_the_offload_was_waited_for(device, new_pool):
    group = memswap.Group("sines", EVERYTHING, pool=new_pool())
    x = random(device, 1000).requires_grad_()
    with group as generation:
        loss = sines(x)
    assert generation.nbytes == group.stats().resident_bytes == 4 * 4000
    generation.launch_offload()
    generation.wait_offload()
    assert group.stats().resident_bytes == 0, "a storage that was sent and waited for is still held"
    loss.backward()


@pytest.mark.parametrize(
    "calls",
    [
        "oowwllWW",  # each twice
        "olW",  # the load before the offload was waited for
        "olwW",  # the wait for an offload that a load has overtaken
        "owlowlW",  # away again before backward
        "owlWowlW",
        "ol",  # never waited for
        "o",  # demanded while it leaves
        "ow",  # demanded while it is away
    ],
)
def test_every_legal_order_gives_the_same_gradients(device, new_pool, calls):
    x = random(device, 300).requires_grad_()
    sines(x).backward()
    expected, x.grad = x.grad, None
    pool = new_pool()
    group = memswap.Group("sines", EVERYTHING, pool=pool)
    with group as generation:
        loss = sines(x)
    for call in calls:
        {
            "o": generation.launch_offload,
            "w": generation.wait_offload,
            "l": generation.launch_load,
            "W": generation.wait_load,
        }[call]()
    loss.backward()
    assert_same_gradients([x.grad], [expected])
    assert group.stats().moved_storages <= 4, "what was away already was sent again"
    del loss
    assert_released(group, pool, device)


@SWAP
def test_leaving_again_after_a_load_copies_nothing(device, new_pool):
    group = memswap.Group("sines", EVERYTHING, pool=new_pool())
    x = random(device, 300).requires_grad_()
    with group as generation:
        loss = sines(x)
    for _ in range(3):
        generation.launch_offload()
        generation.wait_offload()
        generation.launch_load()
    stats = group.stats()
    assert stats.moved_storages == 4 and stats.returned_storages == 12
    loss.backward()


@SWAP
def test_a_load_that_overtakes_the_offload_brings_nothing_back(device, new_pool):
    group = memswap.Group("sines", EVERYTHING, pool=new_pool())
    x = random(device, 2 << 18).requires_grad_()  # too large for a bucket, so it leaves as it is
    with group as generation:
        y = (x * 2).sin()
        loss = y.sum()
    held = generation.nbytes
    generation.launch_offload()
    generation.launch_load()
    generation.wait_load()
    stats = group.stats()
    if stats.returned_storages == 0:  # unless the copy had ended already
        assert stats.resident_bytes == held
    loss.backward()


def test_what_backward_demands_early_is_loaded_then_and_counted(device, new_pool):
    group = memswap.Group("sines", EVERYTHING, pool=new_pool())
    x = random(device, 300).requires_grad_()
    sines(x).backward()
    expected, x.grad = x.grad, None
    with group as generation:
        loss = sines(x)
    generation.launch_offload()
    generation.wait_offload()
    settle(group, device)
    loss.backward()
    assert_same_gradients([x.grad], [expected])
    assert group.stats().stalls == 4, "a demand that found nothing there is a stall"


# --- misuse -------------------------------------------------------------------------------------


def collected(group: memswap.Group, device: torch.device) -> tuple[Any, torch.Tensor]:
    x = random(device, 300).requires_grad_()
    with group as generation:
        loss = sines(x)
    return generation, loss


@pytest.mark.parametrize(
    ("before", "call", "says"),
    [
        ("", "wait_offload", r"launch_offload\(\) first"),
        ("", "launch_load", r"launch_offload\(\) first"),
        ("", "wait_load", r"launch_load\(\) first"),
        ("o", "wait_load", r"launch_load\(\) first"),
    ],
)
def test_misuse_names_the_group_and_says_what_to_do(device, new_pool, before, call, says):
    group = memswap.Group("layer 7", EVERYTHING, pool=new_pool())
    generation, loss = collected(group, device)
    if before:
        generation.launch_offload()
    with pytest.raises(memswap.GroupError, match=f"'layer 7'.*{call}.*{says}"):
        getattr(group, call)()
    loss.backward()  # nothing was lost


def test_a_group_that_collected_nothing_says_so(device, new_pool):
    group = memswap.Group("empty", EVERYTHING, pool=new_pool())
    with pytest.raises(memswap.GroupError, match=r"'empty'.*nothing was collected"):
        group.launch_offload()


def test_a_closed_group_refuses_calls_and_its_graphs_still_run(device, new_pool):
    x = random(device, 300).requires_grad_()
    sines(x).backward()
    expected, x.grad = x.grad, None
    group = memswap.Group("closed", EVERYTHING, pool=new_pool())
    with group as generation:
        loss = sines(x)
    generation.launch_offload()
    group.close()
    for call in ("launch_offload", "wait_offload", "launch_load", "wait_load"):
        for one in (group, generation):
            with pytest.raises(memswap.GroupError, match="closed"):
                getattr(one, call)()
    with pytest.raises(memswap.GroupError, match="closed"), group:
        pass
    loss.backward()
    assert_same_gradients([x.grad], [expected])


@pytest.mark.cpu_only
def test_wrong_arguments_are_refused():
    with pytest.raises(TypeError, match="expected a str"):
        memswap.Group(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"memswap\.Policy"):
        memswap.Groups("swap")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="beside policy"):
        memswap.Group("both", EVERYTHING, groups=memswap.Groups())


# --- microbatches -------------------------------------------------------------------------------


@SWAP
def test_a_load_brings_back_its_own_microbatch_and_no_other(device, new_pool):
    group = memswap.Group("sines", EVERYTHING, pool=new_pool())
    x = [random(device, 300, seed=n).requires_grad_() for n in range(3)]
    generations, losses = [], []
    for one in x:
        with group as generation:
            losses.append(sines(one))
        generation.launch_offload()
        generation.wait_offload()
        generations.append(generation)
    settle(group, device)
    generations[0].launch_load()
    assert group.stats().returned_storages == 4, "another microbatch was loaded as well"
    generations[0].wait_load()
    for loss in losses:
        loss.backward()
    for one in x:
        again = one.detach().clone().requires_grad_()
        sines(again).backward()
        assert_same_gradients([one.grad], [again.grad])


@SWAP
def test_a_storage_of_two_groups_leaves_once(device, new_pool):
    engine = memswap.Groups(EVERYTHING, pool=new_pool())
    first, second = engine.new("first"), engine.new("second")
    x = random(device, 300).requires_grad_()
    shared = random(device, 300, seed=1)
    with first as one:
        y = x * shared
    with second as two:
        loss = (y * shared).sum()
    del shared
    one.launch_offload()
    two.launch_offload()
    assert engine.stats().moved_storages == 1, "a storage that two groups saved was sent twice"
    one.wait_offload()
    two.wait_offload()
    two.launch_load()
    two.wait_load()
    one.launch_load()
    one.wait_load()
    loss.backward()
    wanted = random(device, 300, seed=1)
    assert same_bits(x.grad, wanted * wanted)


@SWAP
def test_a_storage_of_two_microbatches_does_not_say_whose_backward_begins(device, new_pool):
    """Microbatches are often views of one batch: its storage belongs to all of them."""
    group = memswap.Group("views", EVERYTHING, pool=new_pool())
    batch = random(device, 2, 300)
    weight = random(device, 300, seed=1).requires_grad_()
    begun: list[int] = []
    losses = []
    for number, x in enumerate(batch):
        with group as generation:
            losses.append((x * weight * 2).sin().sum())
        generation.on_demand = lambda _, number=number: begun.append(number)
        generation.launch_offload()
    for loss in losses:
        loss.backward()
    assert begun == [0, 1], "another microbatch's backward was taken for begun"


# --- lifetime -----------------------------------------------------------------------------------


@pytest.mark.parametrize("calls", ["", "o", "ow", "owl", "owlW"])
def test_a_dropped_graph_leaves_nothing_behind(device, new_pool, calls):
    pool = new_pool()
    group = memswap.Group("dropped", EVERYTHING, pool=pool)
    generation, loss = collected(group, device)
    for call in calls:
        {
            "o": generation.launch_offload,
            "w": generation.wait_offload,
            "l": generation.launch_load,
            "W": generation.wait_load,
        }[call]()
    del loss
    assert not generation.alive
    settle(group, device)
    assert_released(group, pool, device)
    generation.launch_offload()  # nothing to do, and no error


def test_backward_may_run_twice(device, new_pool):
    group = memswap.Group("twice", EVERYTHING, pool=new_pool())
    x = random(device, 300).requires_grad_()
    sines(x).backward()
    expected, x.grad = x.grad, None
    with group as generation:
        loss = sines(x)
    generation.launch_offload()
    generation.wait_offload()
    generation.launch_load()
    loss.backward(retain_graph=True)
    assert_same_gradients([x.grad], [expected])
    x.grad = None
    generation.launch_load()  # what the first backward has let go of
    generation.wait_load()
    stalls = group.stats().stalls
    loss.backward()
    assert_same_gradients([x.grad], [expected])
    assert group.stats().stalls == stalls == 0


def test_an_edit_between_saving_and_backward_raises_as_autograd_would(device, new_pool):
    for when in ("collected", "leaving", "loaded"):
        group = memswap.Group("edited", EVERYTHING, pool=new_pool())
        x = random(device, 300).requires_grad_()
        with group as generation:
            h = x * 2
            loss = h.sin().sum()
        if when != "collected":
            generation.launch_offload()
        if when == "loaded":
            generation.wait_offload()
            generation.launch_load()
            generation.wait_load()
        if when == "leaving":
            settle(group, device)  # those bytes are never used, but the laboratory cannot know
        with torch.no_grad():
            h.add_(1)
        if when == "collected":
            generation.launch_offload()
            generation.wait_offload()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        del loss, h


def test_a_tensor_added_by_hand_comes_back_as_it_was(device, new_pool):
    pool = new_pool()
    group = memswap.Group("by hand", EVERYTHING, pool=pool)
    base = random(device, 20, 30)
    added = [group.add(base), group.add(base[2:4].t()), group.add(random(device, 7, seed=2))]
    del base
    group.launch_offload()
    group.wait_offload()
    group.launch_load()
    group.wait_load()
    wanted = random(device, 20, 30)
    for one, expected in zip(
        added, (wanted, wanted[2:4].t(), random(device, 7, seed=2)), strict=True
    ):
        tensor = one.tensor()
        assert same_bits(tensor, expected) and tensor.stride() == expected.stride()
    del one, tensor, added
    assert_released(group, pool, device)


def test_a_paused_group_collects_nothing_and_still_moves_what_it_has(device, new_pool):
    group = memswap.Group("paused", EVERYTHING, pool=new_pool())
    generation, loss = collected(group, device)
    group.pause()
    offered = group.stats().offered_tensors
    other, unseen = collected(group, device)
    assert group.paused and group.stats().offered_tensors == offered
    assert other.nbytes == 0
    generation.launch_offload()
    other.launch_offload()  # nothing there, no error
    group.resume()
    assert not group.paused
    assert group.stats().moved_storages == 4
    loss.backward()
    unseen.backward()


def test_blocks_nest_and_an_exception_ends_them(device, new_pool):
    group = memswap.Group("nested", EVERYTHING, pool=new_pool())
    x = random(device, 300).requires_grad_()
    with group as outer:
        h = (x * 2).sin()
        with group as inner:
            loss = h.exp().sum()
    assert inner is outer, "a block inside a block of the same group is one generation"
    with pytest.raises(ValueError, match="in the block"), group:
        raise ValueError("in the block")
    with group as after:
        pass
    assert after is not outer
    outer.launch_offload()
    loss.backward()


def test_threads_collect_into_blocks_of_their_own(device, new_pool):
    group = memswap.Group("threads", EVERYTHING, pool=new_pool())
    found: dict[int, bool] = {}

    def work(number: int) -> None:
        x = random(device, 200, seed=number).requires_grad_()
        with group as generation:
            loss = sines(x)
        generation.launch_offload()
        generation.wait_offload()
        generation.launch_load()
        generation.wait_load()
        loss.backward()
        again = x.detach().clone().requires_grad_()
        sines(again).backward()
        found[number] = same_bits(x.grad, again.grad)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {0: True, 1: True, 2: True}


# --- small storages travel together -------------------------------------------------------------


@SWAP
def test_small_storages_take_one_block_and_large_ones_their_own(device, new_pool):
    pool = new_pool()
    group = memswap.Group("bucket", EVERYTHING, pool=pool)
    x = random(device, 100).requires_grad_()
    large = random(device, (buckets.SMALL_BYTES // 4) + 1).requires_grad_()
    with group as generation:
        loss = sines(x, 20) + (large * 2).sin().sum()
    generation.launch_offload()
    assert pool.statistics().blocks == 2, "twenty small storages and a large one: two copies"
    assert group.stats().moved_storages == 21
    generation.wait_offload()
    generation.launch_load()
    loss.backward()
    for one in (x, large):
        again = one.detach().clone().requires_grad_()
        (sines(again, 20) if one is x else (again * 2).sin().sum()).backward()
        assert_same_gradients([one.grad], [again.grad])
    del loss
    assert_released(group, pool, device)


@SWAP
def test_a_bucket_is_never_longer_than_it_may_be(device, new_pool, monkeypatch):
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 4 * 400)
    pool = new_pool()
    group = memswap.Group("buckets", EVERYTHING, pool=pool)
    x = random(device, 100).requires_grad_()
    with group as generation:
        loss = sines(x, 10)
    generation.launch_offload()
    assert pool.statistics().blocks == 3, "ten storages, four to a bucket"
    loss.backward()


def test_views_and_the_rest_of_their_storage_travel_together(device, new_pool):
    """A slice, its whole and a transpose are one storage: one copy, and all of it comes back."""
    pool = new_pool()
    group = memswap.Group("views", EVERYTHING, pool=pool)
    x = random(device, 3, 5).requires_grad_()

    def loss() -> torch.Tensor:
        whole = random(device, 8, 5, seed=1)
        return (x * whole[2:5]).sum() + (x.t() @ whole[:3]).sum() + (whole * whole.sum()).sum() * 0

    loss().backward()
    expected, x.grad = x.grad, None
    with group as generation:
        out = loss()
    generation.launch_offload()
    generation.wait_offload()
    generation.launch_load()
    out.backward()
    assert_same_gradients([x.grad], [expected])
    del out
    assert_released(group, pool, device)


@SWAP
def test_an_edit_of_what_came_back_does_not_reach_the_next_reader(device, new_pool):
    """A bucket's memory lives as long as any of its tensors: what was written there is not read
    again."""
    group = memswap.Group("edited later", EVERYTHING, pool=new_pool())
    added = [group.add(random(device, 40, seed=n)) for n in range(2)]
    group.launch_offload()
    group.wait_offload()
    group.launch_load()
    group.wait_load()
    other = added[1].tensor()
    added[0].tensor().add_(1)
    assert same_bits(added[0].tensor(), random(device, 40)), "another reader's edit was seen"
    assert same_bits(other, random(device, 40, seed=1))


@SWAP
@pytest.mark.filterwarnings("ignore:memswap. a storage")
def test_a_pool_without_room_leaves_the_group_where_it_is(device, new_pool):
    pool = new_pool(budget="1MiB")
    group = memswap.Group("full", EVERYTHING, pool=pool)
    x = random(device, 150_000).requires_grad_()  # 600 kB each
    with group as generation:
        loss = sines(x, 4)
    generation.launch_offload()
    generation.wait_offload()
    stats = group.stats()
    assert stats.kept["pool"].tensors >= 2, "nobody was told that the pool is full"
    generation.launch_load()
    generation.wait_load()
    loss.backward()
    again = x.detach().clone().requires_grad_()
    sines(again, 4).backward()
    assert_same_gradients([x.grad], [again.grad])


# --- when a transfer fails ------------------------------------------------------------------------


@SWAP
@pytest.mark.cpu_only
@pytest.mark.parametrize("together", [True, False])
def test_a_send_that_fails_keeps_the_bytes(device, tmp_path, monkeypatch, together):
    if not together:
        monkeypatch.setattr("memswap.engine.group.SMALL_BYTES", 0)
    pool = memswap.DiskPool(tmp_path, budget="16MiB", extent="1MiB")
    pool.reserve("1MiB")  # space is set aside, and then the disk fails
    group = memswap.Group("broken disk", EVERYTHING, pool=pool)
    x = random(device, 4096).requires_grad_()
    with pytest.warns(UserWarning, match="stays where it is"):
        with files_no_longer_than(0):
            with group as generation:
                loss = sines(x)
            generation.launch_offload()
            generation.wait_offload()
        generation.launch_load()
        generation.wait_load()
        loss.backward()
    again = x.detach().clone().requires_grad_()
    sines(again).backward()
    assert_same_gradients([x.grad], [again.grad])
    assert group.stats().kept["pool"].tensors == 4
    del loss
    assert_released(group, pool, device)


@SWAP
@pytest.mark.parametrize("together", [True, False])
def test_a_launch_that_raises_takes_no_memory_and_loses_nothing(
    device, new_pool, monkeypatch, together
):
    if not together:
        monkeypatch.setattr("memswap.engine.group.SMALL_BYTES", 0)
    pool = new_pool()
    group = memswap.Group("raises", EVERYTHING, pool=pool)
    generation, loss = collected(group, device)

    class Broken:
        def __init__(self, lane):
            self.lane = lane

        def send(self, storage, block):
            raise RuntimeError("no such stream")

        def __getattr__(self, name):
            return getattr(self.lane, name)

    opened = transfer.open_lane
    with monkeypatch.context() as broken:
        broken.setattr(transfer, "open_lane", lambda *a, **k: Broken(opened(*a, **k)))
        with pytest.raises(RuntimeError, match="no such stream"):
            generation.launch_offload()
    with pytest.raises(memswap.GroupError, match="nothing was launched"):
        generation.wait_offload()
    loss.backward()
    del loss
    assert_released(group, pool, device)


@SWAP
@pytest.mark.cpu_only
def test_bytes_that_vanished_are_an_error_that_names_the_group(device, tmp_path):
    pool = memswap.DiskPool(tmp_path, budget="16MiB", extent="1MiB")
    group = memswap.Group("vanished", EVERYTHING, pool=pool)
    generation, loss = collected(group, device)
    generation.launch_offload()
    generation.wait_offload()
    os.truncate(f"/proc/self/fd/{descriptor_under(tmp_path)}", 0)
    generation.launch_load()
    with pytest.raises(memswap.TransferError, match=r"'vanished'.*cannot be brought back"):
        generation.wait_load()
    with pytest.raises(memswap.TransferError, match="cannot be brought back"):
        loss.backward()
