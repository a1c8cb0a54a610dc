"""Benchmarks of an accelerator run on one, named as `make bench` and `make gpu` name it."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

from memswap.cli.bench import codec, kinds
from memswap.planning import profile

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
OPTIONS = {
    "bench_budget_curve": "--layers 2 --length 64",
    "bench_device": "--tokens 64",
    "bench_codec": "--steps 1 --sizes 1 --kind-size 1 --rounds 1",
    "bench_hooks": "--tensors 20 --rounds 2",
    "bench_peers": "--layers 1 --hidden 64 --batch 1 --sequence 32 --rounds 1 --learn 2 "
    "--only plain --only memswap.manage --only save_on_cpu --only torch.utils.checkpoint",
    "bench_planning": "--layers 3 --rounds 1",
    "bench_disk": "--mib 16 --rounds 1",
    "bench_host_pool": "--tokens 64 --layers 1 --rounds 1",
    "bench_optimizer": "--layers 1 --hidden 64 --heads 2 --seq 16 --batch 1 --blocks 1 --steps 1 "
    "--ratio-steps 1 --room 64KiB",
}


@pytest.mark.accelerator
@pytest.mark.one_schedule
@pytest.mark.parametrize("name", OPTIONS)
def test_it_runs_on_the_device_that_is_named_without_a_number(
    device: torch.device, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "result.json"
    command = [name, "--device", device.type, "--json", str(file), *OPTIONS[name].split()]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # no rates of a run before
    monkeypatch.setattr(profile, "COPY_BYTES", 1 << 20)
    monkeypatch.setattr(profile, "CODEC_BYTES", 1 << 20)
    monkeypatch.setattr(kinds, "SEQUENCE", 64)  # a sixteenth of each training step
    monkeypatch.setattr(kinds, "BATCH", 2)
    monkeypatch.setattr(codec, "MIB", 1 << 16)
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setattr(sys, "argv", command)
    importlib.import_module(name).main()
    assert json.loads(file.read_text(encoding="utf-8"))["environment"]["command"] == [
        Path(word).name for word in command
    ]


@pytest.mark.accelerator
@pytest.mark.one_schedule
@pytest.mark.parametrize("style", kinds.LEARNING_RATES)
def test_what_is_captured_under_autocast_is_bfloat16(
    device: torch.device, style: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An accelerator's autocast computes more in float32 than a CPU's does."""
    monkeypatch.setattr(kinds, "SEQUENCE", 16)
    tap = kinds.Tap(most_bytes=1 << 10, open=True)
    model = kinds.Model(tap, style).to(device)
    tokens = torch.zeros(1, 16, dtype=torch.long, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        loss = model(tokens, tokens)
    loss.backward()
    others = {name for name, (first, *_) in tap.taken.items() if first.dtype != torch.bfloat16}
    assert not others, f"of another dtype: {sorted(others)}"
