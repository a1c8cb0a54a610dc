"""python -m memswap: what cannot work is refused in words, before anything is trained."""

from __future__ import annotations

import argparse
import ast
import inspect
import re
from pathlib import Path

import pytest
import torch

import memswap
from memswap.__main__ import main
from memswap.cli import model_options, selftest

pytestmark = pytest.mark.cpu_only


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("bench", "required: benchmark"),
        ("demo --steps 0", "--steps: expected a whole number of at least 1, found '0'"),
        ("plan --batch x", "--batch: expected a whole number of at least 1, found 'x'"),
        ("report --layers -1", "--layers: expected a whole number"),
        ("bench codec --threads 0", "--threads: expected a whole number"),
        ("bench codec --sizes 1,,4", "--sizes: expected a whole number of at least 1, found ''"),
        ("demo --json FILE/x.json", "x.json cannot be written: no access to"),
        ("demo --json FOLDER", "expected a file, found the folder"),
        ("plan --save FILE/x", "cannot be written"),
        ("selftest --report FILE/x", "cannot be written"),
        ("report --out FILE", "expected a folder, found the file"),
    ],
)
def test_arguments_that_cannot_work_are_refused(
    arguments: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.touch()
    given = arguments.replace("FILE", str(file)).replace("FOLDER", str(tmp_path)).split()
    with pytest.raises(SystemExit) as ended:
        main(given)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("bench codec --device qpu", "torch knows no device 'qpu'"),
        ("plan --budget lots", "memswap plan: --budget: expected auto or"),
        ("plan --heads 7", "cannot be split into 7 heads"),
    ],
)
def test_what_only_torch_or_the_model_knows_ends_with_a_sentence(
    arguments: str, words: str
) -> None:
    with pytest.raises(SystemExit, match=words):
        main(arguments.split())


def test_no_command_at_all_prints_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    told = capsys.readouterr().out
    for command in ("demo", "bench", "selftest", "plan", "report", "info"):
        assert command in told


@pytest.mark.parametrize("command", ["demo", "bench codec", "selftest", "plan", "report"])
def test_help_says_what_each_option_is_and_no_default_that_is_none(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*command.split(), "--help"])
    assert not ended.value.code
    told = " ".join(capsys.readouterr().out.partition("options:")[2].split())
    assert "None" not in told and "False" not in told
    options = re.split(r"\s(?=--[a-z])", told)[1:]
    assert len(options) > 3
    for option in options:
        name, *words = option.split()
        assert [word for word in words if word.islower()], f"{command} {name}: not a word about it"


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert not ended.value.code
    assert memswap.__version__ in capsys.readouterr().out


def test_selftest_asserts_nothing_that_an_optimizing_python_leaves_out() -> None:
    """Under ``python -O`` an ``assert`` is no check, and every device would pass."""
    tree = ast.parse(inspect.getsource(selftest))
    left_out = [ast.unparse(one) for one in ast.walk(tree) if isinstance(one, ast.Assert)]
    assert all(one.endswith("is not None") for one in left_out), left_out


def test_selftest_that_checked_nothing_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def skipped(device: torch.device) -> str:
        raise selftest.NothingToCheckError("nothing here")

    checks = {"order": skipped, selftest.RATES: lambda device: "fast"}
    monkeypatch.setattr(selftest, "CHECKS", checks)
    assert main(["selftest", "--device", "cpu", "--report", str(tmp_path / "r.json")]) == 1


@pytest.mark.parametrize(
    ("capability", "expected"), [("AVX2", (2, 512, "fp32")), ("AVX512", (8, 512, "bf16"))]
)
def test_a_model_is_of_float32_where_bfloat16_is_slow(
    capability: str, expected: tuple[int, int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(model_options.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(model_options, "default_device", lambda: "cpu")
    parser = argparse.ArgumentParser()
    model_options.add_model_arguments(parser)
    found = parser.parse_args([])
    assert (found.batch, found.seq, found.dtype) == expected
