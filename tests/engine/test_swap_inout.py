"""swap_out and swap_in: the tensor stays the same object, only its bytes go away and come back."""

from __future__ import annotations

import contextlib
import gc
import os
import tempfile
import weakref

import pytest
import torch
from eventually import eventually
from helpers import (
    assert_pool_empty,
    files_no_longer_than,
    new_input,
    new_stack,
    random,
    same_bits,
)

import memswap
from memswap._native import native
from memswap.engine import transfers


def test_tensor_keeps_identity_shape_version_and_bits(device, new_pool):
    pool = new_pool()
    tensor = random(device, 33, 7).t().contiguous()
    tensor.add_(0)
    storage_key = native.storage_key(tensor)
    before = id(tensor), tensor._version, tensor.shape, tensor.stride(), tensor.dtype
    gc.collect()
    for _ in range(3):
        assert memswap.swap_out(tensor, pool)
        assert pool.statistics().in_use_bytes == 33 * 7 * 4
        assert (id(tensor), tensor._version, tensor.shape, tensor.stride(), tensor.dtype) == before
        memswap.swap_in(tensor)
        assert (id(tensor), tensor._version, tensor.shape, tensor.stride(), tensor.dtype) == before
        assert native.storage_key(tensor) == storage_key, "the storage was replaced"
    assert same_bits(tensor, random(device, 33, 7).t())
    assert_pool_empty(pool)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_every_dtype_and_an_offset(device, new_pool, dtype):
    pool = new_pool()
    tensor = torch.empty(0, dtype=dtype, device=device)
    tensor.set_(random(device, 100, dtype=dtype))
    tensor.as_strided_((47,), (1,), 3)  # no view: nobody else sees the storage
    assert memswap.swap_out(tensor, pool)
    memswap.swap_in(tensor)
    assert same_bits(tensor, random(device, 100, dtype=dtype)[3:50])
    assert_pool_empty(pool)


def test_device_memory_is_really_given_back(device, new_pool):
    if device.type == "cpu":
        pytest.skip("the CPU allocator does not tell what is allocated")
    allocated = torch.get_device_module(device).memory_allocated
    pool = new_pool()
    tensor = random(device, 4096)
    full = allocated()
    assert memswap.swap_out(tensor, pool)
    assert allocated() <= full - 4096 * 4, "the tensor's memory is still allocated"
    memswap.swap_in(tensor)
    assert same_bits(tensor, random(device, 4096))


def test_without_a_pool_of_the_users(device):
    tensor = random(device, 50)
    assert memswap.swap_out(tensor)
    memswap.swap_in(tensor)
    assert same_bits(tensor, random(device, 50))


def test_use_right_after_swap_in_and_edit_right_before_swap_out(device, new_pool):
    """Every edge of the order: edit, out, in, edit, out, in without a pause."""
    pool = new_pool()
    tensor = torch.zeros(2000, device=device)
    for _ in range(5):
        tensor.add_(1)
        assert memswap.swap_out(tensor, pool)
        churn = torch.full((2000,), -7.0, device=device)  # may get the very memory
        memswap.swap_in(tensor)
        tensor.mul_(2)
        del churn
    assert same_bits(tensor, torch.full((2000,), 62.0, device=device))
    assert_pool_empty(pool)


def test_adamw_with_its_state_away_between_steps(device, new_pool):
    def train(pool):
        model = new_stack(device, depth=1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for step in range(3):
            optimizer.zero_grad(set_to_none=True)
            model(new_input(device, seed=step)).backward()
            states = [
                t
                for state in optimizer.state.values()
                for t in state.values()
                if torch.is_tensor(t) and t.device.type == device.type and t.numel() > 1
            ]
            if pool is not None:
                for tensor in states:
                    memswap.swap_in(tensor)
            optimizer.step()
            states = [
                t
                for state in optimizer.state.values()
                for t in state.values()
                if torch.is_tensor(t) and t.device.type == device.type and t.numel() > 1
            ]
            assert states
            if pool is not None:
                assert all([memswap.swap_out(tensor, pool) for tensor in states])
        if pool is not None:
            for tensor in states:
                memswap.swap_in(tensor)
        return [*(p.detach() for p in model.parameters()), *states]

    pool = new_pool()
    ours, plain = train(pool), train(None)
    assert len(ours) == len(plain)
    assert all(map(same_bits, ours, plain)), "AdamW took another step with its state swapped"
    assert_pool_empty(pool)


HOLDERS = {
    "view": lambda t: t[1:],
    "reshaped": lambda t: t.view(-1),
    "detached alias": lambda t: t.detach(),
    "data": lambda t: t.data,
    "untyped storage": lambda t: t.untyped_storage(),
    "saved by a live graph": lambda t: torch.ones(4, 5, device=t.device, requires_grad=True).mul(t),
    "numpy array": lambda t: t.numpy(),
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_shared_storage_is_refused(device, new_pool, holder):
    if holder == "numpy array" and device.type != "cpu":
        pytest.skip("NumPy arrays share host memory only")
    pool = new_pool()
    tensor = random(device, 4, 5)
    held = HOLDERS[holder](tensor)
    with pytest.raises(memswap.SharedStorageError) as caught:
        memswap.swap_out(tensor, pool)
    assert "hold" in str(caught.value) and "clone" in str(caught.value), str(caught.value)
    assert same_bits(tensor, random(device, 4, 5)), "a refused tensor was changed"
    del held, caught
    if holder != "untyped storage":  # Python keeps the storage object with the tensor
        assert memswap.swap_out(tensor, pool), f"{holder} is gone, and it is still refused"
        memswap.swap_in(tensor)
    assert same_bits(tensor, random(device, 4, 5))
    assert_pool_empty(pool)


def test_storage_object_that_python_once_made_is_no_holder(device, new_pool):
    """torch.save, copy.deepcopy and many libraries look at a tensor's untyped storage."""
    pool = new_pool()
    tensor = random(device, 9)
    tensor.untyped_storage().nbytes()
    gc.collect()
    assert memswap.swap_out(tensor, pool)
    memswap.swap_in(tensor)
    assert same_bits(tensor, random(device, 9))


def test_tensor_in_several_python_variables_is_not_shared(device, new_pool):
    pool = new_pool()
    tensor = random(device, 8)
    alias, container = tensor, {"state": [tensor]}
    assert memswap.swap_out(alias, pool), "the same object under another name is no other holder"
    memswap.swap_in(container["state"][0])
    assert same_bits(tensor, random(device, 8))


def test_leaf_parameter_with_gradient_can_be_swapped(device, new_pool):
    parameter = torch.nn.Parameter(random(device, 8))
    parameter.square().sum().backward()
    pool = new_pool()
    assert memswap.swap_out(parameter, pool)
    memswap.swap_in(parameter)
    assert same_bits(parameter, random(device, 8)) and parameter.requires_grad
    (parameter * 2).sum().backward()


USES = {
    "add": lambda t: t + 1,
    "add_": lambda t: t.add_(1),
    "data_ptr": lambda t: t.data_ptr(),
    "cpu": lambda t: t.cpu().sum(),
    "clone": lambda t: t.clone(),
    "item": lambda t: t[0].item(),
    "repr": repr,
    "copy_ into it": lambda t: t.copy_(torch.ones(8)),
    "matmul": lambda t: t @ t,
}


@pytest.mark.parametrize("use", USES)
def test_using_a_tensor_that_is_away_says_so(device, new_pool, use):
    pool = new_pool()
    tensor = random(device, 8)
    assert memswap.swap_out(tensor, pool)
    with pytest.raises(RuntimeError, match=r"swapped out; call memswap\.swap_in"):
        USES[use](tensor)
    memswap.swap_in(tensor)
    assert same_bits(tensor, random(device, 8))


def test_swapping_twice_is_an_error_that_changes_nothing(device, new_pool):
    pool = new_pool()
    tensor = random(device, 8)
    with pytest.raises(memswap.NotSwappedError, match="not swapped out"):
        memswap.swap_in(tensor)
    assert memswap.swap_out(tensor, pool)
    with pytest.raises(ValueError, match="already swapped out"):
        memswap.swap_out(tensor, pool)
    memswap.swap_in(tensor)
    with pytest.raises(memswap.NotSwappedError):
        memswap.swap_in(tensor)
    assert same_bits(tensor, random(device, 8))
    assert_pool_empty(pool)


def test_full_pool_says_no_and_leaves_the_tensor_as_it_was(device, new_pool):
    pool = new_pool(budget="4KiB")
    tensor = random(device, 4096)
    address = tensor.data_ptr()
    assert memswap.swap_out(tensor, pool) is False
    assert tensor.data_ptr() == address and same_bits(tensor, random(device, 4096))
    with pytest.raises(memswap.NotSwappedError):
        memswap.swap_in(tensor)


@pytest.mark.parametrize(
    "make",
    {
        "empty": lambda d: torch.empty(0, device=d),
        "sparse": lambda d: torch.eye(3).to_sparse(),
        "meta": lambda d: torch.empty(3, device="meta"),
    }.items(),
    ids=lambda m: m[0],
)
def test_tensors_without_plain_bytes_are_refused(device, new_pool, make):
    with pytest.raises(ValueError, match="plain strided tensor"):
        memswap.swap_out(make[1](device), new_pool())


def test_tensor_that_dies_while_away_gives_its_block_back(device, new_pool):
    pool = new_pool()
    tensor = random(device, 64)
    assert memswap.swap_out(tensor, pool)
    alive = weakref.ref(tensor)
    del tensor
    assert alive() is None, "memswap keeps a tensor alive that nobody wants"
    assert_pool_empty(pool)


def test_version_still_guards_what_is_saved_after_swap_in(device, new_pool):
    pool = new_pool()
    tensor = random(device, 8)
    assert memswap.swap_out(tensor, pool)
    memswap.swap_in(tensor)
    x = torch.ones(8, device=device, requires_grad=True)
    loss = (x * tensor).sum()
    tensor.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_send_that_cannot_start_leaves_the_tensor_as_it_was(device, new_pool, monkeypatch):
    class Broken:
        def set_max_leaving_bytes(self, nbytes):
            pass

        def send(self, storage, block):
            raise RuntimeError("the device is lost")

    tensor = random(device, 100)
    expected = tensor.clone()
    monkeypatch.setattr("memswap.engine.transfers.open_lane", lambda device: Broken())
    with pytest.raises(RuntimeError, match="the device is lost"):
        memswap.swap_out(tensor, new_pool())
    assert same_bits(tensor, expected), "a failed swap_out lost the tensor's bytes"


@pytest.mark.cpu_only
def test_a_write_that_fails_while_the_tensor_is_asked_for_loses_nothing(
    device, tmp_path, monkeypatch
):
    # Without workers a send begins when somebody waits for it.
    monkeypatch.setattr(transfers, "open_lane", lambda device: native.WorkerLane(workers=0))
    pool = memswap.DiskPool(tmp_path, budget="16MiB", extent="1MiB")
    pool.reserve("1MiB")  # space is set aside, and then the disk fails
    tensor = random(device, 4096)
    with files_no_longer_than(0):
        assert memswap.swap_out(tensor, pool)
        memswap.swap_in(tensor)
    assert same_bits(tensor, random(device, 4096)), "the only copy was lost"
    assert memswap.swap_out(tensor, pool), "the tensor counts as away"
    memswap.swap_in(tensor)
    assert same_bits(tensor, random(device, 4096))
    assert_pool_empty(pool)


@pytest.mark.cpu_only
def test_many_tensors_away_take_no_more_threads_than_one(device, new_pool):
    pool = new_pool()
    tensors = [random(device, 10, seed=seed) for seed in range(50)]
    assert memswap.swap_out(tensors[0], pool)
    threads = len(os.listdir("/proc/self/task"))
    assert all(memswap.swap_out(tensor, pool) for tensor in tensors[1:])
    more = len(os.listdir("/proc/self/task")) - threads
    assert more < len(tensors) / 2, f"{more} threads for {len(tensors) - 1} tensors"
    for seed, tensor in enumerate(tensors):
        memswap.swap_in(tensor)
        assert same_bits(tensor, random(device, 10, seed=seed))


def files_bytes(folder):
    """What nameless files in a folder take of the disk."""
    taken = 0
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{number}").startswith(str(folder)):
                taken += os.fstat(int(number)).st_blocks * 512
    return taken


@pytest.mark.cpu_only
def test_many_tensors_without_a_pool_share_one(device, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = len(os.listdir("/proc/self/task"))
    tensors = [random(device, 1024, seed=seed) for seed in range(20)]
    assert memswap.swap_out(tensors[0])
    threads, taken = len(os.listdir("/proc/self/task")), files_bytes(tmp_path)
    assert all(memswap.swap_out(tensor) for tensor in tensors[1:])
    assert len(os.listdir("/proc/self/task")) <= threads, "threads of its own for each tensor"
    # The file system counts blocks of its own, so not to the byte.
    assert files_bytes(tmp_path) < 2 * taken, "a file of its own for each tensor"
    for seed, tensor in enumerate(tensors):
        memswap.swap_in(tensor)
        assert same_bits(tensor, random(device, 1024, seed=seed))
    eventually(lambda: len(os.listdir("/proc/self/task")) <= before)
    assert files_bytes(tmp_path) == 0, "the pool outlives the last tensor that is away"
