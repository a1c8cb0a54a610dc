"""One Inf, NaN or huge element must not cost its neighbours their compression."""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import memswap
from memswap.codec import LayoutName

pytestmark = pytest.mark.cpu_only

WIDE = [torch.bfloat16, torch.float32, torch.float64]
INF, NAN = float("inf"), float("nan")


def normal(elements: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(elements, generator=torch.Generator().manual_seed(0)).to(dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def ratio_of(tensor: torch.Tensor, layout: LayoutName | None = None) -> float:
    frame = memswap.encode(tensor, layout=layout)
    assert same_bits(memswap.decode(frame), tensor)
    return frame.ratio


@pytest.mark.parametrize("dtype", WIDE, ids=str)
@pytest.mark.parametrize("outlier", [INF, -INF, NAN, 3e38, -1e30])
def test_an_outlier_in_every_block_costs_next_to_nothing(
    dtype: torch.dtype, outlier: float
) -> None:
    tensor = normal(64 * 1024, dtype)
    without = ratio_of(tensor, "dense")
    tensor[500::1024] = outlier
    ratio = ratio_of(tensor, "dense")
    assert ratio > 0.997 * without, (
        f"{ratio:.3f}x with an outlier per block, {without:.3f}x without"
    )


@pytest.mark.parametrize("dtype", WIDE, ids=str)
def test_so_it_does_where_zeros_are_left_out(dtype: torch.dtype) -> None:
    tensor = torch.relu(normal(64 * 1024, dtype))
    without = ratio_of(tensor, "sparse")
    tensor[500::1024] = INF
    assert ratio_of(tensor, "sparse") > 0.99 * without


def test_so_it_does_in_float32_that_holds_bfloat16() -> None:
    tensor = normal(64 * 1024).float()
    without = ratio_of(tensor, "upcast")
    tensor[500::1024] = INF
    assert ratio_of(tensor, "upcast") > 0.99 * without


@pytest.mark.parametrize("every", [10, 16, 64, 100, 128])
def test_outlier_channels_cost_what_they_hold(every: int) -> None:
    """A channel that is 2^40 larger: 16 bits more for each of its elements at most."""
    tensor = normal(256 * every)
    without = 16 / ratio_of(tensor)
    tensor[3::every] *= 2.0**40
    bits = 16 / ratio_of(tensor)
    assert bits < without + 16 / every + 0.1, f"{bits:.2f} bits, {without:.2f} without"


@pytest.mark.parametrize("masked", [0.01, 0.1, 0.2])
def test_scores_with_masked_positions_still_shrink(masked: float) -> None:
    scores = normal(256 * 1024)
    hidden = torch.rand(scores.shape, generator=torch.Generator().manual_seed(1)) < masked
    bits = 16 / ratio_of(scores.masked_fill(hidden, -INF))
    assert bits < 11 + 16 * masked, f"{bits:.2f} bits per element, {masked:.0%} of them -inf"


def test_tiny_elements_beside_outliers_do_not_pull_the_centre_down() -> None:
    tensor = normal(64 * 1024)
    tensor[100::1024] = INF
    tensor[200::64] = 1e-30
    assert ratio_of(tensor) > 1.4


def centre_of(exponents: list[int]) -> int:
    """c2 of docs/format.md section 5."""
    there = [e for e in exponents if e != 0]
    m, k = max(there, default=0), max(len(there), 1)
    s = sum(min(m - e, 31) for e in there)
    if s >= 16 * k:
        samples = [e for e in exponents[::33] if e != 0]
        p = max(p for p in range(0, 256, 8) if 2 * sum(e >= p for e in samples) >= len(samples))
        w = min(max(p - 12, 1), 224)
        if 2 * sum(w <= e <= w + 31 for e in samples) > len(samples):
            near = [e for e in exponents if w <= e <= w + 31]
            m, k = max(near), len(near)
            s = sum(m - e for e in near)
    quotient = (8 * s - 7 * k) // (8 * k) if 8 * s > 7 * k else 0
    return (m + 1 - quotient) % 256


@given(
    base=st.integers(0, 255),
    spread=st.integers(1, 40),
    far=st.integers(0, 255),
    share=st.sampled_from([0, 1, 20, 100, 300, 480, 530, 800]),
    elements=st.sampled_from([1, 33, 34, 500, 1024]),
    seed=st.integers(0, 1 << 20),
)
@settings(max_examples=150)
def test_the_centre_is_the_one_of_the_specification(
    base: int, spread: int, far: int, share: int, elements: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    exponents = (base + torch.randint(0, spread, (1024,), generator=generator)) % 256
    is_far = torch.randint(0, 1024, (1024,), generator=generator) < share
    exponents[is_far] = (far + torch.randint(0, 3, (1024,), generator=generator))[is_far] % 256
    exponents[elements:] = 0
    rest = torch.randint(0, 256, (1024,), generator=generator)
    rotated = exponents << 8 | rest
    words = (rotated >> 1 | (rotated & 1) << 15)[:elements]
    tensor = words.to(torch.int32).to(torch.uint16).view(torch.bfloat16)
    frame = memswap.encode(tensor, layout="dense")
    assert same_bits(memswap.decode(frame), tensor)
    (center_sum,) = struct.unpack_from("<Q", frame.to_bytes(), 64)
    assert center_sum == centre_of(exponents.tolist())
