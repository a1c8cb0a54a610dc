"""Other systems to compare with, on ranks of their own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

from ranks import Rank, RankPool

BUILD = "from deepspeed.comm.torch import build_shm_op; build_shm_op()"


@pytest.fixture
def rank_pool() -> Iterator[RankPool]:
    """Ranks for one test: DeepSpeed leaves state behind in its process.

    At its first use it compiles an operator, for longer than a test may take: here, in time.
    """
    if importlib.util.find_spec("deepspeed") is not None:
        environment = os.environ | {"DS_ACCELERATOR": "cpu"}
        subprocess.run([sys.executable, "-c", BUILD], check=True, env=environment, timeout=280)
    pool = RankPool()
    yield pool
    pool.close()


def import_deepspeed(rank: Rank) -> ModuleType:
    """DeepSpeed, told about this rank; skips where it is not installed."""
    os.environ |= {
        "DS_ACCELERATOR": "cpu",
        "LOCAL_RANK": str(rank.rank),
        "LOCAL_SIZE": str(rank.size),
    }
    return pytest.importorskip("deepspeed")
