"""Windows: encodes that wait for an operator to run beside, and everything that may come between."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import assert_same_gradients, new_input, new_stack, train_step

import memswap
from memswap import Action, Policy, Windows
from memswap.engine import expectations

ENCODE = Policy(action=Action.ENCODE, min_bytes=1)


@pytest.fixture(autouse=True)
def _every_tensor_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensors of these models are shorter than their frames."""
    monkeypatch.setattr(expectations, "WORTH", float("inf"))


def test_first(device) -> None:
    model, x = new_stack(device), new_input(device)
    plain = train_step(model, lambda: model(x))
    manager = memswap.manage(
        model.layers,
        ENCODE,
        windows=Windows(seconds=lambda op, shapes: 1e-3),
        prefetch_bytes="4KiB",
    )
    for _ in range(4):
        assert_same_gradients(train_step(model, lambda: model(x)), plain)
    print(manager.window_stats())
    print(manager.report())
    print({k: v for k, v in manager._saver.observer._known.items()})
    print(manager._saver.queue.encode_rate, manager._saver.queue.decode_rate)
    manager.remove()
