"""When a call of the driver fails: Python hears of it, in clear words, and nothing is lost."""

from __future__ import annotations

import gc
import warnings

import pytest
import torch
from helpers import EVERYTHING, assert_same_gradients, new_input, new_stack, same_bits, train_step

import fake_acl
import memswap

pytestmark = pytest.mark.own_laboratory

OUT_OF_MEMORY = 207001
INTERNAL = 507000
#: What a swapped training step calls, and how many good calls go before the bad one.
CALLS = [
    (call, after)
    for call in ("aclrtMemcpyAsync", "aclrtRecordEvent", "aclrtStreamWaitEvent", "launch")
    for after in (0, 7, 20)
] + [("aclrtCreateEvent", 0), ("aclrtQueryEventStatus", 0), ("aclrtQueryEventStatus", 9)]


def new_pool(device):
    return memswap.HostPool(budget="64MiB", slab="64KiB", device=device, pageable=False)


@pytest.mark.every_action
@pytest.mark.parametrize(("call", "after"), CALLS)
def test_a_failed_call_is_heard_and_the_next_step_is_right(device, call, after):
    x = new_input(device)
    reference = new_stack(device)
    expected = train_step(reference, lambda: reference(x))
    model, pool = new_stack(device), new_pool(device)
    saved = memswap.saved_tensors(EVERYTHING, pool=pool, prefetch_bytes=0)

    def step():
        with saved:
            return model(x)

    failed = fake_acl._C.failed_counts().get(call, 0)
    error = None
    with fake_acl.faults_of(call, after=after), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            found = train_step(model, step)
            torch.npu.synchronize()
        except RuntimeError as caught:
            error = str(caught)
    if fake_acl._C.failed_counts().get(call, 0) == failed:
        pytest.skip(f"a step makes fewer than {after + 1} calls of {call}")
    if error is None:
        assert_same_gradients(found, expected)
        spoken = " ".join(str(w.message) for w in told)
        assert "memswap" in spoken or call == "aclrtQueryEventStatus", "the failure was swallowed"
    else:
        assert f"{call}: injected failure" in error or "507000" in error, error
    model.zero_grad(set_to_none=True)
    del error
    gc.collect()
    assert_same_gradients(train_step(model, step), expected)
    gc.collect()
    torch.npu.synchronize()
    saved.stats()
    assert pool.statistics().blocks == 0, "a failed transfer left its block behind"


def test_pinned_memory_that_is_refused_keeps_the_tensors(device):
    x = new_input(device)
    reference = new_stack(device)
    expected = train_step(reference, lambda: reference(x))
    model, pool = new_stack(device), new_pool(device)
    saved = memswap.saved_tensors(EVERYTHING, pool=pool)

    def step():
        with saved:
            return model(x)

    fake_acl.machine.pinned_empty_cache()
    with fake_acl.faults_of("aclrtMallocHost", n=10**6, code=OUT_OF_MEMORY):
        with pytest.warns(UserWarning, match="memswap"):
            assert_same_gradients(train_step(model, step), expected)
    assert saved.stats().moved_storages == 0
    # torch_npu swallows the driver's words: it returns no memory and says nothing.
    assert "pinned allocator of npu:0" in pool.statistics().last_refusal
    assert_same_gradients(train_step(model, step), expected)


def refuse_device_memory():
    torch.npu.synchronize()
    torch.npu.empty_cache()
    return fake_acl.faults_of("aclrtMalloc", n=10**6, code=OUT_OF_MEMORY)


def test_device_memory_that_is_refused_for_what_returns_is_an_error_and_the_next_step_is_right(
    device,
):
    leaf = torch.full((6 << 20,), 0.5, device=device).requires_grad_()  # 24 MiB
    pool = memswap.HostPool(budget="256MiB", slab="32MiB", device=device)
    saved = memswap.saved_tensors(EVERYTHING, pool=pool, prefetch_bytes=0)

    def loss():
        with saved:
            return (leaf * 2).sin().sum()

    (leaf * 2).sin().sum().backward()
    expected, leaf.grad = leaf.grad.cpu(), None
    broken = loss()
    torch.npu.synchronize()
    saved._engine.settle()
    with refuse_device_memory(), pytest.raises(RuntimeError, match="out of memory"):
        broken.backward()
    del broken
    leaf.grad = None
    loss().backward()
    assert same_bits(leaf.grad, expected)


def test_device_memory_that_is_refused_for_a_frame_is_an_error(device):
    host = torch.randn(12 << 20, generator=torch.Generator().manual_seed(5)).bfloat16()  # 24 MiB
    tensor = torch.empty(host.shape, dtype=host.dtype, device=device)
    tensor.copy_(host)
    with refuse_device_memory(), pytest.raises(RuntimeError, match="out of memory"):
        memswap.encode(tensor)
    assert same_bits(tensor, host)
    assert same_bits(memswap.decode(memswap.encode(tensor[:9000].clone())), host[:9000])


LOSS = """
import fake_acl, torch, memswap
from helpers import frames_expected, new_input, new_stack
from memswap._native import native
native.register_codec("npu", fake_acl.machine.ascend_codec())
encodes = frames_expected(worth=float("inf"))
encodes.__enter__()
device = torch.device("npu", 0)
x, model = new_input(device), new_stack(device)
pool = memswap.HostPool(budget="64MiB", slab="64KiB", device=device)
saved = memswap.saved_tensors(memswap.Policy(action=memswap.Action.ACTION, min_bytes=1), pool=pool)
with saved:
    loss = model(x)
torch.npu.synchronize()
assert saved.stats().moved_storages > 0
fake_acl.device_lost()
try:
    loss.backward()
    torch.npu.synchronize()
except RuntimeError as error:
    print("heard:", str(error))
else:
    print("silence")
del loss, saved
import gc; gc.collect()
print("alive", flush=True)
import os; os._exit(0)  # torch_npu's own exit waits for a device that is gone
"""


@pytest.mark.parametrize(
    ("queue", "action"),
    [("0", "SWAP"), ("0", "ENCODE_SWAP"), ("1", "SWAP"), ("1", "ENCODE"), ("2", "ENCODE_SWAP")],
)
def test_a_lost_device_is_an_error_and_no_hang_and_no_crash(run_apart, queue, action):
    done = run_apart(LOSS.replace("ACTION", action), TASK_QUEUE_ENABLE=queue)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "heard:" in done.stdout, done.stdout + done.stderr[-3000:]
    assert "507010" in done.stdout or "the device is lost" in done.stdout, done.stdout
    assert "alive" in done.stdout, "letting go of tensors on a lost device ended the process"
