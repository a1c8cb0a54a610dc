"""Layers compiled by inductor, the default backend of torch.compile, save through memswap too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import (
    EVERYTHING,
    assert_released,
    assert_same_gradients,
    new_input,
    new_stack,
    train_step,
)

import memswap


def compiled_stack(device: torch.device) -> Any:
    """Each layer compiled for itself: regional compilation, one compilation for all of them."""
    model = new_stack(device, depth=2)
    for layer in model.layers:
        layer.compile()
    return model


@pytest.mark.slow  # compiles with g++ for half a minute and more
@pytest.mark.cpu_only
def test_gradients_of_layers_that_inductor_compiled_do_not_change(
    device: torch.device, new_pool: Any, inductor: None
) -> None:
    plain, x = compiled_stack(device), new_input(device)
    expected = train_step(plain, lambda: plain(x))

    model, pool = compiled_stack(device), new_pool()
    engine = memswap.saved_tensors(EVERYTHING, pool=pool)

    def loss() -> torch.Tensor:
        with engine:
            return model(x)

    for _ in range(3):
        assert_same_gradients(train_step(model, loss), expected)
    assert engine.stats().moved_storages > 0, "nothing that inductor saves was moved by the block"
    assert_released(engine, pool)

    pool = new_pool()
    manager = memswap.manage(model.layers, EVERYTHING, pool=pool)
    for _ in range(3):
        assert_same_gradients(train_step(model, lambda: model(x)), expected)
    assert manager.stats().moved_storages > 0, "nothing that inductor saves was moved by manage"
    assert_released(manager, pool)
