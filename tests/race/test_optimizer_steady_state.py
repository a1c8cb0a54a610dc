"""A steady step of a managed optimizer: no host synchronisation, no new memory, step after step."""

from __future__ import annotations

import pytest
import torch
from optimizer_helpers import ROOM, loss_of, maker, manage, new_model
from race_workloads import DEVICE, MATRIX, new_pool

import memswap
from simdev import counters, laboratory

pytestmark = [pytest.mark.own_laboratory, pytest.mark.one_schedule]


@pytest.mark.parametrize("room", [ROOM, 1])
@pytest.mark.parametrize("schedule", MATRIX[:4], ids=str)
def test_a_steady_step_never_waits_on_the_host(schedule, room) -> None:
    with laboratory(schedule):
        model = new_model(DEVICE, depth=6)
        optimizer = maker("AdamW", "foreach")(model.parameters())
        manager = manage(optimizer, new_pool(), room=room)
        loss_of(model, DEVICE, 0).backward()
        for _ in range(3):
            optimizer.step()
        before = counters.host_syncs()
        optimizer.step()
        waited = counters.host_syncs() - before
        assert manager.statistics().chunks > 2
        torch.accelerator.synchronize()
        optimizer.zero_grad()
        del model, optimizer, manager
    assert waited == 0, f"the host waited {waited} times in a step"


@pytest.mark.parametrize("steps", [300, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("action", "room"), [("swap", 3 * 8192), ("encode_swap", 3 * 8192), ("swap", 1)]
)
def test_hundreds_of_steps_take_what_ten_took(action: str, room: int, steps: int) -> None:
    with laboratory(MATRIX[1]):
        model = new_model(DEVICE, depth=6, width=32)
        optimizer = maker("AdamW", "foreach")(model.parameters())
        pool = new_pool()
        manager = manage(optimizer, pool, action=memswap.Action(action), room=room)
        taken = []
        for step in range(steps):
            optimizer.zero_grad()
            loss_of(model, DEVICE, step % 5).backward()
            optimizer.step()
            if step in (10, steps - 1):
                torch.accelerator.synchronize()
                taken.append(
                    (
                        counters.device_allocations(),
                        pool.statistics().slabs_acquired,
                        pool.statistics().blocks,
                    )
                )
        assert manager.statistics().steps == steps
        optimizer.zero_grad()
        del model, optimizer, manager, pool
    assert taken[0] == taken[1], f"device allocations, slabs, blocks: {taken[0]}, then {taken[1]}"
