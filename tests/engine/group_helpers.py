"""What tests of groups share."""

from __future__ import annotations

from typing import Any

import torch
from helpers import (
    assert_nothing_left,
    assert_pool_empty,
    flush_autograd,
    random,
)

import memswap
from memswap._native import native


def settle(group: Any, device: torch.device) -> memswap.types.Stats:
    """Everything that leaves has left, on the host's clock too."""
    groups = getattr(group, "_groups", group)
    groups.settle()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    for transfers in groups.engine.open_transfers():
        if isinstance(transfers.lane, native.StagedLane):
            transfers.lane.finish_writes()  # its worker may hold a storage for a moment
    return groups.stats()


def assert_released(group: Any, pool: Any, device: torch.device) -> None:
    flush_autograd(device)
    assert_nothing_left(group.stats())
    assert_pool_empty(pool)


def sines(x: torch.Tensor, count: int = 4) -> torch.Tensor:
    """A loss whose graph saves `count` tensors that nobody else holds."""
    for _ in range(count):
        x = (x * 1.5).sin()
    return x.sum()


def leaf_and_gradient(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """A leaf, and the gradient that it gets from `sines` without a group."""
    x = random(device, 300).requires_grad_()
    sines(x).backward()
    expected, x.grad = x.grad, None
    assert expected is not None
    return x, expected


def make_calls(batch: Any, letters: str) -> None:
    """The calls that these letters stand for: o and w for the offload, l and W for the load."""
    calls = {
        "o": batch.launch_offload,
        "w": batch.wait_offload,
        "l": batch.launch_load,
        "W": batch.wait_load,
    }
    for letter in letters:
        calls[letter]()


def collected(group: memswap.Group, device: torch.device) -> tuple[Any, torch.Tensor]:
    x = random(device, 300).requires_grad_()
    with group as batch:
        loss = sines(x)
    return batch, loss
