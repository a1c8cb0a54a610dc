"""Edges that are broken on purpose, lane by lane, with a count of how often it struck."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from race_workloads import (
    MATRIX,
    Workload,
    compute_streams,
    expected,
    fetch_stream,
    lanes_opened,
    observe,
    pair,
    send_stream,
)

from memswap import Policy
from simdev import mutations

Breaking = Callable[[], contextlib.AbstractContextManager[Any]]
Streams = list[tuple[int, int]]


class Counter:
    """The hits of several mutations, and of a test's own."""

    def __init__(self) -> None:
        self.parts: list[Any] = []
        self.own = 0

    @property
    def hits(self) -> int:
        return self.own + sum(part.hits for part in self.parts)


def on_every_lane(
    mutate: Callable[[Any], contextlib.AbstractContextManager[Any]], opener: str = "open_lane"
) -> Breaking:
    """The mutation, for each lane that the workload opens by `opener`, with that lane's streams."""

    @contextlib.contextmanager
    def breaking() -> Iterator[Counter]:
        counter = Counter()
        with contextlib.ExitStack() as stack:

            def react(lane: Any) -> Any:
                counter.parts.append(stack.enter_context(mutate(lane)))
                return lane

            stack.enter_context(lanes_opened(react, opener))
            yield counter

    return breaking


def drop(
    waiter: Callable[[Any], Any], source: Callable[[Any], Any], opener: str = "open_lane"
) -> Breaking:
    """Waits of one of a lane's streams for another are lost."""
    return on_every_lane(
        lambda lane: mutations.drop_waits(waiter=waiter(lane), source=source(lane)), opener
    )


# ---------------------------------------------------------------- with a codec lane
class Lanes:
    """The lanes of one engine, as they are opened."""

    def __init__(self) -> None:
        self.codec: Any = None
        self.copies: Any = None

    def streams(self, name: str) -> Streams:
        if name == "encode":
            return [pair(self.codec.encode_stream)]
        if name == "decode":
            return [pair(self.codec.decode_stream)]
        if name in ("send", "fetch"):
            stream = send_stream if name == "send" else fetch_stream
            return [] if self.copies is None else [stream(self.copies)]
        own = {pair(self.codec.encode_stream), pair(self.codec.decode_stream)}
        own.add(pair(self.codec.control_stream))
        if self.copies is None:
            device_index = pair(self.codec.encode_stream)[0]
            from simdev import _C

            every = [(device_index, index) for index in range(_C.pool_streams + 1)]
            return [stream for stream in every if stream not in own]
        return [stream for stream in compute_streams(self.copies) if stream not in own]


def drop_between(waiter: str, source: str, needs_copies: bool = False) -> Breaking:
    """The engine's waits of one stream for another are lost, from when its lanes are open."""

    @contextlib.contextmanager
    def breaking() -> Iterator[Any]:
        lanes, found = Lanes(), Counter()
        with contextlib.ExitStack() as stack:

            def begin() -> None:
                if lanes.codec is None or (needs_copies and lanes.copies is None):
                    return
                if not found.parts:
                    found.parts.append(
                        stack.enter_context(
                            mutations.drop_waits(
                                waiter=lanes.streams(waiter), source=lanes.streams(source)
                            )
                        )
                    )

            def codec(lane: Any) -> Any:
                lanes.codec = lane
                begin()
                return lane

            def copies(lane: Any) -> Any:
                lanes.copies = lane
                begin()
                return lane

            stack.enter_context(lanes_opened(codec, "open_codec_lane"))
            stack.enter_context(lanes_opened(copies))
            yield found

    return breaking


@dataclass(frozen=True)
class EncodeEdge:
    """An edge of an encode under a whole engine, and what breaks it: nothing makes up for it."""

    name: str
    broken: Breaking
    policy: Policy
    workload: Workload

    def __str__(self) -> str:
        return self.name


def assert_caught(edge: EncodeEdge, **options: Any) -> None:
    """The detector speaks under some schedule, and under some the gradients are wrong."""
    right = expected(edge.workload)
    seen = [
        observe(schedule, edge.workload, edge.broken, policy=edge.policy, **options)
        for schedule in MATRIX
    ]
    struck = [one for one in seen if one.hits]
    assert struck, f"{edge}: the mutation never struck"
    assert any(one.reports for one in struck), f"{edge}: the detector said nothing"
    assert any(one.differs_from(right) for one in struck), f"{edge}: no wrong data anywhere"
