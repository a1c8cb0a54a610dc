"""Checkpointed regions and torch.compile: compiled layers in regions, regions in a graph."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from checkpoint_helpers import CheckpointPolicy, policy_of
from helpers import (
    EVERYTHING,
    assert_released,
    assert_same_gradients,
    new_input,
    new_stack,
    random,
    train_step,
)
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import memswap

pytestmark = [
    pytest.mark.slow,
    pytest.mark.cpu_only,
    pytest.mark.filterwarnings("ignore:.*context_fn"),
]

SWAP = policy_of(CheckpointPolicy.MUST_SWAP)
BACKENDS = pytest.mark.parametrize("backend", ["eager", "aot_eager"])


@pytest.fixture(autouse=True)
def _fresh() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def regions_of_compiled_layers(device: Any, new_pool: Any, backend: str) -> memswap.types.Stats:
    plain, x = new_stack(device, depth=2), new_input(device)
    for layer in plain.layers:
        layer.compile(backend=backend)
    expected = train_step(plain, lambda: plain(x))
    torch._dynamo.reset()

    model, pool = new_stack(device, depth=2), new_pool()
    for layer in model.layers:
        layer.compile(backend=backend)
    ours = memswap.Checkpointing(SWAP, swap_inputs=True, pool=pool, min_bytes=1)

    def loss() -> torch.Tensor:
        h = model.enter(x)
        for layer in model.layers:
            h = ours.checkpoint(layer, h)
        return h.square().mean()

    for _ in range(3):
        assert_same_gradients(train_step(model, loss), expected)
    assert_released(ours, pool)
    return ours.stats()


@BACKENDS
def test_layers_compiled_one_by_one_inside_regions(device, new_pool, backend):
    stats = regions_of_compiled_layers(device, new_pool, backend)
    # Two inputs and eight matrix products in each of three steps, less what is needed at once.
    assert stats.offered_tensors == 3 * (2 + 8)
    assert stats.moved_storages > 3 * 4


def test_layers_that_inductor_compiled_inside_regions(device, new_pool, inductor):
    """Its kernels call no operators, so a policy sees none of them; the inputs leave."""
    assert regions_of_compiled_layers(device, new_pool, "inductor").moved_storages > 0


@BACKENDS
@pytest.mark.parametrize("policy", ["function", "op list", None])
def test_regions_inside_a_compiled_function(device, new_pool, backend, policy):
    """There a region is torch's own: what would leave is saved, and the block around moves it."""
    model, x, pool = new_stack(device, depth=2), new_input(device), new_pool()
    expected = train_step(model, lambda: model(x))
    chosen = {"function": SWAP, "op list": [torch.ops.aten.addmm.default], None: None}[policy]

    @torch.compile(backend=backend, fullgraph=True)
    def compiled(x: torch.Tensor) -> torch.Tensor:
        h = model.enter(x)
        for layer in model.layers:
            h = memswap.checkpoint(type(layer).forward, layer, h, policy_fn=chosen)
        return h.square().mean()

    engine = memswap.saved_tensors(EVERYTHING, pool=pool)

    def loss() -> torch.Tensor:
        with engine:
            return compiled(x)

    for _ in range(2):
        assert_same_gradients(train_step(model, loss), expected)
    assert_released(engine, pool)


@BACKENDS
def test_a_compiled_model_of_checkpointed_modules(device, new_pool, backend):
    model, x = new_stack(device, depth=2), new_input(device)
    expected = train_step(model, lambda: model(x))
    memswap.checkpoint_module(model.layers, SWAP, min_bytes=1)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for _ in range(2):
        assert_same_gradients(train_step(model, lambda: compiled(x)), expected)


def test_regions_that_inductor_compiles(device, inductor):
    """The same code as of torch's own checkpoint with the same policy, so the same bits."""
    raw, weight = random(device, 16, 16), random(device, 16, 16, seed=1)

    def fn(x: torch.Tensor) -> torch.Tensor:
        return ((x @ weight).sin() @ weight).sin().exp()

    def theirs(x: torch.Tensor) -> torch.Tensor:
        ops = [torch.ops.aten.mm.default]
        context_fn = functools.partial(create_selective_checkpoint_contexts, ops)
        return checkpoint(fn, x, use_reentrant=False, context_fn=context_fn)

    def ours(x: torch.Tensor) -> torch.Tensor:
        return memswap.checkpoint(fn, x, policy_fn=SWAP)

    found = []
    for call in (theirs, ours):
        torch._dynamo.reset()
        x = raw.clone().requires_grad_()
        torch.compile(call, fullgraph=True)(x).sum().backward()
        found.append(x.grad)
    assert_same_gradients([found[1]], [found[0]])
