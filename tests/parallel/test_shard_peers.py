"""Sharded weights beside another system's: the same training, where it is installed."""

from __future__ import annotations

import copy

import pytest
import torch

from other_systems import import_deepspeed, rank_pool
from ranks import Rank, distributed
from sharding import loss_of, make_net, moved, sharded, tokens_of, train, whole

__all__ = ["rank_pool"]


@pytest.mark.slow
@distributed(2)
@pytest.mark.parametrize("checkpointed", [[], [0, 1, 2]], ids=str)
def test_training_equals_zero_3_of_deepspeed(rank: Rank, checkpointed: list[int]) -> None:
    deepspeed = import_deepspeed(rank)
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
