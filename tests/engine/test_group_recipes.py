"""Recipes in groups and chains: they leave with their batch, and are computed when demanded."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from group_helpers import make_calls, settle
from helpers import (
    assert_nothing_left,
    assert_pool_empty,
    assert_same_gradients,
    collect,
    flush_autograd,
    random,
)
from recipe_helpers import RECOMPUTE, words_of
from torch import nn

import memswap
from memswap.engine import recipes

ROWS, WIDTH = 32, 16
NBYTES = 4 * ROWS * 2 * WIDTH


class Gated(nn.Module):
    """Autograd saves the input, gate, up, and what are recipes: silu of gate and the product."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def new_layers(device: torch.device, depth: int = 3) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(Gated() for _ in range(depth)).to(device)


def gradients_of(layers: nn.Module, loss: torch.Tensor, **options: Any) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, list(layers.parameters()), **options))


def plain(layers: nn.ModuleList, x: torch.Tensor) -> list[torch.Tensor]:
    y = x
    for layer in layers:
        y = layer(y)
    return gradients_of(layers, y.square().mean())


class Grouped:
    """Layers whose batches a schedule moves, until their recipes are proven."""

    def __init__(self, device: torch.device, pool: Any) -> None:
        self.layers, self.x = new_layers(device), random(device, ROWS, WIDTH)
        self.expected = plain(self.layers, self.x)
        self.groups = memswap.Groups(RECOMPUTE, pool=pool)
        self.each = [self.groups.new(f"layer {n}") for n in range(len(self.layers))]
        self.device = device
        for _ in range(recipes.PROOFS + 2):
            self.check()
        self.groups.reset_stats()

    def forward(self) -> tuple[torch.Tensor, list[Any]]:
        y, batches = self.x, []
        for group, layer in zip(self.each, self.layers, strict=True):
            with group as batch:
                y = layer(y)
            batches.append(batch)
        return y.square().mean(), batches

    def check(self, calls: str = "owlW") -> None:
        """A step in which each batch gets these calls, in backward's order where it loads."""
        loss, batches = self.forward()
        split = calls.find("l") if "l" in calls else len(calls)
        for batch in batches:
            make_calls(batch, calls[:split])
        for batch in reversed(batches):
            make_calls(batch, calls[split:])
        assert_same_gradients(gradients_of(self.layers, loss), self.expected)


def test_a_groups_recipes_are_used_once_they_are_proven(device, new_pool):
    pool = new_pool()
    one = Grouped(device, pool)
    one.check()
    stats = one.groups.stats()
    assert stats.recipe_storages >= len(one.layers), words_of(one.groups)
    assert stats.recipe_runs >= stats.recipe_storages
    assert stats.stalls == 0, "what a recipe reads was not back although it was loaded"
    flush_autograd(device)
    assert_nothing_left(one.groups.stats())
    assert_pool_empty(pool)


@pytest.mark.parametrize("calls", ["", "o", "ow", "olW", "owlWowlW", "oowwllWW"])
def test_every_legal_order_gives_the_same_gradients(device, new_pool, calls):
    pool = new_pool()
    one = Grouped(device, pool)
    for _ in range(2):
        one.check(calls)
    flush_autograd(device)
    assert_nothing_left(one.groups.stats())
    assert_pool_empty(pool)


def test_a_recipe_stays_until_its_batch_leaves(device, new_pool):
    one = Grouped(device, new_pool())
    loss, batches = one.forward()
    held = one.groups.stats().resident_bytes
    assert_same_gradients(gradients_of(one.layers, loss, retain_graph=True), one.expected)
    assert one.groups.stats().recipe_runs == 0, "what nobody has sent away was computed again"
    for batch in batches:
        make_calls(batch, "ow")
    stats = settle(one.groups, device)
    assert stats.recipe_storages >= len(one.layers)
    assert stats.resident_bytes <= held - NBYTES * len(one.layers), "recipes free nothing"
    assert_same_gradients(gradients_of(one.layers, loss), one.expected)
    assert one.groups.stats().recipe_runs > 0


def test_a_recipe_counts_when_it_leaves_and_once(device, new_pool):
    """As a storage does that leaves in any other form."""
    one = Grouped(device, new_pool())
    loss, batches = one.forward()
    stats = one.groups.stats()
    assert stats.moved_storages == stats.recipe_storages == stats.recipe_bytes == 0, (
        "what no batch was told to send counts as gone"
    )
    make_calls(batches[0], "ow")
    first = one.groups.stats()
    assert 0 < first.recipe_storages < first.moved_storages
    assert first.recipe_bytes == NBYTES * first.recipe_storages
    make_calls(batches[0], "lWow")
    assert one.groups.stats().recipe_storages == first.recipe_storages, "one storage counts twice"
    for batch in batches[1:]:
        make_calls(batch, "ow")
    assert one.groups.stats().recipe_storages == len(batches) * first.recipe_storages
    assert_same_gradients(gradients_of(one.layers, loss), one.expected)


def test_a_load_computes_nothing(device, new_pool):
    """Its result would take memory before anybody needs it."""
    one = Grouped(device, new_pool())
    loss, batches = one.forward()
    for batch in batches:
        make_calls(batch, "owlW")
    assert one.groups.stats().recipe_runs == 0
    for _ in range(2):
        found = gradients_of(one.layers, loss, retain_graph=True)
        assert_same_gradients(found, one.expected)
    for batch in batches:
        make_calls(batch, "owlW")
    assert_same_gradients(gradients_of(one.layers, loss), one.expected)


def test_a_source_that_is_edited_after_its_batch_has_left(device, new_pool):
    """Autograd saves the gate, so its edit is refused as it would be."""
    one = Grouped(device, new_pool())
    seen: list[torch.Tensor] = []
    hook = one.layers[1].gate.register_forward_hook(lambda m, a, output: seen.append(output))
    loss, batches = one.forward()
    hook.remove()
    for batch in batches:
        make_calls(batch, "ow")
    with torch.no_grad():
        seen.pop().detach().mul_(2)
    with pytest.raises(memswap.InplaceEditError):
        gradients_of(one.layers, loss)
    del loss
    flush_autograd(device)
    collect()
    assert_nothing_left(one.groups.stats())


def test_a_weight_that_is_edited_before_and_after_its_batch_has_left(device, new_pool):
    """A recipe that reads a parameter: it is run before an optimizer's step edits that."""
    torch.manual_seed(0)
    weight = random(device, ROWS, WIDTH).requires_grad_()
    group = memswap.Group("cast", RECOMPUTE, pool=new_pool())

    def step() -> tuple[torch.Tensor, Any]:
        with group as batch:
            loss = (weight.double() * weight.double().sin()).sum()
        return loss, batch

    (expected,) = torch.autograd.grad(step()[0], [weight])
    for _ in range(recipes.PROOFS + 2):
        loss, batch = step()
        make_calls(batch, "owlW")
        assert_same_gradients(torch.autograd.grad(loss, [weight]), [expected])
    for calls in ("", "ow"):
        loss, batch = step()
        make_calls(batch, calls)
        weight.grad = torch.ones_like(weight)
        before = weight.detach().clone()
        torch.optim.SGD([weight], lr=0.5).step()
        make_calls(batch, "" if calls else "ow")
        assert_same_gradients(torch.autograd.grad(loss, [weight]), [expected])
        with torch.no_grad():
            weight.copy_(before)
        weight.grad = None


def test_what_is_known_of_operators_does_not_grow(device, new_pool):
    """A schedule that runs for a million steps notes each operator for one batch."""
    one = Grouped(device, new_pool())
    one.check()
    known = one.groups.engine.recipes.known_storages
    for _ in range(3):
        one.check()
    assert one.groups.engine.recipes.known_storages <= known


@pytest.mark.parametrize("door", ["chain", "swap_modules"])
def test_chains_and_modules_recompute_as_groups_do(device, new_pool, door):
    layers, x = new_layers(device, 4), random(device, ROWS, WIDTH)
    expected = plain(layers, x)
    pool = new_pool()
    if door == "chain":
        scheduled = memswap.chain(layers, RECOMPUTE, pool=pool)
    else:
        named = nn.ModuleDict({"layers": layers})
        scheduled = memswap.swap_modules(named, "layers.{0-3}", policy=RECOMPUTE, pool=pool)
    for _ in range(recipes.PROOFS + 3):
        scheduled.reset_stats()
        assert_same_gradients(plain(layers, x), expected)
    assert scheduled.stats().recipe_runs > 0
    scheduled.remove()
    flush_autograd(device)
    gc.collect()
    assert_nothing_left(scheduled.stats())
    assert_pool_empty(pool)
