"""Returns are issued ahead of their use, within a window, in an order that is learnt."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import (
    EVERYTHING,
    assert_released,
    assert_same_gradients,
    gradients,
    let_sends_end,
    random,
    train_step,
)
from torch import nn

import memswap
from memswap._native import native
from memswap.engine import transfers

WIDTH, ROWS = 16, 8
ONE = ROWS * WIDTH * 4  # bytes of one activation


class Watched(native.LaneAround):
    """A lane that notes what it is asked for."""

    def __init__(self, lane: Any, log: list[str]) -> None:
        super().__init__(lane)
        self.lane, self.log = lane, log

    def send(self, storage: Any, block: Any) -> Any:
        self.log.append("send")
        return self.lane.send(storage, block)

    def fetch(self, block: Any) -> Any:
        self.log.append("fetch")
        return self.lane.fetch(block)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.lane, name)


@pytest.fixture
def log(monkeypatch):
    """Every send, every fetch and every use, in the order in which the host issued them."""
    events: list[str] = []
    opened = transfers.open_lane
    monkeypatch.setattr(transfers, "open_lane", lambda *a, **k: Watched(opened(*a, **k), events))
    return events


class Use(torch.autograd.Function):
    """Saves a tensor of its own; notes in backward that it is used."""

    @staticmethod
    def forward(ctx, x, made, log):
        ctx.save_for_backward(made)
        ctx.log = log
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        (made,) = ctx.saved_tensors
        ctx.log.append("use")
        return gradient + made.sum() * 0, None, None


def step(engine, device, log, count=6):
    """`count` storages of ONE bytes each, saved in order and used in reverse."""
    x = torch.zeros(4, device=device, requires_grad=True)
    with engine:
        for number in range(count):
            x = Use.apply(x, random(device, ROWS, WIDTH, seed=number), log)
    let_sends_end(engine, device)
    del log[:]
    x.sum().backward()
    taken, log[:] = list(log), []
    return taken


def ahead(events):
    """The largest number of fetches that were issued and not used yet."""
    most = now = 0
    for event in events:
        now += {"fetch": 1, "use": -1}.get(event, 0)
        most = max(most, now)
    return most


def test_lookahead_of_zero_makes_every_return_a_stall(device, new_pool, log):
    engine = memswap.saved_tensors(EVERYTHING, pool=new_pool(), prefetch_bytes=0)
    for _ in range(3):
        engine.reset_stats()
        events = step(engine, device, log)
        assert events == ["fetch", "use"] * 6, "something was brought back before it was asked for"
        stats = engine.stats()
        assert stats.stalls == stats.returned_storages == 6


@pytest.mark.parametrize("window", [1, 2, 3])
def test_returns_are_issued_ahead_within_the_window(device, new_pool, log, window):
    engine = memswap.saved_tensors(EVERYTHING, pool=new_pool(), prefetch_bytes=window * ONE)
    step(engine, device, log)  # learns
    for _ in range(2):
        engine.reset_stats()
        events = step(engine, device, log)
        stats = engine.stats()
        assert stats.kept["needed at once"].tensors == window, "the window stays at the turn"
        assert stats.moved_storages == 6 - window
        assert stats.stalls == 0, "a return that the order predicted was late"
        assert events.count("fetch") == 6 - window
        assert ahead(events) <= window, "more bytes were on their way than the window allows"
        assert events[0] == "fetch", "nothing was issued when backward began"


def test_first_backward_looks_ahead_in_reverse_order_of_saving(device, new_pool, log):
    engine = memswap.saved_tensors(EVERYTHING, pool=new_pool(), prefetch_bytes=2 * ONE)
    step(engine, device, log)
    assert engine.stats().stalls == 1, "only the very first demand could not be foreseen"


def test_bytes_resident_during_backward_stay_within_the_window(device, new_pool, log):
    engine = memswap.saved_tensors(EVERYTHING, pool=new_pool(), prefetch_bytes=2 * ONE)
    step(engine, device, log, count=10)
    x = torch.zeros(4, device=device, requires_grad=True)
    with engine:
        for number in range(10):
            x = Use.apply(x, random(device, ROWS, WIDTH, seed=number), log)
    let_sends_end(engine, device)
    engine.reset_stats()
    x.sum().backward()
    peak = engine.stats().peak_resident_bytes
    assert peak <= 3 * ONE, f"{peak / ONE} activations were resident; the window is 2, and 1 in use"


def test_changed_order_costs_stalls_and_nothing_else(device, new_pool):
    class Route(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])
            self.order = [0, 1, 2, 3]

        def forward(self, x):
            for index in self.order:
                x = self.layers[index](x).tanh()
            return x.square().sum()

    torch.manual_seed(0)
    model = Route().to(device)
    x = random(device, ROWS, WIDTH)
    pool = new_pool()
    manager = memswap.manage(model.layers, EVERYTHING, pool=pool, prefetch_bytes=2 * ONE)
    for order in ([0, 1, 2, 3], [3, 1, 0, 2], [1, 0], [0, 1, 2, 3], [2, 2, 2], [0, 1, 2, 3]):
        model.order = order
        found = train_step(model, lambda: model(x))
        manager.remove()
        expected = train_step(model, lambda: model(x))
        assert_same_gradients(found, expected)
        assert_released(manager, pool)
        manager = memswap.manage(model.layers, EVERYTHING, pool=pool, prefetch_bytes=2 * ONE)


def test_another_order_of_demands_than_last_time(device, new_pool, log):
    """The same forward; backward asks for its parts in turn one way, then the other."""
    pool = new_pool()
    engine = memswap.saved_tensors(EVERYTHING, pool=pool, prefetch_bytes=2 * ONE)

    def run(turn):
        leaves = [torch.zeros(4, device=device, requires_grad=True) for _ in range(2)]
        ends = list(leaves)
        with engine:
            for number in range(6):
                made = random(device, ROWS, WIDTH, seed=number)
                ends[number % 2] = Use.apply(ends[number % 2], made, log)
        let_sends_end(engine, device)
        for index in turn:
            ends[index].sum().backward()
        return [leaf.grad for leaf in leaves]

    for turn in ((0, 1), (0, 1), (1, 0), (0, 1), (1, 0)):
        found = run(turn)
        assert_same_gradients(found, [torch.ones(4, device=device)] * 2)
        del found
        assert_released(engine, pool)


def test_nothing_comes_back_for_a_graph_that_is_not_run(device, new_pool, log):
    engine = memswap.saved_tensors(EVERYTHING, pool=new_pool(), prefetch_bytes=2 * ONE)
    step(engine, device, log)
    x = torch.zeros(4, device=device, requires_grad=True)
    with engine:
        x = Use.apply(x, random(device, ROWS, WIDTH), log)
    let_sends_end(engine, device)
    del log[:], x
    engine.stats()
    assert "fetch" not in log


def test_block_that_stays_open_over_many_steps_learns_all_the_same(device, new_pool, log):
    engine = memswap.saved_tensors(EVERYTHING, pool=new_pool(), prefetch_bytes=2 * ONE)
    with engine:
        for number in range(3):
            engine.reset_stats()
            x = torch.zeros(4, device=device, requires_grad=True)
            for index in range(6):
                x = Use.apply(x, random(device, ROWS, WIDTH, seed=index), log)
            let_sends_end(engine, device)
            x.sum().backward()
            stats = engine.stats()
            kept = stats.kept["needed at once"].tensors if number else 0
            assert kept == (2 if number else 0), f"step {number} was not taken for a new forward"
            assert stats.stalls == (0 if number else 1)


def test_automatic_window_is_the_default_and_prefetches(device, new_pool, log):
    engine = memswap.saved_tensors(EVERYTHING, pool=new_pool())
    step(engine, device, log, count=10)
    engine.reset_stats()
    step(engine, device, log, count=10)
    assert engine.stats().stalls == 0
    assert 1 <= engine.stats().kept["needed at once"].tensors <= 2, "about an eighth stays"


def managed_mlp(device, pool, policy, **options):
    torch.manual_seed(0)
    layers = nn.ModuleDict(
        {name: nn.Linear(WIDTH, WIDTH) for name in ("embed", "block0", "block1", "head")}
    ).to(device)
    x = random(device, ROWS, WIDTH)

    def loss():
        h = x * 2
        for layer in layers.values():
            h = layer(h).tanh()
        return h.sum()

    expected = train_step(layers, loss)
    manager = memswap.manage(dict(layers), policy, pool=pool, prefetch_bytes=0, **options)
    assert_same_gradients(train_step(layers, loss), expected)
    return manager


def head_alone(tensor, info):
    return memswap.Action.SWAP if info.unit == "head" else memswap.Action.KEEP


def no_activation(tensor, info):
    return memswap.Action.KEEP if tensor.shape[0] == ROWS else None


def option_names(value):
    """A test's id: a function by its name, not by its address."""
    if isinstance(value, dict):
        return str({name: getattr(one, "__name__", one) for name, one in value.items()})
    return None


@pytest.mark.parametrize(
    ("options", "moved"),
    [
        ({}, 4),
        ({"include": "block*"}, 2),
        ({"exclude": "head"}, 3),
        ({"include": ("block*", "embed"), "exclude": ("*0",)}, 2),
        ({"exclude": "*"}, 0),
        ({"min_bytes": ONE}, 4),
        ({"min_bytes": ONE + 1}, 0),
        ({"action": memswap.Action.KEEP}, 0),
        ({"fn": head_alone}, 1),
        ({"fn": no_activation}, 0),
    ],
    ids=option_names,
)
def test_policy_says_what_moves(device, new_pool, options, moved):
    pool = new_pool()
    policy = memswap.Policy(**{"min_bytes": 1, **options})
    manager = managed_mlp(device, pool, policy)
    stats = manager.stats()
    assert stats.moved_storages == moved
    if moved < 4:
        assert stats.kept["small" if "min_bytes" in options else "policy"].tensors == 4 - moved
    assert_released(manager, pool, moved=moved > 0)


def test_policy_function_is_told_unit_and_bytes_and_asked_once_per_storage(device, new_pool):
    asked = []

    def decide(tensor, info):
        asked.append((info.unit, info.nbytes, info.storage_nbytes, tuple(tensor.shape)))
        return memswap.Action.SWAP

    manager = managed_mlp(device, new_pool(), memswap.Policy(min_bytes=1, fn=decide))
    shape = (ROWS, WIDTH)
    assert asked == [(name, ONE, ONE, shape) for name in ("embed", "block0", "block1", "head")]
    manager.remove()


@pytest.mark.own_form("a recipe has no bytes away")
def test_reset_stats_starts_anew_and_forgets_nothing_that_is_alive(device, new_pool):
    pool = new_pool()
    engine = memswap.saved_tensors(EVERYTHING, pool=pool)
    x = random(device, 64).requires_grad_()
    with engine:
        loss = (x * 2).sin().sum()
    engine.reset_stats()
    stats = engine.stats()
    assert stats.moved_storages == stats.offered_tensors == stats.deduplicated_tensors == 0
    assert stats.away_bytes == stats.peak_away_bytes == 256, "what is away now is still away"
    loss.backward()
    del loss
    assert_released(engine, pool, moved=False)


@pytest.mark.own_form("a recipe has no bytes away")
def test_stats_add_up(device, new_pool):
    pool = new_pool()
    engine = memswap.saved_tensors(memswap.Policy(min_bytes=200), pool=pool, prefetch_bytes=0)
    w = random(device, 8, 8).requires_grad_()
    with engine:
        loss = ((random(device, 8, 8, seed=1) @ w).tanh().exp() @ w).sum(0).sin().sum()
    stats = let_sends_end(engine, device)
    kept = sum(count.tensors for count in stats.kept.values())
    assert stats.offered_tensors == kept + stats.moved_storages + stats.deduplicated_tensors
    assert stats.peak_away_bytes >= stats.away_bytes == stats.moved_bytes
    assert stats.freed_bytes == stats.moved_bytes, "nobody holds what was moved"
    assert stats.resident_bytes == 0
    loss.backward()
    after = engine.stats()
    assert after.returned_bytes == after.moved_bytes
    assert after.returned_storages == after.moved_storages
    assert after.exposed_wait_s > 0, "without prefetch, nobody waited for what came back"
    del loss
    assert_released(engine, pool)


def test_report_names_what_was_done(device, new_pool):
    manager = managed_mlp(device, new_pool(), memswap.Policy(min_bytes=1, exclude="head"))
    text = manager.report()
    for line in ("offered by autograd", "kept: parameter", "kept: policy", "moved", "returned"):
        assert line in text, f"the report does not say '{line}':\n{text}"
    assert manager.units == ("embed", "block0", "block1", "head")
    manager.remove()


@pytest.mark.accelerator
def test_prefetch_hides_the_transfers(device, new_pool):
    """In virtual time: without lookahead, backward waits for every copy."""
    if device.type == "cuda":
        pytest.skip("virtual time belongs to the simulated accelerator")
    from simdev import virtual_time

    def backward_us(prefetch_bytes):
        torch.manual_seed(0)
        layers = nn.ModuleList([nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)])
        layers.to(device)
        one = 512 * 64 * 4
        manager = memswap.manage(
            layers, EVERYTHING, pool=new_pool(), prefetch_bytes=prefetch_bytes * one
        )
        x = random(device, 512, 64)
        # slow memory: computing a layer costs about as much as bringing its input back
        costs = {"host_us": 0.1, "launch_us": 0.1, "hbm_gb_per_s": 10}
        with virtual_time(**costs, h2d_gb_per_s=2, d2h_gb_per_s=2) as clock:
            for _ in range(3):  # the first step learns
                h = x
                for layer in layers:
                    h = layer(h)
                loss = h.sum()
                del h
                let_sends_end(manager, device)
                begin = clock.elapsed_us()
                loss.backward()
                elapsed = clock.elapsed_us() - begin
        manager.remove()
        return elapsed

    none, some = backward_us(0), backward_us(2)
    assert some < 0.9 * none, f"{some:.0f} us with prefetch, {none:.0f} us without"


def test_a_managed_model_learns_over_steps(device, new_pool):
    torch.manual_seed(0)
    layers = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(6)])
    layers.to(device)

    def forward(number):
        h = random(device, ROWS, WIDTH, seed=number)
        for layer in layers:
            h = layer(h)
        return h.sum()

    expected = [train_step(layers, lambda n=number: forward(n)) for number in range(3)]
    pool = new_pool()
    manager = memswap.manage(layers, EVERYTHING, pool=pool, prefetch_bytes=ONE)
    for number in range(3):
        manager.reset_stats()
        loss = forward(number)
        let_sends_end(manager, device)
        assert manager.stats().freed_bytes > 0
        layers.zero_grad(set_to_none=True)
        loss.backward()
        del loss
        stalls = manager.stats().stalls
        assert stalls <= (1 if number == 0 else 0), f"step {number}: {stalls} returns were late"
        assert_same_gradients(gradients(layers), expected[number])
    assert_released(manager, pool)
