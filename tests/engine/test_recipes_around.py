"""What the model computes around its layers: a recipe of the first layer may begin there."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from helpers import assert_nothing_left, assert_same_gradients, collect, flush_autograd
from torch import nn

import memswap

pytestmark = pytest.mark.own_form("its recipes are learnt, which takes proofs")

POLICY = memswap.Policy(action="recompute", min_bytes=1024)
LEARNING_STEPS = 4
WIDTH, ROWS, TOKENS = 32, 16, 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.into, self.back = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.back(nn.functional.gelu(self.into(self.norm(x))))


class Model(nn.Module):
    """Embeddings that stand beside the layers, as a language model has them."""

    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.places = nn.Embedding(ROWS, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head: nn.Module = nn.Identity()
        self.fails = False
        if frozen:
            self.table.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(TOKENS, device=tokens.device)
        x = self.table(tokens) + self.places(places)
        for layer in self.layers:
            x = layer(x)
        if self.fails:
            raise ArithmeticError
        return self.head(x).square().mean()


def new_tokens(device: torch.device) -> torch.Tensor:
    return (torch.arange(TOKENS) * 7 % ROWS).to(device)


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [one for one in model.parameters() if one.requires_grad]


def gradients(model: nn.Module, tokens: torch.Tensor, **how: Any) -> list[torch.Tensor]:
    return list(torch.autograd.grad(model(tokens), trained(model), **how))


def learnt(manager: memswap.types.Manager) -> set[str]:
    """Words of the recipes that are proven."""
    known = manager._engine.recipes
    assert known is not None
    return {words for _, (words, proofs, failed) in known.learnt() if proofs >= 2 and not failed}


def looks_up(manager: memswap.types.Manager) -> bool:
    return any("embedding" in words for words in learnt(manager))


def test_a_lazy_module_behind_the_layers_has_no_memory_when_they_begin(
    device: torch.device,
) -> None:
    model, tokens = Model().to(device), new_tokens(device)
    model.head = nn.LazyLinear(8, device=device)
    with memswap.manage(model, POLICY) as manager:
        model(tokens).backward()  # makes the head's weights
        found = [gradients(model, tokens) for _ in range(LEARNING_STEPS + 1)]
        assert looks_up(manager) == (device.type == "cpu")
    expected = gradients(model, tokens)
    for one in found:
        assert_same_gradients(one, expected)


def test_what_the_first_layer_saves_is_looked_up_again_and_no_bit_differs(
    device: torch.device,
) -> None:
    model, tokens = Model().to(device), new_tokens(device)
    expected = gradients(model, tokens)
    with memswap.manage(model, POLICY) as manager:
        for _ in range(LEARNING_STEPS + 2):
            manager.reset_stats()
            assert_same_gradients(gradients(model, tokens), expected)
        # Elsewhere a copy of the indices would have to be ordered.
        assert looks_up(manager) == (device.type == "cpu")
        whole = manager.stats()
    with memswap.manage(model.layers, POLICY) as manager:
        for _ in range(LEARNING_STEPS + 2):
            manager.reset_stats()
            assert_same_gradients(gradients(model, tokens), expected)
        assert not looks_up(manager), "nobody has said what is around these layers"
    if device.type == "cpu":
        assert whole.recipe_bytes == manager.stats().recipe_bytes + TOKENS * WIDTH * 4


def test_indices_that_numpy_fills_anew_are_those_of_the_lookup(device: torch.device) -> None:
    """Nobody counts it, and of a frozen table autograd needs none of them."""
    filled = numpy.zeros(TOKENS, dtype=numpy.int64)
    tokens = torch.from_numpy(filled)
    model = Model(frozen=True).to(device)
    with memswap.manage(model, POLICY) as manager:
        for step in range(LEARNING_STEPS + 2):
            filled[:] = (numpy.arange(TOKENS) * (step + 3)) % ROWS
            expected = gradients(Model(frozen=True).to(device), tokens.to(device))
            loss = model(tokens if device.type == "cpu" else tokens.to(device))
            filled[:] = ROWS - 1
            assert_same_gradients(list(torch.autograd.grad(loss, trained(model))), expected)
        assert looks_up(manager) == (device.type == "cpu")


def test_a_table_that_is_gathered_for_a_forward_is_no_source(device: torch.device) -> None:
    """As ZeRO does: the parameter is the same one, its memory is not."""
    model, tokens = Model().to(device), new_tokens(device)
    expected = gradients(model, tokens)
    rows, there = model.table.weight.detach().clone(), torch.empty_like(model.table.weight)

    def gather(module: nn.Module, args: Any) -> None:
        there.copy_(rows)
        module.weight.data = there  # type: ignore[union-attr, assignment]

    shard = model.table.weight.data
    model.table.register_forward_pre_hook(gather)
    with memswap.manage(model, POLICY) as manager:
        for _ in range(LEARNING_STEPS + 2):
            loss = model(tokens)
            there.zero_()  # its memory serves something else meanwhile
            assert_same_gradients(list(torch.autograd.grad(loss, trained(model))), expected)
            model.table.weight.data = shard
        assert not looks_up(manager), learnt(manager)


@pytest.mark.cpu_only
def test_a_step_of_the_optimizer_before_backward_reads_the_table_first(
    device: torch.device,
) -> None:
    tokens = new_tokens(device)
    found = []
    for managed in (False, True):
        model = Model().to(device)
        optimizer = torch.optim.SGD([model.table.weight], lr=0.1)
        manager = memswap.manage(model, POLICY) if managed else None
        for step in range(LEARNING_STEPS + 2):
            loss = model(tokens)
            if step >= LEARNING_STEPS:  # while a place is learnt, it would keep its bytes then
                optimizer.step()
            loss.backward()
        found.append([one.grad for one in model.parameters()])
        if manager is not None:
            assert looks_up(manager)
            manager.remove()
    assert_same_gradients(found[1], found[0])


@pytest.mark.cpu_only
def test_another_edit_of_the_table_is_refused_in_autograds_words(device: torch.device) -> None:
    model, tokens = Model().to(device), new_tokens(device)
    with memswap.manage(model, POLICY) as manager:
        for _ in range(LEARNING_STEPS + 1):
            gradients(model, tokens)
        assert looks_up(manager)
        loss = model(tokens)
        with torch.no_grad():
            model.table.weight.mul_(2)
        with pytest.raises(memswap.InplaceEditError):
            loss.backward()


def test_a_forward_that_fails_leaves_nobody_listening(device: torch.device) -> None:
    model, tokens = Model().to(device), new_tokens(device)
    expected = gradients(model, tokens)
    with memswap.manage(model, POLICY) as manager:
        for step in range(LEARNING_STEPS + 2):
            model.fails = step % 2 == 0
            if model.fails:
                with pytest.raises(ArithmeticError):
                    model(tokens)
            else:
                assert_same_gradients(gradients(model, tokens), expected)
            known = manager._engine.recipes
            assert known is not None
            before = known.known_storages
            made = torch.ones(TOKENS, WIDTH, device=device).exp()
            assert known.known_storages == before, "an operator outside of the model is noted"
            del made
        flush_autograd(device)
        collect()
        assert_nothing_left(manager.stats())


@pytest.mark.parametrize("share", [80, 60])
def test_the_planned_peak_is_the_measured_one(
    device: torch.device, new_pool: Any, share: int
) -> None:
    model, tokens = Model().to(device), new_tokens(device)
    expected = gradients(model, tokens)
    policy = memswap.Policy(min_bytes=1024)
    with memswap.manage(model, policy, budget=f"{share}%", pool=new_pool()) as manager:
        for _ in range(5):
            assert_same_gradients(gradients(model, tokens), expected)
            plan = manager.wait_for_plan()
        assert plan is not None
        manager.reset_stats()
        for _ in range(2):
            assert_same_gradients(gradients(model, tokens), expected)
        assert manager.stats().peak_resident_bytes == plan.peak_bytes
