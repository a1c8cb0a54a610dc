"""Recipes where torch's settings change, under modes, and beside compiled and checkpointed code."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers import assert_same_gradients, random
from recipe_helpers import RECOMPUTE, Region, check_steps, words_of
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import memswap
from memswap.engine import recipes

#: Recipes have no lane of their own; tests/race breaks their edges under all schedules.
pytestmark = pytest.mark.few_schedules


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recipes are used before they are proven."""
    monkeypatch.setattr(recipes, "PROOFS", 0)


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    """What a test sets is reset."""
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    precision = torch.get_float32_matmul_precision()
    onednn = torch.backends.mkldnn.enabled
    yield
    torch.backends.mkldnn.enabled = onednn
    torch.set_flush_denormal(False)
    torch.set_num_threads(threads)
    torch.set_default_dtype(dtype)
    torch.use_deterministic_algorithms(deterministic, warn_only=warns)
    torch.set_float32_matmul_precision(precision)


def feed_forward(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = F.layer_norm(x, (16,))
    gate, up = F.linear(y, w), F.linear(y, w.t())
    z = F.silu(gate) * up
    return x + F.linear(z, w).softmax(-1).sum(-1, keepdim=True) * z


SETTINGS: dict[str, Callable[[], None]] = {
    "threads": lambda: torch.set_num_threads(3 - min(torch.get_num_threads(), 2)),
    "default dtype": lambda: torch.set_default_dtype(torch.float64),
    "deterministic": lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    "precision": lambda: torch.set_float32_matmul_precision("medium"),
    "oneDNN": lambda: setattr(torch.backends.mkldnn, "enabled", False),
    "denormals": lambda: torch.set_flush_denormal(True),
}

OF_A_PROCESSOR = ("oneDNN", "denormals")

#: Half of it is a number as well, which no normal float32 is.
DENORMAL = 1e-39


def now() -> tuple[Any, ...]:
    return (
        torch.get_num_threads(),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.get_float32_matmul_precision(),
        torch.backends.mkldnn.enabled,
        (torch.tensor(DENORMAL) / 2).item(),
    )


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_that_changes_before_backward(device: torch.device, name: str) -> None:
    """What is run again runs as it ran; backward itself runs as it is set, and stays so."""
    if name in OF_A_PROCESSOR and device.type != "cpu":
        pytest.skip("simulated kernels are a processor's, and run when they like")
    numbers = 4097  # so many that threads share them

    def program(region: Region) -> list[torch.Tensor]:
        torch.set_num_threads(1)
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)
        torch.set_float32_matmul_precision("highest")
        torch.backends.mkldnn.enabled = True
        torch.set_flush_denormal(False)
        x = random(device, 16, numbers).requires_grad_()
        with region():
            y = x * 2
            total = y.sum(0)  # in parts, as many as there are threads
            wide = torch.arange(1, 5, device=device).float() / 3 * total[:4]
            whole = (torch.ones(4, dtype=torch.int64, device=device) * 2) / 3
            bent = F.gelu(total) * total.exp()  # on a CPU oneDNN's, whose bits are its own
            # By way of numbers that may be flushed to zero.
            faint = total.detach() * DENORMAL * 2.0**127
            loss = (total.sin() * total.exp()).mean() + (wide.exp() * whole).sum()
            loss = loss + (bent + faint.sin() * total).sum()
        SETTINGS[name]()
        before = now()
        (found,) = torch.autograd.grad(loss, x)
        assert now() == before, "a recipe has left a setting of its own behind"
        return [found]

    check_steps(program, steps=2)


@pytest.mark.cpu_only  # the simulated accelerator has no autocast of its own
@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("steps_between", [True, False])
def test_casts_of_autocast(cache: bool, steps_between: bool) -> None:
    """Autocast's cache holds a parameter's cast until the block ends, and lets go of it then."""
    device = torch.device("cpu")

    def program(region: Region) -> list[torch.Tensor]:
        w = nn.Parameter(random(device, 16, 16))
        optimizer = torch.optim.SGD([w], lr=0.1)
        found = []
        for step in range(3):
            x = random(device, 8, 16, seed=step)
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache), region():
                loss = feed_forward(feed_forward(x, w), w).float().square().mean()
            if steps_between and w.grad is not None:
                optimizer.step()
                optimizer.zero_grad()
            loss.backward()
            assert w.grad is not None
            found.append(w.grad.clone())
        return found

    block = check_steps(program, steps=2)
    assert any("cast(parameter)" in one for one in words_of(block))


@pytest.mark.cpu_only
def test_autocast_of_a_cpu_leaves_operators_alone_that_only_a_gpus_knows() -> None:
    """A norm and a power have rules in CUDA's autocast, and run as they are in a CPU's."""
    device = torch.device("cpu")

    def program(region: Region) -> list[torch.Tensor]:
        w, x = nn.Parameter(random(device, 16, 16)), random(device, 8, 16)

        def forward() -> torch.Tensor:
            y = F.layer_norm(F.linear(x, w), (16,))
            z = F.linear(y, w)
            z = 0.5 * z * (1 + torch.tanh(0.8 * (z + 0.044715 * z.pow(3))))
            return F.linear(z, w).float().sum()

        with torch.autocast("cpu", torch.bfloat16), region():
            loss = forward()
        return list(torch.autograd.grad(loss, w))

    words = words_of(check_steps(program, steps=2))
    assert any(one.startswith("layer_norm(") for one in words), words
    assert any(one.startswith("tanh(") and "pow" in one for one in words), words


@pytest.mark.cpu_only
def test_autocast_that_is_switched_within_the_forward_and_on_in_backward() -> None:
    device = torch.device("cpu")

    def program(region: Region) -> list[torch.Tensor]:
        w = nn.Parameter(random(device, 16, 16))
        x = random(device, 8, 16)
        with region():
            y = feed_forward(x, w)
            with torch.autocast("cpu", torch.bfloat16):
                y = feed_forward(y, w)
                with torch.autocast("cpu", enabled=False):
                    y = feed_forward(y.float(), w)
                y = y * w.sum().softmax(0)
            with torch.autocast("cpu", torch.float16):
                y = feed_forward(y, w)
        with torch.autocast("cpu", torch.bfloat16):
            return list(torch.autograd.grad(y.float().square().mean(), w))

    check_steps(program, steps=2)


class Functions(TorchFunctionMode):
    """Sees functions, and makes every sine a cosine."""

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return (torch.cos if func is torch.sin else func)(*args, **(kwargs or {}))


class Swaps(TorchDispatchMode):
    """Makes every sine a cosine, below autograd."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        aten = torch.ops.aten
        if func is aten.sin.default:
            return aten.cos.default(*args) * 1.5
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [Functions, Swaps])
@pytest.mark.parametrize("where", ["forward", "backward", "both"])
def test_modes_of_the_users(device: torch.device, mode: Any, where: str) -> None:
    def program(region: Region) -> list[torch.Tensor]:
        x = random(device, 8, 16).requires_grad_()
        in_forward = mode() if where != "backward" else contextlib.nullcontext()
        in_backward = mode() if where != "forward" else contextlib.nullcontext()
        with region(), in_forward:
            y = (x * 2).exp()
            y = torch.sin(y) * torch.sin(y.neg())
            loss = (y.square() * y.tanh()).sum()
        with in_backward:
            return list(torch.autograd.grad(loss, x))

    check_steps(program, steps=2, runs=None if mode is Swaps and where != "backward" else True)


class Tagged(torch.Tensor):
    """A subclass without data of its own."""


class Pair(torch.Tensor):
    """A wrapper of two tensors, of which it is the sum."""

    @staticmethod
    def __new__(cls, a: torch.Tensor, b: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, a.shape, dtype=a.dtype, device=a.device, requires_grad=a.requires_grad
        )

    def __init__(self, a: torch.Tensor, b: torch.Tensor) -> None:
        self.a, self.b = a, b

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        def unwrap(x: Any) -> Any:
            return x.a + x.b if isinstance(x, cls) else x

        out = func(*torch.utils._pytree.tree_map(unwrap, args), **(kwargs or {}))
        return cls(out, torch.zeros_like(out)) if func is torch.ops.aten.detach.default else out


@pytest.mark.parametrize("kind", ["subclass", "wrapper"])
def test_tensors_of_a_class_of_their_own(device: torch.device, kind: str) -> None:
    def program(region: Region) -> list[torch.Tensor]:
        x, b = random(device, 8, 16).requires_grad_(), random(device, 8, 16, seed=4)
        factor: torch.Tensor = b.as_subclass(Tagged) if kind == "subclass" else Pair(b, b * 0.5)
        with region():
            y = (x * 2).exp()
            z = y * factor
            loss = (z.sin() * (factor * 1.5) * z.cos()).sum()
        (found,) = torch.autograd.grad(loss, x)
        return [found.as_subclass(torch.Tensor)]

    check_steps(program, steps=2, runs=None)


def test_hooks_of_modules_and_tensors(device: torch.device) -> None:
    """They change what passes by, and one edits it."""

    def program(region: Region) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, 16), nn.Tanh())
        model.to(device)
        model[0].register_forward_hook(lambda module, args, out: out * 1.5)
        model[1].register_forward_pre_hook(lambda module, args: (args[0] + 0.5,))
        model[2].register_forward_hook(lambda module, args, out: out.mul_(0.5))
        model[1].register_full_backward_hook(lambda module, grads, outs: (grads[0] * 2,))
        x = random(device, 8, 16)
        with region():
            y = model(x).exp()
            y.register_hook(lambda grad: grad.sin())
            loss = (y * y.detach().cos()).sum()
        return list(torch.autograd.grad(loss, list(model.parameters())))

    check_steps(program, steps=2)


# --- beside checkpoints ---------------------------------------------------------------------------


def regions(kind: str) -> Callable[..., torch.Tensor]:
    """Runs a function as a checkpoint region of some kind."""
    from torch.utils.checkpoint import (
        CheckpointPolicy,
        create_selective_checkpoint_contexts,
    )

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        kept = "mm" in str(operator) or "silu" in str(operator)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    if kind == "selective":
        return lambda f, *args: checkpoint(
            f,
            *args,
            use_reentrant=False,
            context_fn=lambda: create_selective_checkpoint_contexts(policy),
        )
    if kind == "memswap":
        return memswap.checkpoint
    if kind == "memswap, selective":
        swapped = memswap.CheckpointPolicy.MUST_SWAP
        again = memswap.CheckpointPolicy.PREFER_RECOMPUTE

        def choose(context: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
            return swapped if "mm" in str(operator) else again

        return lambda f, *args: memswap.checkpoint(f, *args, policy_fn=choose)
    return lambda f, *args: checkpoint(f, *args, use_reentrant=kind == "reentrant")


REGIONS = ("reentrant", "plain", "selective", "memswap", "memswap, selective")


@pytest.mark.parametrize("kind", REGIONS)
@pytest.mark.parametrize("inside", [True, False])
def test_checkpoint_regions(device: torch.device, kind: str, inside: bool) -> None:
    """A region within the block, and a block within the region."""
    region_of = regions(kind)

    def program(region: Region) -> list[torch.Tensor]:
        w = nn.Parameter(random(device, 16, 16) / 4)
        x = random(device, 8, 16).requires_grad_()

        def layer(y: torch.Tensor) -> torch.Tensor:
            with contextlib.nullcontext() if inside else region():
                return feed_forward(y, w)

        with region() if inside else contextlib.nullcontext():
            y = feed_forward(x * 1.0, w)
            y = region_of(layer, y)
            y = region_of(layer, y.exp().log1p())
            loss = (y.sin() * y).sum()
        loss.backward()
        assert w.grad is not None and x.grad is not None
        return [w.grad, x.grad]

    check_steps(program, steps=3, runs=None)


@pytest.mark.parametrize("kind", REGIONS)
def test_managed_units_in_regions_and_regions_in_units(device: torch.device, kind: str) -> None:
    region_of = regions(kind)

    class Unit(nn.Module):
        def __init__(self, is_region: bool) -> None:
            super().__init__()
            self.is_region = is_region
            self.weight = nn.Parameter(random(device, 16, 16) / 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.is_region:
                return region_of(feed_forward, x, self.weight)
            return feed_forward(x, self.weight)

    def gradients(model: nn.ModuleList) -> list[torch.Tensor]:
        x = random(device, 8, 16).requires_grad_()
        x = x * 1.0
        for number, unit in enumerate(model):
            x = region_of(unit, x) if number == 1 else unit(x)
        model.zero_grad()
        x.square().mean().backward()
        return [one.grad.clone() for one in model.parameters() if one.grad is not None]

    model = nn.ModuleList([Unit(number == 2) for number in range(4)])
    expected = gradients(model)
    with memswap.manage(model, RECOMPUTE) as manager:
        for _ in range(4):
            assert_same_gradients(gradients(model), expected)
        assert manager.stats().recipe_runs > 0


# --- beside compiled code -------------------------------------------------------------------------


@pytest.mark.cpu_only
@pytest.mark.usefixtures("inductor")
@pytest.mark.parametrize("inside", [True, False], ids=["managed", "beside"])
def test_compiled_layers_beside_eager_ones(inside: bool) -> None:
    """Compiled code overwrites what it has made, with nobody to count it."""
    device = torch.device("cpu")
    torch.manual_seed(0)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(16, 16) / 4)
            self.table = nn.Parameter(torch.randn(8, 16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x + F.embedding(torch.arange(8), self.table)
            return feed_forward(torch.cat([y, y.sin()], 1)[:, ::2].relu() + y, self.weight)

    layers = nn.ModuleList(Layer() for _ in range(4))
    for number in (1, 2):
        layers[number].compile()

    def gradients() -> list[torch.Tensor]:
        x = random(device, 8, 16)
        for layer in layers:
            x = layer(x)
        layers.zero_grad()
        x.square().mean().backward()
        return [one.grad.clone() for one in layers.parameters() if one.grad is not None]

    managed = list(layers) if inside else [layers[0], layers[3]]
    # Hooks change what is compiled together: the comparison is with hooks that keep everything.
    with memswap.manage(managed, memswap.Policy("keep", min_bytes=1)):
        gradients()
        expected = gradients()
    torch._dynamo.reset()
    with memswap.manage(managed, RECOMPUTE) as manager:
        for _ in range(4):
            assert_same_gradients(gradients(), expected)
        assert manager.stats().recipe_runs > 0
