"""What ``python -m memswap bench codec`` says of a tensor."""

from __future__ import annotations

import pytest
import torch

from memswap.cli.bench.codec import Bench, Result, entropy_bound, render, temporary_nbytes

ELEMENTS = 64 * 8192


def normal() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(ELEMENTS, generator=generator).to(torch.bfloat16)


def random_bits() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    bits = torch.randint(-(2**15), 2**15, (ELEMENTS,), generator=generator, dtype=torch.int16)
    return bits.view(torch.bfloat16)


def test_a_measurement_has_ratio_rates_and_temporary_bytes() -> None:
    found = Bench(torch.device("cpu"), rounds=1, show=print).memswap("normal", normal())
    assert 1.45 < found.ratio < (entropy_bound(normal()) or 0)
    assert min(found.encode_bytes_per_s, found.decode_bytes_per_s, found.copy_bytes_per_s) > 0
    assert found.temporary_nbytes is not None
    assert 0.3 < found.temporary_nbytes / found.nbytes < 0.35, (
        "a frame's worst case, less the frame"
    )
    table = render(Result(kinds=[found]))
    assert "temporary MiB" in table and "normal" in table


def test_the_worst_case_takes_two_thousandths_more_and_nothing_for_a_while() -> None:
    tensor = random_bits()
    found = Bench(torch.device("cpu"), rounds=1, show=print).memswap("random bits", tensor)
    assert found.ratio == pytest.approx(1 / 1.002, abs=1e-3)
    assert temporary_nbytes(tensor, None) == 0
