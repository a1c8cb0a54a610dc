"""Ranks that plan together under "auto" hold a plan, or give it up, by what the slowest took."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from memswap import Rates
from memswap.planning import checking, learner, verdicts
from memswap.planning.agreement import Basis, agreed
from memswap.planning.holding import Sample
from ranks import Rank, distributed
from test_plan_agreement import Layer, managed, step, trained

#: Of a machine on which moving costs nothing, so that a plan moves something.
FREE = Rates("any", 1e12, 1e12, 1e12, 1e12)


def layers() -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList([Layer() for _ in range(6)])


def took(planned_s: float, plain_s: float) -> Any:
    """In place of `sample_of`: what a rank measures."""

    def sample_of(record: Any, kept: Sequence[bool]) -> Sample:
        plain = all(kept)
        return Sample(plain_s if plain else planned_s, 0.0)

    return sample_of


def test_of_several_ranks_the_slowest_counts() -> None:
    ours, theirs = Sample(2.0, 0.1), Sample(1.0, 0.3)
    found = agreed([Basis(None, None, sample=one, free_bytes=8.0) for one in (ours, theirs)])
    assert found.sample == Sample(2.0, 0.3) and found.free_bytes == 8.0
    found = agreed([Basis(None, None, sample=ours, free_bytes=8.0), Basis(None, None)])
    assert found.sample is None and found.free_bytes is None, "one rank does not know"


@distributed(2)
def test_a_plan_that_one_rank_cannot_afford_is_given_up_by_all_with_the_same_step(
    rank: Rank,
) -> None:
    """Rank 0 finds that the plan costs nothing; on rank 1 a step takes twice as long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checking, "sample_of", took(1.0 + rank.rank, 1.0))
        model = layers()
        with managed(model, "auto", FREE) as manager:
            first = trained(rank, manager, model, lambda plan: plan.moved_bytes > 0)
            assert not first.held and not first.declined
            plan = trained(rank, manager, model, lambda plan: bool(plan.declined))
            assert plan.moved_bytes == 0
            rank.same_everywhere(plan.declined, "why everything stays")
            manager.reset_stats()
            step(rank, model).backward()
            assert manager.stats().moved_storages == 0, "a plan that was declined is followed"


@distributed(2)
def test_a_plan_that_all_ranks_can_afford_is_held_and_some_steps_were_plain_on_all(
    rank: Rank,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checking, "sample_of", took(1.0, 1.0))
        kept = held(rank, patch)
        assert any(kept), "the plan was compared with nothing"
        rank.same_everywhere(kept, "the steps in which everything stays")


@distributed(2)
def test_where_one_rank_has_no_memory_for_a_plain_step_no_rank_makes_one(rank: Rank) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checking, "sample_of", took(1.0, 1.0))
        patch.setattr(learner, "free_bytes", lambda device: 0 if rank.rank == 1 else 1 << 40)
        assert not any(held(rank, patch)), "everything stays where there is no memory for that"


def held(rank: Rank, patch: pytest.MonkeyPatch) -> list[bool]:
    """For each step under a plan until that is held, whether everything stayed."""
    patch.setattr(verdicts, "differs", lambda step, known: False)  # times are noise here
    model = layers()
    kept = []
    with managed(model, "auto", FREE) as manager:
        trained(rank, manager, model, lambda plan: plan.moved_bytes > 0)
        while not (plan := manager.plan).held:
            assert not plan.declined and len(kept) < 1000
            manager.reset_stats()
            step(rank, model).backward()
            manager.wait_for_plan()
            kept.append(manager.stats().moved_storages == 0)
    return kept
