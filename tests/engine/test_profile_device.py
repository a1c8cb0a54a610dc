"""`memswap.profile` of an accelerator: what is measured where."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import memswap
from memswap.planning import profile


@pytest.mark.accelerator
@pytest.mark.one_schedule
def test_a_device_without_an_index_is_the_current_one(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def measure(asked: torch.device, place: Path) -> None:
        raise RuntimeError(f"measured {asked}")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(profile, "measure", measure)
    for asked in (None, device.type, device):
        with pytest.raises(RuntimeError, match=f"measured {device.type}:{device.index}"):
            memswap.profile(asked)
