"""The examples of several ranks: losses are those of one process, in every combination."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from ranks import Rank, distributed

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_llama.py"
SMALL = {"layers": 3, "width": 16, "vocabulary": 16, "length": 12, "dtype": "float64", "steps": 3}


@functools.cache
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_llama", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_llama"] = module
    spec.loader.exec_module(module)
    return module


#: Whether weights are sharded, the sequence is cut, activations are managed, layers checkpointed.
COMBINATIONS = list(itertools.product([False, True], repeat=4))

#: Of these, some in which each two of the four meet in all ways.
PAIRWISE = [combination for combination in COMBINATIONS if sum(combination) in (0, 3)]


@functools.cache
def losses_of_one_process() -> list[float]:
    module = example()
    losses: list[float] = module.train(module.Config(**SMALL), torch.device("cpu"), None)
    return losses


def assert_same_losses(rank: Rank, **options: Any) -> None:
    module = example()
    losses = module.train(module.Config(**SMALL, **options), torch.device("cpu"), rank.mesh)
    assert losses == pytest.approx(losses_of_one_process(), rel=0, abs=1e-12)
    assert losses[-1] < losses[0], "nothing was learnt"


@distributed(4)
@pytest.mark.parametrize(
    ("shard", "context", "manage", "checkpoint"),
    [pytest.param(*one, marks=() if one in PAIRWISE else pytest.mark.slow) for one in COMBINATIONS],
    ids=lambda on: "yes" if on else "no",
)
def test_the_losses_are_those_of_one_process(
    rank: Rank, shard: bool, context: bool, manage: bool, checkpoint: bool
) -> None:
    assert_same_losses(
        rank, shard=shard, context=context, manage=manage, checkpoint=2 if checkpoint else 0
    )


@distributed(4)
@pytest.mark.parametrize("ulysses", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_the_losses_are_those_of_one_process_where_keys_are_gathered(
    rank: Rank, ulysses: int
) -> None:
    assert_same_losses(rank, shard=True, context=True, checkpoint=1, ulysses=ulysses)


@pytest.mark.slow
@distributed(3)
def test_three_ranks_share_a_sequence_that_they_do_not_divide(rank: Rank) -> None:
    module = example()
    uneven = SMALL | {"length": 14}
    cpu = torch.device("cpu")
    alone = module.train(module.Config(**uneven), cpu, None)
    together = module.train(module.Config(**uneven, shard=True, context=True), cpu, rank.mesh)
    assert together == pytest.approx(alone, rel=0, abs=1e-12)


def test_fsdp2_with_context_parallelism_runs_under_torchrun() -> None:
    example = EXAMPLE.with_name("fsdp2_context_parallel.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*command, "--nproc-per-node", "2", str(example)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines() if "loss" in line]
    assert len(losses) == 8 and losses[-1] < losses[0], f"nothing was learnt: {losses}"
    assert "really freed" in done.stdout
