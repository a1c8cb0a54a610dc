"""Checkpointed regions rely on the edges of a swap and of an encode: each, broken, is caught.

The recomputation is a consumer of its own kind: it asks for what was saved on the stream that
autograd gave it, in the order of the forward, and its operators read it at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from broken_edges import on_every_lane
from checkpoint_helpers import CheckpointPolicy, policy_of
from helpers import new_input, new_stack
from race_workloads import (
    DEVICE,
    MATRIX,
    Region,
    assert_silent_and_right,
    compute_streams,
    expected,
    fetch_stream,
    observe,
    on_host,
    pair,
    plain,
    send_stream,
)

import memswap
from simdev import _C, mutations

pytestmark = [
    pytest.mark.own_laboratory,
    pytest.mark.one_schedule,
    pytest.mark.usefixtures("every_tensor_is_encoded"),
]

#: The region's operators alone use the engine: what else is saved stays.
OPTIONS = {"policy": memswap.Policy(action=memswap.Action.KEEP, min_bytes=1), "prefetch_bytes": 0}


def workload_of(decision: CheckpointPolicy) -> Callable[[Region], list[torch.Tensor]]:
    """Gradients of two steps, on streams in turn, of layers whose matrix products leave."""
    policy = policy_of(decision)

    def workload(region: Region) -> list[torch.Tensor]:
        model = new_stack(DEVICE, depth=2)
        streams = [torch.Stream(device=DEVICE) for _ in range(2)]
        found: list[torch.Tensor] = []
        for step, stream in enumerate(streams):
            stream.wait_stream(torch.accelerator.current_stream())
            with stream:
                model.zero_grad(set_to_none=True)
                h = model.enter(new_input(DEVICE, seed=step))
                with region():
                    for layer in model.layers:
                        if region is plain:
                            h = layer(h)
                        else:
                            h = memswap.checkpoint(layer, h, policy_fn=policy)
                loss = h.square().mean()
                del h
                loss.backward()
                del loss
                found += [parameter.grad.clone() for parameter in model.parameters()]
            torch.accelerator.current_stream().wait_stream(stream)
        return on_host(found)

    return workload


SWAPPED, ENCODED = map(workload_of, (CheckpointPolicy.MUST_SWAP, CheckpointPolicy.MUST_ENCODE))


def decode_stream(lane: Any) -> tuple[int, int]:
    return pair(lane.decode_stream)


def other_streams(lane: Any) -> list[tuple[int, int]]:
    own = decode_stream(lane)
    every = [(own[0], index) for index in range(_C.pool_streams + 1)]
    return [stream for stream in every if stream != own]


EDGES = {
    "an operator's output leaves before it is there": (
        SWAPPED,
        "open_lane",
        lambda lane: mutations.drop_waits(send_stream(lane), compute_streams(lane)),
    ),
    "a storage is filled before its memory is free": (
        SWAPPED,
        "open_lane",
        lambda lane: mutations.drop_waits(fetch_stream(lane), compute_streams(lane)),
    ),
    "a storage is handed out before it arrived": (
        SWAPPED,
        "open_lane",
        lambda lane: mutations.drop_waits(compute_streams(lane), fetch_stream(lane)),
    ),
    "a storage is handed out before it was decoded": (
        ENCODED,
        "open_codec_lane",
        lambda lane: mutations.drop_waits(other_streams(lane), decode_stream(lane)),
    ),
}


@pytest.mark.parametrize("name", list(EDGES))
def test_a_broken_edge_is_caught_by_the_detector_and_as_wrong_data(name: str) -> None:
    workload, opener, mutate = EDGES[name]
    right = expected(workload)
    breaking = on_every_lane(mutate, opener)
    seen = [observe(schedule, workload, breaking, **OPTIONS) for schedule in MATRIX]
    struck = [one for one in seen if one.hits]
    assert struck, "the mutation never struck"
    assert any(one.reports for one in struck), "the detector said nothing"
    assert any(one.differs_from(right) for one in struck), "no wrong data anywhere"


@pytest.mark.parametrize("workload", [SWAPPED, ENCODED], ids=["swapped", "encoded"])
def test_unbroken_regions_are_silent_and_right_under_every_schedule(workload: Any) -> None:
    assert_silent_and_right(workload, **OPTIONS)
