"""A step whose state streams through the device, with every request for memory failing in turn.

The device's, and pinned memory's; state in pinned memory, in a file, and in both. A step that is
not told of it gives the bits of a plain one. One that raises has lost nothing: every tensor is as
before the step, or as after it, and the step can be made again from a checkpoint.
"""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from helpers import same_bits
from optimizer_helpers import ROOM, assert_same, loss_of, maker, manage, new_model, state_bits
from race_workloads import DEVICE, EAGER, MATRIX
from staging import WHERE, finish_writes, little_staging, pool_at

from simdev import _C, faults, laboratory

pytestmark = [pytest.mark.own_laboratory, pytest.mark.one_schedule]

LAZY = MATRIX[1]

#: Steps before the one in which memory fails.
BEFORE = 3


@pytest.fixture(autouse=True)
def _little_staging(monkeypatch: pytest.MonkeyPatch) -> None:
    little_staging(monkeypatch)


class Training:
    """Three steps, and gradients for the next one."""

    def __init__(self, form: str, pool: Any = None, room: int = ROOM) -> None:
        self.model = new_model(DEVICE, depth=4)
        # Weights decay by themselves, before anything that is allocated.
        self.optimizer = maker("AdamW", form, weight_decay=0.0)(self.model.parameters())
        self.manager = None if pool is None else manage(self.optimizer, pool, room=room)
        for step in range(BEFORE):
            self.gradients(step)
            self.optimizer.step()
        self.gradients(BEFORE)

    def gradients(self, step: int) -> None:
        self.optimizer.zero_grad()
        loss_of(self.model, DEVICE, step).backward()

    def bits(self) -> list[torch.Tensor]:
        return state_bits(self.optimizer, self.model)

    def checkpoint(self) -> Any:
        """All that a step changes."""
        return copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))

    def load(self, checkpoint: Any) -> None:
        model, optimizer = checkpoint
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(copy.deepcopy(optimizer))


def plain_bits(form: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Before the step and after it."""
    plain = Training(form)
    before = [one.clone() for one in plain.bits()]
    plain.optimizer.step()
    return before, plain.bits()


#: Where state is, the schedule, the form of the step and its room. The fast ones first.
CASES = [("host", EAGER, "single", 1), ("disk", LAZY, "single", 1)]
MORE = [
    (where, schedule, form, room)
    for where in WHERE
    for schedule in (EAGER, LAZY)
    for form in ("single", "foreach")
    for room in (1, ROOM)
]


@pytest.mark.parametrize(
    ("where", "schedule", "form", "room"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE if case not in CASES)],
    ids=str,
)
def test_each_failing_allocation_of_a_step_in_chunks_is_survived_or_raised(
    where: str, schedule: Any, form: str, room: int, tmp_path: Any
) -> None:
    with laboratory(schedule, allow_pinned_growth=True):
        before, expected = plain_bits(form)
        pool = pool_at(where, tmp_path)
        training = Training(form, pool, room)
        checkpoint = training.checkpoint()
        raised = survived = 0
        for after in range(300):
            short = _C.memory_stats(0)["out_of_memory"]
            failed = False
            with faults.fail_device(1, after):
                try:
                    training.optimizer.step()
                except torch.OutOfMemoryError:
                    failed = True
            struck = _C.memory_stats(0)["out_of_memory"] > short
            if failed:
                assert_each_is_one_of(training.bits(), before, expected, form)
                training.load(checkpoint)
                training.optimizer.step()
            assert_same(training.bits(), expected)
            raised, survived = raised + failed, survived + (struck and not failed)
            training.load(checkpoint)
            if not struck:
                break
        else:
            pytest.fail("a step makes more than 300 allocations: this test would be incomplete")
        finish_writes(pool)
        del training, checkpoint, before, expected
        gc.collect()
    assert raised, "no allocation of a step had to be had: the test shows nothing"
    assert survived, "no allocation was made ahead of its need: the test shows little"


def assert_each_is_one_of(
    found: list[torch.Tensor], before: list[torch.Tensor], after: list[torch.Tensor], form: str
) -> None:
    """A step of single tensors, which is over with one before it begins with the next."""
    assert len(found) == len(after), "a parameter or some state is lost"
    if form == "single":
        for number, (ours, old, new) in enumerate(zip(found, before, after, strict=True)):
            assert same_bits(ours, old) or same_bits(ours, new), (
                f"tensor {number} is neither as before the step nor as after it"
            )


@pytest.mark.filterwarnings("ignore:memswap")
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("room", [1, ROOM])
def test_pinned_memory_that_fails_at_any_request_costs_no_bit(
    where: str, room: int, tmp_path: Any
) -> None:
    """Each slab of a pool, and of the memory on the way to a file; from it on, or it alone."""
    with laboratory(LAZY, allow_pinned_growth=True):
        _, expected = plain_bits("single")
        for after in range(4):
            for count in (1, 10_000):
                pool = pool_at(where, tmp_path)
                with faults.fail_pinned(count, after):
                    training = Training("single", pool, room)
                    training.optimizer.step()
                assert_same(training.bits(), expected)
                finish_writes(pool)
                del training, pool
                gc.collect()
