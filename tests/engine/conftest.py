"""Fixtures of the engine tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers import Training, flush_autograd, new_stack


@pytest.fixture(autouse=True)
def _let_go(
    _laboratory: object, device: torch.device, request: pytest.FixtureRequest
) -> Iterator[None]:
    """The laboratory looks for leaks once pytest and autograd's thread have let go."""
    yield
    for name in ("pool", "saver", "region"):
        request.node.funcargs.pop(name, None)
    flush_autograd(device)


@pytest.fixture(params=["saved_tensors", "manage"])
def way(request: pytest.FixtureRequest) -> str:
    """The two doors: a `with` block around the forward, and a managed model."""
    return request.param


@pytest.fixture
def new_training(
    device: torch.device, new_pool: Callable[..., Any], way: str
) -> Callable[..., Training]:
    """Makes a small stack trained through either door."""

    def make(depth: int = 3, **options: Any) -> Training:
        return Training(way, new_stack(device, depth), new_pool(), **options)

    return make
