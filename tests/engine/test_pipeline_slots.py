"""A pipeline stage driven by hand, in every order of actions, on the device under test."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import (
    EVERYTHING,
    assert_nothing_left,
    assert_pool_empty,
    assert_same_gradients,
    flush_autograd,
    new_input,
)
from torch import nn

import memswap

pytestmark = pytest.mark.every_action("swap", "encode_swap", "recompute")

#: F forward, B backward, I and W its two halves: gradients of the input, then of the weights.
ORDERS = {
    "gpipe": "F0 F1 F2 F3 F4 B0 B1 B2 B3 B4",
    "1f1b": "F0 F1 F2 B0 F3 B1 F4 B2 B3 B4",
    "zero bubble": "F0 F1 F2 F3 I0 I1 F4 W0 I2 W1 I3 I4 W2 W3 W4",
    "halves apart": "F0 F1 F2 F3 I0 I1 I2 I3 W0 W1 W2 W3",
}


class Stage:
    """What :func:`memswap.manage_pipeline` needs of a stage."""

    stage_index = 1

    def __init__(self, device: torch.device) -> None:
        torch.manual_seed(0)
        self.submod = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)).to(device)

    def run(self, order: str, device: torch.device) -> list[torch.Tensor]:
        """Gradients of the weights, then of the inputs in the order of their backward."""
        weights = list(self.submod.parameters())
        grads = [torch.zeros_like(weight) for weight in weights]
        of_inputs: list[torch.Tensor] = []
        waiting: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for action in order.split():
            number = int(action[1:])
            if action[0] == "F":
                x = new_input(device, seed=number).requires_grad_()
                waiting[number] = x, self.submod(x).square().mean()
                continue
            x, loss = waiting[number]
            if action[0] in "BI":
                of_inputs += torch.autograd.grad(loss, [x], retain_graph=True)
            if action[0] in "BW":
                found = torch.autograd.grad(loss, weights)
                grads = [a + b for a, b in zip(grads, found, strict=True)]
                del waiting[number], loss
        return grads + of_inputs


@pytest.mark.parametrize("name", list(ORDERS))
def test_every_order_of_actions_gives_the_same_gradients(device, new_pool, name):
    stage, pool = Stage(device), new_pool()
    expected = stage.run(ORDERS[name], device)
    with memswap.manage_pipeline(stage, policy=EVERYTHING, pool=pool, min_gap=3) as manager:
        for _ in range(2):
            manager.reset_stats()
            assert_same_gradients(stage.run(ORDERS[name], device), expected)
    assert manager.stats().moved_storages > 0
    flush_autograd(device)
    assert_nothing_left(manager.stats())
    assert_pool_empty(pool)


@pytest.mark.one_schedule
@pytest.mark.every_action("swap")
def test_halves_close_together_are_read_in_one_stay_and_halves_apart_leave_between(
    device, new_pool
):
    returned: dict[str, Any] = {}
    for order in ("F0 F1 F2 F3 I0 W0 I1 W1 I2 W2 I3 W3", ORDERS["halves apart"]):
        stage = Stage(device)
        with memswap.manage_pipeline(
            stage, policy=EVERYTHING, pool=new_pool(), min_gap=3
        ) as manager:
            for _ in range(2):
                manager.reset_stats()
                stage.run(order, device)
            returned[order] = manager.stats()
    together, apart = returned.values()
    assert together.returned_storages == together.moved_storages
    assert apart.returned_storages > apart.moved_storages, "the second half had to bring them again"
