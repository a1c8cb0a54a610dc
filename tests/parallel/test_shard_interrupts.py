"""Ctrl-C in a sharded model: no hook tells the end of a call, and the next step is right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from memswap.parallel.in_flight import _listeners
from ranks import Rank, distributed
from sharding import assert_same, loss_of, make_net, sharded, tokens_of, train


@distributed(2)
@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
def test_the_step_after_an_interrupted_forward_is_right(rank: Rank, grad: bool) -> None:
    start = make_net()
    reference, _ = sharded(rank, start)
    net, context = sharded(rank, start, late=True, context={"slots": 2})

    def interrupt(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        raise KeyboardInterrupt

    handle = net.layers[1].wo.register_forward_hook(interrupt)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt), torch.set_grad_enabled(grad):
            loss_of(net, tokens_of(9, 2)[rank.rank])
    handle.remove()
    train(net, rank, steps=2)
    train(reference, rank, steps=2)
    assert_same(net, reference, rank, bitwise=True)
    assert all(hasattr(value, "full_tensor") for value in net.parameters())
    assert context.stats().lent == 0, "weights of the interrupted step are still there"
    assert all(unit.progress.depth == 0 for unit in context.units)
    assert not _listeners.get(), "a call that has ended still hears of exchanges"
