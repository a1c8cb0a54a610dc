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


@pytest.mark.accelerator
def test_measuring_in_the_midst_of_training_meets_nobody_else_s_work(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first plan measures: its memory was somebody's whose kernels may still be queued."""
    monkeypatch.setattr(profile, "COPY_BYTES", 1 << 20)
    monkeypatch.setattr(profile, "CODEC_BYTES", 1 << 20)
    left = torch.ones(1 << 18, device=device)
    total = (left * 3).sum()
    del left
    assert profile.measure(device).d2h_bytes_per_s > 0
    assert total.item() == 3 << 18
