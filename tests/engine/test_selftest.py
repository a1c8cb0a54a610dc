"""`memswap selftest` passes where memswap works, and fails where one bit is different."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import memswap
from memswap.__main__ import main
from memswap.cli import selftest

pytestmark = pytest.mark.one_schedule


def test_selftest_passes_and_writes_its_report(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selftest, "RATE_ELEMENTS", 1 << 16)  # kernels may be emulated
    file = tmp_path / "report.json"
    assert main(["selftest", "--device", device.type, "--report", str(file)]) == 0
    report = json.loads(file.read_text())
    assert report["passed"] is True
    outcomes = {check["name"]: check["outcome"] for check in report["checks"]}
    assert set(outcomes.values()) == {"passed"}, report["checks"]
    assert report["environment"]["codec"] and report["environment"]["torch"]


@pytest.mark.parametrize("broken", ["decode", "swap_in"])
def test_selftest_fails_where_one_bit_is_different(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    right = getattr(memswap, broken)

    def wrong(given: object) -> object:
        found = right(given)
        tensor = given if found is None else found
        assert isinstance(tensor, torch.Tensor)
        flat = tensor.view(torch.uint8).view(-1)
        flat[-1] ^= 1
        return found

    monkeypatch.setattr(memswap, broken, wrong)
    few = {name: selftest.CHECKS[name] for name in ("encode and decode", "swap out and in")}
    monkeypatch.setattr(selftest, "CHECKS", few)
    file = tmp_path / "report.json"
    assert main(["selftest", "--device", device.type, "--report", str(file)]) == 1
    failed = [c for c in json.loads(file.read_text())["checks"] if c["outcome"] == "FAILED"]
    assert len(failed) == 1 and "other bits" in failed[0]["detail"]
