"""Sharded weights beside another system's: the same training, where it is installed."""

from __future__ import annotations

import copy
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from ranks import Rank, RankPool, distributed
from sharding import loss_of, make_net, moved, sharded, tokens_of, train, whole

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


@pytest.mark.slow
@distributed(2)
@pytest.mark.parametrize("checkpointed", [[], [0, 1, 2]], ids=str)
def test_training_equals_zero_3_of_deepspeed(rank: Rank, checkpointed: list[int]) -> None:
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": str(rank.rank), "LOCAL_SIZE": "2"}
    deepspeed = pytest.importorskip("deepspeed")
    start = make_net(torch.float32)
    start.checkpointed = checkpointed
    net, _ = sharded(rank, start, context={"slots": 2})
    train(net, rank)
    assert moved(net, start)

    theirs = copy.deepcopy(start)
    engine, _, _, _ = deepspeed.initialize(
        model=theirs,
        optimizer=torch.optim.AdamW(theirs.parameters(), lr=1e-2, weight_decay=0.1),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": 0.0,  # or it clips to a norm of 1
            "zero_optimization": {
                "stage": 3,
                "stage3_param_persistence_threshold": 0,
                "overlap_comm": False,
            },
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        },
        dist_init_required=False,
    )
    for step in range(3):
        engine.backward(loss_of(engine, tokens_of(step, rank.size)[rank.rank]))
        engine.step()
    mine = whole(net)
    parameters = dict(theirs.named_parameters())
    with deepspeed.zero.GatheredParameters(list(parameters.values())):
        for name, parameter in parameters.items():
            assert torch.equal(mine[name], parameter.detach()), f"{name} differs"
