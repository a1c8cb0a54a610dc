"""Hooks on modules: calls that repeat, recur, raise at every moment, and never end."""

from __future__ import annotations

import weakref
from functools import partial

import pytest
import torch
from eventually import eventually
from helpers import (
    EVERYTHING,
    Block,
    assert_released,
    assert_same_gradients,
    collect,
    flush_autograd,
    new_input,
    new_stack,
    random,
    train_step,
)
from torch import nn

import memswap

SWAP = memswap.Policy(action=memswap.Action.SWAP, min_bytes=1)


def top_hooks():
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


@pytest.fixture(params=["manage", "chain"])
def managed(request):
    """Puts memswap on modules: by order, or as a chain."""
    door = memswap.manage if request.param == "manage" else memswap.chain
    return lambda modules, pool: door(modules, EVERYTHING, pool=pool)


class Shared(nn.Module):
    """A few layers, each called several times in one forward; or as many layers of their own."""

    def __init__(self, layers: int, times: int, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Linear(width, width)
        self.layers = nn.ModuleList([Block(width) for _ in range(layers)])
        self.times = times

    def forward(self, x):
        x = self.embed(x)
        for _ in range(self.times):
            for layer in self.layers:
                x = layer(x)
        return x.square().mean()


def iterations(manager, modules, run):
    """How many iterations a step's calls belong to."""
    seen = []
    handles = [
        one.register_forward_hook(lambda *_: seen.append(manager._engine.iteration))
        for one in modules
    ]
    run()
    for handle in handles:
        handle.remove()
    assert len(seen) >= len(modules)
    return len({id(iteration) for iteration in seen})


@pytest.mark.one_schedule
def test_layers_in_a_loop_are_one_iteration(device, new_pool):
    torch.manual_seed(0)
    model, x = Shared(2, 6).to(device), new_input(device)
    expected = train_step(model, lambda: model(x))
    pool = new_pool()
    manager = memswap.manage(model.layers, SWAP, pool=pool)
    for _ in range(3):
        found = iterations(manager, model.layers, lambda: train_step(model, lambda: model(x)))
        assert found == 1, f"2 layers called 6 times in a forward are taken for {found} forwards"
    assert_same_gradients(train_step(model, lambda: model(x)), expected)
    model.zero_grad(set_to_none=True)
    assert_released(manager, pool)


@pytest.mark.one_schedule
def test_layers_in_a_loop_have_one_plan(device, new_pool):
    """The plan of a loop can do what the plan of as many layers can."""

    def planned(layers, times):
        torch.manual_seed(0)
        model = Shared(layers, times).to(device)
        expected = train_step(model, lambda: model(x))
        with memswap.manage(model.layers, SWAP, pool=new_pool(), budget=most) as manager:
            for _ in range(6):
                assert_same_gradients(train_step(model, lambda: model(x)), expected)
            manager.reset_stats()
            train_step(model, lambda: model(x))
            flush_autograd(device)
            assert manager.stats().peak_resident_bytes <= most, "the budget does not hold"
            return manager.plan.kept_peak_bytes

    x, most = random(device, 4, 32, 16), 300 * 2**10
    assert planned(2, 6) == pytest.approx(planned(12, 1), rel=0.01)


def test_forwards_that_do_not_depend_on_each_other_are_iterations_of_their_own(device, new_pool):
    model, x = new_stack(device, depth=2), new_input(device)
    manager = memswap.manage(model.layers, EVERYTHING, pool=new_pool())
    first = model(x)
    before = manager._engine.iteration
    second = model(x)
    assert manager._engine.iteration is not before, "two microbatches are taken for one forward"
    chained = manager._engine.iteration
    third = model.layers[1](model.layers[0](random(device, 2, 8, 16) * second)).sum()
    assert manager._engine.iteration is chained, "what follows from a forward is one with it"
    (first + third).backward()


class Recursive(nn.Module):
    """Calls itself."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.block = Block(width)
        self.trouble = None

    def forward(self, x, depth=0):
        x = self.block(x)
        if depth < 2:
            x = self(x, depth + 1)
        if depth == 0 and self.trouble is not None:
            x = self.trouble(x)
        return self.block(x)


class Nested(nn.Module):
    """The same, each level with a name of its own."""

    def __init__(self, recursive: Recursive, levels: int) -> None:
        super().__init__()
        self.block = recursive.block
        self.inner = Nested(recursive, levels - 1) if levels else None

    def forward(self, x):
        x = self.block(x)
        if self.inner is not None:
            x = self.inner(x)
        return self.block(x)


def offered(managed, new_pool, modules, run):
    manager = managed(modules, new_pool())
    run()
    flush_autograd(torch.device("cpu"))
    found = manager.stats().offered_tensors
    manager.remove()
    return found


def test_a_module_that_calls_itself(device, new_pool, managed):
    torch.manual_seed(0)
    model = Recursive().to(device)
    nested, x = Nested(model, 2), new_input(device)
    expected = train_step(model, lambda: model(x).sum())
    levels = [nested, nested.inner, nested.inner.inner]
    wanted = offered(managed, new_pool, levels, lambda: nested(x).sum().backward())
    manager = managed([model], new_pool())
    for _ in range(3):
        manager.reset_stats()
        assert_same_gradients(train_step(model, lambda: model(x).sum()), expected)
        assert manager.stats().offered_tensors == wanted, (
            "an inner call ended the hooks of the outer one: what the outer one saves stays"
        )
        assert top_hooks() is None


class RaisesBefore:
    """A pre-hook of somebody else's, which raises on demand before memswap's."""

    def __init__(self, module, *, first):
        self.armed = False
        self.handle = module.register_forward_pre_hook(self, prepend=first)

    def __call__(self, module, args):
        if self.armed:
            raise ValueError("not now")


class Catches(nn.Module):
    """Goes on with its second block where the first one raises."""

    def __init__(self, error):
        super().__init__()
        self.inner, self.block = Block(16), Block(16)
        self.error = error

    def forward(self, x):
        try:
            x = self.inner(x)
        except self.error:
            x = x * 1
        return self.block(x)


@pytest.mark.parametrize("first", [True, False], ids=["before ours", "after ours"])
def test_anothers_pre_hook_that_raises_ends_nobody_elses_call(device, new_pool, managed, first):
    torch.manual_seed(0)
    outer, x = Catches(ValueError).to(device), new_input(device)
    without = nn.Sequential(outer.block)
    manager = managed([outer], new_pool())
    without(x * 1).sum().backward()
    manager.reset_stats()
    manager.remove()
    outer.zero_grad(set_to_none=True)
    wanted = offered(managed, new_pool, [outer.block], lambda: outer.block(x * 1).sum().backward())

    pool = new_pool()
    manager = managed([outer, outer.inner], pool)
    raises = RaisesBefore(outer.inner, first=first)
    raises.armed = True
    for _ in range(3):
        manager.reset_stats()
        outer(x).sum().backward()
        found = manager.stats().offered_tensors
        assert found == wanted, f"{found} tensors were seen of the outer module's {wanted}"
        assert top_hooks() is None
    outer.zero_grad(set_to_none=True)
    assert_released(manager, pool)


def test_anothers_pre_hook_that_raises_in_a_recursion(device, new_pool, managed):
    """Our hook at the end runs, of a module whose outer call has begun, for a call that has not."""
    torch.manual_seed(0)
    model, x = Recursive().to(device), new_input(device)

    def trouble(x):
        raises.armed = True
        try:
            return model(x, 1)
        except ValueError:
            return x * 1
        finally:
            raises.armed = False

    wanted = offered(managed, new_pool, [model], lambda: model(x).sum().backward())
    manager = managed([model], new_pool())
    raises = RaisesBefore(model, first=True)
    model.trouble = trouble
    model(x).sum().backward()
    assert manager.stats().offered_tensors == wanted, "the outer call lost its hooks"
    assert top_hooks() is None


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["forward", "forward hook before ours", "forward hook after"])
def test_a_call_that_raises_leaves_nothing(device, new_pool, managed, where, error):
    model, x = new_stack(device), new_input(device)
    expected = train_step(model, lambda: model(x))
    pool = new_pool()
    raising = [False]

    def trouble(*_):
        if raising[0]:
            raise error("on purpose")

    layer = model.layers[1]
    if where == "forward hook before ours":
        layer.register_forward_hook(trouble)
    manager = managed(model.layers, pool)
    if where == "forward hook after":
        layer.register_forward_hook(trouble)
    if where == "forward":
        layer.down.register_forward_pre_hook(trouble)
    for _ in range(2):
        raising[0] = True
        with pytest.raises(error):
            model(x)
        raising[0] = False
        assert_same_gradients(train_step(model, lambda: model(x)), expected)
        assert top_hooks() is None, "hooks of a call that raised are still installed"
    model.zero_grad(set_to_none=True)
    collect()
    assert_released(manager, pool)


def test_an_interrupt_inside_two_managers_is_cleared_by_the_next_step(device, new_pool):
    """The inner manager's hooks lie above the outer one's, which is the first to be called."""
    model, x = new_stack(device), new_input(device)
    expected = train_step(model, lambda: model(x))
    pools = [new_pool(), new_pool()]
    outer = memswap.manage([model], EVERYTHING, pool=pools[0])
    inner = memswap.manage(model.layers, EVERYTHING, pool=pools[1])

    def interrupt(module, args):
        raise KeyboardInterrupt

    for _ in range(2):
        handle = model.layers[1].down.register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(x)
        handle.remove()
        assert_same_gradients(train_step(model, lambda: model(x)), expected)
        assert top_hooks() is None, "hooks of the interrupted forward are still installed"
    model.zero_grad(set_to_none=True)
    for manager, pool in ((outer, pools[0]), (inner, pools[1])):
        manager.remove()
        assert_released(manager, pool)


def test_a_call_that_was_interrupted_and_survived(device, new_pool):
    """The outer module catches the interrupt and goes on: its own hooks end with it."""

    def interrupt(module, args):
        raise KeyboardInterrupt

    torch.manual_seed(0)
    model, x = Catches(KeyboardInterrupt).to(device), new_input(device)
    model.inner.down.register_forward_pre_hook(interrupt)
    expected = train_step(model, lambda: model(x).sum())
    pool = new_pool()
    manager = memswap.manage([model, model.inner], EVERYTHING, pool=pool)
    for _ in range(3):
        assert_same_gradients(train_step(model, lambda: model(x).sum()), expected)
        assert top_hooks() is None, "the inner call's hooks were taken for the outer one's"
    model.zero_grad(set_to_none=True)
    assert_released(manager, pool)


@pytest.mark.cpu_only
def test_compiled_layer_that_raises_leaves_nothing(device, new_pool, managed):
    """Compiled code runs no hook of a call that raises."""
    torch._dynamo.reset()
    model, x = new_stack(device, depth=2), new_input(device)
    bad = random(device, 2, 8, 15)
    for layer in model.layers:
        layer.compile(backend="aot_eager")
    expected = train_step(model, lambda: model(x))
    torch._dynamo.reset()
    pool = new_pool()
    manager = managed(model.layers, pool)
    for _ in range(3):
        assert_same_gradients(train_step(model, lambda: model(x)), expected)
        with pytest.raises(Exception, match="15"):
            model.layers[0](bad)
    assert_same_gradients(train_step(model, lambda: model(x)), expected)
    assert top_hooks() is None
    model.zero_grad(set_to_none=True)
    assert_released(manager, pool)
    torch._dynamo.reset()


@pytest.mark.parametrize("when", ["inside a call", "between calls"])
def test_hooks_removed_in_a_forward(device, new_pool, managed, when):
    model, x = new_stack(device), new_input(device)
    expected = train_step(model, lambda: model(x))
    pool = new_pool()
    manager = managed(model.layers, pool)
    train_step(model, lambda: model(x))
    where = model.layers[1].down if when == "inside a call" else model.layers[1]
    handle = where.register_forward_pre_hook(lambda module, args: manager.remove())
    assert_same_gradients(train_step(model, lambda: model(x)), expected)
    handle.remove()
    assert top_hooks() is None
    before = manager.stats().offered_tensors
    assert_same_gradients(train_step(model, lambda: model(x)), expected)
    assert manager.stats().offered_tensors == before
    model.zero_grad(set_to_none=True)
    assert_released(manager, pool)


# --- two on the same layers -----------------------------------------------------------------------

SECOND = {
    "manage": lambda model, pool: memswap.manage(model.layers, EVERYTHING, pool=pool),
    "manage the model": lambda model, pool: memswap.manage(model, EVERYTHING, pool=pool),
    "manage one layer": lambda model, pool: memswap.manage([model.layers[2]], pool=pool),
    "chain": lambda model, pool: memswap.chain(model.layers, EVERYTHING, pool=pool),
    "swap_modules": lambda model, pool: memswap.swap_modules(
        model, ["layers.0.up", "layers.{*}"], only_input=True, pool=pool
    ),
}


@pytest.mark.parametrize("second", SECOND)
def test_a_second_manager_of_a_layer_is_refused(device, new_pool, managed, second):
    model, x = new_stack(device), new_input(device)
    expected = train_step(model, lambda: model(x))
    pool, other = new_pool(), new_pool()
    first = managed(model.layers, pool)

    def hooks():
        return [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]

    before = hooks()
    with pytest.raises(ValueError, match=r"this Block is managed already.*call remove\(\)"):
        SECOND[second](model, other)
    assert hooks() == before, "what was refused has left hooks"
    for _ in range(2):
        assert_same_gradients(train_step(model, lambda: model(x)), expected)
    first.remove()
    with SECOND[second](model, other) as allowed:
        assert_same_gradients(train_step(model, lambda: model(x)), expected)
        assert allowed.stats().offered_tensors > 0


class Holds(nn.Module):
    """Keeps what it computed and so its graph, as a pruned layer does its weight's."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.held = None

    def forward(self, x):
        self.held = self.linear(x).sin()
        return self.held * x


@pytest.mark.parametrize("backward", [False, True], ids=["forward alone", "with backward"])
@pytest.mark.parametrize(
    "door",
    [
        memswap.manage,
        memswap.chain,
        partial(memswap.manage, budget="60%"),
        partial(memswap.manage, budget="device:90%"),
    ],
    ids=["manage", "chain", "budget", "device budget"],
)
def test_a_layer_that_holds_its_graph_goes_and_with_it_what_has_left(
    device, new_pool, door, backward
):
    """No backward takes the graph down, and Python's collector does not look into it."""
    layers = nn.ModuleList([Holds() for _ in range(3)]).to(device)
    x, pool = torch.linspace(-1, 1, 640, device=device).view(10, 64), new_pool()
    manager = door(layers, EVERYTHING, pool=pool)
    for layer in layers:
        x = layer(x)
    assert manager.stats().moved_storages > 0
    if backward:
        x.sum().backward()
    gone = weakref.ref(layers[0])
    del layers, layer, manager, x
    collect()
    assert gone() is None, "memswap's hooks hold a layer whose graph it holds itself"
    assert eventually(lambda: not pool.statistics().blocks), "what has left stays away for ever"
