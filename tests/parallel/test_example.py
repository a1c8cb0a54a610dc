"""A Llama under each combination of what shards, cuts, moves and recomputes: losses of one process.

And the example of several ranks.
"""

from __future__ import annotations

import functools
import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import llama_training
from ranks import Rank, distributed

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SMALL = {"layers": 3, "width": 16, "vocabulary": 16, "length": 12, "dtype": "float64", "steps": 3}


#: Whether weights are sharded, the sequence is cut, activations are managed, layers checkpointed.
COMBINATIONS = list(itertools.product([False, True], repeat=4))

#: Of these, some in which each two of the four meet in all ways.
PAIRWISE = [combination for combination in COMBINATIONS if sum(combination) in (0, 3)]


@functools.cache
def losses_of_one_process() -> list[float]:
    return llama_training.train(llama_training.Config(**SMALL), torch.device("cpu"), None)


def assert_same_losses(rank: Rank, **options: Any) -> None:
    config = llama_training.Config(**SMALL, **options)
    losses = llama_training.train(config, torch.device("cpu"), rank.mesh)
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
    uneven = SMALL | {"length": 14}
    cpu = torch.device("cpu")
    alone = llama_training.train(llama_training.Config(**uneven), cpu, None)
    cut = llama_training.Config(**uneven, shard=True, context=True)
    together = llama_training.train(cut, cpu, rank.mesh)
    assert together == pytest.approx(alone, rel=0, abs=1e-12)


def test_fsdp2_with_context_parallelism_runs_under_torchrun() -> None:
    example = EXAMPLES / "fsdp2_context_parallel.py"
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
