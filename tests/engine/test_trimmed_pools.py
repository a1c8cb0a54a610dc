"""A CPU's pools give back what only the first forwards needed, and nothing that a graph needs."""

from __future__ import annotations

import pytest
from helpers import assert_same_gradients, gradients, new_input, new_stack
from helpers import plain_gradients as plain

import memswap
from memswap.engine.transfers import TRIM_AT

ENCODED = memswap.Policy("encode", min_bytes=1)

pytestmark = pytest.mark.cpu_only


@pytest.fixture
def given_back(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each trim."""
    trimmed: list[int] = []
    trim = memswap.HostPool.trim

    def counted(pool: memswap.HostPool) -> int:
        trimmed.append(trim(pool))
        return trimmed[-1]

    monkeypatch.setattr(memswap.HostPool, "trim", counted)
    return trimmed


def test_what_the_first_forwards_needed_is_given_back(device, given_back):
    model, x = new_stack(device), new_input(device)
    with memswap.manage(model.layers, ENCODED):
        for number in range(1, 2 * max(TRIM_AT)):
            model.zero_grad()
            model(x).sum().backward()
            done = sum(number > one for one in TRIM_AT)
            assert len(given_back) == 2 * done, "frames and decoded storages, at each of these"
    assert sum(given_back) > 0, "nothing was given back"
    assert_same_gradients(gradients(model), plain(device, x))


def test_a_graph_from_before_keeps_its_bytes(device, given_back):
    model, x = new_stack(device), new_input(device)
    with memswap.manage(model.layers, ENCODED):
        losses = [model(x).sum() for _ in range(max(TRIM_AT) + 2)]
        assert given_back, "no pool was trimmed while the graphs were alive"
        for loss in reversed(losses):
            model.zero_grad()
            loss.backward()
            assert_same_gradients(gradients(model), plain(device, x))


def test_a_pool_of_the_users_is_the_users(device, given_back):
    pool = memswap.HostPool(budget="64MiB", slab="1MiB", device="cpu")
    model, x = new_stack(device), new_input(device)
    with memswap.manage(model.layers, ENCODED, pool=pool):
        for _ in range(max(TRIM_AT) + 1):
            model(x).sum().backward()
        assert len(given_back) == len(TRIM_AT), "the pool of decoded storages alone"
        assert pool.statistics().reserved_bytes > 0
