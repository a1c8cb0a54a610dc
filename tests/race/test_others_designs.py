"""Eight designs that gave wrong gradients in public: wrong here as well, and right with memswap.

Wrong under at least one schedule of the machine, most of them silently; memswap has the bits of the
same training without it under every schedule, and the detector reports nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import others_designs as others
import pytest
import torch
from helpers import EVERYTHING, same_bits
from race_workloads import (
    EAGER,
    MATRIX,
    Observation,
    Region,
    Workload,
    expected,
    new_pool,
    observe,
)

import memswap
from simdev import LaboratoryError, Schedule, laboratory

pytestmark = [pytest.mark.own_laboratory, pytest.mark.one_schedule]


@dataclass(frozen=True)
class Case:
    """A report, its design, and a training that shows it."""

    report: str
    design: Callable[[], Any]
    workload: Workload
    races: bool = True
    """Whether it depends on the order of streams, which the detector then reports."""


CASES = [
    Case("Megatron-LM 7398", others.InlineReload, others.stack),
    Case("axolotl 3833", others.CloneOnCopyStream, others.shifted),
    Case("ms-swift 10157", others.KeyWithoutStrides, others.transposed, races=False),
    Case("HyperParallel 664", others.EmptiesStorages, others.shared, races=False),
    Case("torchtitan 2581", others.StreamAskedTooLate, others.stack),
    Case("torchtune 1867", others.FreedOnCopyStream, others.stack),
    Case("torchtune 2683", others.StreamOfTheBeginning, others.stack_on_another_stream),
    Case("VeOmni 872", others.EmptiesStorages, others.chunked, races=False),
]


def region_of(design: Callable[[], Any]) -> Region:
    made: list[Any] = []

    def region() -> Any:
        if not made:
            made.append(design())
        return made[0]

    return region


def under(schedule: Schedule, case: Case, design: Callable[[], Any]) -> Observation:
    """The training with a design. It may fail; what it leaves behind is not asked here."""
    seen = Observation()
    try:
        with laboratory(schedule.with_check("collect")) as lab:
            try:
                seen.results = case.workload(region_of(design))
                torch.accelerator.synchronize()
            except (RuntimeError, IndexError) as error:
                seen.error = str(error)
            seen.reports = lab.forgive()
    except LaboratoryError as error:
        seen.error = seen.error or str(error)
    return seen


@functools.cache
def observations(place: int) -> list[Observation]:
    case = CASES[place]
    return [under(schedule, case, case.design) for schedule in MATRIX]


@pytest.mark.parametrize("place", range(len(CASES)), ids=lambda place: CASES[place].report)
def test_the_design_gives_other_gradients(place: int) -> None:
    case, plain = CASES[place], expected(CASES[place].workload)
    wrong = [one for one in observations(place) if one.differs_from(plain)]
    assert wrong, f"{case.report}: right under every schedule"
    assert any(one.results is not None for one in wrong) or case.report == "HyperParallel 664", (
        f"{case.report}: never silently wrong, only {wrong[0].error}"
    )
    if case.races:
        assert all(one.reports for one in observations(place)), "the detector missed it"


@pytest.mark.parametrize("under_schedule", MATRIX, ids=str)
@pytest.mark.parametrize("workload", sorted({case.workload.__name__ for case in CASES}))
def test_memswap_has_the_same_bits(under_schedule: Schedule, workload: str) -> None:
    train = getattr(others, workload)

    def new_region() -> Region:
        saved = memswap.saved_tensors(EVERYTHING, pool=new_pool(slab="64KiB"))
        return lambda: saved

    seen = observe(under_schedule, train, new_region=new_region)
    assert not seen.error and not seen.reports
    assert seen.results is not None
    for ours, plain in zip(seen.results, expected(train), strict=True):
        assert same_bits(ours, plain)


@pytest.mark.parametrize("workload", ["stack", "shifted", "transposed", "shared", "chunked"])
def test_what_they_meant_is_right(workload: str) -> None:
    """With every edge in its place the same lines give the same bits: nothing else is wrong."""
    case = Case("none", others.Right, getattr(others, workload))
    for schedule in (EAGER, *MATRIX[1:3]):
        seen = under(schedule, case, others.Right)
        assert not seen.differs_from(expected(case.workload)) and not seen.reports, seen.error


def test_the_page_has_these_numbers() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "other-offloaders.md"
    rows = [line for line in page.read_text("utf-8").splitlines() if line.startswith("| ")]
    for place, case in enumerate(CASES):
        wrong = sum(one.differs_from(expected(case.workload)) for one in observations(place))
        row = next((row for row in rows if row.startswith(f"| {case.report} ")), "")
        assert f"| {wrong} of {len(MATRIX)}" in row, f"{case.report}: {wrong}, and {row!r}"
