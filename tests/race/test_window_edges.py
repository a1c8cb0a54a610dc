"""The edges of an encode that waited for a window: each broken on purpose is caught, twice.

    saved -> waits -> window -> encode -> join -> freed;  wanted -> window -> decode -> consumer

The race detector speaks, and some schedule gives other gradients. Beside the edges of every encode
(tests/race/test_encode_edges.py) there is one that waiting adds: the window that starts an encode
may be another stream's, and the lane orders it after the stream that is current then. One edge
needs no line of its own: encodes are joined when backward begins, and decodes come after compute.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from broken_edges import EncodeEdge, assert_caught, drop_between
from race_workloads import (
    DEVICE,
    EAGER,
    Region,
    Workload,
    assert_silent_and_right,
    on_host,
    one_stream,
    two_streams,
)
from torch import nn

from memswap import Action, Policy, Windows
from memswap.engine.hook_scope import HookScope

pytestmark = [
    pytest.mark.own_laboratory,
    pytest.mark.one_schedule,
    pytest.mark.usefixtures("every_tensor_is_encoded"),
    pytest.mark.filterwarnings("ignore:memswap. a storage"),  # small arenas are full at times
]

ENCODE = Policy(action=Action.ENCODE, min_bytes=1)
ENCODE_SWAP = Policy(action=Action.ENCODE_SWAP, min_bytes=1)


class WindowedRegion:
    """One engine with windows, entered again for each forward; each nn.Linear opens a window."""

    def __init__(self, policy: Policy, prefetch_bytes: int, seconds: float) -> None:
        pool = None
        self.engine = Windows().engine(policy, pool, prefetch_bytes)
        self.seconds = seconds
        self.scopes: list[HookScope] = []
        self.hooks: list[Any] = []

    def __call__(self) -> WindowedRegion:
        return self

    def __enter__(self) -> None:
        self.engine.lock.run(self.engine.begin_iteration)
        self.scopes.append(HookScope(self.engine, ""))
        self.scopes[-1].enter()
        everywhere = torch.nn.modules.module
        self.hooks.append(everywhere.register_module_forward_pre_hook(self.product))
        self.hooks.append(everywhere.register_module_forward_hook(self.made))

    def __exit__(self, *_: object) -> None:
        while self.hooks:
            self.hooks.pop().remove()
        self.scopes.pop().leave()
        self.engine.end_forward()

    def product(self, module: nn.Module, args: Any) -> None:
        if isinstance(module, nn.Linear):
            self.engine.open_window(self.seconds)

    def made(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        if isinstance(module, nn.Linear) and output.grad_fn is not None:
            engine, seconds = self.engine, self.seconds
            output.grad_fn.register_prehook(lambda gradients: engine.open_window(seconds))


def region(policy: Policy = ENCODE, prefetch_bytes: int = 1 << 14, seconds: float = 1.0) -> Region:
    return WindowedRegion(policy, prefetch_bytes, seconds)


# ---------------------------------------------------------------- a workload of its own
def saved_here_window_there(region: Region) -> list[torch.Tensor]:
    """A tensor is saved on one stream; the next window is one of another that waits for nothing."""
    here, there = torch.accelerator.current_stream(), torch.Stream(device=DEVICE)
    found = []
    torch.accelerator.synchronize()
    for step in range(2):
        with here:
            x = torch.full((32, 32), 0.5 + step, device=DEVICE, requires_grad=True)
        context = region()
        with context:
            with here:
                y = (x * 2).exp()
                z = y * y
                del y
            with there:
                nn.Linear(4, 4, device=DEVICE)(torch.ones(4, 4, device=DEVICE))
        with here:
            z.sum().backward()
            found += on_host([x.grad])
            del x, z
    torch.accelerator.synchronize()
    return found


@contextlib.contextmanager
def encodes_start_on_any_stream() -> Iterator[Any]:
    """Rule 1 of [Note: Windows] broken: a window starts what was saved on another stream."""

    class Hits:
        hits = 0

    def anywhere(stream: torch.Stream) -> bool:
        Hits.hits += stream != torch.accelerator.current_stream(DEVICE)
        return True

    right = Windows.engine

    def engine(options: Windows, *arguments: Any) -> Any:
        made = right(options, *arguments)
        made.windows.is_current = anywhere
        return made

    Windows.engine = engine  # type: ignore[method-assign]
    try:
        yield Hits
    finally:
        Windows.engine = right  # type: ignore[method-assign]


# ---------------------------------------------------------------- the edges
EDGES = [
    EncodeEdge(
        "saved -> encode in a window", drop_between("encode", "compute"), ENCODE, one_stream
    ),
    EncodeEdge(
        "saved on another stream -> encode",
        encodes_start_on_any_stream,
        ENCODE,
        saved_here_window_there,
    ),
    EncodeEdge("encode -> join -> freed", drop_between("compute", "encode"), ENCODE, two_streams),
    EncodeEdge(
        "allocation -> decode in a window", drop_between("decode", "compute"), ENCODE, one_stream
    ),
    EncodeEdge(
        "decode in a window -> consumer", drop_between("compute", "decode"), ENCODE, one_stream
    ),
    EncodeEdge(
        "encode in a window -> copy", drop_between("send", "encode", True), ENCODE_SWAP, one_stream
    ),
    EncodeEdge(
        "copy -> decode in a window", drop_between("decode", "fetch", True), ENCODE_SWAP, one_stream
    ),
]


@pytest.mark.parametrize("edge", EDGES, ids=str)
def test_a_broken_edge_is_caught_by_the_detector_and_as_wrong_data(edge: EncodeEdge) -> None:
    assert_caught(edge, new_region=region)


@pytest.mark.parametrize("policy", [ENCODE, ENCODE_SWAP], ids=["encode", "both"])
@pytest.mark.parametrize(
    "workload", [one_stream, two_streams, saved_here_window_there], ids=lambda w: w.__name__
)
@pytest.mark.parametrize("seconds", [1.0, 1e-7], ids=["all", "some"])
def test_unbroken_windows_are_silent_and_right_under_every_schedule(
    workload: Workload, policy: Policy, seconds: float
) -> None:
    assert_silent_and_right(workload, new_region=region, policy=policy, seconds=seconds)


def test_the_workloads_do_encode_in_windows() -> None:
    """Otherwise the edges would be those of leftovers."""
    from simdev import laboratory

    with laboratory(EAGER):
        one = region()
        one_stream(one)
        stats = one.engine.window_stats()  # type: ignore[attr-defined]
        del one
    assert stats.encoded_in_windows > 10 and stats.decoded_in_windows > 10
