"""python -m memswap plan and report, on the demo's model and on a file."""

from __future__ import annotations

import json

import pytest
from steps import ALL, RATES, stack

from memswap.__main__ import main
from memswap.cli.step_file import load, save
from memswap.planning import profile as module

TINY = ["--device", "cpu", "--layers", "2", "--hidden", "64", "--heads", "2", "--seq", "128"]
TINY += ["--batch", "4"]


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path):
    """No measuring of this machine, and no file in the user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "measure", lambda device, folder: module.Rates(**{
        **RATES.as_dict(), "encode_bytes_per_s": 1e9, "decode_bytes_per_s": 1e9,
        "inline_codec": True,
    }))  # fmt: skip


@pytest.mark.cpu_only
def test_plan_trains_the_demo_and_shows_a_line_per_layer(tmp_path, capsys):
    file = tmp_path / "step.json"
    assert main(["plan", *TINY, "--budget", "95%", "--save", str(file)]) == 0
    text = capsys.readouterr().out
    assert "\n0 " in text and "\n1 " in text and "predicted cost" in text
    assert "measured: peak" in text
    step, _ = load(file)
    assert len(step.storages) > 10 and step.compute_s > 0


def test_plan_for_another_machine_and_report(tmp_path, capsys):
    file, out = tmp_path / "step.json", tmp_path / "out"
    save(stack([1 << 20] * 8, actions=ALL), RATES, file)
    options = ["--load", str(file), "--budget", "60%", "--machine", "H200"]
    assert main(["plan", *options]) == 0
    assert "rates of H200" in capsys.readouterr().out
    assert main(["report", *options, "--out", str(out)]) == 0
    assert json.loads((out / "trace.json").read_text())["traceEvents"]
    pytest.importorskip("matplotlib")
    assert (out / "memory.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.accelerator
def test_planning_for_a_cpu_beside_an_accelerator_names_the_accelerator(device):
    with pytest.raises(SystemExit, match=f"stays there beside.*--device {device.type}"):
        main(["plan", *TINY, "--budget", "95%"])


@pytest.mark.cpu_only
def test_a_budget_for_another_machine_need_not_be_met_by_this_one(tmp_path, capsys):
    tight = [*TINY, "--budget", "50%"]
    with pytest.raises(SystemExit, match="cannot be met"):
        main(["plan", *tight])
    file = tmp_path / "step.json"
    assert main(["plan", *tight, "--machine", "H200", "--save", str(file)]) == 0
    assert "rates of H200" in capsys.readouterr().out
    assert load(file)[0].storages


@pytest.mark.parametrize(
    ("budget", "words"),
    [("1KiB", "at least"), ("lots", "expected auto or a size"), ("x%", "or a share")],
)
def test_a_budget_that_cannot_be_met_or_read_ends_with_a_sentence(tmp_path, budget, words):
    file = tmp_path / "step.json"
    save(stack([1 << 20] * 8), RATES, file)
    with pytest.raises(SystemExit, match=words):
        main(["plan", "--load", str(file), "--budget", budget])


def test_info_shows_the_rates(capsys):
    assert main(["info"]) == 0
    assert "encode, decode" in capsys.readouterr().out
