"""What inductor, the default backend of torch.compile, compiles saves through memswap too."""

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


def compiled_stack(device: torch.device, how: str) -> Any:
    """A model of which each layer is compiled for itself, or which is compiled as a whole."""
    torch._dynamo.reset()
    model = new_stack(device, depth=2, width=64)
    for part in model.layers if how == "layers" else [model]:
        part.compile()
    return model


@pytest.mark.slow  # compiles with g++ for half a minute and more
@pytest.mark.cpu_only
@pytest.mark.parametrize("how", ["layers", "model"])
def test_gradients_of_what_inductor_compiled_do_not_change(
    device: torch.device, new_pool: Any, inductor: None, how: str
) -> None:
    """Last bits depend on which operators are fused, so hooks may divide no graph."""
    plain, x = compiled_stack(device, how), new_input(device, batch=4, width=64)
    expected = train_step(plain, lambda: plain(x))

    model, pool = compiled_stack(device, how), new_pool()
    saved = memswap.saved_tensors(EVERYTHING, pool=pool)

    def loss() -> torch.Tensor:
        with saved:
            return model(x)

    for _ in range(3):
        assert_same_gradients(train_step(model, loss), expected)
    assert saved.stats().moved_storages > 0, "nothing that inductor saves was moved by the block"
    assert_released(saved, pool)

    model, pool = compiled_stack(device, how), new_pool()
    policy = EVERYTHING if how == "layers" else memswap.Policy("swap", min_bytes=1)
    manager = memswap.manage(model, policy, pool=pool)
    for _ in range(3):
        assert_same_gradients(train_step(model, lambda: model(x)), expected)
    assert manager.stats().moved_storages > 0, "nothing that inductor saves was moved by manage"
    assert_released(manager, pool)
