"""Every view of a storage is rebuilt exactly: size, strides, offset, dtype and bits."""

from __future__ import annotations

import pytest
import torch
from helpers import (
    EVERYTHING,
    assert_released,
    assert_same_gradients,
    assert_the_same_within,
    random,
    round_trip,
)
from torch import nn

import memswap

pytestmark = pytest.mark.every_action


def test_views_of_one_storage_move_together(device, new_pool):
    pool = new_pool()
    engine = memswap.saved_tensors(EVERYTHING, pool=pool)

    def make():
        base = random(device, 12, 4)
        return [
            base,
            base[3:],
            base.t(),
            base.view(48),
            base[::2, 1],
            base[:, None].expand(12, 3, 4),
        ]

    seen, expected = round_trip(engine, make, device)
    assert seen == expected, "a view came back different"
    stats = engine.stats()
    assert stats.moved_storages == 1, f"{stats.moved_storages} transfers for one storage"
    assert stats.moved_bytes == 12 * 4 * 4
    assert stats.deduplicated_tensors == 5
    assert stats.returned_storages == 1, "views of one storage came back apart"
    assert_released(engine, pool)


VIEWS = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.transpose(0, 2),
    "permuted": lambda t: t.permute(2, 0, 1),
    "slice at an offset": lambda t: t[1:, 2:],
    "strided slice": lambda t: t[:, ::2, 1::3],
    "one row": lambda t: t[2],
    "0-d": lambda t: t[1, 2, 3],
    "expand with stride 0": lambda t: t[:, :1].expand(4, 100, 8),
    "expand all": lambda t: t[0, 0, 0].expand(5, 5),
    "overlapping as_strided": lambda t: t.as_strided((20, 9), (2, 1), 5),
    "as_strided with large gaps": lambda t: t.as_strided((3, 2), (50, 7), 3),
    "unfold": lambda t: t.view(-1).unfold(0, 7, 3),
    "diagonal": lambda t: t.diagonal(0, 0, 1),
    "narrow at the very end": lambda t: t.view(-1)[-1:],
    "empty slice": lambda t: t[:0],
    "one dimension of length 1 with an odd stride": lambda t: t.as_strided((1, 4), (77, 2), 1),
}
KINDS = {
    "fp32": torch.float32,
    "fp64": torch.float64,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "int64": torch.int64,
    "int8": torch.int8,
    "bool": torch.bool,
    "complex64": torch.complex64,
}


@pytest.mark.parametrize("settle", [True, False], ids=["away", "perhaps on its way"])
@pytest.mark.parametrize("name", VIEWS)
def test_view_comes_back_with_size_stride_offset_and_bits(device, new_pool, name, settle):
    pool = new_pool()
    engine = memswap.saved_tensors(EVERYTHING, pool=pool)
    seen, expected = round_trip(
        engine, lambda: [VIEWS[name](random(device, 4, 6, 8))], device, settle=settle
    )
    assert seen == expected, f"{name}: the view that backward got differs from the one saved"
    if "empty" not in name:
        assert engine.stats().moved_storages == 1, f"{name}: the storage was not moved"
        assert engine.stats().returned_storages == 1 or not settle, f"{name}: it never came back"
    assert_released(engine, pool, moved="empty" not in name)


@pytest.mark.parametrize("name", KINDS)
def test_dtype_comes_back_bit_for_bit(device, new_pool, name):
    pool = new_pool()
    engine = memswap.saved_tensors(EVERYTHING, pool=pool)

    def make():
        base = random(device, 5, 7, dtype=KINDS[name])
        return [base, base.t()[2:], base[1, 1:]]

    seen, expected = round_trip(engine, make, device)
    assert seen == expected, f"{name}: bits, dtype or strides changed"
    assert engine.stats().moved_storages == 1
    assert_released(engine, pool)


def test_nan_payloads_signed_zeros_infinities_and_denormals_survive(device, new_pool):
    engine = memswap.saved_tensors(EVERYTHING, pool=new_pool())
    patterns = [0x7FC12345, 0x7F800001, -0x00000001, -0x80000000, 0x7F800000, 1, 0x007FFFFF]

    def make():
        return [torch.tensor(patterns, dtype=torch.int32).view(torch.float32).to(device)]

    seen, expected = round_trip(engine, make, device)
    assert seen == expected, "special values lost their bits"
    assert seen[0].content == torch.tensor(patterns, dtype=torch.int32).numpy().tobytes()
    assert engine.stats().moved_storages == 1


def test_conjugate_and_negative_views_stay_lazy(device, new_pool):
    engine = memswap.saved_tensors(EVERYTHING, pool=new_pool())

    def make():
        base = random(device, 3, 5, dtype=torch.complex64)
        return [base.conj(), base.conj().t(), base.conj().imag, base.real, torch.view_as_real(base)]

    seen, expected = round_trip(engine, make, device)
    assert [s.conj for s in seen] == [True, True, False, False, False], "the conjugate bit is lost"
    assert [s.neg for s in seen] == [False, False, True, False, False], "the negative bit is lost"
    assert seen == expected
    assert engine.stats().moved_storages == 1


def test_reinterpreted_dtype_is_a_view_too(device, new_pool):
    engine = memswap.saved_tensors(EVERYTHING, pool=new_pool())

    def make():
        base = random(device, 8, 4)
        return [base, base.view(torch.int32), base.view(torch.int16)[:, 3:]]

    seen, expected = round_trip(engine, make, device)
    assert seen == expected
    assert engine.stats().moved_storages == 1


def test_channels_last_stays_channels_last(device, new_pool):
    pool = new_pool()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3)).to(device)
    model = model.to(memory_format=torch.channels_last)
    x = random(device, 2, 3, 8, 8).to(memory_format=torch.channels_last)
    model(x).square().sum().backward()
    expected = [p.grad for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    engine = memswap.saved_tensors(EVERYTHING, pool=pool)
    with engine:
        loss = model(x).square().sum()
    loss.backward()
    assert_same_gradients([p.grad for p in model.parameters()], expected)
    del loss
    seen, wanted = round_trip(
        engine, lambda: [random(device, 2, 3, 4, 5).to(memory_format=torch.channels_last)], device
    )
    assert seen == wanted and seen[0].stride == (60, 1, 15, 3), "channels_last was lost"
    assert_released(engine, pool)


def test_expanded_tensor_moves_its_few_bytes_only(device, new_pool):
    engine = memswap.saved_tensors(EVERYTHING, pool=new_pool())
    seen, expected = round_trip(engine, lambda: [random(device, 5, 1).expand(5, 1000)], device)
    assert seen == expected
    assert engine.stats().moved_bytes == 20, "an expanded tensor was materialised"


def test_shifted_labels_of_a_causal_language_model(device, new_pool):
    pool = new_pool()
    engine = memswap.saved_tensors(EVERYTHING, pool=pool, prefetch_bytes=0)
    weight = random(device, 16, 11).requires_grad_()

    def loss():
        tokens = random(device, 3, 9, dtype=torch.int64, seed=4) % 11
        logits = random(device, 3, 9, 16, seed=5) @ weight
        # Two looks at one storage of labels: one at an offset, one from the start.
        shifted = nn.functional.cross_entropy(
            logits[:, :-1].reshape(-1, 11), tokens[:, 1:].reshape(-1)
        )
        direct = nn.functional.nll_loss(
            logits.log_softmax(-1)[:, 0], tokens[:, -1], reduction="sum"
        )
        first = nn.functional.nll_loss(logits.log_softmax(-1)[:, 1], tokens[:, 0])
        return shifted + direct + first

    assert_the_same_within(engine, pool, weight, loss, steps=3)


def test_gradient_that_is_a_view_of_what_came_back_survives(device, new_pool):
    """A backward that returns a view of its unpacked tensor, kept for long (torchtune's case)."""

    class ReturnsView(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, other):
            ctx.save_for_backward(other)
            return x * 1

        @staticmethod
        def backward(ctx, gradient):
            (other,) = ctx.saved_tensors
            return other.view(-1)[: gradient.numel()].view_as(gradient), None

    pool = new_pool()
    engine = memswap.saved_tensors(EVERYTHING, pool=pool)
    x = torch.zeros(4, 4, device=device, requires_grad=True)
    with engine:
        out = ReturnsView.apply(x, random(device, 40, seed=3))
        for number in range(4):  # more storages come and go after it
            out = out * random(device, 4, 4, seed=number).exp()
    out.sum().backward()
    del out
    churn = [torch.full((40,), 7.0, device=device) for _ in range(8)]
    expected = random(device, 40, seed=3)[:16].view(4, 4)
    assert_same_gradients([x.grad], [expected])
    del churn
    assert_released(engine, pool)


@pytest.mark.one_schedule
def test_any_chain_of_views_comes_back_identical(device, new_pool):
    hypothesis = pytest.importorskip("hypothesis")
    from hypothesis import strategies as st

    pool = new_pool()
    engine = memswap.saved_tensors(EVERYTHING, pool=pool)

    def apply(t, step):
        kind, a, b, c = step
        if kind == "transpose" and t.dim() >= 2:
            return t.transpose(a % t.dim(), b % t.dim())
        if kind == "slice" and t.dim():
            dim = a % t.dim()
            length = t.size(dim)
            start = b % (length + 1)
            return t[(slice(None),) * dim + (slice(start, None, 1 + c % 3),)]
        if kind == "select" and t.dim() and t.size(a % t.dim()):
            return t.select(a % t.dim(), b % t.size(a % t.dim()))
        if kind == "expand":
            return t.unsqueeze(a % (t.dim() + 1)).expand(
                *(-1 if d != a % (t.dim() + 1) else 1 + b % 3 for d in range(t.dim() + 1))
            )
        if kind == "as_strided" and t.untyped_storage().nbytes() // t.element_size() > 12:
            return t.as_strided((2 + a % 2, 2), (b % 4, c % 4), a % 4)
        if kind == "conj" and t.is_complex():
            return t.conj()
        if kind == "imag" and t.is_complex():
            return t.imag
        if kind == "unfold" and t.dim() and t.size(a % t.dim()) >= 2:
            return t.unfold(a % t.dim(), 2, 1 + b % 2)
        if kind == "bytes" and t.dtype is torch.float32 and t.dim() and t.stride(-1) == 1:
            return t.view(torch.int32)
        return t

    number = st.integers(0, 7)
    kinds = [
        "transpose",
        "slice",
        "select",
        "expand",
        "as_strided",
        "conj",
        "imag",
        "unfold",
        "bytes",
    ]
    step = st.tuples(st.sampled_from(kinds), number, number, number)
    chains = st.lists(st.lists(step, max_size=5), min_size=1, max_size=4)
    dtypes = st.sampled_from(
        [torch.float32, torch.complex64, torch.bool, torch.bfloat16, torch.int64]
    )

    @hypothesis.settings(
        max_examples=60,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(chains, dtypes)
    def check(chains, dtype):
        def make():
            base = random(device, 3, 4, 5, dtype=dtype)
            views = []
            for chain in chains:
                view = base
                for one in chain:
                    view = apply(view, one)
                views.append(view)
            return views

        before = engine.stats().moved_storages
        seen, expected = round_trip(engine, make, device)
        assert seen == expected, f"views {chains} of a {dtype} base came back different"
        assert engine.stats().moved_storages - before <= 1, "one base moved more than once"

    check()
    assert_released(engine, pool)
