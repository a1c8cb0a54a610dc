"""Groups: what a block saved leaves and returns when it is told to, and in no other moment."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
from group_helpers import (
    assert_released,
    collected,
    leaf_and_gradient,
    make_calls,
    settle,
    sines,
)
from helpers import (
    EVERYTHING,
    assert_same_gradients,
    gradients,
    new_input,
    new_stack,
    random,
    same_bits,
    train_step,
)

import memswap

pytestmark = pytest.mark.every_action

SWAP = pytest.mark.every_action("swap")  # counts what the raw bytes do


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


def test_a_group_whose_graph_is_dropped_leaves_no_cycle(device, new_pool):
    """Its pool, which may be pinned memory, must not wait for the cycle collector."""
    pool = new_pool()
    group = memswap.Group("dropped", EVERYTHING, pool=pool)
    x = random(device, 64).requires_grad_()
    with group:
        loss = sines(x)
    group.launch_offload()
    settle(group, device)
    alive = weakref.ref(pool)
    gc.disable()
    try:
        del pool, group, loss
        assert alive() is None
    finally:
        gc.enable()


def test_nothing_moves_by_itself(device, new_pool):
    pool = new_pool()
    group = memswap.Group("idle", EVERYTHING, pool=pool)
    x, expected = leaf_and_gradient(device)
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
    with group as batch:
        loss = sines(x)
    assert batch.nbytes == group.stats().resident_bytes == 4 * 4000
    batch.launch_offload()
    batch.wait_offload()
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
    x, expected = leaf_and_gradient(device)
    pool = new_pool()
    group = memswap.Group("sines", EVERYTHING, pool=pool)
    with group as batch:
        loss = sines(x)
    make_calls(batch, calls)
    loss.backward()
    assert_same_gradients([x.grad], [expected])
    assert group.stats().moved_storages == 4, "what was away already was sent again, or nothing was"
    del loss
    assert_released(group, pool, device)


@SWAP
def test_leaving_again_after_a_load_copies_nothing(device, new_pool):
    group = memswap.Group("sines", EVERYTHING, pool=new_pool())
    x = random(device, 300).requires_grad_()
    with group as batch:
        loss = sines(x)
    for _ in range(3):
        batch.launch_offload()
        batch.wait_offload()
        batch.launch_load()
    stats = group.stats()
    assert stats.moved_storages == 4 and stats.returned_storages == 12
    loss.backward()


@SWAP
@pytest.mark.accelerator
@pytest.mark.parametrize("in_a_file", [False, True])
@pytest.mark.parametrize("numbers", [300, 1 << 19])  # in a bucket, and alone
def test_what_leaves_while_it_returns_gives_its_memory_back(
    device, new_pool, tmp_path, in_a_file, numbers
):
    pool = memswap.DiskPool(tmp_path, budget="64MiB") if in_a_file else new_pool()
    group = memswap.Group("sines", EVERYTHING, pool=pool)
    x = random(device, numbers).requires_grad_()
    sines(x).backward()
    expected, x.grad = x.grad, None
    with group as batch:
        loss = sines(x)
    make_calls(batch, "ow")
    settle(group, device)  # what is in a file is nowhere else
    allocated = torch.get_device_module(device).memory_allocated
    before = allocated()
    for calls in ("lo", "low", "lWow"):
        make_calls(batch, calls)
        assert allocated() <= before, f"after {calls}"  # a worker may have let go of more since
        assert group.stats().resident_bytes == 0
    loss.backward()
    assert_same_gradients([x.grad], [expected])
    del loss
    assert_released(group, pool, device)


@SWAP
def test_a_load_that_overtakes_the_offload_brings_nothing_back(device, new_pool):
    group = memswap.Group("sines", EVERYTHING, pool=new_pool())
    x = random(device, 2 << 18).requires_grad_()  # too large for a bucket, so it leaves as it is
    with group as batch:
        y = (x * 2).sin()
        loss = y.sum()
    held = batch.nbytes
    batch.launch_offload()
    batch.launch_load()
    batch.wait_load()
    stats = group.stats()
    assert stats.moved_storages == 1, "nothing was on its way"
    if stats.returned_storages == 0:  # unless the copy had ended already
        assert stats.resident_bytes == held
    loss.backward()


def test_what_backward_demands_early_is_loaded_then_and_counted(device, new_pool):
    group = memswap.Group("sines", EVERYTHING, pool=new_pool())
    x, expected = leaf_and_gradient(device)
    with group as batch:
        loss = sines(x)
    batch.launch_offload()
    batch.wait_offload()
    settle(group, device)
    loss.backward()
    assert_same_gradients([x.grad], [expected])
    stats = group.stats()
    # What is computed then is no stall: nobody could have loaded it.
    assert stats.stalls == 4 - stats.recipe_storages, "what is not there is a stall"


# --- misuse -------------------------------------------------------------------------------------


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
    batch, loss = collected(group, device)
    if before:
        batch.launch_offload()
    with pytest.raises(memswap.GroupError, match=f"'layer 7'.*{call}.*{says}"):
        getattr(group, call)()
    loss.backward()  # nothing was lost


def test_a_group_that_collected_nothing_says_so(device, new_pool):
    group = memswap.Group("empty", EVERYTHING, pool=new_pool())
    with pytest.raises(memswap.GroupError, match=r"'empty'.*nothing was collected"):
        group.launch_offload()


def test_a_closed_group_refuses_calls_and_its_graphs_still_run(device, new_pool):
    x, expected = leaf_and_gradient(device)
    group = memswap.Group("closed", EVERYTHING, pool=new_pool())
    with group as batch:
        loss = sines(x)
    batch.launch_offload()
    group.close()
    for call in ("launch_offload", "wait_offload", "launch_load", "wait_load"):
        for one in (group, batch):
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
    batchs, losses = [], []
    for one in x:
        with group as batch:
            losses.append(sines(one))
        batch.launch_offload()
        batch.wait_offload()
        batchs.append(batch)
    settle(group, device)
    batchs[0].launch_load()
    assert group.stats().returned_storages == 4, "another microbatch was loaded as well"
    batchs[0].wait_load()
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
    inputs = random(device, 2, 300)
    weight = random(device, 300, seed=1).requires_grad_()
    begun: list[int] = []
    losses = []
    for number, x in enumerate(inputs):
        with group as batch:
            losses.append((x * weight * 2).sin().sum())
        batch.on_demand = lambda _, number=number: begun.append(number)
        batch.launch_offload()
    for loss in losses:
        loss.backward()
    assert begun == [0, 1], "another microbatch's backward was taken for begun"


# --- lifetime -----------------------------------------------------------------------------------


@pytest.mark.parametrize("calls", ["", "o", "ow", "owl", "owlW"])
def test_a_dropped_graph_leaves_nothing_behind(device, new_pool, calls):
    pool = new_pool()
    group = memswap.Group("dropped", EVERYTHING, pool=pool)
    batch, loss = collected(group, device)
    make_calls(batch, calls)
    del loss
    assert not batch.alive
    settle(group, device)
    assert_released(group, pool, device)
    batch.launch_offload()  # nothing to do, and no error


def test_backward_may_run_twice(device, new_pool):
    group = memswap.Group("twice", EVERYTHING, pool=new_pool())
    x, expected = leaf_and_gradient(device)
    with group as batch:
        loss = sines(x)
    batch.launch_offload()
    batch.wait_offload()
    batch.launch_load()
    loss.backward(retain_graph=True)
    assert_same_gradients([x.grad], [expected])
    x.grad = None
    batch.launch_load()  # what the first backward has let go of
    batch.wait_load()
    stalls = group.stats().stalls
    loss.backward()
    assert_same_gradients([x.grad], [expected])
    assert group.stats().stalls == stalls == 0
    assert group.stats().moved_storages > 0


def test_an_edit_between_saving_and_backward_raises_as_autograd_would(device, new_pool):
    for when in ("collected", "leaving", "loaded"):
        group = memswap.Group("edited", EVERYTHING, pool=new_pool())
        x = random(device, 300).requires_grad_()
        with group as batch:
            h = x * 2
            loss = h.sin().sum()
        if when != "collected":
            batch.launch_offload()
        if when == "loaded":
            batch.wait_offload()
            batch.launch_load()
            batch.wait_load()
        if when == "leaving":
            settle(group, device)  # those bytes are never used, but the laboratory cannot know
        with torch.no_grad():
            h.add_(1)
        if when == "collected":
            batch.launch_offload()
            batch.wait_offload()
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
    assert group.stats().returned_storages == 2, "what is looked at had not left"
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
    batch, loss = collected(group, device)
    group.pause()
    offered = group.stats().offered_tensors
    other, unseen = collected(group, device)
    assert group.paused and group.stats().offered_tensors == offered
    assert other.nbytes == 0
    batch.launch_offload()
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
    assert inner is outer, "a block inside a block of the same group is one batch"
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
        with group as batch:
            loss = sines(x)
        batch.launch_offload()
        batch.wait_offload()
        batch.launch_load()
        batch.wait_load()
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
