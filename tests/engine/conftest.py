"""Fixtures of the engine tests."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import Training, flush_autograd, new_stack
from swap_helpers import DOORS, open_door


@pytest.fixture(autouse=True)
def _let_go(
    _laboratory: object, device: torch.device, request: pytest.FixtureRequest
) -> Iterator[None]:
    """The laboratory looks for leaks once pytest and autograd's thread have let go."""
    yield
    for name in ("pool", "engine", "region"):
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


@pytest.fixture(params=DOORS)
def door(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Puts memswap on all layers of a model: a chain of them, or modules found by a pattern."""
    return functools.partial(open_door, request.param)


@pytest.fixture
def inductor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A working inductor, or a reason why there is none.

    What g++ made is kept in the build folder, like that of other compilers: inductor's own cache
    knows it by the code, torch, the compiler and its flags.
    """
    build = Path(os.environ.get("MEMSWAP_BUILD_DIR", tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(build / "inductor"))
    from torch._inductor import config

    torch._dynamo.reset()
    with config.patch(compile_threads=1):  # no pool of processes that outlives the test
        try:
            torch.compile(torch.sin)(torch.ones(3))
        except Exception as error:
            pytest.skip(f"inductor does not compile for a CPU here: {str(error).splitlines()[0]}")
        yield
    torch._dynamo.reset()
