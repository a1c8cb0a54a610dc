"""Recipes of operators of many kinds, used before they are proven: no bit differs."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from helpers import random
from recipe_helpers import Region, check_steps, words_of
from torch import nn
from torch.nn import functional as F

import memswap
from memswap.engine import recipes

#: Recipes have no lane of their own; tests/race breaks their edges under all schedules.
pytestmark = pytest.mark.few_schedules

Operator = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recipes are used before they are proven: what is wrong once shows at once."""
    monkeypatch.setattr(recipes, "PROOFS", 0)


def strided(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = (x * w).t().contiguous().t().sin()
    return y[::2] * y[1::2].cos() + y[:1].expand(4, -1) * 2


def channels_last(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = (x * w).view(2, 2, 4, 8).to(memory_format=torch.channels_last)
    z = F.silu(y) * y.exp().to(memory_format=torch.contiguous_format)
    return F.group_norm(z, 2) * z.float()


def foreach(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    parts = [(x * w).sin(), (x + w).cos()]
    torch._foreach_mul_([one.detach() for one in parts], 1.0)
    scaled = torch._foreach_mul(parts, 0.5)
    return torch.cat(list(torch._foreach_exp(scaled))) * 2


def functional(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = torch.addcmul(x, x, w, value=0.5)
    y = torch.lerp(y, w, 0.25).clamp(-2, 2)
    return torch.where(y > 0, y.sigmoid(), y.tanh()).masked_fill(w > 1, 0.5)


def one_of_several_outputs(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x * w
    normed, mean, rstd = torch.native_layer_norm(y, (16,), None, None, 1e-5)
    return normed.exp() + mean.detach() + rstd.detach()


def scalars(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    scale = (w.mean() * 3).exp()  # without a dimension
    nothing = x[:0] * w[:0]  # without an element
    return x * scale.sin() + nothing.exp().sum() * nothing.sum()


def with_a_number(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = 2.0**0.5 * (x * w).pow(3) + 0.044715
    return torch.tanh(y * torch.tensor(0.7978845608)) * y


def embedded(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    index = torch.arange(8, device=x.device) % 5
    return F.embedding(index, w, padding_idx=2).exp() * (x * w).sin()


def nested_views(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = (x * w).exp()
    part = y.view(4, 2, 16)[:, 1].transpose(0, 1)
    return part.sin() * part.cos() * y.view(-1)[3:4]


def expanded(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    row = (x[:1] * w[:1]).sin()
    return (row.expand(8, 16) * x).exp() * row.expand_as(x).contiguous().cos()


def stacked(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = torch.stack([x.sin(), (w * x).cos()])
    z = torch.cat([y[0], y[1].flip(0)]).roll(1, 0)
    return F.pad(z, (1, 1)).exp() * F.pad(z, (0, 2), value=0.5)


def soft(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = (x @ w.t()).float()
    return F.log_softmax(y, -1).exp() * F.softmax(y, 0) + F.glu(y, -1).sum()


def own_result(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x * w).tanh().sigmoid().exp().rsqrt().sqrt().reciprocal()


def cast(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = (x * w).bfloat16()
    return (y * y.double().exp().half()).float() * y.to(torch.float64, copy=True).float()


def two_maps(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.vmap(lambda a, b: (a * b).sin() * b.exp())(x, w)


def jacobian_products(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    value, tangent = torch.func.jvp(lambda a: (a * w).tanh(), (x,), (torch.ones_like(x),))
    return value * tangent.sin()


def edited_between(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x * w
    z = y + 1  # saves nothing
    y.mul_(2).sigmoid_()
    z.add_(y.detach())
    return z.sin() * y


OPERATORS: dict[str, Operator] = {
    function.__name__: function
    for function in (
        strided, channels_last, foreach, functional, one_of_several_outputs, scalars,
        with_a_number, embedded, nested_views, expanded, stacked, soft, own_result, cast,
        edited_between,
    )
}  # fmt: skip
#: Their tensors are no plain ones while the function runs.
TRANSFORMS: dict[str, Operator] = {
    function.__name__: function for function in (two_maps, jacobian_products)
}


def gradients(
    operator: Operator, device: torch.device, region: Region, *, twice: bool = False
) -> list[torch.Tensor]:
    x, w = (random(device, 8, 16, seed=one).requires_grad_() for one in (1, 2))
    with region():
        loss = operator(x * 1.5, w * 0.5).float().square().sum()  # neither is a leaf
        if twice:
            (slope,) = torch.autograd.grad(loss, x, create_graph=True)
            loss = loss + slope.square().sum()
    found = torch.autograd.grad(loss, [x, w], retain_graph=True)
    return [loss.detach(), *found, *torch.autograd.grad(loss, [x, w])]


@pytest.mark.parametrize("name", OPERATORS)
def test_no_bit_differs(device: torch.device, name: str) -> None:
    check_steps(lambda region: gradients(OPERATORS[name], device, region), steps=2)


@pytest.mark.parametrize("name", [one for one in OPERATORS if one != "foreach"])
def test_no_bit_of_a_second_derivative_differs(device: torch.device, name: str) -> None:
    check_steps(lambda region: gradients(OPERATORS[name], device, region, twice=True))


@pytest.mark.parametrize("name", TRANSFORMS)
def test_no_bit_differs_under_a_transform(device: torch.device, name: str) -> None:
    check_steps(lambda region: gradients(TRANSFORMS[name], device, region), steps=2, runs=None)


RANDOM: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.3) * x,
    "feature dropout": lambda x: F.dropout1d(x, 0.3) * x,
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.3).exp(),
    "rrelu": lambda x: F.rrelu(x, training=True).sin(),
    "bernoulli": lambda x: torch.bernoulli(x.detach().sigmoid()) * x,
    "bernoulli in place": lambda x: torch.empty_like(x).bernoulli_(0.5).div_(0.5) * x,
    "noise": lambda x: torch.randn_like(x).exp() * x,
    "gumbel": lambda x: F.gumbel_softmax(x) * x,
    "multinomial": lambda x: x.gather(1, torch.multinomial(x.detach().exp(), 2)).exp(),
}


@pytest.mark.parametrize("name", RANDOM)
def test_what_draws_random_numbers_never_draws_again(device: torch.device, name: str) -> None:
    """Nor does what is run again change what is drawn afterwards."""

    def program(region: Region) -> list[torch.Tensor]:
        torch.manual_seed(5)
        x = random(device, 8, 16).requires_grad_()
        with region():
            loss = RANDOM[name](x * 1.5).sum()
        (found,) = torch.autograd.grad(loss, x)
        return [found, torch.rand(4, device=device)]

    words = words_of(check_steps(program, steps=2, runs=None))
    for one in ("dropout", "rrelu", "bernoulli", "randn", "multinomial"):
        assert not any(one in recipe for recipe in words), words


def test_an_embedding_that_scales_its_rows(device: torch.device) -> None:
    """max_norm edits the table in each forward, without a graph and in place."""
    index = torch.arange(8, device=device) % 5

    def program(region: Region) -> list[torch.Tensor]:
        table = nn.Embedding(5, 16, padding_idx=1, max_norm=1.0).to(device)
        with torch.no_grad():
            table.weight.copy_(random(device, 5, 16, seed=3))
        with region():
            y = table(index)
            y = y.exp() * table(index).cos() * table.weight.sin()[:1]
        y.sum().backward()
        assert table.weight.grad is not None
        return [table.weight.grad, table.weight.detach().clone()]

    check_steps(program, steps=2, runs=None)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_running_statistics_are_those_of_one_forward(
    device: torch.device, momentum: float | None
) -> None:
    def program(region: Region) -> list[torch.Tensor]:
        norm = nn.BatchNorm1d(16, momentum=momentum).to(device)
        x = random(device, 8, 16).requires_grad_()
        for _ in range(2):
            with region():
                y = F.silu(norm(x * 2)) * norm.running_mean
            norm.train(not norm.training)
        with region():
            z = norm(x * 2).exp()
        found = torch.autograd.grad(y.sum() + z.sum(), [x, *norm.parameters()])
        return [*found, norm.running_mean.clone(), norm.running_var.clone()]  # type: ignore[union-attr, operator]

    check_steps(program, steps=2)


def test_what_the_host_reads_is_read_once(device: torch.device) -> None:
    """A program that branches on a value, and one that makes a number of it."""

    def program(region: Region) -> list[torch.Tensor]:
        x = random(device, 8, 16).requires_grad_()
        with region():
            y = (x * 2).exp()
            scale = y.max().item()
            z = y / scale * (y.sin() if bool((y > scale / 2).any()) else y.cos())
            chosen = z[z > 0.1].exp()  # as many as there are
        return list(torch.autograd.grad(chosen.sum(), x))

    check_steps(program, steps=2)


def test_an_operator_with_several_outputs_runs_once(device: torch.device) -> None:
    def program(region: Region) -> list[torch.Tensor]:
        x = random(device, 8, 16).requires_grad_()

        def normed(x: torch.Tensor) -> torch.Tensor:
            y, mean, _ = torch.native_layer_norm(x * 2, (16,), None, None, 1e-5)
            return (y.sin() * mean.detach().exp()).sum()

        with region():
            loss = normed(x)
        return list(torch.autograd.grad(loss, x))

    block = check_steps(program)
    layer_norms = [one for one in words_of(block) if one.startswith("layer_norm")]
    assert len(layer_norms) == 1, words_of(block)
    stats = block.stats()
    assert stats.recipe_runs < stats.recipe_storages, "each output was made by a run of its own"


@pytest.fixture
def opaque() -> Iterator[None]:
    """An operator that copies its input, and then writes into the copy as a kernel does."""
    library = torch.library.Library("memswap_test_opaque", "FRAGMENT")
    library.define("above(Tensor x) -> Tensor")

    def above(x: torch.Tensor) -> torch.Tensor:
        made = x.clone()
        made.numpy()[made.numpy() < 0.5] = 0.5  # counted by nobody
        return made

    library.impl("above", above, "CPU")
    yield
    library._destroy()


@pytest.mark.cpu_only
@pytest.mark.usefixtures("opaque")
def test_what_a_kernel_calls_is_its_own_business() -> None:
    """The copy inside is no recipe of the result, though their bits may be equal for years."""

    def program(region: Region) -> list[torch.Tensor]:
        w = random(torch.device("cpu"), 8, 16).requires_grad_()
        with region():
            x = (w * 2).detach()
            z = x * w * torch.ops.memswap_test_opaque.above(x)
        return list(torch.autograd.grad(z.square().sum(), w))

    check_steps(program, runs=None)


@pytest.mark.cpu_only
def test_a_factor_is_no_copy_of_its_matrix() -> None:
    """LAPACK works in place, in a clone of its input."""

    def program(region: Region) -> list[torch.Tensor]:
        x = random(torch.device("cpu"), 8, 8).requires_grad_()
        with region():
            matrix = x @ x.t() + 8 * torch.eye(8)
            loss = matrix.sin().sum()  # saves the matrix
            loss = loss + (torch.linalg.cholesky(matrix) * 2).exp().sum()
            loss = loss + torch.linalg.inv(matrix).sum()
            loss = loss + torch.linalg.qr(matrix).R.sin().sum()
        return list(torch.autograd.grad(loss, x))

    check_steps(program, runs=None)


def test_a_function_of_the_users_own_feeds_recipes(device: torch.device) -> None:
    """What it gives, and what it saves, may be sources and results."""

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: torch.Tensor, w: torch.Tensor):  # type: ignore[no-untyped-def]
            y = x * w
            kept = y.sin()
            ctx.save_for_backward(y, kept, w)
            ctx.mark_non_differentiable(kept)
            return y.exp(), kept

        @staticmethod
        def backward(ctx, gradient: torch.Tensor, _: torch.Tensor):  # type: ignore[no-untyped-def]
            y, kept, w = ctx.saved_tensors
            return gradient * y.exp() * kept * w, gradient * kept

    def operator(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y, kept = Own.apply(x, w)
        return F.silu(y) * kept * y.cos()

    check_steps(lambda region: gradients(operator, device, region), steps=2)


def test_a_long_row_of_cheap_operators_is_run_again_in_parts(device: torch.device) -> None:
    """Each reads what the one before it gave. Nothing recurses through all of them, and the first
    demand does not bring all of them back."""
    length, nbytes = 4000, 8 * 16 * 4

    def program(region: Region) -> list[torch.Tensor]:
        x, w = (random(device, 8, 16, seed=one).requires_grad_() for one in (1, 2))
        with region():
            y = x * 0.99
            for _ in range(length):
                y = y * w
                y = y / w
            loss = y.sum()
        return list(torch.autograd.grad(loss, [x, w]))

    block = check_steps(program)
    stats = block.stats()
    assert stats.recipe_storages > length
    assert stats.peak_resident_bytes < 0.7 * 2 * length * nbytes


def test_policies_by_size_leave_small_sources_where_they_are(device: torch.device) -> None:
    policy = memswap.Policy("recompute", min_bytes=256)
    check_steps(
        lambda region: gradients(OPERATORS["scalars"], device, region), steps=2, policy=policy,
        runs=None,
    )  # fmt: skip
