"""A codec lane on the simulated device, with what its programs need beside it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from race_workloads import DEVICE, MATRIX, new_pool, pair

from memswap._native import native
from simdev import _C

BF16, DENSE = 1, 0
FRAME_MAGIC = b"MSF1"
ELEMENTS = 20_000  # three tiles, the last one short
TIGHT = 64  # units of var: too few for any tile, so all payloads overflow
ONE_FRAME = 16 << 10  # bytes of an arena with room for the worst case of one such frame
LAZY = next(schedule for schedule in MATRIX if schedule.policy == "lazy")


def values(seed: int, scale: float = 1.0) -> torch.Tensor:
    """What a layer might save, on the host."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(ELEMENTS, generator=generator) * scale).bfloat16()


class Machine:
    """A codec lane, a lane for copies and a pool, on the simulated device.

    Args:
        arena_budget: bytes of the device for what does not fit frames.
        arena_chunk: what is taken of that at a time, and of `pinned`.
        pinned: bytes of pinned memory that serve first.
    """

    def __init__(
        self, arena_budget: int = 1 << 20, arena_chunk: int = 1 << 18, pinned: int = 0
    ) -> None:
        self.arena_pool = new_pool(budget=pinned, slab=pinned) if pinned else None
        self.lane = native.StreamCodecLane(
            DEVICE,
            arena_budget=arena_budget,
            arena_chunk=arena_chunk,
            arena_pool=self.arena_pool.native if self.arena_pool is not None else None,
        )
        self.copies = native.StreamLane(DEVICE, max_leaving_bytes=0, chunk_bytes=1 << 20)
        self.pool = new_pool()
        self.around_decode: Callable[[], Any] = contextlib.nullcontext

    def encode(
        self, tensor: torch.Tensor, var_capacity: int | None = TIGHT, swap: bool = False
    ) -> tuple[Any, Any, Any]:
        """View, encoded storage and ticket. The caller drops the tensor."""
        view, storage = native.capture(tensor), native.StorageRef(tensor)
        if swap:
            encoding = self.lane.encode_to(
                storage, (BF16, DENSE, var_capacity), self.copies, self.pool.native
            )
        else:
            encoding = self.lane.encode(storage, (BF16, DENSE, var_capacity))
        assert encoding is not None, self.lane.last_refusal
        return view, *encoding

    def decode(self, view: Any, encoded: Any) -> torch.Tensor:
        with self.around_decode():
            storage, arrival = self.lane.decode(encoded)
        arrival.wait()
        return view.rebuild(storage, False)


def encode_stream(machine: Machine) -> tuple[int, int]:
    return pair(machine.lane.encode_stream)


def decode_stream(machine: Machine) -> tuple[int, int]:
    return pair(machine.lane.decode_stream)


def control_stream(machine: Machine) -> tuple[int, int]:
    return pair(machine.lane.control_stream)


def send_stream(machine: Machine) -> tuple[int, int]:
    return pair(machine.copies.send_stream)


def fetch_stream(machine: Machine) -> tuple[int, int]:
    return pair(machine.copies.fetch_stream)


def compute_streams(machine: Machine) -> list[tuple[int, int]]:
    own = {
        encode_stream(machine),
        decode_stream(machine),
        control_stream(machine),
        send_stream(machine),
        fetch_stream(machine),
    }
    every = [(DEVICE.index, index) for index in range(_C.pool_streams + 1)]
    return [stream for stream in every if stream not in own]
