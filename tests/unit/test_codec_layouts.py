"""memswap.encode picks the layout: nearly the shortest frame of all that could be had."""

from __future__ import annotations

import random
import statistics

import pytest
import torch

import memswap
from memswap.cli.bench.layouts import DTYPES, cost_of_choosing, kinds_of, sizes_of

pytestmark = pytest.mark.cpu_only

BLOCK = 1024
ROOM = 1.02  # of the shortest frame


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_kind_of_tensor_gets_nearly_the_shortest_frame(dtype: torch.dtype) -> None:
    too_long = []
    for kind, make in kinds_of(dtype).items():
        tensor = make()
        assert tensor.dtype == dtype, kind
        found, by_force = memswap.encode(tensor).nbytes, sizes_of(tensor)
        if found > ROOM * min(by_force.values()):
            too_long.append(f"{kind}: {found} bytes, by force {by_force}")
    assert not too_long, f"{dtype}:\n" + "\n".join(too_long)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_constant_takes_bytes_for_each_block_and_not_kilobytes(dtype: torch.dtype) -> None:
    for value in (0, 1):
        frame = memswap.encode(torch.full((1 << 20,), value, dtype=torch.int64).to(dtype))
        blocks = (1 << 20) // BLOCK
        assert frame.nbytes < 64 * blocks, f"{value}: {frame.nbytes} bytes for {blocks} blocks"


KINDS = ("normal", "zeros", "sparse", "random", "one", "small")


def blocks_of(
    kind: str, count: int, dtype: torch.dtype, generator: torch.Generator
) -> torch.Tensor:
    values = torch.randn(count * BLOCK, generator=generator)
    if kind == "random":
        shape = (count * BLOCK * dtype.itemsize,)
        return torch.randint(0, 256, shape, generator=generator).byte().view(dtype)
    made = {
        "zeros": torch.zeros_like,
        "sparse": torch.relu,
        "one": torch.ones_like,
        "small": lambda values: values * 1e-3,
    }
    return made.get(kind, torch.clone)(values).to(dtype)


def mixture(dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Up to six kinds of blocks, a few or many of each, once or seven times one behind another."""
    choose, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    counts = [choose.randint(1, choose.choice((1, 20, 400))) for _ in range(choose.randint(1, 6))]
    parts = [blocks_of(choose.choice(KINDS), count, dtype, generator) for count in counts]
    tail = blocks_of("normal", 1, dtype, generator)[: choose.randint(0, BLOCK)]
    pieces = [*parts * choose.choice((1, 1, 7)), tail]
    return torch.cat([piece.view(torch.uint8) for piece in pieces]).view(dtype)


def over_the_shortest(tensor: torch.Tensor) -> float:
    """The frame's length over that of the shortest, which is never far.

    A rare long block among short ones is seen too often or never, which decides about a small share
    of the tensor.
    """
    frame, by_force = memswap.encode(tensor), sizes_of(tensor)
    assert torch.equal(memswap.decode(frame).view(torch.uint8), tensor.view(torch.uint8))
    shortest = min(by_force.values())
    most = max(1.25 * shortest, shortest + tensor.nbytes / 50)
    assert frame.nbytes <= most, f"{frame.nbytes} bytes, by force {by_force}"
    return frame.nbytes / shortest


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn], ids=str)
def test_mixtures_of_blocks_get_nearly_the_shortest_frames(dtype: torch.dtype) -> None:
    """On average, over the same mixtures in every run: a sample tells the shares of kinds within
    what chance allows, and of one mixture in a thousand another layout's frame is shorter by a
    quarter and more."""
    longer = statistics.mean(over_the_shortest(mixture(dtype, seed)) for seed in range(30))
    # Found: 1.001 to 1.002. The first blocks alone would tell 1.009 to 1.017.
    assert longer < 1.005, f"on average {longer:.4f} of the shortest frames"


def test_one_long_block_among_many_short_ones() -> None:
    normal = blocks_of("normal", 1, torch.bfloat16, torch.Generator().manual_seed(0))
    zeros = torch.zeros(107 * BLOCK, dtype=torch.bfloat16)
    over_the_shortest(torch.cat([normal, zeros, normal, zeros]))


def test_the_sample_of_a_large_tensor_takes_a_small_share_of_its_encode() -> None:
    """Of the processor's time, on one thread. 3 % are allowed; the rest is for other processes."""
    tensor = torch.randn(1 << 24, generator=torch.Generator().manual_seed(0)).bfloat16()
    share = cost_of_choosing(tensor, "dense", rounds=15)
    assert share < 0.06, f"choosing a layout took {share:.1%} of an encode"
