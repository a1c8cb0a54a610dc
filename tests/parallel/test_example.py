"""examples/train_llama.py prints the same losses in every combination as in one process."""

from __future__ import annotations

import functools
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

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


@distributed(4)
@pytest.mark.parametrize("checkpoint", [0, 2])
@pytest.mark.parametrize("manage", [False, True], ids=["", "manage"])
def test_the_losses_are_those_of_one_process(rank: Rank, manage: bool, checkpoint: int) -> None:
    module = example()
    cpu = torch.device("cpu")
    alone = module.train(module.Config(**SMALL), cpu, None)
    config = module.Config(**SMALL, shard=True, manage=manage, checkpoint=checkpoint)
    together = module.train(config, cpu, rank.mesh)
    assert together == pytest.approx(alone, rel=0, abs=1e-12)
    assert together[-1] < together[0], "nothing was learnt"
