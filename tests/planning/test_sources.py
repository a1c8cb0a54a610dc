"""Storages that only recipes read: they are there where a plan uses them, and nowhere else."""

from __future__ import annotations

from dataclasses import replace

import pytest
from steps import RATES, saved

from memswap import Action
from memswap.cli.step_file import load, save
from memswap.planning.planner import make_plan
from memswap.planning.replay import replay
from memswap.planning.search import Search
from memswap.planning.step import Recipe, Region, Step

LAYERS, NARROW, WIDE = 4, 500, 1000

#: Of a machine that only computes.
ALONE = replace(RATES, d2h_bytes_per_s=0.0, h2d_bytes_per_s=0.0, encode_bytes_per_s=0.0)


def sourced() -> Step:
    """Each layer saves a storage that can be made again of one half as large, which autograd does
    not save."""
    saves, storages = 2 * LAYERS, []
    for layer in range(LAYERS):
        wide = 2 * layer + 1
        narrow = saved(NARROW, wide + 1, None, unit=str(layer))
        recipe = Recipe(f"cast of {layer}", (wide - 1,), 1e-4)
        demand = saves + LAYERS - 1 - layer
        actions = (Action.SWAP, Action.RECOMPUTE)
        again = saved(
            WIDE, wide + 1, demand, actions=actions, unit=str(layer), ordinal=1, recipe=recipe
        )
        storages += [replace(narrow, for_recipe=True), again]
    order = tuple(range(saves - 1, 0, -2))
    return Step(tuple(storages), order, (1e-3,) * (saves + LAYERS))


def test_what_no_recipe_reads_takes_nothing():
    step = sourced()
    assert Search(step, RATES).kept().found.peak_bytes == LAYERS * WIDE
    left = step.without(step.sources)
    assert len(left.storages) == LAYERS and not left.sources
    assert Search(left, RATES).kept().found.peak_bytes == LAYERS * WIDE
    assert sum(left.gaps_s) == pytest.approx(sum(step.gaps_s))
    assert all(one.recipe is None for one in left.storages)


def test_what_recipes_read_counts_for_as_long_as_they_may_run():
    step = sourced()
    every = {index: Action.RECOMPUTE for index in range(1, 2 * LAYERS, 2)}
    found = replay(step, ALONE, every)
    held = [NARROW * min(mark // 2 + 1, LAYERS) for mark in range(2 * LAYERS)]
    assert found.resident_bytes[: 2 * LAYERS] == [
        nbytes + (WIDE if mark % 2 else 0) for mark, nbytes in enumerate(held)
    ]
    backward = [NARROW * (LAYERS - place) + WIDE for place in range(LAYERS)]
    assert found.resident_bytes[2 * LAYERS :] == backward


@pytest.mark.parametrize("used", range(1, LAYERS + 1))
def test_a_plan_has_the_sources_that_it_uses_and_no_others(used):
    step = sourced()
    budget = WIDE * (LAYERS - used) + NARROW * used + (WIDE if used == LAYERS else 0)
    plan = make_plan(step, ALONE, max(budget, LAYERS * NARROW + WIDE))
    recomputed = [one for one in plan.storages if one.action is Action.RECOMPUTE]
    assert len(plan.step.sources) == len(recomputed) > 0
    assert len(plan.storages) == len(plan.step.storages) == 2 * LAYERS - len(plan.left_out)
    assert plan.left_out <= step.sources
    choice = {index: one.action for index, one in enumerate(plan.storages)}
    again = replay(plan.step, ALONE, choice, plan.limit_bytes)
    assert again.peak_bytes == plan.peak_bytes <= plan.budget_bytes
    assert plan.kept_peak_bytes == LAYERS * WIDE


def test_a_source_may_leave_and_come_back_for_its_recipe():
    step = sourced()
    choice = dict.fromkeys(range(1, 2 * LAYERS, 2), Action.RECOMPUTE)
    choice |= dict.fromkeys(step.sources, Action.SWAP)
    found = replay(step, RATES, choice, NARROW + WIDE)
    assert found.peak_bytes == NARROW + WIDE
    assert found.resident_bytes[-1] == NARROW + WIDE, "it comes back for the recipe, which needs it"


def test_a_regions_input_that_nobody_saves_any_more_is_its_own():
    step = replace(sourced(), regions=(Region("1", (1, 2), 7),))
    (region,) = step.without(step.sources).regions
    assert region.inputs == (0,) and region.other_nbytes == 7 + NARROW


def test_a_step_with_sources_is_written_and_read(tmp_path):
    step, file = sourced(), tmp_path / "step.json"
    save(step, RATES, file)
    assert load(file) == (step, RATES)
