"""A mixture of experts: token counts that vary by step, one expert with four times its share.

Every size is new, so whatever is sized by the last step is wrong in this one. What must not happen:
an error, a tensor that is resized or encoded again and again, memory that grows from step to step.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import assert_nothing_left, assert_same_gradients, flush_autograd, train_step
from moe_layers import Model, inputs

import memswap
from memswap import Action, Policy, Windows

POLICY = Policy(action=Action.ENCODE, min_bytes=1 << 10)


@pytest.mark.one_schedule
def test_imbalanced_experts_train_bit_for_bit_without_a_storm_of_allocations(device) -> None:
    torch.manual_seed(0)
    model = Model().to(device, torch.bfloat16)
    steps = 8
    plain = [train_step(model, lambda s=s: model(*inputs(device, s))) for s in range(steps)]

    manager = memswap.manage(model.layers, POLICY, windows=Windows(), prefetch_bytes="64KiB")
    held: list[Any] = []
    for step in range(steps):
        before = manager.stats()
        pinned = pinned_allocations(device)
        found = train_step(model, lambda s=step: model(*inputs(device, s)))
        assert_same_gradients(found, plain[step])
        del found
        flush_autograd(device)
        now = manager.stats()
        considered = now.offered_tensors - before.offered_tensors
        moved = now.moved_storages - before.moved_storages
        assert 0 < moved <= considered, "something was encoded more than once"
        assert now.returned_storages - before.returned_storages <= moved
        assert "codec room" not in now.kept
        if step > 2:
            assert pinned_allocations(device) == pinned, "pinned memory is taken in a steady step"
        manager._engine._transfers.settle()
        assert_nothing_left(manager.stats())
        lane = manager._engine._transfers.all()[0].codec_lane
        if hasattr(lane, "arena_statistics"):
            held.append(lane.arena_statistics()["reserved_bytes"])
    assert len(set(held[1:])) <= 1, f"the arena grows from step to step: {held}"
    manager.remove()


@pytest.mark.accelerator
@pytest.mark.one_schedule
def test_each_moved_tensor_takes_one_frame_and_one_storage_and_nothing_else(device) -> None:
    """Device memory that the cache could not serve, at most: no search by trial and error."""
    torch.manual_seed(0)
    model = Model().to(device, torch.bfloat16)

    def allocations(step: int) -> int:
        module = getattr(torch, device.type)
        before = device_allocations(device)
        train_step(model, lambda: model(*inputs(device, step)))
        module.empty_cache()
        return device_allocations(device) - before

    train_step(model, lambda: model(*inputs(device, 0)))
    getattr(torch, device.type).empty_cache()
    plain = [allocations(step) for step in range(4)]
    manager = memswap.manage(model.layers, POLICY, windows=Windows(), prefetch_bytes="64KiB")
    for step in range(4):
        allocations(step)
    for step in range(4):
        before = manager.stats().moved_storages
        taken = allocations(step)
        moved = manager.stats().moved_storages - before
        assert moved > 0
        assert taken <= plain[step] + 2 * moved
    manager.remove()


def device_allocations(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.memory_stats(device)["num_device_alloc"])
    from simdev import counters

    return counters.device_allocations()


def pinned_allocations(device: torch.device) -> int:
    if device.type in ("cpu", "cuda"):
        return 0
    from simdev import counters

    return counters.pinned_allocations()
