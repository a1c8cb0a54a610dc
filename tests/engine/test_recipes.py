"""Action.RECOMPUTE: storages that the operator that made them gives again, bit for bit."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import EVERYTHING, assert_nothing_left, assert_same_gradients, collect, random
from torch import nn
from torch.utils.checkpoint import checkpoint

import memswap
from memswap.engine import recipes, training

pytestmark = pytest.mark.own_form("its recipes are learnt, which takes proofs")

RECOMPUTE = memswap.Policy(action="recompute", min_bytes=1)


class Gated(nn.Module):
    """A SwiGLU feed-forward behind a norm, and a residual sum."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gate, self.up = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y)).tanh()


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recipes are used before they are proven."""
    monkeypatch.setattr(recipes, "PROOFS", 0)


def new_model(device: torch.device, depth: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Gated() for _ in range(depth))).to(device)


def gradients_of(model: nn.Module, x: torch.Tensor, context: Any = None) -> list[torch.Tensor]:
    with context or contextlib.nullcontext():
        loss = model(x).square().mean()
    return list(torch.autograd.grad(loss, list(model.parameters())))


def words_of(manager: memswap.types.Manager) -> set[str]:
    """The recipes that are in force, in words."""
    known = manager._engine.recipes
    assert known is not None
    return {words for _, (words, proofs, failed) in known.learnt() if proofs >= 2 and not failed}


def test_a_model_learns_for_two_steps_and_then_recomputes(device):
    model, x = new_model(device), random(device, 4, 16)
    expected = gradients_of(model, x)
    with memswap.manage(model, RECOMPUTE) as manager:
        for step in range(5):
            manager.reset_stats()
            assert_same_gradients(gradients_of(model, x), expected)
            stats = manager.stats()
            if step < recipes.PROOFS:
                assert stats.recipe_storages == 0, f"step {step} used what was not proven"
        assert stats.recipe_storages > 6 and stats.recipe_bytes > 0
        assert 0 < stats.recipe_runs <= stats.recipe_storages + 3
        assert {"silu(saved)", "mul(saved, saved)", "add(saved, saved)"} <= words_of(manager)
        assert "of these, as recipes" in manager.report()
        assert_nothing_left(stats)


def test_without_an_action_a_cpu_recomputes_what_it_can_and_an_accelerator_swaps(device, new_pool):
    model, x = new_model(device), random(device, 64, 16)
    expected = gradients_of(model, x)
    used = {}
    for recipes_on in (True, False):
        pool = None if device.type == "cpu" else new_pool()
        policy = memswap.Policy(min_bytes=1, recipes=recipes_on)
        with memswap.manage(model, policy, pool=pool) as manager:
            for _ in range(recipes.PROOFS + 2):
                manager.reset_stats()
                assert_same_gradients(gradients_of(model, x), expected)
            used[recipes_on] = manager.stats().recipe_storages
            assert ("recipes: " in manager.report()) == (used[recipes_on] > 0)
            assert (manager._engine.recipes is None) == (not recipes_on or device.type != "cpu")
    assert used[False] == 0, "one argument is to turn recipes off"
    assert (used[True] > 0) == (device.type == "cpu")


def test_recipes_take_fewer_bytes_than_anything_else(device):
    model, x = new_model(device), random(device, 64, 16)
    peaks = {}
    for action in ("keep", "recompute"):
        with memswap.manage(model, memswap.Policy(action, min_bytes=1)) as manager:
            for _ in range(4):
                manager.reset_stats()
                gradients_of(model, x)
            peaks[action] = manager.stats().peak_resident_bytes
    assert peaks["recompute"] < 0.75 * peaks["keep"]


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("again", [1, 2])
def test_a_graph_may_run_again_and_beside_another(device, again):
    model, x = new_model(device), random(device, 4, 16)
    other = random(device, 4, 16, seed=2)
    wanted = list(model.parameters())
    expected = gradients_of(model, x), gradients_of(model, other)
    block = memswap.saved_tensors(RECOMPUTE)
    with block:
        first = model(x).square().mean()
    with block:
        second = model(other).square().mean()
    for _ in range(again):
        found = torch.autograd.grad(first, wanted, retain_graph=True)
        assert_same_gradients(found, expected[0])
    assert_same_gradients(torch.autograd.grad(second, wanted), expected[1])
    assert block.stats().recipe_runs > again
    del first, second
    collect()
    assert_nothing_left(block.stats())


@pytest.mark.accelerator
@pytest.mark.one_schedule
@pytest.mark.usefixtures("at_once")
def test_what_a_recipe_makes_on_the_way_is_let_go_of_once_it_was_read(device, new_pool):
    module = torch.get_device_module(device)
    x = random(device, 64, 1024).requires_grad_()
    with memswap.saved_tensors(RECOMPUTE, pool=new_pool()) as saved:
        made = x.sin()
        for _ in range(6):
            made = made + 1
        loss = made.sin().sum()
    del made
    collect()
    torch.accelerator.synchronize()
    before = module.memory_allocated()
    module.reset_peak_memory_stats()
    torch.autograd.grad(loss, x)
    torch.accelerator.synchronize()
    taken = (module.max_memory_allocated() - before) / x.nbytes
    assert saved.stats().recipe_runs == 1 and saved.stats().recipe_storages == 1
    assert taken < 5, f"a row of seven operators has {taken:.1f} results at once"


@pytest.mark.usefixtures("at_once")
def test_second_derivatives(device):
    model, x = new_model(device, 2), random(device, 4, 16).requires_grad_()

    def penalty(context: Any) -> list[torch.Tensor]:
        with context:
            (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
            loss = slope.square().sum()
        return list(torch.autograd.grad(loss, list(model.parameters()), allow_unused=True))

    expected = penalty(contextlib.nullcontext())
    block = memswap.saved_tensors(RECOMPUTE)
    assert_same_gradients(penalty(block), expected)
    assert block.stats().recipe_runs > 0


@pytest.mark.usefixtures("at_once")
def test_under_autocast_casts_of_parameters_are_recipes(device):
    model, x = new_model(device), random(device, 64, 16)

    def run(context: Any) -> list[torch.Tensor]:
        with context, torch.autocast(device.type, torch.bfloat16):
            loss = model(x).float().square().mean()
        return list(torch.autograd.grad(loss, list(model.parameters())))

    if device.type not in ("cpu", "cuda"):
        pytest.skip("the simulated accelerator has no autocast of its own")
    expected = run(contextlib.nullcontext())
    with memswap.manage(model, RECOMPUTE) as manager:
        assert_same_gradients(run(contextlib.nullcontext()), expected)
        words = {row[1][0] for row in manager._engine.recipes.learnt()}
        assert "cast(parameter)" in words
        assert manager.stats().recipe_runs > 0


@pytest.mark.usefixtures("at_once")
@pytest.mark.cpu_only
def test_a_smaller_tensor_is_kept_in_place_of_its_cast(new_pool):
    """The bfloat16 sum in front of a float32 norm, which autograd does not save."""

    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into = nn.Linear(16, 16, dtype=torch.bfloat16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.cumsum(self.into(x), 0)  # saves nothing, and is not run again
            wide = y.float()
            return (wide * wide.pow(2).mean(-1, keepdim=True).rsqrt()).to(x.dtype)

    torch.manual_seed(0)
    model = nn.Sequential(Cast(), Cast())
    x = random(torch.device("cpu"), 64, 16, dtype=torch.bfloat16)
    expected = gradients_of(model, x)
    with memswap.manage(model, RECOMPUTE, pool=new_pool()) as manager:
        assert_same_gradients(gradients_of(model, x), expected)
        assert "cast(kept)" in {row[1][0] for row in manager._engine.recipes.learnt()}
        assert_nothing_left(manager.stats())


@pytest.mark.cpu_only
def test_what_is_kept_for_a_recipe_is_shorter_than_the_frame_of_its_result():
    """A sum of a float32 and a bfloat16 tensor has a long frame, a cast no longer one than what it
    was cast from: the bfloat16 tensor is kept for the sum alone."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into = nn.Linear(64, 64, dtype=torch.bfloat16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            added = torch.cumsum(self.into(x.tanh().bfloat16()), 0)  # nothing saves it
            y = torch.cumsum(x, 0)
            y = y.exp2() * 0.5 + added if self.sums else added.float()
            return torch.cumsum(y.sin(), 1).exp()  # saved last, and needed at once

        sums = True

    def in_force(sums: bool) -> int:
        torch.manual_seed(0)
        layer = Layer()
        layer.sums = sums
        x = random(torch.device("cpu"), 512, 64).requires_grad_()
        expected = gradients_of(layer, x)
        with memswap.manage([layer], memswap.Policy("recompute", min_bytes=4096)) as manager:
            for _ in range(4):
                manager.reset_stats()
                assert_same_gradients(gradients_of(layer, x), expected)
            known = manager._engine.recipes
            assert known is not None
            words = {row[1][0] for row in known.learnt()}
            assert ("add(mul(saved), kept)" if sums else "cast(kept)") in words, words
            return manager.stats().recipe_storages

    # The cast to bfloat16 is a recipe in both.
    assert in_force(sums=True) == in_force(sums=False) + 1


@pytest.mark.usefixtures("at_once")
def test_a_source_that_is_edited_in_the_forward_was_read_before(device, new_pool):
    """Autograd allows it: no operator has saved the source."""
    weight = random(device, 16, 16).requires_grad_()
    x = random(device, 8, 16)

    def run(context: Any) -> list[torch.Tensor]:
        with context:
            source = torch.cumsum(x @ weight, 0)
            y = source.double()  # eight bytes of four
            loss = (y * y).sum()
            source.mul_(3)  # the recipe reads it
            loss = loss + source.sum()
        return list(torch.autograd.grad(loss, [weight]))

    expected = run(contextlib.nullcontext())
    block = memswap.saved_tensors(RECOMPUTE, pool=new_pool())
    assert_same_gradients(run(block), expected)
    assert block.stats().recipe_storages > 0


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_a_step_between_forward_and_backward(device, optimizer):
    """What was computed from a parameter is what it was before the step."""

    def run(recomputes: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        weight = nn.Parameter(random(device, 16, 16))
        step = optimizer([weight], lr=0.1)
        x = random(device, 8, 16).requires_grad_()
        weight.grad = torch.ones_like(weight)
        with memswap.saved_tensors(RECOMPUTE) if recomputes else contextlib.nullcontext():
            y = (x.double() @ weight.double()).square().sum()
        step.step()
        return list(torch.autograd.grad(y, [x, weight]))

    assert_same_gradients(run(True), run(False))


@pytest.mark.usefixtures("at_once")
def test_an_edit_that_nobody_sees_is_refused_in_autograds_words(device):
    weight = random(device, 16, 16).requires_grad_()
    with memswap.saved_tensors(RECOMPUTE):
        loss = (random(device, 8, 16).requires_grad_().double() @ weight.double()).square().sum()
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(memswap.InplaceEditError, match="modified by an inplace operation"):
        loss.backward()


def test_a_place_whose_source_is_edited_each_step_keeps_its_bytes(device):
    weight = nn.Parameter(random(device, 16, 16))
    x = random(device, 8, 16).requires_grad_()
    block = memswap.saved_tensors(RECOMPUTE)
    for _ in range(5):
        copy = weight.detach().clone()
        expected = torch.autograd.grad((x.double() @ copy.double()).square().sum(), x)
        with block:
            loss = (x.double() @ weight.double()).square().sum()
        with torch.no_grad():
            weight.mul_(1.5)  # by nobody whose operators are known
        assert_same_gradients(torch.autograd.grad(loss, x), expected)
    assert any(row[1][2] for row in block._engine.recipes.learnt()), "no place was given up"


@pytest.mark.parametrize("training", [True, False])
def test_dropout_is_never_run_again(device, training):
    model = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.5), nn.Linear(64, 16)).to(device)
    model.train(training)
    x = random(device, 8, 16)
    expected = []
    for step in range(5):
        torch.manual_seed(step)
        expected.append(gradients_of(model, x))
    with memswap.manage([model], RECOMPUTE) as manager:
        for step in range(5):
            torch.manual_seed(step)
            assert_same_gradients(gradients_of(model, x), expected[step])
        assert manager._engine.recipes is not None
        words = [words for _, (words, _, _) in manager._engine.recipes.learnt()]
    assert not any("dropout" in one or "bernoulli" in one for one in words), words


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_inside_and_outside(device, reentrant):
    model, x = new_model(device), random(device, 4, 16).requires_grad_()
    wanted = list(model.parameters())

    def run(context: Any) -> list[torch.Tensor]:
        with context:
            y = model[0](x)
            y = checkpoint(model[1], y, use_reentrant=reentrant)
            loss = model[2](y).square().mean()
        model.zero_grad()
        loss.backward()
        return [p.grad.clone() for p in wanted]

    expected = run(contextlib.nullcontext())
    outer = memswap.saved_tensors(RECOMPUTE)
    assert_same_gradients(run(outer), expected)
    assert outer.stats().recipe_runs > 0

    inner = memswap.saved_tensors(RECOMPUTE)

    def region(y: torch.Tensor) -> torch.Tensor:
        with inner:
            return model[1](y)

    def outside() -> list[torch.Tensor]:
        model.zero_grad()
        model[2](
            checkpoint(region, model[0](x), use_reentrant=reentrant)
        ).square().mean().backward()
        return [p.grad.clone() for p in wanted]

    assert_same_gradients(outside(), expected)


@pytest.mark.usefixtures("at_once")
def test_a_graph_that_is_dropped_leaves_nothing(device):
    model, x = new_model(device), random(device, 4, 16)
    block = memswap.saved_tensors(RECOMPUTE)
    with block:
        loss = model(x).square().mean()
    assert block.stats().recipe_storages > 0
    del loss
    collect()
    assert_nothing_left(block.stats())
    known = weakref.ref(block._engine.recipes)
    del block
    gc.collect()
    assert known() is None, "the recipes live longer than their engine"


@pytest.mark.usefixtures("at_once")
def test_a_scaled_loss_and_a_skipped_step(device):
    if device.type not in ("cpu", "cuda"):
        pytest.skip("GradScaler knows no simulated accelerator")

    def run(recomputes: bool) -> tuple[list[torch.Tensor], list[float]]:
        model, x = new_model(device), random(device, 4, 16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler(device.type, init_scale=2.0**127, backoff_factor=2.0**-60)
        scales = []
        manager = memswap.manage(model, RECOMPUTE) if recomputes else None
        with manager or contextlib.nullcontext():
            for _ in range(5):
                optimizer.zero_grad()
                with torch.autocast(device.type, torch.bfloat16):
                    loss = (32 * model(x).float()).square().sum()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                scales.append(scaler.get_scale())
        if manager is not None:
            assert manager.stats().recipe_runs > 0
        return [p.detach().clone() for p in model.parameters()], scales

    (managed, scales), (plain, expected) = run(True), run(False)
    assert_same_gradients(managed, plain)
    assert scales == expected
    assert scales[0] < 2.0**127, "no step was skipped"
    assert scales[-1] == scales[-2], "no step was taken"


def test_a_dispatch_mode_in_backward_does_not_see_what_is_run_again(device):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Names(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if func is not torch.ops.aten.detach.default:  # what any pair of hooks adds
                self.names.append(func.name())
            return func(*args, **(kwargs or {}))

    model, x = new_model(device), random(device, 4, 16)

    def backward() -> list[str]:
        model.zero_grad(set_to_none=True)
        loss = model(x).square().mean()
        with Names() as seen:
            loss.backward()
        return seen.names

    expected = backward()
    with memswap.manage(model, RECOMPUTE) as manager:
        for _ in range(4):
            assert backward() == expected
        assert manager.stats().recipe_runs > 0


@pytest.mark.usefixtures("at_once")
@pytest.mark.cpu_only
def test_an_operator_of_the_users_is_run_again_where_its_name_is_given():
    library = torch.library.Library("memswap_test_recipes", "FRAGMENT")
    library.define("halve(Tensor x) -> Tensor")
    library.impl("halve", lambda x: torch.from_numpy(x.numpy() / 2), "CPU")
    try:
        halve = torch.ops.memswap_test_recipes.halve
        x = random(torch.device("cpu"), 8, 16)

        def run(policy: memswap.Policy) -> int:
            weight = random(torch.device("cpu"), 8, 16, seed=3).requires_grad_()
            block = memswap.saved_tensors(policy)
            with block:
                y = x * weight.cos()
                z = halve(y.detach()) * weight
            z.sum().backward()
            assert weight.grad is not None
            return block.stats().recipe_storages

        named = memswap.Policy(
            action="recompute", min_bytes=1, operators=["memswap_test_recipes::halve"]
        )
        assert run(named) > run(RECOMPUTE)
    finally:
        library._destroy()


@pytest.mark.cpu_only
@pytest.mark.parametrize("proofs", [recipes.PROOFS, 0])
def test_an_operator_that_gives_other_bits_each_time_is_found_out(monkeypatch, proofs):
    """Without proofs the gradients are wrong: the comparison would see it."""
    monkeypatch.setattr(recipes, "PROOFS", proofs)
    calls = [0]

    def drift(x: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        return torch.from_numpy(x.numpy() + 2.0 ** -(calls[0] + 3))

    library = torch.library.Library("memswap_test_drift", "FRAGMENT")
    library.define("drift(Tensor x) -> Tensor")
    library.impl("drift", drift, "CPU")
    try:
        policy = memswap.Policy("recompute", min_bytes=1, operators="memswap_test_drift::drift")
        block = memswap.saved_tensors(policy)
        right = []
        for _ in range(5):
            weight = random(torch.device("cpu"), 8, 16, seed=3, dtype=torch.float64)
            weight.requires_grad_()
            with block:
                factor = torch.ops.memswap_test_drift.drift(weight.cos().detach())
                loss = (factor * weight.sin()).sum()
                expected = factor * weight.detach().cos()
            del factor
            loss.backward()
            right.append(torch.equal(weight.grad, expected))
    finally:
        library._destroy()
    assert all(right) == (proofs > 0)
    if proofs:
        assert any("drift" in row[1][0] and row[1][2] for row in block._engine.recipes.learnt())


@pytest.mark.usefixtures("at_once")
def test_what_an_optimizer_changes_is_read_before(device, monkeypatch):
    """Without the hook the demand is refused: the tests of steps would see it."""

    class Handle:
        def remove(self) -> None: ...

    monkeypatch.setattr(training, "register_optimizer_step_pre_hook", lambda hook: Handle())
    weight = nn.Parameter(random(device, 16, 16))
    step = torch.optim.SGD([weight], lr=0.1)
    weight.grad = torch.ones_like(weight)
    x = random(device, 8, 16).requires_grad_()
    with memswap.saved_tensors(RECOMPUTE):
        loss = (x.double() @ weight.double()).square().sum()
    step.step()
    with pytest.raises(memswap.InplaceEditError):
        torch.autograd.grad(loss, x)


def test_names_of_operators_have_a_form():
    with pytest.raises(ValueError, match="expected namespace::name"):
        memswap.Policy(operators="silu")
    with pytest.raises(TypeError, match="names of operators"):
        memswap.Policy(operators=[1])
    assert memswap.Policy(operators="a::b").operators == ("a::b",)


def test_without_recompute_no_operator_is_observed(device):
    block = memswap.saved_tensors(EVERYTHING)
    assert block._engine.recipes is None


def test_a_function_may_choose_recompute_for_some(device):
    model, x = new_model(device), random(device, 4, 16)
    expected = gradients_of(model, x)

    def choose(tensor: torch.Tensor, info: memswap.TensorInfo) -> memswap.Action:
        return memswap.Action.RECOMPUTE if info.unit == "1" else memswap.Action.KEEP

    with memswap.manage(model, memswap.Policy(fn=choose, min_bytes=1)) as manager:
        for _ in range(4):
            assert_same_gradients(gradients_of(model, x), expected)
        assert {row[0][0] for row in manager._engine.recipes.learnt()} == {"1"}
        assert manager.stats().recipe_runs > 0


def run_on_two_threads(body: Callable[[], None]) -> None:
    import threading

    errors: list[BaseException] = []

    def guarded() -> None:
        try:
            body()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded) for _ in range(2)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert not errors, errors


@pytest.mark.usefixtures("at_once")
@pytest.mark.cpu_only
def test_two_threads_have_logs_of_their_own():
    device = torch.device("cpu")
    model, x = new_model(device), random(device, 4, 16)
    expected = gradients_of(model, x)
    block = memswap.saved_tensors(RECOMPUTE)

    def body() -> None:
        for _ in range(5):
            assert_same_gradients(gradients_of(model, x, block), expected)

    run_on_two_threads(body)
