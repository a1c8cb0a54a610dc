"""Models train on the simulated device, with the same bits under every schedule."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from simdev_models import assert_bitwise_equal, train_language_model
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import simdev
from simdev import SCHEDULES, run_in
from simdev.laboratory import FREE

DEVICE = simdev.NAME
ALL = [*SCHEDULES, FREE]
EAGER = SCHEDULES[0]

every_schedule = pytest.mark.parametrize("schedule", ALL, ids=str)


def same_bits_everywhere(body, schedule):
    """The eager result is the reference: sim against sim has no kernel differences."""
    assert_bitwise_equal(run_in(EAGER, body), run_in(schedule, body))


@every_schedule
def test_an_mlps_gradients_have_the_cpus_bits(schedule):
    def gradients(device):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).to(device)
        model(torch.randn(8, 16).to(device)).pow(2).mean().backward()
        return [p.grad.cpu() for p in model.parameters()]

    assert_bitwise_equal(gradients("cpu"), run_in(schedule, gradients, DEVICE))


@every_schedule
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_a_language_model_trains_without_a_blocking_operator(schedule, optimizer):
    make = functools.partial(getattr(torch.optim, optimizer), foreach=True)
    before = simdev.counters.operators()[1]
    same_bits_everywhere(lambda: train_language_model(DEVICE, optimizer=make), schedule)
    assert simdev.counters.operators()[1] == before, simdev.counters.operators()[2]


def test_a_language_model_agrees_with_the_cpu():
    with sdpa_kernel(SDPBackend.MATH):
        expected = train_language_model("cpu", steps=3)
    for a, b in zip(expected, run_in(EAGER, train_language_model, DEVICE, steps=3), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@every_schedule
def test_bf16_training(schedule):
    same_bits_everywhere(lambda: train_language_model(DEVICE, dtype=torch.bfloat16), schedule)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("norm", "shape"),
    [
        (lambda: nn.LayerNorm(8), (4, 8)),
        (lambda: nn.LayerNorm(8, elementwise_affine=False), (4, 8)),
        (lambda: nn.GroupNorm(2, 8), (4, 8, 3)),
        (lambda: nn.BatchNorm1d(8), (4, 8)),
    ],
    ids=["layer", "layer_plain", "group", "batch"],
)
def test_norms_have_the_cpus_bits_forward_and_backward(norm, shape, dtype):
    def train(device):
        torch.manual_seed(0)
        x = torch.randn(shape).to(dtype).to(device).requires_grad_()
        module = norm().to(dtype).to(device)
        y = module(x)
        (y * torch.arange(8, device=device).view(8, *[1] * (len(shape) - 2))).sum().backward()
        return [t.detach().cpu() for t in (y, x.grad, *(p.grad for p in module.parameters()))]

    assert_bitwise_equal(train("cpu"), run_in(EAGER, train, DEVICE))


@every_schedule
def test_checkpoint_restores_the_random_state_of_dropout(schedule):
    def gradients(use_checkpoint):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)).to(DEVICE)
        x = torch.randn(4, 8, device=DEVICE, requires_grad=True)
        y = checkpoint(model, x, use_reentrant=False) if use_checkpoint else model(x)
        y.sum().backward()
        return [x.grad.cpu(), *(p.grad.cpu() for p in model.parameters())]

    plain = run_in(schedule, gradients, False)
    assert_bitwise_equal(plain, run_in(schedule, gradients, True))
    assert_bitwise_equal(run_in(EAGER, gradients, False), plain)


def test_random_numbers_follow_the_seed_and_the_saved_state():
    def body():
        device_module = getattr(torch, DEVICE)
        torch.manual_seed(1)
        a = torch.randn(4, device=DEVICE)
        state = device_module.get_rng_state()
        b = torch.rand(3, device=DEVICE)
        device_module.set_rng_state(state)
        c = torch.rand(3, device=DEVICE)
        torch.manual_seed(1)
        generator = torch.Generator(device=DEVICE).manual_seed(5)
        d = torch.randn(4, device=DEVICE)
        e = torch.randn(4, device=DEVICE, generator=generator)
        generator.manual_seed(5)
        f = torch.randn(4, device=DEVICE, generator=generator)
        return [t.cpu() for t in (a, b, c, d, e, f)]

    a, b, c, d, e, f = run_in(EAGER, body)
    assert torch.equal(a, d) and torch.equal(b, c) and torch.equal(e, f)
    assert not torch.equal(a[:3], b)


@every_schedule
def test_autocast_lowers_matmuls_and_raises_norms(schedule):
    def body():
        torch.manual_seed(0)
        linear, norm = nn.Linear(8, 8).to(DEVICE), nn.LayerNorm(8).to(DEVICE)
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            y = linear(torch.randn(4, 8).to(DEVICE))
            z = norm(y)
        assert (y.dtype, z.dtype) == (torch.bfloat16, torch.float32)
        z.pow(2).sum().backward()
        return [z.detach().cpu(), linear.weight.grad.cpu()]

    same_bits_everywhere(body, schedule)


def test_grad_scaler_skips_the_step_that_overflowed():
    def body():
        scaler = torch.amp.GradScaler(DEVICE)
        p = nn.Parameter(torch.ones(3, device=DEVICE))
        opt = torch.optim.SGD([p], lr=0.25)
        for factor in (2.0, float("inf")):
            opt.zero_grad()
            scaler.scale((p * factor).sum()).backward()
            scaler.step(opt)
            scaler.update()
        return p.tolist()

    assert run_in(EAGER, body) == [0.5] * 3


@every_schedule
def test_convolution_batch_norm_and_pooling(schedule):
    def train(device):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        model = model.to(device)
        x = torch.randn(2, 3, 8, 8).to(device).requires_grad_()
        F.max_pool2d(model(x), 2).pow(2).sum().backward()
        values = [x.grad, model[1].running_mean, *(p.grad for p in model.parameters())]
        return [v.cpu() for v in values]

    same_bits_everywhere(lambda: train(DEVICE), schedule)
    for a, b in zip(train("cpu"), run_in(schedule, train, DEVICE), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("schedule", [EAGER, SCHEDULES[1]], ids=str)
def test_compile_with_aot_eager(schedule):
    def body():
        torch._dynamo.reset()
        x = torch.ones(3, device=DEVICE, requires_grad=True)
        torch.compile(lambda t: (t * 2 + 1).relu(), backend="aot_eager")(x).sum().backward()
        return x.grad.tolist()

    assert run_in(schedule, body) == [2.0] * 3


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda: torch.tensor([1, 0, 2], device=DEVICE).nonzero().flatten().tolist(), [0, 2]),
        (lambda: (x := torch.arange(5, device=DEVICE))[x > 2].tolist(), [3, 4]),
        (lambda: torch.tensor([3.0, 1, 2], device=DEVICE).sort()[1].tolist(), [1, 2, 0]),  # noqa: PLW0108
        (
            lambda: torch.cat(
                [torch.ones(2, device=DEVICE), torch.zeros(1, device=DEVICE)]
            ).tolist(),
            [1, 1, 0],
        ),
        (
            lambda: (
                torch.zeros(3, device=DEVICE)
                .index_put((torch.tensor([1], device=DEVICE),), torch.ones(1, device=DEVICE))
                .tolist()
            ),
            [0, 1, 0],
        ),
        (
            lambda: torch.einsum("ij,jk->ik", *[torch.ones(2, 2, device=DEVICE)] * 2).tolist(),
            [[2, 2], [2, 2]],
        ),
        (lambda: torch.fft.fft(torch.ones(2, device=DEVICE)).real.tolist(), [2, 0]),  # noqa: PLW0108
        (
            lambda: torch.func.grad(lambda x: (x * x).sum())(torch.ones(2, device=DEVICE)).tolist(),
            [2, 2],
        ),
        (lambda: torch.vmap(lambda x: x * 2)(torch.ones(2, 1, device=DEVICE)).tolist(), [[2], [2]]),
    ],
    ids=["nonzero", "mask", "sort", "cat", "index_put", "einsum", "fft", "func_grad", "vmap"],
)
def test_operators_of_every_kind(function, expected):
    for schedule in (EAGER, SCHEDULES[1]):
        assert run_in(schedule, function) == expected


def test_errors_of_arguments_surface_at_the_call_and_of_data_at_a_synchronisation():
    def wrong_shapes():
        torch.ones(2, 3, device=DEVICE) @ torch.ones(2, 3, device=DEVICE)

    def wrong_data():
        row = F.embedding(torch.tensor([7], device=DEVICE), torch.ones(3, 2, device=DEVICE))
        with pytest.raises(IndexError, match="out of range"):
            row.cpu()

    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        run_in(EAGER, wrong_shapes)
    run_in(EAGER, wrong_data)


def test_changing_numbers_do_not_grow_the_shape_memo():
    def body():
        x = torch.ones(4, device=DEVICE)
        sizes = []
        for i in range(200):
            x.mul(1.0 + i / 7).add(x, alpha=i / 3).pow(1 + i / 100)
            sizes.append(simdev._C.memo_size())
        return sizes

    sizes = run_in(EAGER, body)
    assert sizes[-1] == sizes[5]


def test_an_operator_that_was_redefined_is_not_taken_for_its_predecessor():
    for columns in (2, 5):
        library = torch.library.Library("simdev_redefined", "DEF")
        library.define("widen(Tensor x) -> Tensor")
        make = lambda x, n=columns: x.new_ones(x.shape[0], n)  # noqa: E731
        library.impl("widen", make, "CPU")
        library.impl("widen", make, "Meta")
        shape = run_in(
            EAGER,
            lambda: tuple(torch.ops.simdev_redefined.widen(torch.ones(3, device=DEVICE)).shape),
        )
        library._destroy()
        del library
        assert shape == (3, columns)
