"""memswap.encode picks the shape: nearly the shortest frame of all that could be had."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import memswap
from memswap import codec

pytestmark = pytest.mark.cpu_only

FLOATS = [
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]
BLOCK = 1024
ROOM = 1.02  # of the shortest frame


def shapes_for(dtype: torch.dtype) -> list[codec.ShapeName]:
    code = codec.dtype_code(dtype)
    names: list[codec.ShapeName] = ["ints", "raw"]
    names += ["dense", "sparse"] if code <= 6 else []
    names += ["bits"] if dtype.itemsize == 1 else []
    names += ["upcast"] if code == 3 else []
    return names


def expect_near_the_shortest(tensor: torch.Tensor) -> None:
    frame = memswap.encode(tensor)
    by_force = {
        name: memswap.encode(tensor, shape=name).nbytes for name in shapes_for(tensor.dtype)
    }
    shortest = min(by_force, key=lambda name: by_force[name])
    assert frame.nbytes <= ROOM * by_force[shortest], (
        f"{tensor.dtype}: the frame took {frame.nbytes} bytes, where shape {shortest!r} takes "
        f"{by_force[shortest]}"
    )


def normal(*size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(0))


def uniform(*size: int) -> torch.Tensor:
    return torch.rand(size, generator=torch.Generator().manual_seed(1))


def causal_scores() -> torch.Tensor:
    """Masked with 0 behind the softmax, as a backward's gradient of scores is."""
    return normal(4, 512, 512).tril()


def causal_softmax() -> torch.Tensor:
    scores = normal(4, 512, 512)
    above = torch.ones(512, 512, dtype=torch.bool).triu(1)
    return scores.masked_fill(above, -torch.inf).softmax(-1)


def embedding_gradient(rows_in_100: int) -> Callable[[], torch.Tensor]:
    def made() -> torch.Tensor:
        asked_for = uniform(2048, 1) * 100 < rows_in_100
        return normal(2048, 768) * 1e-3 * asked_for

    return made


VALUES: dict[str, Callable[[], torch.Tensor]] = {
    "normal": lambda: normal(1 << 20),
    "half zeros": lambda: normal(1 << 20) * (uniform(1 << 20) < 0.5),
    "residual dropout": lambda: torch.nn.functional.dropout(normal(1 << 20), 0.1),
    "squared relu": lambda: normal(1 << 20).relu().square(),
    "causal softmax": causal_softmax,
    "causal scores": causal_scores,
    "embedding gradient, 3 rows in 100": embedding_gradient(3),
    "embedding gradient, 30 rows in 100": embedding_gradient(30),
    "embedding gradient, 85 rows in 100": embedding_gradient(85),
    "zeros": lambda: torch.zeros(1 << 20),
    "ones": lambda: torch.ones(1 << 20),
    "bfloat16 cast up": lambda: normal(1 << 20).bfloat16().float(),
    "float16 cast up": lambda: normal(1 << 20).half().float(),
}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", VALUES)
def test_floats_get_nearly_the_shortest_frame(name: str, dtype: torch.dtype) -> None:
    expect_near_the_shortest(VALUES[name]().to(dtype))


@pytest.mark.parametrize(
    "tensor",
    [
        pytest.param(uniform(1 << 20) < 0.9, id="dropout mask"),
        pytest.param(torch.ones(1024, 1024, dtype=torch.bool).tril(), id="causal mask"),
        pytest.param((uniform(1 << 20) < 0.5).to(torch.uint8), id="mask in uint8"),
        pytest.param((uniform(1 << 20) * 256).to(torch.uint8), id="random bytes"),
        pytest.param((uniform(1 << 20) * 50257).long(), id="tokens"),
        pytest.param(uniform(1 << 18).argsort(), id="permutation"),
        pytest.param(normal(64, 1 << 12).max(1).indices.repeat(100), id="indices of maxima"),
        pytest.param(torch.arange(1 << 20), id="positions"),
        pytest.param(
            (uniform(1 << 20) * 65536).to(torch.int32).view(torch.float32), id="small bits"
        ),
    ],
)
def test_integers_get_nearly_the_shortest_frame(tensor: torch.Tensor) -> None:
    expect_near_the_shortest(tensor)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.bool], ids=str)
def test_a_constant_takes_bytes_for_each_block_and_not_kilobytes(dtype: torch.dtype) -> None:
    for value in (0, 1):
        frame = memswap.encode(torch.full((1 << 20,), value).to(dtype))
        blocks = (1 << 20) // BLOCK
        assert frame.nbytes < 64 * blocks, f"{value}: {frame.nbytes} bytes for {blocks} blocks"


@given(
    kinds=st.lists(
        st.tuples(
            st.sampled_from(["normal", "zeros", "sparse", "random", "one", "small"]),
            st.integers(1, 400),
        ),
        min_size=1,
        max_size=6,
    ),
    period=st.integers(1, 7),
    tail=st.integers(0, BLOCK),
    dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.float8_e4m3fn]),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=60, deadline=None)
@example([("normal", 1), ("zeros", 107)], 2, 0, torch.bfloat16, 0)  # one block of 108 is long
def test_any_mixture_of_blocks_gets_a_frame_that_no_shape_beats_by_far(
    kinds: list[tuple[str, int]], period: int, tail: int, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)

    def rows(kind: str, count: int) -> torch.Tensor:
        values = torch.randn(count, BLOCK, generator=generator)
        if kind == "zeros":
            return torch.zeros(count, BLOCK).to(dtype)
        if kind == "sparse":
            return values.relu().to(dtype)
        if kind == "one":
            return torch.ones(count, BLOCK).to(dtype)
        if kind == "small":
            return (values * 1e-3).to(dtype)
        if kind == "random":
            width = dtype.itemsize
            return (
                torch.randint(0, 256, (count, BLOCK * width), generator=generator)
                .byte()
                .view(dtype)
            )
        return values.to(dtype)

    parts = [rows(kind, count).view(torch.uint8) for kind, count in kinds]
    whole = torch.cat([part.view(dtype).view(-1).view(torch.uint8) for part in parts * period])
    tensor = torch.cat([whole, rows("normal", 1).view(-1)[:tail].view(torch.uint8)]).view(dtype)
    frame = memswap.encode(tensor)
    sizes = {name: memswap.encode(tensor, shape=name).nbytes for name in shapes_for(dtype)}
    # Blocks at random tell a mixture's shares within what chance allows: 24 of them, so that a
    # shape that is far shorter is never missed. A rare long block among short ones is seen too
    # often or never, which decides about a small share of the tensor.
    most = max(1.25 * min(sizes.values()), min(sizes.values()) + tensor.nbytes / 50)
    assert frame.nbytes <= most, f"{frame.nbytes} bytes, by force {sizes}"
    assert torch.equal(memswap.decode(frame).view(torch.uint8), tensor.view(torch.uint8))


def test_the_sample_of_a_large_tensor_takes_a_small_share_of_its_encode() -> None:
    """Of the processor's time, on one thread. 3 % are allowed; the rest is for other processes."""
    tensor = normal(1 << 24).bfloat16()

    def seconds(work: Callable[[], object]) -> float:
        start = time.thread_time()
        work()
        return time.thread_time() - start

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        code = codec.dtype_code(tensor.dtype)
        shares = []
        for _ in range(15):
            sample = seconds(lambda: codec.native.choose_shape(tensor, code))
            shares.append(sample / seconds(lambda: memswap.encode(tensor, shape="dense")))
    finally:
        torch.set_num_threads(threads)
    share = statistics.median(shares)
    assert share < 0.06, f"choosing a shape took {share:.1%} of an encode"
