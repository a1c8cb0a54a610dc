"""A style on a module that never runs is an error at the end of the first step."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.utils.checkpoint import checkpoint

from cut_attention import Attention, Core, make, open_comms, random
from memswap.parallel import ContextParallel
from ranks import Rank, distributed


class Model(nn.Module):
    """Two layers; in the second one ``unused`` is what the style thinks computes attention."""

    def __init__(self, around: Any = lambda layer, x: layer(x)) -> None:
        super().__init__()
        self.layers = nn.ModuleList([make(), make()])
        for layer in self.layers:
            layer.unused = Core()
        self.around = around

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = x + self.around(layer, x)
        return {"x": x}


PLANS = {
    "in one layer of two": {"layers.0.core", "layers.1.unused"},
    "in all layers": {"layers.*.unused"},
}
NEVER = r"layers\.1\.unused \(Core\).* never ran.*apply it to the module whose forward"


@distributed(2)
def test_a_style_that_never_fired_is_an_error_at_the_end_of_the_first_step(rank: Rank) -> None:
    """Without a call of the user's: accepted, and silently a no-op, in another system."""
    mesh = init_device_mesh("cpu", (2,))

    def apply(model: nn.Module, names: set[str]) -> ContextParallel:
        style = ContextParallel(ranges="ranges", model=model, comm=open_comms(rank, True))
        parallelize_module(model, mesh, dict.fromkeys(names, style))
        return style

    x = random(2, 4, 16).requires_grad_()
    for where, names in PLANS.items():
        # The end of the first backward, which has done its work.
        model = Model()
        apply(model, names)
        loss = model(x)["x"].sum()
        with pytest.raises(RuntimeError, match=NEVER):
            loss.backward()
        assert model.layers[0].out.weight.grad is not None, where
        # Without a backward, the second forward.
        model = Model()
        apply(model, names)
        with torch.no_grad():
            model(x)
            with pytest.raises(RuntimeError, match=NEVER):
                model(x)
        # Whatever is around the layers.
        for around in (
            lambda layer, x: checkpoint(layer, x, use_reentrant=False),
            lambda layer, x: checkpoint(layer, x, use_reentrant=True),
        ):
            model = Model(around)
            style = ContextParallel(ranges="ranges", model=model, comm=open_comms(rank, True))
            style.apply(model.layers[1].unused, mesh)
            with pytest.raises(RuntimeError, match=NEVER):
                model(x)["x"].sum().backward()


@distributed(2)
def test_without_the_model_a_style_notices_where_it_can(rank: Rank) -> None:
    mesh = init_device_mesh("cpu", (2,))
    x = random(2, 4, 16).requires_grad_()
    # One of its modules ran: the end of the backward pass.
    model = Model()
    style = ContextParallel(ranges="ranges", comm=open_comms(rank, True))
    parallelize_module(model, mesh, {"layers.0.core": style, "layers.1.unused": style})
    with pytest.raises(RuntimeError, match=r"Core \(1 of 2 never ran\)"):
        model(x)["x"].sum().backward()
    # None did, and one has parameters: the step of their optimizer, before it writes.
    model = Model()
    model.layers[0].unused = make()
    style = ContextParallel(ranges="ranges", comm=open_comms(rank, True))
    parallelize_module(model, mesh, {"layers.0.unused": style})
    other = nn.Linear(2, 2)
    model(x)["x"].sum().backward()
    torch.optim.SGD(other.parameters()).step()
    before = [weight.clone() for weight in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(RuntimeError, match=r"Attention \(1 of 1 never ran\)"):
        optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))
    # A style that is gone leaves no hook in torch.
    gc.collect()  # other tests' styles
    hooks = len(_global_optimizer_pre_hooks)
    del model, style
    gc.collect()
    assert len(_global_optimizer_pre_hooks) == hooks - 1


@distributed(2)
def test_a_style_that_fired_costs_nothing_after_the_first_step(rank: Rank) -> None:
    model = Model()
    style = ContextParallel(ranges="ranges", model=model, comm=open_comms(rank, True))
    parallelize_module(model, init_device_mesh("cpu", (2,)), {"layers.*.core": style})
    modules = list(model.modules())
    before = sum(len(one._forward_hooks) for one in modules)
    x = random(2, 4, 16)
    outputs = [model(x)["x"].sum() for _ in range(2)]  # two microbatches
    for y in outputs:
        y.backward()
    assert not style.first_step.watched
    assert sum(len(one._forward_hooks) for one in modules) < before
    with torch.no_grad():
        model(x)
        model(x)


@distributed(2)
def test_an_evaluation_before_the_first_step_is_none(rank: Rank) -> None:
    gc.collect()  # other tests' styles
    hooks = len(_global_optimizer_pre_hooks)
    model: Attention = make()
    style = ContextParallel(ranges="ranges", model=model, comm=open_comms(rank, True))
    style.apply(model.core, init_device_mesh("cpu", (2,)), q=model.q, o=model.out)
    assert len(_global_optimizer_pre_hooks) == hooks + 1
    with torch.no_grad():
        for _ in range(2):
            model(random(2, 4, 16))
    assert not style.first_step.watched  # everything has run
    assert len(_global_optimizer_pre_hooks) == hooks
