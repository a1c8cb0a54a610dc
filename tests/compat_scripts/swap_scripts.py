"""What the scripts of swapping systems share: a training, and the order in which groups moved."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import (
    assert_nothing_left,
    assert_same_gradients,
    flush_autograd,
    gradients,
    new_input,
)
from torch import nn

from memswap._native import native

CALLS = {
    "launch_offload": "send",
    "wait_offload": "sent",
    "launch_load": "bring",
}


def train(
    model: nn.Module,
    device: torch.device,
    steps: int = 3,
    microbatches: int = 1,
    after_step: Callable[[], None] = lambda: None,
) -> list[Any]:
    """The gradients of every step. All microbatches are forwarded before the first backward."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(steps):
        optimizer.zero_grad()
        losses = [model(new_input(device, seed=9 * step + n)) for n in range(microbatches)]
        for loss in losses:
            loss.backward()
        del losses, loss
        found += gradients(model)
        optimizer.step()
        after_step()
    flush_autograd(device)
    return found


def assert_a_graph_is_run_twice(
    plain: nn.Module, model: nn.Module, device: torch.device, stats: Callable[[], Any]
) -> None:
    """The gradients of two backwards through one graph are a plain model's; then nothing is left.

    Args:
        plain: the model without memswap.
        model: the same with it.
        device: of both.
        stats: gives the statistics of the engine that moves what `model` saves.
    """
    for one in (plain, model):
        loss = one(new_input(device))
        loss.backward(retain_graph=True)
        loss.backward()
        del loss
    assert_same_gradients(gradients(model), gradients(plain))
    assert stats().moved_storages > 0
    flush_autograd(device)
    assert_nothing_left(stats())


def assert_three_layers_swap(
    model: nn.Module, device: torch.device, expected: list[Any], stats: Callable[[], Any]
) -> None:
    """Three steps of a model of which three layers swap: no warning, no stall, nothing left.

    Args:
        model: with its layers under a swapping system's names.
        device: of the model.
        expected: the gradients of a plain :func:`train`.
        stats: gives the statistics of the engine.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same_gradients(train(model, device), expected)
    assert stats().moved_storages >= 3 * 3 * 5, "three layers, three steps, several tensors each"
    assert stats().stalls == 0, "something was not on its way before backward needed it"
    assert_nothing_left(stats())


def watched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows while groups move: ``"send model.*[0]"``. Calls that change nothing are left out."""
    events: list[str] = []

    def spy(call: str, plain: Callable[[native.Batch], Any]) -> Callable[..., Any]:
        def called(batch: native.Batch, *args: Any) -> Any:
            before = batch.phase
            result = plain(batch, *args)
            if batch.phase is not before:
                events.append(f"{CALLS[call]} {batch.name}")
            return result

        return called

    for call in CALLS:
        monkeypatch.setattr(native.Batch, call, spy(call, getattr(native.Batch, call)))
    return events
