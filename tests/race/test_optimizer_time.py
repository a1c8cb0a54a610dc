"""How long a step takes whose state streams through the device, in virtual time."""

from __future__ import annotations

import pytest
import torch
from optimizer_helpers import loss_of, maker, manage, new_model
from race_workloads import DEVICE, EAGER, new_pool

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


def test_where_only_two_parameters_fit_kernels_wait_for_the_link_and_nothing_else_does() -> None:
    """The state of one is on its way in both directions at the same time, tensor by tensor."""
    kernels_us = step_us(None)
    managed = step_us(STATE_BYTES // (2 * DEPTH))
    assert managed < 1.10 * (LINK_US + kernels_us), f"{managed:.0f} us, the link {LINK_US:.0f}"
