"""chain and swap_modules: which modules, how far ahead, what is there at once."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers import (
    EVERYTHING,
    assert_nothing_left,
    assert_same_gradients,
    flush_autograd,
    gradients,
    new_input,
    new_stack,
    random,
    train_step,
)
from swap_helpers import DOORS, open_door
from torch import nn
from torch.utils.checkpoint import checkpoint

import memswap
from memswap._native import native
from memswap.schedules import towers

pytestmark = [pytest.mark.every_action("swap"), pytest.mark.one_schedule]


# --- names ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "matches", "not_matches"),
    [
        ("model.layers.0", ["model.layers.0"], ["model.layers.00", "model.layers.0.mlp"]),
        ("model.layers.{*}", ["model.layers.0", "model.layers.17"], ["model.layers.x", "layers.1"]),
        ("layers.{2-10}", ["layers.2", "layers.10"], ["layers.1", "layers.11"]),
        ("layers.?", ["layers.0", "layers.x"], ["layers.10", "layers."]),
        ("*.mlp", ["a.mlp", "a.0.b.mlp"], ["mlp", "a.mlp.up"]),
        (
            "layers.{0-1}.experts.{*}.up",
            ["layers.1.experts.7.up"],
            ["layers.2.experts.7.up", "layers.1.experts.up"],
        ),
        ("a+b.{*}", ["a+b.1"], ["aab.1"]),
    ],
)
def test_patterns_match_whole_names(pattern, matches, not_matches):
    compiled = towers.compiled_pattern(pattern)
    for name in matches:
        assert compiled(name), f"{pattern} should match {name}"
    for name in not_matches:
        assert not compiled(name), f"{pattern} should not match {name}"


def test_a_tower_is_what_differs_in_its_first_number(device):
    assert towers.tag("vision.layers.3") == "vision.layers.*"
    assert towers.tag("layers.2.experts.7.up") == "layers.*.experts.7.up"
    assert towers.tag("head") == "head"
    models = {"student": new_stack(device), "teacher": new_stack(device, depth=2)}
    with memswap.swap_modules(models, "*.layers.{0-1}") as swap:
        assert set(swap.schedule.towers) == {"student.layers.*", "teacher.layers.*"}
        assert swap.units == tuple(f"{m}.layers.{n}" for m in models for n in (0, 1))
        assert "student.layers.*" in swap.report()
        assert "(student.layers.0 to teacher.layers.1)" in swap.report()


def test_wrong_arguments_are_refused(device):
    model = new_stack(device, depth=1)
    with pytest.raises(ValueError, match=r"no module matches 'blocks\.\*'.*'layers'"):
        memswap.swap_modules(model, "blocks.*")
    with pytest.raises(ValueError, match=r"found '\{a\}'"):
        memswap.swap_modules(model, "layers.{a}")
    with pytest.raises(TypeError, match="plan="):
        memswap.swap_modules(model, [])
    with pytest.raises(TypeError, match="check="):
        memswap.swap_modules(model, "layers.*", check=3)
    with pytest.raises(TypeError, match=r"expected an nn\.Module"):
        memswap.swap_modules([model], "layers.*")
    with pytest.raises(ValueError, match="distance=0"):
        memswap.chain(model.layers, distance=0)
    with pytest.raises(ValueError, match=r"chain\(\): found no modules"):
        memswap.chain([])
    with memswap.chain(model.layers) as chain, pytest.raises(ValueError, match="distance=-1"):
        chain.schedule.distance = -1


# --- swap_modules --------------------------------------------------------------------------------


def test_only_the_input_moves_where_a_module_recomputes_the_rest(device, new_pool):
    class Recomputed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))

        def forward(self, hidden_states):
            return hidden_states + checkpoint(self.inner, hidden_states, use_reentrant=False)

    torch.manual_seed(0)
    layers = nn.ModuleList([Recomputed() for _ in range(4)]).to(device)
    model = nn.ModuleDict({"layers": layers})
    x = new_input(device).requires_grad_()

    def loss():
        y = x * 1
        for layer in layers:
            y = layer(y)
        return y.square().mean()

    loss().backward()
    expected = gradients(model)
    pool = new_pool()
    swap = memswap.swap_modules(
        model, "layers.{*}", only_input=True, prefetch=False, policy=EVERYTHING, pool=pool
    )
    for _ in range(2):
        swap.reset_stats()
        model.zero_grad(set_to_none=True)
        loss().backward()
        assert_same_gradients(gradients(model), expected)
    assert swap.stats().moved_storages == 4, "one input for each layer, and nothing else"


def test_without_prefetch_every_return_is_a_stall_and_with_it_hardly_any(device, new_pool):
    model, x = new_stack(device, depth=6), new_input(device)
    found = {}
    for prefetch in (False, True):
        swap = memswap.swap_modules(
            model, "layers.{*}", prefetch=prefetch, policy=EVERYTHING, pool=new_pool()
        )
        for _ in range(3):
            swap.reset_stats()
            train_step(model, lambda: model(x))
        found[prefetch] = swap.stats()
        swap.remove()
    assert found[False].stalls == found[False].returned_storages > 0
    assert found[True].stalls < found[True].returned_storages / 4


def test_two_layers_are_there_at_once_or_more_where_the_link_is_slow(device, new_pool, monkeypatch):
    model, x = new_stack(device, depth=6), new_input(device)
    windows = {}
    for speed in (1e15, 0.0):
        monkeypatch.setattr(towers, "link_speed", lambda of, speed=speed: speed)
        swap = memswap.swap_modules(model, "layers.{*}", policy=EVERYTHING, pool=new_pool())
        (tower,) = swap.schedule.towers.values()
        assert tower.prefetch_bytes is None and tower.link_bytes_per_s is None
        for _ in range(4):
            swap.reset_stats()
            train_step(model, lambda: model(x))
        stats = swap.stats()
        saved = stats.moved_bytes + sum(
            count.bytes
            for reason, count in stats.kept.items()
            if reason in ("needed at once", "never freed")
        )
        windows[speed] = tower.prefetch_bytes / saved
        assert tower.link_bytes_per_s == speed
        swap.remove()
    assert abs(windows[1e15] - 2 / 6) < 0.05, "a fast link: two of six layers"
    assert windows[0.0] > 0.95, "a link that carries nothing: nothing need come back"


def test_plans_and_towers_go_by_the_same_rates(device, new_pool, monkeypatch):
    """What memswap.profile has measured is not measured again, and not otherwise."""
    rates = memswap.Rates("known", 1e9, 123e6, 1e9, 1e9)
    monkeypatch.setattr(towers, "remembered", lambda device, folder: rates)
    model, x = new_stack(device, depth=3), new_input(device)
    with memswap.swap_modules(model, "layers.{*}", policy=EVERYTHING, pool=new_pool()) as swap:
        for _ in range(3):
            train_step(model, lambda: model(x))
        (tower,) = swap.schedule.towers.values()
        assert tower.link_bytes_per_s == 123e6


def test_the_link_is_measured_and_takes_nothing_from_the_system(device, new_pool, monkeypatch):
    monkeypatch.setattr(towers, "remembered", lambda device, folder: None)
    model, x = new_stack(device, depth=3), new_input(device)
    pool = new_pool()
    pool.reserve("4MiB")
    swap = memswap.swap_modules(model, "layers.{*}", policy=EVERYTHING, pool=pool)
    taken = pool.statistics().slabs_acquired
    for _ in range(3):
        train_step(model, lambda: model(x))
    (tower,) = swap.schedule.towers.values()
    assert tower.link_bytes_per_s is not None and tower.link_bytes_per_s > 1e6
    assert pool.statistics().slabs_acquired == taken


# --- chain ---------------------------------------------------------------------------------------


@pytest.fixture
def journal(monkeypatch):
    """Which group was told what, in order."""
    events: list[str] = []
    for call in ("launch_offload", "wait_offload", "launch_load"):
        plain = getattr(native.Batch, call)

        def told(batch, *arguments, call=call, plain=plain):
            first = batch.phase
            plain(batch, *arguments)
            if batch.phase is not first:
                events.append(f"{call} {batch.name}")

        monkeypatch.setattr(native.Batch, call, told)
    return events


@pytest.mark.parametrize("distance", [1, 2])
def test_a_chain_keeps_its_schedule(device, new_pool, journal, distance):
    model, x = new_stack(device, depth=4), new_input(device)
    expected = train_step(model, lambda: model(x))
    chain = memswap.chain(model.layers, EVERYTHING, distance=distance, pool=new_pool())
    assert chain.units == ("0", "1", "2", "3") and chain.schedule.distance == distance
    model.zero_grad(set_to_none=True)
    loss = model(x)
    forward, journal[:] = list(journal), []
    wanted = ["launch_offload 0", "launch_offload 1", "wait_offload 0"]
    if distance == 1:
        wanted += ["launch_offload 2", "wait_offload 1", "wait_offload 2"]
    else:
        wanted += ["wait_offload 1"]
    assert forward == wanted, "launched after a layer, waited for after the next"
    loss.backward()
    loads = [int(event.split()[1]) for event in journal if event.startswith("launch_load")]
    assert loads == list(range(3 - distance, -1, -1)), "loaded in backward's order, once each"
    assert chain.stats().stalls == 0
    assert_same_gradients(gradients(model), expected)


def test_a_chains_distance_may_change_between_steps(device, new_pool):
    model, x = new_stack(device, depth=4), new_input(device)
    expected = train_step(model, lambda: model(x))
    chain = memswap.chain(model.layers, EVERYTHING, pool=new_pool())
    moved = []
    for distance in (1, 3, 2):
        chain.schedule.distance = distance
        chain.reset_stats()
        assert_same_gradients(train_step(model, lambda: model(x)), expected)
        moved.append(chain.stats().moved_storages)
    assert moved[1] < moved[2] < moved[0], "the further ahead, the more layers stay"


@pytest.mark.parametrize("door", DOORS)
def test_paused_modules_leave_forwards_alone(device, new_pool, door):
    model, x = new_stack(device), new_input(device)
    expected = train_step(model, lambda: model(x))
    scheduled = open_door(door, model, new_pool())
    before = model(x)
    scheduled.pause()
    offered = scheduled.stats().offered_tensors
    assert_same_gradients(train_step(model, lambda: model(x)), expected)
    assert scheduled.stats().offered_tensors == offered
    scheduled.resume()
    model.zero_grad(set_to_none=True)
    before.backward()  # begun before the pause
    assert_same_gradients(gradients(model), expected)
    del before
    assert_same_gradients(train_step(model, lambda: model(x)), expected)
    assert scheduled.stats().offered_tensors > offered
    assert "moved" in scheduled.report()
    flush_autograd(device)
    assert_nothing_left(scheduled.stats())


def test_a_forward_may_leave_layers_out(device, new_pool):
    model, x = new_stack(device, depth=4), new_input(device)

    def loss(order: list[int]) -> torch.Tensor:
        y = x
        for index in order:
            y = model.layers[index](y)
        return y.square().mean()

    orders = [[0, 1, 2, 3], [0, 2, 3], [1, 3], [3], [0, 1]]
    expected = [train_step(model, lambda o=o: loss(o)) for o in orders]
    chain = memswap.chain(model.layers, EVERYTHING, pool=new_pool())
    for order, wanted in zip(orders, expected, strict=True):
        assert_same_gradients(train_step(model, lambda o=order: loss(o)), wanted)
    flush_autograd(device)
    assert_nothing_left(chain.stats())


def test_an_exception_in_a_layer_and_an_interrupt_end_its_block(device, new_pool):
    class Fails(nn.Module):
        error: type[BaseException] | None = None

        def forward(self, x: torch.Tensor) -> Any:
            if self.error is not None:
                raise self.error("in a layer")
            return x.sin()

    layers = nn.ModuleList([Fails(), Fails(), Fails()])
    chain = memswap.chain(layers, EVERYTHING, pool=new_pool())
    x = random(device, 64).requires_grad_()
    for error in (ValueError, KeyboardInterrupt):
        layers[1].error = error
        with pytest.raises(error):
            layers[1](layers[0](x * 1))
        layers[1].error = None
        y = x * 1
        for layer in layers:
            y = layer(y)
        y.sum().backward()
    offered = chain.stats().offered_tensors
    (x * 2).exp().sum()
    assert chain.stats().offered_tensors == offered, "hooks of a layer that failed are still there"


def test_a_copied_layer_is_in_no_chain(device, new_pool):
    model, x = new_stack(device), new_input(device)
    with memswap.chain(model.layers, EVERYTHING, pool=new_pool()) as chain:
        copied = copy.deepcopy(model)
        assert_same_gradients(
            train_step(copied, lambda: copied(x)), train_step(model, lambda: model(x))
        )
        moved = chain.stats().moved_storages
        train_step(copied, lambda: copied(x))
        assert chain.stats().moved_storages == moved
    train_step(model, lambda: model(x))
    assert chain.stats().moved_storages == moved, "the chain was removed"


def test_a_checkpointed_region_in_a_chain_leaves_with_its_layer(device, new_pool):
    """What its policy swaps, and its inputs, belong to the layer's group."""

    class Region(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

        def forward(self, x):
            return x + memswap.checkpoint(self.inner, x, policy_fn=policy)

    def policy(ctx, op, *args, **kwargs):
        swap = memswap.CheckpointPolicy.MUST_SWAP
        return (
            swap if op is torch.ops.aten.gelu.default else memswap.CheckpointPolicy.MUST_RECOMPUTE
        )

    torch.manual_seed(0)
    layers = nn.ModuleList([Region() for _ in range(3)]).to(device)
    x = new_input(device).requires_grad_()

    def loss():
        y = x * 1
        for layer in layers:
            y = layer(y)
        return y.square().mean()

    expected = train_step(layers, loss)
    pool = new_pool()
    chain = memswap.chain(layers, EVERYTHING, pool=pool)
    for _ in range(2):
        chain.reset_stats()
        assert_same_gradients(train_step(layers, loss), expected)
    assert chain.stats().moved_storages >= 2, "what the policy swaps did not leave"
    assert chain.stats().stalls == 0
    flush_autograd(device)
    assert_nothing_left(chain.stats())
