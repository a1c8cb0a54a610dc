"""Hardware by its data sheet: formulas, and the faults of cost models before this one."""

from __future__ import annotations

import pytest
import torch

from memswap.planning.cost_model import (
    A2,
    A3,
    GIB,
    H200,
    HARDWARE,
    collective_s,
    hardware,
    matmul_flop,
    matmul_shape,
)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ((3,), (3,)),
        ((3,), (3, 4)),
        ((2, 3), (3,)),
        ((2, 3), (3, 4)),
        ((5, 2, 3), (3, 4)),
        ((5, 2, 3), (5, 3, 4)),
        ((1, 2, 3), (7, 3, 4)),
        ((6, 1, 2, 3), (5, 3, 4)),
        ((3,), (5, 3, 4)),
        ((5, 2, 3), (3,)),
        ((0, 3), (3, 4)),
    ],
)
def test_shapes_are_those_of_torch_and_flop_follow_from_them(left, right):
    result = torch.matmul(torch.empty(left), torch.empty(right))
    assert matmul_shape(left, right) == tuple(result.shape)
    assert matmul_flop(left, right) == 2 * left[-1] * result.numel()


@pytest.mark.parametrize(
    ("left", "right", "words"),
    [
        ((2, 3), (4, 5), "3 columns meet 4 rows"),
        ((2, 2, 3), (5, 3, 4), "do not broadcast"),
        ((), (3,), "scalar"),
        ((3,), (4,), "meet"),
    ],
)
def test_shapes_that_do_not_fit_are_refused_in_words(left, right, words):
    with pytest.raises(ValueError, match=words):
        matmul_flop(left, right)


def test_a_small_product_is_bound_by_memory_and_a_large_one_by_arithmetic():
    thin = H200.matmul_s((1, 8192), (8192, 8192))
    assert thin == pytest.approx((8192 + 8192 * 8192 + 8192) * 2 / 4.8e12)
    large = H200.matmul_s((8192, 8192), (8192, 8192))
    assert large == pytest.approx(2 * 8192**3 / (989e12 * 0.6))


def test_dtypes_have_rates_and_sizes_of_their_own():
    """A model that assumes two bytes per element plans float32 for half of its time."""
    shapes = ((4096, 4096), (4096, 4096))
    times = [H200.matmul_s(*shapes, dtype) for dtype in (torch.bfloat16, torch.float32)]
    assert times[1] == pytest.approx(times[0] * 989 / 495)
    assert H200.matmul_s(*shapes, torch.float8_e4m3fn) < times[0]
    thin = [H200.matmul_s((1, 4096), (4096, 64), d) for d in (torch.bfloat16, torch.float32)]
    assert thin[1] == pytest.approx(2 * thin[0])
    assert H200.matmul_s(*shapes, torch.float64) >= times[1]


def test_a_rate_of_zero_in_a_table_does_not_divide_by_zero():
    """The published all-to-all of two A3 ranks is 0: a plan for them ended in an exception."""
    assert A3.all_to_all_bytes_per_s[2] == 0
    assert A3.all_to_all_s(GIB, 2) == pytest.approx(1 / 229.4)
    with pytest.raises(ValueError, match="no rate is known"):
        collective_s({2: 0, 4: 0}, 1.0, 2, "all-to-all")


def test_a_group_size_that_is_not_in_the_table_is_not_free_of_charge():
    """Unknown sizes used to count as 1000 GiB/s."""
    assert A2.all_gather_s(GIB, 6) == pytest.approx(1 / 73)  # the slower of 4 and 8
    assert A2.all_gather_s(GIB, 12) == pytest.approx(1 / 138)
    assert A2.all_gather_s(GIB, 1024) == pytest.approx(1 / 138)
    assert A2.all_to_all_s(GIB, 3) == pytest.approx(1 / 37)
    assert A2.all_gather_s(GIB, 1) == 0
    with pytest.raises(ValueError, match="1 rank or more"):
        A2.all_gather_s(GIB, 0)


def test_calls_by_keyword_cost_what_calls_by_position_cost():
    """Keyword calls used to raise, or to cost nothing."""
    assert A2.all_gather_s(nbytes=GIB, group_size=8) == A2.all_gather_s(GIB, 8)
    assert A2.all_to_all_s(group_size=16, nbytes=GIB) == pytest.approx(1 / 40.1)
    by_keyword = A2.matmul_s(right=(8, 16), left=(4, 8), dtype=torch.float16)
    assert by_keyword == A2.matmul_s((4, 8), (8, 16), torch.float16)


def test_copies_and_codec():
    rates = H200.rates()
    assert (rates.h2d_bytes_per_s, rates.d2h_bytes_per_s) == (55.6e9, 52.8e9)
    assert A2.encode_s(100 * GIB) == pytest.approx(1.0)
    assert A2.decode_s(111 * GIB) == pytest.approx(1.0)


@pytest.mark.parametrize("name", ["A2", "A3", "H100", "H200", "CPU"])
def test_every_named_machine_can_be_planned_for(name):
    found = hardware(name.lower())
    assert found is HARDWARE[name]
    rates = found.rates()
    assert rates.copies and rates.encodes
    assert rates.duplex_d2h_bytes_per_s <= rates.d2h_bytes_per_s
    assert rates.duplex_h2d_bytes_per_s <= rates.h2d_bytes_per_s
    assert found.matmul_s((64, 64), (64, 64)) > 0


def test_an_unknown_machine_is_refused_with_the_names_there_are():
    with pytest.raises(ValueError, match="A2, A3, H100, H200, CPU"):
        hardware("B9000")
