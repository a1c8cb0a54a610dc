"""manage(model): the blocks that it finds, through wrappers, and where an iteration begins."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from helpers import (
    EVERYTHING,
    Block,
    assert_released,
    assert_same_gradients,
    new_input,
    new_stack,
    train_step,
)
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

import memswap
from memswap.hooks.blocks import find_blocks


class Other(Block):
    """A block of another class."""


class Holds(nn.Module):
    """A model that holds modules, and calls them one after another."""

    def __init__(self, **modules: nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x):
        for module in self.children():
            for one in module if isinstance(module, nn.ModuleList) else [module]:
                x = one(x)
        return x.square().mean()


class Experts(nn.Module):
    """A layer with a list of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([Block(16) for _ in range(3)])

    def forward(self, x):
        return sum(one(x) for one in self.experts)


class OtherExperts(Experts):
    """A layer of another class, as in models that mix two kinds."""


class Mixed(Holds):
    """A list of layers of different classes, which the model names."""

    _no_split_modules: ClassVar = ["Experts", "OtherExperts", "Absent"]


class GradientCheckpointingLayer(Block):
    """Stands for transformers' base class, which is known by its name and where it comes from."""


GradientCheckpointingLayer.__module__ = "transformers.modeling_layers"


class Recomputing(Holds):
    """Calls its blocks in checkpoint regions, as models of diffusers do when they are told to."""

    gradient_checkpointing = True

    def forward(self, x):
        for module in self.layers:
            x = checkpoint(module, x, use_reentrant=False)
        return x.square().mean()


class Layer(GradientCheckpointingLayer):
    """A layer of a transformers model."""


class NamesTooMuch(Holds):
    """Names its small embedding beside its layers, as CLIP does."""

    _no_split_modules: ClassVar = ["Embedding", "Layer"]


class Embedding(Holds):
    """What such a model names and does not repeat."""


class Diffusion(Holds):
    """A diffusers model: other words for the same."""

    _repeated_blocks: ClassVar = ["Experts", "OtherExperts"]


def blocks(count, kind=Block):
    return [kind(16) for _ in range(count)]


def numbered(name, count):
    return [f"{name}.{i}" for i in range(count)]


def twice(layers):
    return Holds(layers=nn.ModuleList(layers), of_encoder=nn.ModuleList(layers[:2]))


MODELS = {
    "list": (lambda: Holds(layers=nn.ModuleList(blocks(3))), numbered("layers", 3)),
    "sequential between others": (
        lambda: Holds(body=nn.Sequential(nn.Linear(16, 16), *blocks(2), nn.LayerNorm(16))),
        ["body.1", "body.2"],
    ),
    "encoder and decoder": (
        lambda: Holds(
            encoder=Holds(layers=nn.ModuleList(blocks(2))),
            decoder=Holds(layers=nn.ModuleList(blocks(3, Other))),
        ),
        numbered("encoder.layers", 2) + numbered("decoder.layers", 3),
    ),
    "not a list of small heads": (
        lambda: Holds(
            layers=nn.ModuleList(blocks(40)), heads=nn.ModuleList([Holds(a=nn.Linear(2, 2))] * 1)
        ),
        numbered("layers", 40),
    ),
    "the outer of lists inside each other": (
        lambda: Holds(layers=nn.ModuleList([Experts(), Experts()])),
        numbered("layers", 2),
    ),
    "a first layer of another class": (
        lambda: Holds(layers=nn.ModuleList([*blocks(1, Other), *blocks(2)])),
        numbered("layers", 3),
    ),
    "_no_split_modules": (
        lambda: Mixed(layers=nn.ModuleList([Experts(), OtherExperts()])),
        numbered("layers", 2),
    ),
    "_repeated_blocks": (
        lambda: Diffusion(layers=nn.ModuleList([Experts(), OtherExperts()])),
        numbered("layers", 2),
    ),
    "GradientCheckpointingLayers": (
        lambda: NamesTooMuch(
            embedding=Embedding(a=nn.Linear(16, 2)), layers=nn.ModuleList(blocks(3, Layer))
        ),
        numbered("layers", 3),
    ),
    "GradientCheckpointingLayers inside stages": (
        lambda: Holds(
            stages=nn.ModuleList([Holds(layers=nn.ModuleList(blocks(2, Layer))) for _ in range(2)])
        ),
        numbered("stages.0.layers", 2) + numbered("stages.1.layers", 2),
    ),
    "stages that recompute their layers": (
        lambda: Holds(
            a=Recomputing(layers=nn.ModuleList(blocks(2))),
            b=Holds(layers=nn.ModuleList(blocks(2))),
        ),
        ["a", *numbered("b.layers", 2)],
    ),
    "GradientCheckpointingLayers of a model that recomputes": (
        lambda: Recomputing(layers=nn.ModuleList(blocks(2, Layer))),
        numbered("layers", 2),
    ),
    "layers that are wrapped, one of them": (
        lambda: Holds(layers=nn.ModuleList([checkpoint_wrapper(Block(16)), *blocks(1)])),
        numbered("layers", 2),
    ),
    "lists that share their blocks": (lambda: twice(blocks(3)), numbered("layers", 3)),
    "sizes that nobody knows yet": (
        lambda: Holds(
            layers=nn.ModuleList(
                [nn.Sequential(nn.LazyLinear(16), nn.Linear(16, 16)) for _ in range(2)]
            )
        ),
        numbered("layers", 2),
    ),
    "nothing that repeats": (
        lambda: Holds(a=Block(16), b=Other(16), c=nn.Sequential(nn.Linear(16, 16), nn.ReLU())),
        ["0"],
    ),
    "torch's own operators": (
        lambda: Holds(layers=nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])),
        ["0"],
    ),
}


@pytest.mark.cpu_only
@pytest.mark.parametrize("name", MODELS)
def test_what_is_found(name):
    make, expected = MODELS[name]
    assert list(find_blocks(make()).units) == expected


def test_inputs_of_checkpoint_regions_move(device, new_pool):
    """The hooks of blocks inside such regions save nothing."""
    model = Recomputing(layers=nn.ModuleList(blocks(3))).to(device)
    x = new_input(device)
    expected = train_step(model, lambda: model(x))
    pool = new_pool()
    with memswap.manage(model, EVERYTHING, pool=pool) as manager:
        assert "it recomputes its blocks" in manager.report()
        for _ in range(3):
            assert_same_gradients(train_step(model, lambda: model(x)), expected)
        assert manager.stats().moved_storages > 0
    assert_released(manager, pool)


@pytest.mark.cpu_only
def test_small_lists_do_not_count_beside_a_large_one():
    heads = nn.ModuleList([Holds(a=nn.Linear(2, 2)) for _ in range(5)])
    model = Holds(layers=nn.ModuleList(blocks(4)), heads=heads)
    assert list(find_blocks(model).units) == numbered("layers", 4)


class Peft(nn.Module):
    """As PEFT wraps a model: its forward calls the base model's forward, not the model."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base_model = base
        self.adapter = nn.Linear(2, 2)

    def get_base_model(self):
        return self.base_model

    def forward(self, x):
        return self.base_model.forward(x)


WRAPPERS = {
    "data parallel": nn.DataParallel,
    "torch.compile": lambda model: torch.compile(model, backend="eager"),
    "checkpoint wrapper": checkpoint_wrapper,
    "PEFT": Peft,
    "two": lambda model: nn.DataParallel(Peft(model)),
}


@pytest.mark.cpu_only
@pytest.mark.parametrize("name", WRAPPERS)
def test_wrappers_are_seen_through(device, new_pool, name):
    torch._dynamo.reset()
    plain, x = new_stack(device), new_input(device)
    expected = train_step(plain, lambda: plain(x))
    inner = new_stack(device)
    model = WRAPPERS[name](inner)
    pool = new_pool()
    # Of a model that is compiled as a whole, what no action is named for stays.
    policy = memswap.Policy("swap", min_bytes=0) if name == "torch.compile" else EVERYTHING
    with memswap.manage(model, policy, pool=pool) as manager:
        assert manager.units == tuple(numbered("layers", 3))
        assert "3 Block (layers.0 to layers.2), found in Stack" in manager.report()
        for _ in range(3):
            inner.zero_grad(set_to_none=True)
            model(x).backward()
            assert_same_gradients([p.grad for p in inner.parameters()], expected)
        if name != "checkpoint wrapper":  # that saves its inputs alone
            inner.zero_grad(set_to_none=True)
            assert_released(manager, pool)
    assert not any(one._forward_hooks or one._forward_pre_hooks for one in model.modules())
    torch._dynamo.reset()


def test_a_model_trains_as_its_layers_do(device, new_pool):
    model, x = new_stack(device), new_input(device)
    expected = train_step(model, lambda: model(x))
    moved = []
    for managed in (model, model.layers):
        pool = new_pool()
        manager = memswap.manage(managed, EVERYTHING, pool=pool)
        for _ in range(3):
            assert_same_gradients(train_step(model, lambda: model(x)), expected)
        model.zero_grad(set_to_none=True)
        assert_released(manager, pool)
        moved.append(manager.stats().moved_storages)
        manager.remove()
    assert moved[0] == moved[1]


@pytest.mark.parametrize("windows", [None, memswap.Windows()], ids=["at once", "in windows"])
@pytest.mark.parametrize("how", ["script", "trace"])
def test_a_model_with_modules_that_torch_jit_has_compiled_trains(device, new_pool, how, windows):
    """Inside of blocks, and beside them."""

    def compiled(module):
        example = torch.ones(2, 16)
        return torch.jit.script(module) if how == "script" else torch.jit.trace(module, example)

    model, x = new_stack(device), new_input(device)
    for layer in model.layers:
        layer.down = nn.Sequential(
            layer.down, compiled(nn.Sequential(nn.Linear(16, 16), nn.SiLU()))
        )
    model.to(device)
    model.beside = compiled(nn.Linear(16, 16)).to(device)

    def loss():
        return model(x) + model.beside(x).mean()

    for _ in range(3):  # torch.jit compiles anew after its first calls
        expected = train_step(model, loss)
    pool = new_pool()
    manager = memswap.manage(model, EVERYTHING, pool=pool, windows=windows)
    assert len(manager.units) == len(model.layers)
    for _ in range(3):
        assert_same_gradients(train_step(model, loss), expected)
    model.zero_grad(set_to_none=True)
    assert_released(manager, pool)


class Heads(nn.Module):
    """Calls its first layer again, with nothing that the forward has computed for gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(blocks(3))

    def forward(self, x):
        h = x
        for layer in self.layers:
            h = layer(h)
        return h.square().mean() + self.layers[0](h.detach()).mean()


def test_an_iteration_begins_with_the_models_forward(device, new_pool):
    torch.manual_seed(0)
    model, x = Heads().to(device), new_input(device)
    expected = train_step(model, lambda: model(x))
    manager = memswap.manage(model, EVERYTHING, pool=new_pool())
    seen = []
    for layer in model.layers:
        layer.register_forward_hook(lambda *_: seen.append(manager._engine.iteration))
    for _ in range(3):
        seen.clear()
        assert_same_gradients(train_step(model, lambda: model(x)), expected)
        assert len({id(one) for one in seen}) == 1, "a head is taken for another forward"
    seen.clear()
    first, second = model(x), model(x)
    assert len({id(one) for one in seen}) == 2, "two forwards of the model are one iteration"
    (first + second).backward()


def test_layers_of_a_found_model_may_be_called_without_it(device, new_pool):
    model, x = new_stack(device, depth=2), new_input(device)
    expected = train_step(model, lambda: model(x))
    pool = new_pool()
    manager = memswap.manage(model, EVERYTHING, pool=pool)
    seen = []
    for layer in model.layers:
        layer.register_forward_hook(lambda *_: seen.append(manager._engine.iteration))

    def by_hand():
        h = model.enter(x)
        for layer in model.layers:
            h = layer(h)
        return h.square().mean()

    for _ in range(3):
        assert_same_gradients(train_step(model, by_hand), expected)
    seen.clear()
    first, second = by_hand(), by_hand()
    assert len({id(one) for one in seen}) == 2
    del first, second
    model.zero_grad(set_to_none=True)
    assert_released(manager, pool)
