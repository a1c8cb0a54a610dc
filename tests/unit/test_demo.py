"""The demo's promise: it trains twice, and it fails when one bit of one gradient is different."""

from __future__ import annotations

import json
import math
import struct
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

import memswap
from memswap.__main__ import main
from memswap.cli import demo, measure
from memswap.cli.corpus import Batches, read_corpus
from memswap.cli.gpt import GPT
from memswap.cli.table import format_ratio, format_seconds, render_table
from memswap.cli.training import TrainingConfig, TrainingResult
from memswap.cli.turns import train_in_turns
from memswap.engine.units import format_bytes
from warm_python import warm_python

pytestmark = pytest.mark.cpu_only

TINY = ["--device", "cpu", "--steps", "2", "--layers", "2", "--hidden", "64", "--heads", "2"]
TINY += ["--seq", "64", "--batch", "4"]


def run_memswap(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "memswap", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


IN_ONE_PROCESS = """
import sys
from memswap.__main__ import main
from memswap.cli import demo
from memswap.cli.training import Training

def train(config):
    training = Training(config)
    training.begin()
    for _ in range(config.steps):
        training.step()
    return training.finish()

demo.train_in_turns = lambda configs: {title: train(one) for title, one in configs.items()}
sys.exit(main(ARGUMENTS))
"""


def run_demo_in_one_process(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The demo, whose trainings have processes of their own otherwise; each imports torch."""
    program = IN_ONE_PROCESS.replace("ARGUMENTS", repr(["demo", *arguments]))
    return warm_python().run(program, timeout_s=300)


@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp32", marks=pytest.mark.slow)])
def test_demo_trains_twice_and_reports(tmp_path: Path, dtype: str) -> None:
    file = tmp_path / "demo.json"
    pool_dir = tmp_path / "pool"
    pool_dir.mkdir()
    done = run_memswap(
        "demo", *TINY, "--dtype", dtype, "--json", str(file), "--pool-dir", str(pool_dir)
    )
    assert done.returncode == 0, f"the demo failed:\n{done.stdout}\n{done.stderr}"
    assert "IDENTICAL" in done.stdout
    assert not list(pool_dir.iterdir()), "the demo left its pool's file behind"

    content = json.loads(file.read_text())
    assert content["identical"] is True
    assert content["differences"] == []
    assert content["step_time_ratio"] > 0
    for run in ("plain", "managed"):
        result = content[run]
        assert len(result["losses"]) == len(result["step_s"]) == len(result["gradients"]) == 2
        assert all(math.isfinite(loss) for loss in result["losses"])
        assert result["peak_process_bytes"] > 1 << 20
        assert result["median_step_s"] > 0
        assert "none" not in result["gradients"][0].values(), "a parameter was not trained"
    assert content["plain"]["losses"] == content["managed"]["losses"]
    stats = content["managed"]["stats"]
    assert stats["offered_tensors"] > 0
    assert stats["moved_bytes"] > 0, "the managed run of the demo moved nothing"
    # What was still held when backward asked for it needs no way back.
    assert 0 < stats["returned_bytes"] <= stats["moved_bytes"]
    assert stats["away_bytes"] == stats["resident_bytes"] == 0, "something is left after training"
    assert content["plain"]["stats"]["moved_bytes"] == 0
    assert stats["peak_resident_bytes"] < content["plain"]["stats"]["peak_resident_bytes"]


def test_demo_shows_frames_alone_and_recipes_with_frames(tmp_path: Path) -> None:
    file = tmp_path / "demo.json"
    tiny = [*TINY, "--steps", "6", "--batch", "8"]
    done = run_demo_in_one_process(*tiny, "--budget", "none", "--json", str(file))
    assert done.returncode == 0, f"the demo failed:\n{done.stdout}\n{done.stderr}"
    content = json.loads(file.read_text())
    runs = content["runs"]
    frames, both = (runs[one]["held_bytes"] for one in ("frames", "recipes, frames"))
    assert 0 < both < frames, "recipes do not take less than frames alone"
    assert frames < content["plain"]["stats"]["peak_resident_bytes"]
    assert content["runs"]["frames"]["stats"]["recipe_storages"] == 0
    assert content["managed"]["stats"]["recipe_storages"] > 0
    table = next(part for part in done.stdout.split("\n\n") if "step, median" in part)
    assert "recipes, frames" in table and table.count("identical") == 2


def test_demo_with_policy_keep_moves_nothing(tmp_path: Path) -> None:
    file = tmp_path / "demo.json"
    done = run_demo_in_one_process(*TINY, "--policy", "keep", "--json", str(file))
    assert done.returncode == 0, f"the demo failed:\n{done.stdout}\n{done.stderr}"
    assert json.loads(file.read_text())["managed"]["stats"]["moved_bytes"] == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--device", "abacus"], "torch knows no device 'abacus'"),
        (["--device", "cpu", "--hidden", "64", "--heads", "3"], "cannot be split into 3 heads"),
        (["--device", "cpu", "--layers", "0"], "--layers: expected a whole number"),
        (["--device", "cpu", "--steps", "0"], "at least 1"),
        (["--device", "cpu", "--pool-dir", "/no/such/place"], "is not a directory"),
    ],
)
def test_misuse_is_answered_by_a_sentence(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["demo", *arguments])
    assert ended.value.code != 0
    assert says in f"{ended.value.code} {capsys.readouterr().err}"


def test_info_names_the_versions() -> None:
    program = 'import sys; from memswap.__main__ import main; sys.exit(main(["info"]))'
    done = warm_python().run(program, timeout_s=300)
    assert done.returncode == 0, done.stderr
    assert torch.__version__ in done.stdout


def run_with_gradients(gradients: list[dict[str, torch.Tensor]]) -> TrainingResult:
    stats = {
        "offered_tensors": 1, "offered_bytes": 1,
        "deduplicated_tensors": 0, "deduplicated_bytes": 0,
        "kept": {"parameter": {"tensors": 1, "bytes": 1}},
        "moved_storages": 1, "moved_bytes": 1, "returned_storages": 1, "returned_bytes": 1,
        "encoded_storages": 1, "encoded_bytes": 3, "frame_bytes": 2,
        "freed_bytes": 1, "stalls": 0, "exposed_wait_s": 0.0,
        "peak_resident_bytes": 1, "peak_away_bytes": 1,
    }  # fmt: skip
    return TrainingResult(
        losses=[1.0] * len(gradients),
        gradients=[
            {name: measure.fingerprint(gradient) for name, gradient in step.items()}
            for step in gradients
        ],
        step_s=[1.0] * len(gradients),
        stats=stats,
        first_stats=stats,
    )


def test_one_wrong_bit_in_one_gradient_fails_the_demo(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    right = [{"weight": torch.randn(8, 8), "bias": torch.zeros(8)} for _ in range(3)]
    wrong = [dict(step) for step in right]
    wrong[1]["bias"] = wrong[1]["bias"].clone()
    wrong[1]["bias"][3] = -0.0
    plain = run_with_gradients(right)
    results = {"plain": plain, "frames": plain, "recipes, frames": run_with_gradients(wrong)}
    monkeypatch.setattr(demo, "train_in_turns", lambda configs: dict(results))
    file = tmp_path / "demo.json"
    parser = demo.argparse.ArgumentParser()
    demo.add_arguments(parser)

    options = ["--device", "cpu", "--budget", "none"]

    status = demo.run(parser.parse_args([*options, "--json", str(file)]))

    assert status != 0, "the demo said yes to a gradient that was not identical"
    assert "step 2: bias" in capsys.readouterr().out
    content = json.loads(file.read_text())
    assert content["identical"] is False
    assert content["differences"] == [{"step": 2, "name": "bias"}]

    results["recipes, frames"] = results["plain"]
    assert demo.run(parser.parse_args(options)) == 0


def test_gradients_that_were_not_compared_are_not_counted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    plain = run_with_gradients([{"weight": torch.ones(2)}] * demo.PLANNED_STEPS)

    def train(configs: Mapping[str, TrainingConfig]) -> dict[str, TrainingResult]:
        if any(config.budget is not None for config in configs.values()):
            raise memswap.BudgetError("too small", 1)
        return dict.fromkeys(configs, plain)

    monkeypatch.setattr(demo, "train_in_turns", train)
    parser = demo.argparse.ArgumentParser()
    demo.add_arguments(parser)
    options = ["--device", "cpu", "--picture", str(tmp_path)]
    assert demo.run(parser.parse_args([*options, "--steps", str(demo.PLANNED_STEPS)])) == 0
    # Of two runs, frames alone and recipes with frames.
    assert f"all {2 * demo.PLANNED_STEPS} gradients" in capsys.readouterr().out
    assert demo.run(parser.parse_args([*options, "--steps", "1"])) == 0
    assert "no picture: nothing was planned (--steps 1" in capsys.readouterr().out


def test_steps_are_compared_with_those_beside_them() -> None:
    plain = TrainingResult(step_s=[9.0, 1.0, 1.0, 2.0, 1.0, 4.0, 1.0])
    slower = TrainingResult(step_s=[9.0, 3.0, 3.0, 6.0, 1.1, 4.4, 1.2])
    assert slower.step_ratio(plain) == pytest.approx(1.1), "of the steps after those that learn"
    assert slower.step_ratio(plain, learning=True) == 3.0
    assert (plain.median_step_s(), plain.median_step_s(learning=True)) == (1.0, 1.0)
    short = TrainingResult(step_s=[9.0, 2.0, 2.0])
    assert short.median_step_s() == 2.0, "a first step warms up"
    assert TrainingResult(step_s=[9.0]).median_step_s() == 9.0


def test_what_a_training_raises_in_its_process_is_raised_here() -> None:
    config = TrainingConfig(
        device="cpu", steps=6, layers=2, hidden=64, heads=2, sequence=64, batch=4, dtype="fp32",
        seed=0, policy="auto", pool_dir=None, budget=1,
    )  # fmt: skip
    with pytest.raises(memswap.BudgetError, match="budget"):
        train_in_turns({"managed": config})


def nan_with_payload(payload: int) -> torch.Tensor:
    raw = bytearray(struct.pack("<I", 0x7FC00000 | payload))
    return torch.frombuffer(raw, dtype=torch.float32)


def test_gradients_are_compared_bit_for_bit() -> None:
    zero, negative_zero = torch.tensor([0.0]), torch.tensor([-0.0])
    assert measure.fingerprint(zero) != measure.fingerprint(negative_zero)
    assert not measure.same_bits(zero, negative_zero)
    one, other = nan_with_payload(1), nan_with_payload(2)
    assert measure.fingerprint(one) == measure.fingerprint(one.clone())
    assert measure.same_bits(one, one.clone())
    assert measure.fingerprint(one) != measure.fingerprint(other)
    assert not measure.same_bits(one, other)
    assert not measure.same_bits(zero, zero.double())
    assert not measure.same_bits(zero, None)
    assert measure.same_bits(None, None)
    assert measure.fingerprint(torch.zeros(2, 3)) != measure.fingerprint(torch.zeros(3, 2))
    assert measure.fingerprint(torch.zeros(0)) == measure.fingerprint(torch.zeros(0))
    transposed = torch.arange(6.0).view(2, 3).t()
    assert measure.fingerprint(transposed) == measure.fingerprint(transposed.contiguous())


def test_a_missing_step_or_gradient_is_a_difference() -> None:
    step = {"weight": "a", "bias": "b"}
    assert measure.differing_gradients([step, step], [step, step]) == []
    assert measure.differing_gradients([step], [step, step]) == [(2, "weight"), (2, "bias")]
    assert measure.differing_gradients([step], [{"weight": "a"}]) == [(1, "bias")]


def test_corpus_and_batches_are_the_same_every_time() -> None:
    text = read_corpus(1 << 16)
    assert text == read_corpus(1 << 16)
    assert len(text) == 1 << 16
    first, second = (Batches(text, 3, 32, seed=5) for _ in range(2))
    for _ in range(3):
        tokens, targets = first.draw(torch.device("cpu"))
        assert tokens.shape == targets.shape == (3, 32)
        assert torch.equal(tokens[:, 1:], targets[:, :-1])
        assert torch.equal(tokens, second.draw(torch.device("cpu"))[0])
    with pytest.raises(ValueError, match="does not fit"):
        Batches(b"short", 1, 32, seed=0)


def test_gpt_ties_its_embedding_and_looks_only_back() -> None:
    torch.manual_seed(0)
    model = GPT(layers=2, hidden=32, heads=4, sequence=16)
    assert model.head.weight is model.token_embedding.weight
    hidden_states = []
    model.norm.register_forward_hook(lambda module, inputs, output: hidden_states.append(output))
    tokens = torch.randint(0, 256, (1, 16))
    model(tokens, tokens)
    tokens[0, 8] = (tokens[0, 8] + 1) % 256
    model(tokens, tokens)
    before, after = hidden_states
    assert torch.equal(before[:, :8], after[:, :8]), "a token changed what came before it"
    assert not torch.equal(before[:, 8:], after[:, 8:])


def test_tables_and_units() -> None:
    assert render_table(["a", "b"], [["x", "1"], ["yy", "22"]]) == "a    b\n--  --\nx    1\nyy  22"
    assert format_bytes(512) == "512 B"
    assert format_bytes(3 << 20) == "3.0 MiB"
    assert format_bytes(5 << 30) == "5.00 GiB"
    assert [format_seconds(s) for s in (2e-6, 0.25, 3.0)] == ["2.0 us", "250.0 ms", "3.00 s"]
    assert format_ratio(3, 2) == "1.50x"
    assert format_ratio(3, 0) == "-"
