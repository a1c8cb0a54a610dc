"""The simulator catches the bugs it exists for, and accuses no correct program.

An offloader by hand, on saved_tensors_hooks, with four deliberate bugs. Each must be reported by
the detector under the friendliest schedule and give wrong data under some schedule. Which one
depends on the bug, hence the matrix.
"""

from __future__ import annotations

import pytest
import torch
from simdev_models import assert_bitwise_equal, train_language_model
from simdev_offload import Offload

import simdev
from simdev import Schedule, laboratory, run_in, schedules
from simdev.laboratory import FREE

DEVICE = simdev.NAME
MATRIX = schedules(10)

#: bug -> policies of which each must show wrong data
BUGS = {
    "leave does not wait for compute": {"side_first"},
    "freed without record_stream": {"lazy", "main_first"},
    "return is not awaited": {"lazy", "main_first"},
    "returned tensor belongs to the side stream": {"side_first"},
}


def train(bug: str | None) -> list[torch.Tensor]:
    offload = Offload(bug)
    result = train_language_model(DEVICE, forward_context=lambda: offload)
    assert offload.offloaded > 20
    return result


@pytest.fixture(scope="module")
def reference():
    return run_in(MATRIX[0], train_language_model, DEVICE)


@pytest.mark.parametrize("schedule", [*MATRIX, FREE], ids=str)
def test_a_correct_offloader_has_no_reports_and_the_same_bits(schedule, reference):
    # run_in raises for any report of the detector, leaked block or deferred free.
    assert_bitwise_equal(reference, run_in(schedule, train, None))


@pytest.mark.parametrize("bug", BUGS)
def test_each_bug_is_reported_under_the_friendliest_schedule(bug):
    with laboratory(Schedule("eager", "eager", check="collect")) as lab:
        train(bug)
        reports = lab.forgive()
    assert len(reports) >= 10, f"the detector missed: {bug}"
    assert all("stream race" in report for report in reports)


@pytest.mark.parametrize("bug", BUGS)
def test_each_bug_raises_at_the_offending_call_in_throw_mode(bug):
    with pytest.raises(RuntimeError, match="stream race"), laboratory(MATRIX[0]):
        train(bug)


@pytest.mark.parametrize("bug", BUGS)
def test_each_bug_gives_wrong_data_under_the_schedules_made_for_it(bug, reference):
    def is_wrong(schedule):
        try:
            result = run_in(schedule.with_check("off"), train, bug)
        except (RuntimeError, IndexError):  # garbage may also fail a kernel's own checks
            return True
        return not all(torch.equal(a, b) for a, b in zip(reference, result, strict=True))

    wrong = [s for s in MATRIX if is_wrong(s)]
    assert {s.policy for s in wrong} >= BUGS[bug], f"only {[s.name for s in wrong]} showed: {bug}"
    assert sum(s.policy == "random" for s in wrong) >= 5
