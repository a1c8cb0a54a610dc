"""memswap.encode picks the layout: nearly the shortest frame of all that could be had."""

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
from memswap.cli.bench.layouts import DTYPES, kinds_of, layouts_of, sizes_of

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
    sizes = {name: memswap.encode(tensor, layout=name).nbytes for name in layouts_of(dtype)}
    # Blocks at random tell a mixture's shares within what chance allows: 24 of them, so that a
    # layout that is far shorter is never missed. A rare long block among short ones is seen too
    # often or never, which decides about a small share of the tensor.
    most = max(1.25 * min(sizes.values()), min(sizes.values()) + tensor.nbytes / 50)
    assert frame.nbytes <= most, f"{frame.nbytes} bytes, by force {sizes}"
    assert torch.equal(memswap.decode(frame).view(torch.uint8), tensor.view(torch.uint8))


def test_the_sample_of_a_large_tensor_takes_a_small_share_of_its_encode() -> None:
    """Of the processor's time, on one thread. 3 % are allowed; the rest is for other processes."""
    tensor = torch.randn(1 << 24, generator=torch.Generator().manual_seed(0)).bfloat16()

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
            sample = seconds(lambda: codec.native.choose_layout(tensor, code))
            shares.append(sample / seconds(lambda: memswap.encode(tensor, layout="dense")))
    finally:
        torch.set_num_threads(threads)
    share = statistics.median(shares)
    assert share < 0.06, f"choosing a layout took {share:.1%} of an encode"
