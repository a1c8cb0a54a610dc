"""A CPU's process has frames and decoded storages only for as long as they are needed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_same_gradients, gradients, new_input, new_stack
from helpers import plain_gradients as plain
from resident_training import map_storages
from torch import nn

import memswap
from memswap._native import native
from memswap.engine import lane, transfers

ENCODED = memswap.Policy("encode", min_bytes=1)

pytestmark = pytest.mark.cpu_only


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> dict[bool, Any]:
    """The pools that are made for frames and for decoded storages, by whether they keep pages."""
    pools: dict[bool, Any] = {}
    open_pool: Callable[..., Any] = lane.ordinary_pool

    def noted(keeps_pages: bool) -> Any:
        pools[keeps_pages] = open_pool(keeps_pages)
        return pools[keeps_pages]

    monkeypatch.setattr(lane, "ordinary_pool", noted)
    monkeypatch.setattr(transfers, "ordinary_pool", noted)
    return pools


def reserved(pool: Any) -> int:
    return int(pool.statistics()["reserved_bytes"])


class Wide(nn.Module):
    """Saves what is much longer than its parameter: 4 MiB, of which a frame is a half or so."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1024))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.scale).tanh()


def backward_changes() -> tuple[int, int]:
    """Bytes of frames before backward, and by how much less the process has behind it."""
    map_storages()
    torch.manual_seed(0)
    model = nn.Sequential(*[Wide() for _ in range(12)])
    x = torch.randn(1024, 1024)
    gauge = native.MemoryGauge(torch.device("cpu"))
    with memswap.manage(model, ENCODED) as manager:
        for _ in range(2):
            model(x).sum().backward()
        loss = model(x).sum()
        frames, before = manager.stats().resident_bytes, gauge.now
        loss.backward()
        return frames, before - gauge.now


def backward_changes_apart(kept: bool) -> tuple[int, int]:
    """In a process of its own: what malloc gives back depends on all that ran before."""
    program = """if True:
        import sys
        import test_trimmed_pools as this
        open_pool = this.lane.ordinary_pool
        if sys.argv[1] == "kept":
            this.lane.ordinary_pool = lambda keeps_pages: open_pool(True)
        print(*this.backward_changes())
    """
    path = [str(Path(memswap.__path__[0]).parent), str(Path(__file__).parent)]
    done = subprocess.run(
        [sys.executable, "-c", program, "kept" if kept else "given back"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    frames, less = map(int, done.stdout.split())
    return frames, less


def test_backward_gives_the_process_back_what_frames_took():
    """The second training has a pool that keeps its pages: the mutation, and what else changes."""
    frames, less = backward_changes_apart(kept=False)
    assert frames > 24 << 20
    _, less_where_kept = backward_changes_apart(kept=True)
    assert less - less_where_kept > frames / 2, "gradients find no room that frames have left"


def test_no_forward_begins_with_what_the_last_backward_decoded(device, opened):
    model, x = new_stack(device), new_input(device)
    with memswap.manage(model.layers, ENCODED):
        for _ in range(3):
            model.zero_grad()
            loss = model(x).sum()
            assert not opened or reserved(opened[True]) == 0
            loss.backward()
            assert reserved(opened[True]) > 0, "nothing was decoded there"
    assert_same_gradients(gradients(model), plain(device, x))


def test_a_graph_from_before_keeps_its_bytes(device, opened):
    model, x = new_stack(device), new_input(device)
    with memswap.manage(model.layers, ENCODED):
        losses = [model(x).sum() for _ in range(4)]
        for loss in reversed(losses):
            for retained in (True, False):  # the second time from what the first has decoded
                model.zero_grad()
                loss.backward(retain_graph=retained)
                assert_same_gradients(gradients(model), plain(device, x))
            again = model(x).sum()  # begins an iteration, which gives back
            again.backward()
    assert opened


def test_a_pool_of_the_users_is_the_users(device, opened):
    pool = memswap.HostPool(budget="64MiB", slab="1MiB", device="cpu")
    model, x = new_stack(device), new_input(device)
    with memswap.manage(model.layers, ENCODED, pool=pool):
        for _ in range(3):
            model(x).sum().backward()
        model(x)
        assert list(opened) == [True] and reserved(opened[True]) == 0
        assert pool.statistics().reserved_bytes > 0
