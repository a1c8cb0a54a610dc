"""What memswap stands on: torch_npu comes up and behaves as the engine was written for."""

from __future__ import annotations

import pytest
import torch
from helpers import EVERYTHING, assert_same_gradients, new_input, new_stack, train_step

import fake_acl
import memswap


def test_the_real_wheel_is_under_test():
    import torch_npu

    assert "site-packages" in torch_npu.__file__
    assert torch.npu.is_available() and torch.accelerator.current_accelerator().type == "npu"


@pytest.mark.own_laboratory
@pytest.mark.parametrize("nbytes", [1 << 12, 1 << 20])
def test_host_pool_is_pinned_by_torch_npu(device, nbytes):
    before = fake_acl.calls().get("aclrtMallocHost", 0)
    pool = memswap.HostPool(budget="64MiB", slab="4MiB", device=device)
    block = pool.native.allocate(nbytes)
    assert fake_acl.calls()["aclrtMallocHost"] > before, "the pool's memory is not the driver's"
    assert block.data_ptr % 512 == 0
    del block
    assert pool.trim() > 0


def test_swapped_tensor_comes_back_bit_for_bit(device):
    pool = memswap.HostPool(budget="64MiB", slab="1MiB", device=device)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool):
        host = torch.randn(1000, generator=torch.Generator().manual_seed(7)).to(dtype)
        tensor = host.to(device)
        assert memswap.swap_out(tensor, pool)
        memswap.swap_in(tensor)
        assert torch.equal(tensor.cpu(), host), f"{dtype} came back changed"


def test_training_under_memswap_is_bit_identical(device, way_of_training):
    x = new_input(device)
    plain = new_stack(device)
    expected = train_step(plain, lambda: plain(x))
    model = new_stack(device)
    pool = memswap.HostPool(budget="64MiB", slab="64KiB", device=device)
    step, stats = way_of_training(model, x, pool)
    for _ in range(3):
        assert_same_gradients(train_step(model, step), expected)
    assert stats().moved_storages > 0 and stats().returned_storages > 0


@pytest.fixture(params=["saved_tensors", "manage"])
def way_of_training(request):
    def saved_tensors(model, x, pool):
        saved = memswap.saved_tensors(EVERYTHING, pool=pool)

        def step():
            with saved:
                return model(x)

        return step, saved.stats

    def manage(model, x, pool):
        manager = memswap.manage(model, policy=EVERYTHING, pool=pool)
        return lambda: model(x), manager.stats

    return {"saved_tensors": saved_tensors, "manage": manage}[request.param]
