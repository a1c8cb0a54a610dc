"""torch.compile of managed layers, of models with managed layers, and of whole functions.

The graphs are those of the same compilation without memswap: as many, of as many operators.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from helpers import (
    EVERYTHING,
    Stack,
    assert_released,
    assert_same_gradients,
    new_input,
    new_stack,
    train_step,
)
from torch import nn

import memswap

LAYERS = ("layer.compile", "torch.compile(layer)")
WHOLE = ("model.compile", "torch.compile(model)")
#: Of a model that is compiled as a whole, what is saved moves only if it is said how.
SWAP = memswap.Policy(action=memswap.Action.SWAP, min_bytes=1)
# Layers of a model: where each is compiled, more than torch compiles again for other guards.
DEPTHS = dict.fromkeys(LAYERS, 10) | dict.fromkeys(WHOLE, 3)


def ways(hows: tuple[str, ...]) -> list[Any]:
    """What is compiled by what, before it is managed or after.

    Guards and graphs are the same on all devices: each way to compile runs on a CPU with one of
    both, and on an accelerator with the other. All run everywhere with --slow.
    """
    return [
        pytest.param(
            how,
            first,
            id=f"{how}-{'before' if first else 'after'} manage",
            marks=(
                pytest.mark.slow_on_cpus
                if first == (number % 2 == 0)
                else pytest.mark.slow_on_accelerators
            ),
        )
        for number, how in enumerate(hows)
        for first in (True, False)
    ]


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Compiled(NamedTuple):
    """A model that is compiled in some way."""

    model: Stack
    called: nn.Module
    manager: memswap.types.Manager | None


def compiled(
    model: Stack,
    how: str,
    manage: Callable[[nn.Module], memswap.types.Manager] | None = None,
    *,
    first: bool = True,
    backend: str = "aot_eager",
) -> Compiled:
    """Compile it, and manage it.

    Args:
        how: what is compiled, and by what.
        manage: how it is managed.
        first: whether it is managed after that, as it is called then; or before.
    """
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    manager = None if manage is None or first else manage(model)
    called: nn.Module = model
    if how == "torch.compile(model)":
        called = torch.compile(model, backend=backend)
    elif how == "model.compile":
        model.compile(backend=backend)
    else:
        for index, layer in enumerate(model.layers):
            if how == "layer.compile":
                layer.compile(backend=backend)
            else:
                model.layers[index] = torch.compile(layer, backend=backend)
    if manage is not None and first:
        manager = manage(called)
    return Compiled(model, called, manager)


def graphs() -> dict[str, Any]:
    """How many graphs were compiled, of how many calls; and where they were broken."""
    counters = torch._dynamo.utils.counters
    return {"stats": dict(counters["stats"]), "graph_break": dict(counters["graph_break"])}


class Plain(NamedTuple):
    """What a stack that is compiled in some way gives without memswap."""

    gradients: list[torch.Tensor | None]  # on the CPU: they outlive a laboratory
    graphs: dict[str, Any]


@functools.cache
def plainly(how: str, depth: int, device: torch.device) -> Plain:
    """Trained once for all who compare with it: compiling it again takes a second or two."""
    plain, x = compiled(new_stack(device, depth), how), new_input(device)
    found = train_step(plain.model, lambda: plain.called(x))
    return Plain([None if one is None else one.cpu() for one in found], graphs())


@pytest.mark.one_schedule
@pytest.mark.parametrize(("how", "first"), ways((*LAYERS, *WHOLE)))
def test_what_is_compiled_is_compiled_as_without(
    device, new_pool, fresh_dynamo, recwarn, how, first
):
    x, pool, depth = new_input(device), new_pool(), DEPTHS[how]
    policy = SWAP if how in WHOLE else EVERYTHING
    expected, as_without = plainly(how, depth, device)
    recwarn.clear()
    model, called, manager = compiled(
        new_stack(device, depth),
        how,
        lambda given: memswap.manage(given, policy, pool=pool),
        first=first,
    )
    for _ in range(3):
        assert_same_gradients(train_step(model, lambda: called(x)), expected)
    assert not [str(one.message) for one in recwarn if "memswap" in str(one.message)]
    assert graphs() == as_without, "hooks changed what is compiled together"
    assert ("compiled as a whole" in manager.report()) == (how in WHOLE)
    assert_released(manager, pool)
    manager.remove()
    assert_same_gradients(train_step(model, lambda: called(x)), expected)


@pytest.mark.one_schedule
@pytest.mark.parametrize(("how", "first"), ways(WHOLE))
def test_what_a_model_saves_stays_that_is_compiled_as_a_whole(
    device, new_pool, fresh_dynamo, how, first
):
    """Its backward asks for all of it at once, so moving it would lower no peak."""
    x, pool = new_input(device), new_pool()
    expected, as_without = plainly(how, 3, device)
    model, called, manager = compiled(
        new_stack(device, 3),
        how,
        lambda given: memswap.manage(given, EVERYTHING, pool=pool),
        first=first,
    )
    with pytest.warns(UserWarning, match="compiled as a whole") as told:
        for _ in range(3):
            assert_same_gradients(train_step(model, lambda: called(x)), expected)
    assert [one.filename for one in told if "memswap" in str(one.message)] == [__file__], (
        "told once, at the user's own line"
    )
    assert graphs() == as_without
    stats = manager.stats()
    assert stats.kept["compiled as a whole"].tensors > 0
    assert "what it saves stays" in manager.report()
    assert_released(manager, pool, moved=False)
    manager.remove()


@pytest.mark.cpu_only
@pytest.mark.parametrize("how", [*LAYERS, *WHOLE])
def test_under_a_budget_what_compiled_code_saves_is_planned(device, new_pool, fresh_dynamo, how):
    x, expected = new_input(device), plainly(how, 3, device).gradients

    def steps(budget):
        model, called, manager = compiled(
            new_stack(device, 3),
            how,
            lambda given: memswap.manage(given, SWAP, pool=new_pool(), budget=budget),
        )
        with manager:
            for _ in range(6):
                assert_same_gradients(train_step(model, lambda: called(x)), expected)
                manager.wait_for_plan()
            assert manager.plan is not None

    if how in WHOLE:  # backward asks for all of a graph's tensors at once
        with pytest.raises(memswap.BudgetError, match="cannot be met"):
            steps("90%")
    steps("1MiB" if how in WHOLE else "90%")


@pytest.mark.cpu_only
def test_a_graph_that_the_model_breaks_is_saved_by_its_parts(device, new_pool, fresh_dynamo):
    """What the layers keep is offered once, and not to the model's scope again."""

    class Breaks(Stack):
        def forward(self, x):
            for layer in self.layers:
                torch._dynamo.graph_break()
                x = layer(x)
            return x.sum()

    def new_model():
        torch.manual_seed(0)
        return Breaks(3, 16)

    x, pool = new_input(device), new_pool()
    plain = compiled(new_model(), "torch.compile(model)")
    expected = train_step(plain.model, lambda: plain.called(x))
    as_without = graphs()
    model, called, manager = compiled(
        new_model(),
        "torch.compile(model)",
        lambda given: memswap.manage(given, SWAP, pool=pool),
    )
    for _ in range(2):
        assert_same_gradients(train_step(model, lambda: called(x)), expected)
    assert graphs()["stats"] == as_without["stats"]
    stats = manager.stats()
    kept = sum(count.tensors for count in stats.kept.values())
    seen = stats.moved_storages + stats.deduplicated_tensors + kept
    assert stats.offered_tensors == seen, "a tensor was counted twice"
    assert_released(manager, pool)


@pytest.mark.cpu_only
def test_a_model_inside_of_a_compiled_function_is_told(device, new_pool, fresh_dynamo):
    model, x = new_stack(device, 2), new_input(device)
    plain = torch.compile(lambda x: model(x) * 2, backend="aot_eager")
    expected = train_step(model, lambda: plain(x))
    with memswap.manage(model, EVERYTHING, pool=new_pool()):
        torch._dynamo.reset()
        with pytest.warns(UserWarning, match="block around the call of a compiled") as told:
            for _ in range(3):
                assert_same_gradients(train_step(model, lambda: plain(x)), expected)
        assert len(told) == 1
    pool = new_pool()
    saved = memswap.saved_tensors(EVERYTHING, pool=pool)

    def loss():
        with saved:
            return plain(x)

    for _ in range(2):
        assert_same_gradients(train_step(model, loss), expected)
    assert_released(saved, pool)


@pytest.mark.cpu_only
@pytest.mark.parametrize("door", ["manage", "saved_tensors"])
def test_nothing_of_memswap_is_compiled(device, new_pool, fresh_dynamo, recwarn, door):
    """Torch runs layers of its own classes under its frame evaluation, and compiles none of them.

    Nor is what their operators call to be compiled: that broke graphs, and warned of memswap's own
    functions. A hook makes torch compile such a layer, which is said.
    """
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(2))
    for layer in layers:
        layer.compile(backend="aot_eager")
    x = new_input(device)
    manager: Any = None
    saved = memswap.saved_tensors(EVERYTHING, pool=new_pool())
    if door == "manage":
        manager = memswap.manage(layers, EVERYTHING, pool=new_pool())
    for _ in range(3):
        with saved:
            layers[1](layers[0](x)).sum().backward()
    told = [str(one.message) for one in recwarn if "memswap" in str(one.message)]
    assert len(told) == (door == "manage"), told
    assert all("unless it has hooks" in one for one in told)
    assert not graphs()["graph_break"]
    if manager is not None:
        assert manager.stats().moved_storages > 0
        manager.remove()


@pytest.mark.cpu_only
def test_recipes_of_compiled_layers(device, new_pool, fresh_dynamo):
    x = new_input(device)
    expected, as_without = plainly("layer.compile", 3, device)
    policy = memswap.Policy(action=memswap.Action.RECOMPUTE, min_bytes=1)
    model, called, manager = compiled(
        new_stack(device, 3), "layer.compile", lambda given: memswap.manage(given, policy)
    )
    for _ in range(4):
        assert_same_gradients(train_step(model, lambda: called(x)), expected)
    assert graphs() == as_without
    manager.remove()


@pytest.mark.one_schedule
@pytest.mark.parametrize("where", ["inside", "outside"])
def test_a_block_in_a_compiled_function_or_around_it(device, new_pool, fresh_dynamo, where):
    """Inside, torch ends its graph at any context manager; the parts save in the block."""
    model, x = new_stack(device, depth=2), new_input(device)
    pool = new_pool()
    called = torch.compile(model, backend="aot_eager")
    expected = train_step(model, lambda: called(x))
    torch._dynamo.reset()
    saved = memswap.saved_tensors(EVERYTHING, pool=pool)

    def loss():
        with saved:
            return called(x)

    if where == "inside":
        called = model
        loss = torch.compile(loss, backend="aot_eager")
    for _ in range(3):
        assert_same_gradients(train_step(model, loss), expected)
    assert_released(saved, pool)
