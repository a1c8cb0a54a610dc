"""Transfers do not make the host wait, and keep what torch_npu knows of a storage."""

from __future__ import annotations

import pytest
import torch
from helpers import EVERYTHING, same_bits

import fake_acl
import memswap
from memswap._native import native
from memswap.engine import transfers

WAITS = ("aclrtSynchronizeStream", "aclrtSynchronizeEvent", "aclrtSynchronizeDevice", "aclrtMemcpy")


def waits() -> int:
    calls = fake_acl.calls()
    return sum(calls.get(name, 0) for name in WAITS)


def test_send_and_fetch_never_make_the_host_wait(device):
    lane = transfers.open_lane(device)
    pool = memswap.HostPool(budget="16MiB", slab="1MiB", device=device)
    blocks = [pool.native.allocate(4000) for _ in range(3)]  # the later ones begin inside a slab
    tensors = [torch.empty(1000, device=device).fill_(i) for i in range(3)]
    before, copies = waits(), fake_acl.calls().get("aclrtMemcpyAsync", 0)
    for tensor, block in zip(tensors, blocks, strict=True):
        lane.send(native.StorageRef(tensor), block).wait()
        lane.fetch(block)[1].wait()
    assert fake_acl.calls()["aclrtMemcpyAsync"] - copies == 6
    assert waits() == before, "torch_npu took the pool's memory for pageable and waited"


def test_a_lanes_events_may_be_recorded_again_while_streams_wait(device):
    """Only events of one kind may, says ACL's reference; a report of the machine fails the test."""
    lane = transfers.open_lane(device)
    pool = memswap.HostPool(budget="16MiB", slab="1MiB", device=device)
    tensor = torch.empty(1000, device=device).fill_(1)
    for _ in range(20):
        block = pool.native.allocate(4000)
        lane.send(native.StorageRef(tensor), block).wait()
    kinds = set(fake_acl.machine.events())
    assert not any(kind.startswith("aclrtCreateEvent ") for kind in kinds), kinds


@pytest.mark.every_action
def test_one_compute_stream_puts_no_free_off(device):
    """After record_stream, torch_npu would wait with the free until an event has passed."""
    pool = memswap.HostPool(budget="16MiB", slab="1MiB", device=device)
    saved = memswap.saved_tensors(EVERYTHING, pool=pool, prefetch_bytes=0)
    leaf = torch.ones(4096, device=device, requires_grad=True)
    torch.npu.synchronize()
    torch.empty(1, device=device)  # completes what earlier tests have put off
    before = fake_acl.machine.memory_stats(0)["deferred"]
    for _ in range(2):
        with saved:
            loss = (leaf * 2).sin().exp().sum()
        saved._engine.settle()
        assert fake_acl.machine.memory_stats(0)["deferred"] == before
        loss.backward()
        del loss
        assert fake_acl.machine.memory_stats(0)["deferred"] == before
    assert saved.stats().moved_storages > 0


FRACTAL_NZ = 29


def private(device):
    """A tensor whose elements lie in tiles; only its storage's descriptor says so."""
    import torch_npu

    return torch_npu.empty_with_format(
        (32, 32), dtype=torch.float16, device=device, acl_format=FRACTAL_NZ
    )


def test_a_swapped_tensor_keeps_its_private_format(device):
    import torch_npu

    tensor = private(device)
    pool = memswap.HostPool(budget="16MiB", slab="1MiB", device=device)
    if memswap.swap_out(tensor, pool):
        memswap.swap_in(tensor)
    assert torch_npu.get_npu_format(tensor) == FRACTAL_NZ


@pytest.mark.every_action
def test_a_saved_tensor_keeps_its_private_format(device):
    import torch_npu

    class Save(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(private(device))
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            (tensor,) = ctx.saved_tensors
            formats.append(torch_npu.get_npu_format(tensor))
            return grad

    formats = []
    x = torch.ones(4, device=device, requires_grad=True)
    pool = memswap.HostPool(budget="16MiB", slab="1MiB", device=device)
    saved = memswap.saved_tensors(EVERYTHING, pool=pool)
    with saved:
        loss = Save.apply(x).sum()
    torch.npu.synchronize()
    loss.backward()
    assert formats == [FRACTAL_NZ], "backward would read tiles as rows"
    assert saved.stats().kept["private format"].tensors == 1


def test_a_tensor_in_a_private_format_is_no_input_for_encode(device):
    with pytest.raises(ValueError, match="private format"):
        memswap.encode(private(device))


def test_what_backward_gets_has_the_base_format_and_the_dtype(device):
    import torch_npu

    pool = memswap.HostPool(budget="16MiB", slab="1MiB", device=device)
    seen = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            y = x * 2
            ctx.save_for_backward(y)
            return y

        @staticmethod
        def backward(ctx, grad):
            (y,) = ctx.saved_tensors
            seen.append((torch_npu.get_npu_format(y), y.clone()))
            return grad * 2

    x = torch.arange(1000.0, device=device).requires_grad_()
    saved = memswap.saved_tensors(EVERYTHING, pool=pool)
    with saved:
        loss = Look.apply(x).sum()
    torch.npu.synchronize()
    loss.backward()
    (format, y), = seen  # fmt: skip
    assert saved.stats().returned_storages == 1
    assert format in (-1, 2), "neither undefined nor ND"
    assert same_bits(y, x.detach() * 2)
