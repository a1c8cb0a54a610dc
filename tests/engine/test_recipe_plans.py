"""Recipes under a budget: the plan chooses what is recomputed, and its peak is what happens."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from helpers import assert_nothing_left, assert_released, assert_same_gradients, random
from recipe_helpers import Gated, slow_rates
from torch import nn

import memswap
from memswap import Action
from memswap.engine import recipes
from memswap.engine.hook_scope import HookScope
from memswap.planning.director import BudgetDirector
from memswap.planning.holding import Holding
from memswap.planning.plan import describe
from memswap.reports import pictures

pytestmark = pytest.mark.one_schedule

ANY = memswap.Policy(min_bytes=1)


def new_layers(device: torch.device, depth: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Gated() for _ in range(depth))).to(device)


def step(layers: nn.Module, x: torch.Tensor, backwards: int = 1) -> list[torch.Tensor | None]:
    layers.zero_grad(set_to_none=True)
    loss = layers(x).square().mean()
    for number in range(backwards):
        loss.backward(retain_graph=number + 1 < backwards)
    return [parameter.grad for parameter in layers.parameters()]


class Managed:
    """Layers under a budget, trained until there is a plan; each step's gradients are compared."""

    def __init__(
        self,
        device: torch.device,
        pool: Any,
        budget: int | str,
        policy: memswap.Policy = ANY,
        rows: int = 64,
        backwards: int = 1,
    ) -> None:
        self.layers, self.backwards = new_layers(device), backwards
        self.x = random(device, rows, 16)
        self.plain = step(self.layers, self.x, backwards)
        self.manager = memswap.manage(
            self.layers, policy, pool=pool, budget=budget, rates=slow_rates(device)
        )
        for _ in range(4):
            self.step()

    def step(self) -> memswap.types.Stats:
        """A step, and what it did."""
        self.manager.reset_stats()
        assert_same_gradients(step(self.layers, self.x, self.backwards), self.plain)
        self.manager.wait_for_plan()
        return self.manager.stats()

    @property
    def plan(self) -> memswap.types.Plan:
        plan = self.manager.plan
        assert plan is not None
        return plan

    def actions(self) -> set[Action]:
        return {one.action for one in self.plan.storages}


@pytest.mark.parametrize("share", [90, 75, 60, 45])
def test_the_planned_peak_is_the_measured_one_and_no_bit_differs(device, new_pool, share):
    pool = new_pool()
    one = Managed(device, pool, f"{share}%")
    for _ in range(3):
        stats = one.step()
    plan = one.plan
    assert stats.recipe_storages > 0, "nothing was recomputed: the test says nothing"
    recomputed = [saved for saved in plan.storages if saved.action is Action.RECOMPUTE]
    assert stats.recipe_storages == len(recomputed), "a recipe that was planned was not used"
    assert stats.recipe_bytes == sum(saved.nbytes for saved in recomputed)
    assert plan.measured_peak_bytes == plan.peak_bytes, "the plan's peak is not what was measured"
    assert plan.peak_bytes <= plan.budget_bytes and plan.over_budget_bytes == 0
    assert_nothing_left(stats)
    one.manager.remove()
    assert_released(one.manager, pool)


def test_a_plan_names_what_is_run_again_in_its_units_and_in_words(device, new_pool):
    one = Managed(device, new_pool(), "60%")
    one.step()
    plan, text = one.plan, str(one.plan)
    named = {saved.recipe for saved in plan.storages if saved.action is Action.RECOMPUTE}
    assert "silu of gate" in named or "mul of silu and up" in named, named
    assert all(not s.recipe for s in plan.storages if s.action is not Action.RECOMPUTE)
    assert all(words in text for words in named)
    assert "recomputed, " in text
    recomputes = [unit for unit in plan.units if unit.actions.get(Action.RECOMPUTE)]
    assert recomputes and all("recompute " in describe(unit) for unit in recomputes)
    assert not any(unit.recompute for unit in plan.units), "a checkpoint region is another thing"
    one.manager.remove()


def row_of(report: str, name: str) -> list[str]:
    """The columns of the one row of a report that has this name."""
    rows = [line.strip() for line in report.splitlines() if line.strip().startswith(name)]
    assert len(rows) == 1, f"{len(rows)} rows are called {name!r}:\n{report}"
    return rows[0].removeprefix(name).split()


def test_a_report_counts_what_was_recomputed_in_rows_of_its_own(device, new_pool):
    one = Managed(device, new_pool(), "60%")
    stats = one.step()
    report = one.manager.report()
    planned = [saved for saved in one.plan.storages if saved.action is Action.RECOMPUTE]
    assert stats.recipe_storages == len(planned) > 0
    assert row_of(report, "of these, as recipes")[0] == str(len(planned))
    assert row_of(report, "operators run again")[0] == str(stats.recipe_runs) != "0"
    one.manager.remove()


class Masked(Gated):
    """What a dropout saves: a mask that is no operator's result for autograd."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        mask = (torch.arange(y.numel(), device=y.device) % 3).view_as(y).float()
        return x + self.last(self.down((nn.functional.silu(y) * mask).repeat(1, 2)))


def test_a_tensor_that_no_operator_names_is_told_by_its_dtype(device, new_pool):
    layers = nn.Sequential(*(Masked() for _ in range(3))).to(device)
    x = random(device, 64, 16)
    manager = memswap.manage(layers, ANY, pool=new_pool(), budget="50%", rates=slow_rates(device))
    for _ in range(5):
        step(layers, x)
        manager.wait_for_plan()
    text = str(manager.plan)
    manager.remove()
    assert ", a tensor of float32)" in text and "#" not in text, text


def test_a_trace_shows_what_is_run_again_as_a_row_of_its_own(device, new_pool, tmp_path):
    one = Managed(device, new_pool(), "60%")
    one.step()
    written = one.manager.trace(tmp_path)
    events = json.loads(written[0].read_text())["traceEvents"]
    rows = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["name"] in ("thread_name", "process_name")
    }
    again = {
        (rows[event["pid"], 0], event["name"])
        for event in events
        if event["ph"] == "X" and rows[event["pid"], event["tid"]] == "recomputing"
    }
    assert again == {("memswap", words) for words in recomputed_in_words(one.plan)} != set()
    one.manager.remove()


def recomputed_in_words(plan: memswap.types.Plan) -> list[str]:
    return [
        f"{saved.recipe} ({saved.unit} #{index})"
        for index, saved in enumerate(plan.storages)
        if saved.action is Action.RECOMPUTE
    ]


@pytest.mark.own_form("what a recipe takes is measured by its proofs")
def test_a_picture_shows_what_is_run_again_as_a_row_of_its_own(
    device, new_pool, tmp_path, monkeypatch
):
    pytest.importorskip("matplotlib")
    drawn: list[Any] = []
    write = pictures._write
    monkeypatch.setattr(
        pictures, "_write", lambda figure, file: (drawn.append(figure), write(figure, file))
    )
    one = Managed(device, new_pool(), "60%")
    one.step()
    written = one.manager.trace(tmp_path)
    assert [file.name for file in written] == ["trace.json", "memory.png"]
    lanes = drawn[0].axes[1]
    rows = {label.get_text(): at for at, label in enumerate(lanes.get_yticklabels())}
    bars = [bar for bar in lanes.patches if bar.get_y() < rows["recomputing"] < bar.get_y() + 1]
    assert len(bars) == len(recomputed_in_words(one.plan)) > 0, "a recipe has no bar in its row"
    assert all(bar.get_width() > 0 for bar in bars), "running operators again takes no time"
    one.manager.remove()


def test_one_argument_turns_recipes_off(device, new_pool):
    one = Managed(device, new_pool(), "90%", memswap.Policy(min_bytes=1, recipes=False))
    stats = one.step()
    assert stats.recipe_storages == 0 and Action.RECOMPUTE not in one.actions()
    assert one.manager._engine.recipes is None, "operators are noted for nothing"
    one.manager.remove()


@pytest.mark.parametrize(("action", "others"), [("recompute", True), ("swap", False)])
def test_an_action_of_the_policy_bounds_what_the_plan_may_do(device, new_pool, action, others):
    one = Managed(device, new_pool(), "85%", memswap.Policy(action, min_bytes=1))
    stats = one.step()
    assert (stats.recipe_storages > 0) == others
    without = one.manager._engine.transfers(device).without_recipe
    allowed = {Action.KEEP, Action.RECOMPUTE, without} if others else {Action.KEEP, Action.SWAP}
    assert one.actions() <= allowed
    one.manager.remove()


@pytest.mark.parametrize("backwards", [2, 3])
def test_a_graph_that_is_retained_runs_its_recipes_each_time_within_the_budget(
    device, new_pool, backwards
):
    pool = new_pool()
    one = Managed(device, pool, "75%", backwards=backwards)
    for _ in range(3):
        stats = one.step()
    assert stats.recipe_runs >= backwards * stats.recipe_storages > 0
    assert one.plan.measured_peak_bytes <= one.plan.budget_bytes
    one.manager.remove()
    assert_released(one.manager, pool)


_enter = HookScope.enter


def test_a_recipe_that_is_lost_is_planned_without_and_no_bit_differs(device, new_pool, monkeypatch):
    """As where an operator gives other bits from some step on, or is not called any more."""
    one = Managed(device, new_pool(), "75%")
    assert one.step().recipe_storages > 0
    known = one.manager._engine.recipes
    monkeypatch.setattr(HookScope, "enter", _knows_no_operator)
    for _ in range(recipes.PROOFS + len(one.plan.storages)):  # a plan may count on others instead
        stats = one.step()
        if Action.RECOMPUTE not in one.actions():
            break
    assert stats.recipe_storages == 0
    assert Action.RECOMPUTE not in one.actions(), "the plan counts on recipes that there are not"
    assert one.plan.peak_bytes <= one.plan.budget_bytes
    assert known is one.manager._engine.recipes
    one.manager.remove()


def _knows_no_operator(scope: HookScope, call: Any = None) -> None:
    """Operators that nobody hears of make nothing that could be recomputed."""
    knows, scope.engine.knows_operators = scope.engine.knows_operators, False
    _enter(scope, call)
    scope.engine.knows_operators = knows


def test_planned_recipes_are_followed_without_asking(device, new_pool, monkeypatch):
    """But where room has to be made."""
    one = Managed(device, new_pool(), "75%")
    one.step()
    asked, choose = [0], BudgetDirector.choose

    def counted(*arguments: Any) -> Any:
        asked[0] += 1
        return choose(*arguments)

    monkeypatch.setattr(BudgetDirector, "choose", counted)
    stats = one.step()
    storages = one.plan.storages
    recomputed = sum(saved.action is Action.RECOMPUTE for saved in storages)
    assert stats.recipe_storages >= recomputed > 3
    assert asked[0] <= 3 < len(storages) / 4, "each storage is asked about"
    one.manager.remove()


@pytest.mark.own_form("its recipes are learnt, which takes proofs")
def test_another_shape_follows_a_plan_once_its_own_recipes_are_proven(device, new_pool):
    one = Managed(device, new_pool(), "75%")
    assert one.step().recipe_storages > 0
    one.x = random(device, 96, 16)
    one.plain = step(one.layers, one.x)
    used = []
    for _ in range(recipes.PROOFS + 4):
        used.append(one.step().recipe_storages)
    assert used[0] == 0, "the first step of a shape used what was not proven for it"
    assert used[-1] > 0, "a shape that borrowed its plan never recomputes"
    assert one.plan.peak_bytes <= one.plan.budget_bytes
    one.manager.remove()


def test_operators_are_noted_only_where_a_plan_recomputes(device, new_pool):
    """Each costs some tenths of a microsecond, so a plan that keeps everything pays nothing."""
    one = Managed(device, new_pool(), "1GiB")
    one.step()
    assert one.actions() == {Action.KEEP}
    engine = one.manager._engine
    engine.recipes.begin_iteration()
    layers, x = one.layers, one.x
    layers(x)
    assert engine.recipes.known_storages == 0, "operators are noted although nothing is recomputed"
    one.manager.remove()


@pytest.mark.cpu_only
def test_forty_five_percent_are_met_on_a_cpu_without_a_pool():
    """bfloat16 layers whose frames are worth it; nothing leaves the processor's memory."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(Gated(128, nn.Identity) for _ in range(6))).to(torch.bfloat16)
    x = torch.randn(512, 128).to(torch.bfloat16)
    plain = step(layers, x)
    with memswap.manage(layers, budget="45%") as manager:
        for _ in range(7):
            manager.reset_stats()
            assert_same_gradients(step(layers, x), plain)
            manager.wait_for_plan()
        plan, stats = manager.plan, manager.stats()
    assert plan is not None and plan.budget_bytes is not None
    assert plan.budget_bytes <= 0.45 * plan.kept_peak_bytes
    assert plan.measured_peak_bytes == plan.peak_bytes <= plan.budget_bytes
    assert stats.peak_resident_bytes <= plan.budget_bytes
    assert {Action.ENCODE, Action.RECOMPUTE} <= {one.action for one in plan.storages}
    assert stats.peak_away_bytes == 0


@pytest.mark.cpu_only
def test_recipes_that_make_a_step_longer_are_given_up(monkeypatch):
    """By measurement, whatever was predicted; operators are not noted any more then."""
    monkeypatch.setattr(Holding, "cost_s", lambda self: 1.0)
    managed = Managed(torch.device("cpu"), None, "auto")
    planned: set[Action] = set()
    for _ in range(200):
        planned |= managed.actions()
        if managed.plan.declined:
            break
        managed.step()
    assert Action.RECOMPUTE in planned, "no recipe was planned"
    assert managed.plan.declined and managed.plan.moved_bytes == 0
    assert "declined, everything stays: moving" in str(managed.plan)
    stats = managed.step()
    assert stats.recipe_runs == 0 and stats.moved_storages == 0
    assert not managed.manager._director._latest.needs_operators
    assert_nothing_left(managed.manager.stats())
