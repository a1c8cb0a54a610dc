"""A mixture of experts: token counts that vary by step, one expert with four times its share.

Every size is new, so whatever is sized by the last step is wrong in this one. What must not happen:
an error, a tensor that is resized or encoded again and again, memory that grows from step to step.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import assert_nothing_left, assert_same_gradients, flush_autograd, train_step
from torch import nn

import memswap
from memswap import Action, Policy, Windows

EXPERTS, WIDTH = 4, 32
POLICY = Policy(action=Action.ENCODE, min_bytes=1 << 10)


class Experts(nn.Module):
    """Tokens are sorted by expert; each expert gets its own part."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, x: torch.Tensor, counts: tuple[int, ...]) -> torch.Tensor:
        parts = x.split(counts)
        out = [nn.functional.silu(part @ self.up[e]) @ self.down[e] for e, part in enumerate(parts)]
        return x + torch.cat(out)


class Model(nn.Module):
    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Experts() for _ in range(depth))

    def forward(self, x: torch.Tensor, counts: list[tuple[int, ...]]) -> torch.Tensor:
        for layer, each in zip(self.layers, counts, strict=True):
            x = layer(x, each)
        return x.square().mean()


def routed(step: int) -> tuple[int, list[tuple[int, ...]]]:
    """How many tokens, and how many go to each expert of each layer; one gets four shares."""
    tokens = 448 + 16 * (7 * step % 5)
    counts = []
    for layer in range(3):
        share = tokens // (EXPERTS + 3)
        each = [share] * EXPERTS
        each[(step + layer) % EXPERTS] = tokens - share * (EXPERTS - 1)
        counts.append(tuple(each))
    return tokens, counts


def inputs(device: torch.device, step: int) -> tuple[torch.Tensor, list[tuple[int, ...]]]:
    tokens, counts = routed(step)
    generator = torch.Generator().manual_seed(step)
    return torch.randn(tokens, WIDTH, generator=generator).to(device, torch.bfloat16), counts


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
        manager._saver._routes.settle()
        assert_nothing_left(manager.stats())
        lane = manager._saver._routes.open_routes()[0].codec_lane
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
