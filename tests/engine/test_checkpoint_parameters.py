"""Checkpointed modules that are called with other parameters than their own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call

import memswap
from memswap import RecomputeError

pytestmark = pytest.mark.one_schedule  # nothing here depends on an order

Parameters = dict[str, torch.Tensor]
Call = Callable[[nn.Module, Parameters, torch.Tensor], torch.Tensor]


def inner_loop(device: torch.device, call: Call, prepare: Any = None) -> list[torch.Tensor]:
    """Two steps of MAML's; gradients of the parameters that they began with."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh()).to(device)
    if prepare is not None:
        prepare(model)
    parameters: Parameters = dict(model.named_parameters())
    x = torch.linspace(-1, 1, 320).reshape(20, 16).to(device)
    for _ in range(2):
        loss = call(model, parameters, x).square().mean()
        gradients = torch.autograd.grad(loss, list(parameters.values()), create_graph=True)
        parameters = {
            name: value - 0.1 * gradient
            for (name, value), gradient in zip(parameters.items(), gradients, strict=True)
        }
    call(model, parameters, x + 1).square().mean().backward()
    return [parameter.grad for parameter in model.parameters()]  # type: ignore[misc]


def plain(model: nn.Module, parameters: Parameters, x: torch.Tensor) -> torch.Tensor:
    return functional_call(model, parameters, (x,))  # type: ignore[no-any-return]


def in_a_region(model: nn.Module, parameters: Parameters, x: torch.Tensor) -> torch.Tensor:
    call = functools.partial(functional_call, model, parameters)
    return memswap.checkpoint(call, x)  # type: ignore[no-any-return]


def test_a_region_around_a_functional_call_keeps_its_parameters(device: torch.device) -> None:
    expected = inner_loop(device, plain)
    assert all(map(torch.equal, inner_loop(device, in_a_region), expected))


@pytest.mark.parametrize("inner", [False, True], ids=["the module itself", "a module in it"])
def test_a_region_inside_a_functional_call_says_that_gradients_would_be_lost(
    device: torch.device, inner: bool
) -> None:
    def prepare(model: nn.Sequential) -> None:
        memswap.checkpoint_module(model[0] if inner else [model], min_bytes=1)

    with pytest.raises(RecomputeError, match="was the result of a computation"):
        inner_loop(device, plain, prepare)


def test_without_a_check_of_determinism_nothing_is_said(device: torch.device) -> None:
    def prepare(model: nn.Sequential) -> None:
        memswap.checkpoint_module([model], determinism_check="none")

    wrong, right = inner_loop(device, plain, prepare), inner_loop(device, plain)
    assert not all(map(torch.equal, wrong, right)), "then the check is not needed"


def test_parameters_that_are_computed_both_times_are_right(device: torch.device) -> None:
    """As where a wrapper (FSDP) puts views of one flat parameter into the module."""

    def gradient(checkpointed: bool) -> torch.Tensor:
        torch.manual_seed(0)
        flat = torch.randn(8, 9, device=device, requires_grad=True)
        model = nn.Linear(8, 8).to(device)
        if checkpointed:
            memswap.checkpoint_module(model)
        views = {"weight": flat[:, :8], "bias": flat[:, 8]}
        del model.weight, model.bias
        for name, view in views.items():
            model._parameters[name] = view  # type: ignore[assignment]
        model(torch.ones(4, 8, device=device)).square().sum().backward()
        assert flat.grad is not None
        return flat.grad

    assert torch.equal(gradient(True), gradient(False))
