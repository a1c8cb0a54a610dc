"""Budgets hold although experts are out of balance, by three rules ([Note: Other sizes]).

On the lazy machine, where nothing has left before somebody waits for it.
"""

from __future__ import annotations

import warnings

import pytest
from moe_layers import Experts
from planned_stacks import LAZY
from race_workloads import DEVICE, new_pool

from memswap.planning.director import BudgetDirector
from memswap.planning.in_flight import InFlight
from simdev import laboratory

pytestmark = [pytest.mark.own_laboratory, pytest.mark.one_schedule]


def beyond_the_budget(share: float, recovers: bool) -> int:
    """Bytes by which a training's peak exceeds its budget."""

    def train() -> int:
        experts = Experts(DEVICE, recovers)
        budget = int(share * experts.kept_bytes(new_pool()))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return experts.stats(new_pool(), budget).peak_resident_bytes - budget

    with laboratory(LAZY):
        return train()


@pytest.mark.parametrize(("share", "recovers"), [(0.5, False), (0.5, True), (0.8, False)])
def test_no_step_exceeds_the_budget(share, recovers):
    assert beyond_the_budget(share, recovers) <= 0


def test_without_waiting_for_room_a_forward_exceeds_the_budget(monkeypatch):
    monkeypatch.setattr(BudgetDirector, "_make_room", lambda self, one, nbytes: None)
    assert beyond_the_budget(0.5, False) > 0


def test_what_starts_back_without_room_exceeds_the_budget(monkeypatch):
    managed = Experts.managed

    def unbounded(self, *arguments):
        """Once its forward is over, an iteration has no limit."""
        manager = managed(self, *arguments)

        def lift(*unused):
            manager._engine.iteration.course.set_limit_bytes(0)

        self.model.register_forward_hook(lift)
        return manager

    monkeypatch.setattr(Experts, "managed", unbounded)
    assert beyond_the_budget(0.5, True) > 0


def test_what_stays_and_is_larger_than_planned_exceeds_the_budget(monkeypatch):
    planned = InFlight.planned

    def without_excess(self, *arguments):
        self.excess_bytes = -(1 << 40)
        return planned(self, *arguments)

    monkeypatch.setattr(InFlight, "planned", without_excess)
    assert beyond_the_budget(0.8, False) > 0
