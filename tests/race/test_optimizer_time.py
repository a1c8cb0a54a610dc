"""How long a step takes whose state streams through the device, in virtual time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from optimizer_helpers import loss_of, maker, manage, new_model
from race_workloads import DEVICE, EAGER, lanes_opened, new_pool

from memswap.optimizers.state import StateMover
from simdev import laboratory, virtual_time

pytestmark = [pytest.mark.own_laboratory, pytest.mark.one_schedule]

WIDTH, DEPTH, LINK_GB_PER_S = 512, 24, 25

#: Of all state, both moments in float32.
STATE_BYTES = 2 * 4 * WIDTH * WIDTH * DEPTH
LINK_US = STATE_BYTES / (LINK_GB_PER_S * 1e3)


def step_us(room: int | None, form: str = "single") -> float:
    """Virtual microseconds of a steady step; `room` None: not managed."""
    # The host runs ahead of the device, as it does on hardware.
    with laboratory(EAGER), virtual_time(host_us=0.5, launch_us=1, queries_wait=False) as clock:
        model = new_model(DEVICE, DEPTH, WIDTH)
        optimizer = maker("AdamW", form)(model.parameters())
        if room is not None:
            manage(optimizer, new_pool("256MiB", slab="64MiB"), room=room)
        loss_of(model, DEVICE, 0).backward()
        for _ in range(2):
            optimizer.step()
        began = clock.elapsed_us()
        optimizer.step()
        torch.accelerator.synchronize()
        ended = clock.elapsed_us()
        optimizer.zero_grad()
        del model, optimizer
    return ended - began


@pytest.mark.parametrize("form", ["single", "foreach"])
def test_a_step_takes_the_links_time(form: str) -> None:
    """The state goes once in each direction, both at a time, with the kernels beside it."""
    managed = step_us(STATE_BYTES // 8, form)
    assert managed < 1.10 * LINK_US, f"{managed:.0f} us, the link takes {LINK_US:.0f}"
    assert managed > LINK_US, "the state has not moved"
    assert step_us(None, form) < 0.6 * LINK_US, "the step's own kernels would hide nothing"


@pytest.mark.parametrize("form", ["single", "foreach"])
def test_where_only_two_parameters_fit_a_step_takes_the_links_time_as_well(form: str) -> None:
    """One is stepped, and the next one's state comes into the memory of the last one's."""
    managed = step_us(STATE_BYTES // (2 * DEPTH), form)
    assert managed < 1.10 * LINK_US, f"{managed:.0f} us, the link takes {LINK_US:.0f}"


def test_tensors_longer_than_what_a_lane_lets_leave_at_once_wait_for_no_link() -> None:
    """256 MiB by default, of which a long parameter's state is more."""

    def bounded(lane: Any) -> Any:
        lane.set_max_leaving_bytes(WIDTH * WIDTH)
        return lane

    with lanes_opened(bounded):
        managed = step_us(STATE_BYTES // (2 * DEPTH))
    assert managed < 1.10 * LINK_US, f"{managed:.0f} us, the link takes {LINK_US:.0f}"


def test_by_way_of_the_allocator_kernels_would_wait_for_the_link(monkeypatch: Any) -> None:
    """The mutation: memory of what has left is waited for by whatever is launched next."""
    monkeypatch.setattr(StateMover, "take_over", lambda mover, tensor: 0)
    kernels_us = step_us(None)
    managed = step_us(STATE_BYTES // (2 * DEPTH))
    assert managed > 0.9 * (LINK_US + kernels_us), "the test above would show nothing"
    assert managed < 1.10 * (LINK_US + kernels_us), f"{managed:.0f} us, the link {LINK_US:.0f}"
