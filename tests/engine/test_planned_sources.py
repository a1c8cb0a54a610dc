"""What autograd does not save, kept for recipes where a plan wants it: the stream before a norm."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from budget_layers import rates_for
from helpers import (
    assert_nothing_left,
    assert_released,
    assert_same_gradients,
    collect,
    flush_autograd,
    random,
)
from torch import nn

import memswap
from memswap import Action, Rates
from memswap.planning import search
from memswap.planning.plan import Plan
from memswap.planning.search import Search
from memswap.planning.step import Step

pytestmark = pytest.mark.own_form("its recipes are learnt, which takes proofs")

ROWS, WIDTH, LAYERS = 64, 32, 6
ANY = memswap.Policy(min_bytes=1024)  # statistics of a norm are smaller, and stay


class Normed(nn.Module):
    """A bfloat16 stream and a norm in float32, as in Llama: autograd saves the stream's float32
    copy, and no operator saves the stream."""

    def __init__(self, edits: bool = False) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.into = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)
        self.edits = edits

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        y = x + self.into((self.scale * normed).bfloat16())
        if self.edits:
            x.mul_(3)  # autograd allows it
        return y


class Model(nn.Module):
    def __init__(self, edits: bool = False) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)
        self.layers = nn.ModuleList(Normed(edits) for _ in range(LAYERS))
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor, sees: bool = False) -> torch.Tensor:
        x = self.before(x)
        for layer in self.layers:
            x = layer(x)
            if sees:
                self.seen.append(x)
        return x.float().square().mean()


def no_codec(device: torch.device) -> Rates:
    """Of a machine that cannot encode, and whose link takes hours."""
    slow = dict.fromkeys(("d2h", "h2d", "duplex_d2h", "duplex_h2d"), 1.0)
    values = {f"{name}_bytes_per_s": rate for name, rate in slow.items()}
    rates = replace(rates_for(device), encode_bytes_per_s=0.0, decode_bytes_per_s=0.0)
    return replace(rates, **({} if device.type == "cpu" else values))


class Managed:
    """The model's layers under a budget, trained until there is a plan; gradients are compared."""

    def __init__(
        self, device: torch.device, pool: Any, budget: int | str, *, edits: bool = False
    ) -> None:
        torch.manual_seed(0)
        self.model = Model(edits).to(device)
        self.x = random(device, ROWS, WIDTH).bfloat16()
        self.plain = self.gradients()
        pool = None if device.type == "cpu" else pool
        self.manager = memswap.manage(
            self.model.layers, ANY, pool=pool, budget=budget, rates=no_codec(device)
        )
        for _ in range(5):
            self.step()

    def gradients(self) -> list[torch.Tensor]:
        loss = self.model(self.x)
        return list(torch.autograd.grad(loss, list(self.model.parameters())))

    def step(self) -> memswap.types.Stats:
        self.manager.reset_stats()
        assert_same_gradients(self.gradients(), self.plain)
        self.manager.wait_for_plan()
        return self.manager.stats()

    @property
    def plan(self) -> Plan:
        plan = self.manager.plan
        assert plan is not None
        return plan

    @property
    def learnt(self) -> Step:
        learnt = self.manager.learnt
        assert learnt is not None
        return learnt[0]


def smallest(step: Step, device: torch.device) -> int:
    """Bytes of the smallest budget in which nothing goes to a pool: recipes alone."""
    here = (Action.RECOMPUTE,)
    storages = tuple(replace(one, actions=here if one.recipe else ()) for one in step.storages)
    return Search(replace(step, storages=storages), no_codec(device)).smallest_bytes()


@pytest.fixture
def budget(device, new_pool) -> int:
    """Of what a plan can only meet here with what autograd does not save."""
    one = Managed(device, new_pool(), "100%")
    step = one.learnt
    one.manager.remove()
    assert len(step.sources) == LAYERS - 1, "what a recipe could keep was not told"
    with_sources, without = (smallest(s, device) for s in (step, step.without(step.sources)))
    assert 5 * with_sources <= 4 * without, f"{with_sources} bytes at least, and {without} without"
    return with_sources


def test_a_plan_keeps_the_stream_in_place_of_its_float32_copy(device, new_pool, budget):
    pool = new_pool()
    one = Managed(device, pool, budget)
    stats = one.step()
    plan = one.plan
    kept = [saved for saved in plan.storages if saved.why == "a recipe reads it"]
    assert len(kept) == len(plan.step.sources) > 0, "the plan keeps no source"
    assert all(saved.nbytes == 2 * ROWS * WIDTH for saved in kept)
    recomputed = [saved for saved in plan.storages if saved.action is Action.RECOMPUTE]
    assert stats.recipe_storages == len(recomputed) > LAYERS
    assert plan.measured_peak_bytes == plan.peak_bytes <= budget
    assert stats.peak_resident_bytes <= budget
    assert_nothing_left(stats)
    one.manager.remove()
    assert_released(one.manager, pool)


@pytest.mark.one_schedule
def test_a_plan_names_what_a_recipe_reads_of_it(device, new_pool, budget):
    one = Managed(device, new_pool(), budget)
    casts = {saved.recipe for saved in one.plan.storages if saved.recipe.startswith("cast of")}
    assert casts and "kept" not in " ".join(casts), casts
    one.manager.remove()


@pytest.mark.one_schedule
def test_what_a_plan_does_without_is_not_saved(device, new_pool):
    one = Managed(device, new_pool(), "100%")
    stats = one.step()
    assert one.learnt.sources and not one.plan.step.sources
    assert len(one.plan.storages) == len(one.learnt.storages) - len(one.learnt.sources)
    assert one.plan.measured_peak_bytes == one.plan.peak_bytes == one.plan.kept_peak_bytes
    assert_nothing_left(stats)
    one.manager.remove()


@pytest.mark.one_schedule
def test_bytes_that_are_not_counted_show(device, new_pool, budget, monkeypatch):
    """The planned peak is the measured one because the planner counts sources: if it does not,
    the two differ."""
    right = search.columns_of

    def broken(step: Step) -> Any:
        storages = [replace(s, nbytes=0) if s.for_recipe else s for s in step.storages]
        return right(replace(step, storages=tuple(storages)))

    monkeypatch.setattr(search, "columns_of", broken)
    one = Managed(device, new_pool(), budget)
    assert one.plan.step.sources
    assert one.plan.measured_peak_bytes > one.plan.peak_bytes
    one.manager.remove()


def test_a_source_that_the_model_edits_was_read_before(device, new_pool, budget):
    """Once there is a plan, that is: a place whose source is edited while it is learnt stays."""
    one = Managed(device, new_pool(), budget)
    for layer in one.model.layers:
        layer.edits = True
    for _ in range(2):
        stats = one.step()
        assert one.plan.step.sources
    assert_nothing_left(stats)
    one.manager.remove()


@pytest.mark.one_schedule
def test_a_source_that_is_edited_while_it_is_learnt_is_none(device, new_pool):
    one = Managed(device, new_pool(), "100%", edits=True)
    assert not one.learnt.sources
    one.manager.remove()


@pytest.mark.one_schedule
def test_an_edit_that_nobody_sees_raises_as_for_recipes_without_a_budget(device, new_pool, budget):
    one = Managed(device, new_pool(), budget)
    loss = one.model(one.x, sees=True)
    edited = one.model.seen[2].detach()
    with torch.no_grad():
        edited.mul_(2)
    with pytest.raises(memswap.InplaceEditError):
        loss.backward()
    one.model.seen.clear()
    del loss, edited
    flush_autograd(device)
    collect()
    one.manager.remove()


def test_a_source_is_there_for_each_backward_of_a_graph(device, new_pool, budget):
    one = Managed(device, new_pool(), budget)
    loss = one.model(one.x)
    for _ in range(2):
        parameters = list(one.model.parameters())
        found = torch.autograd.grad(loss, parameters, retain_graph=True)
        assert_same_gradients(found, one.plain)
    del loss, found
    collect()
    assert_nothing_left(one.manager.stats())
    one.manager.remove()


@pytest.mark.one_schedule
def test_a_graph_that_is_dropped_lets_go_of_its_sources(device, new_pool, budget):
    one = Managed(device, new_pool(), budget)
    loss = one.model(one.x)
    del loss
    collect()
    assert_nothing_left(one.manager.stats())
    one.step()
    one.manager.remove()


@pytest.mark.one_schedule
def test_what_autograd_saves_later_is_no_source(device, new_pool):
    """The stream is saved after its float32 copy, whatever is planned: it counts once."""

    class Gated(Normed):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * x.sigmoid() + x * x

    torch.manual_seed(0)
    layers = nn.ModuleList(Gated() for _ in range(3)).to(device)
    first = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16).to(device)
    x = random(device, ROWS, WIDTH).bfloat16()

    def gradients() -> list[torch.Tensor]:
        y = first(x)
        for layer in layers:
            y = layer(y)
        return list(torch.autograd.grad(y.float().square().mean(), list(layers.parameters())))

    plain = gradients()
    pool = None if device.type == "cpu" else new_pool()
    with memswap.manage(layers, ANY, pool=pool, budget="60%", rates=no_codec(device)) as manager:
        for _ in range(7):
            assert_same_gradients(gradients(), plain)
            with contextlib.suppress(memswap.BudgetError):
                manager.wait_for_plan()
        plan, learnt = manager.plan, manager.learnt
    assert plan is not None and learnt is not None and not learnt[0].sources
    assert plan.measured_peak_bytes == plan.peak_bytes
