"""The edges of an encode: each one broken on purpose, lane by lane.

[Note: Every edge of an encode] in csrc/codec/stream_codec_lane.h numbers them. Each has a mutation
of the simulated machine that removes its wait, and a program in which nothing else makes up for it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from codec_machine import (
    BF16,
    DENSE,
    ELEMENTS,
    ONE_FRAME,
    Machine,
    compute_streams,
    control_stream,
    decode_stream,
    encode_stream,
    fetch_stream,
    send_stream,
    values,
)
from race_workloads import DEVICE, EAGER, Observation, on_host

from memswap._native import native
from simdev import LaboratoryError, laboratory, mutations

Program = Callable[[Machine], list[torch.Tensor]]


# ---------------------------------------------------------------- programs
def let_go_at_once(machine: Machine) -> list[torch.Tensor]:
    """Encoded, waited for and let go of; all memory is written again by whoever comes next."""
    found = []
    for seed in range(3):
        made = values(seed).to(DEVICE, non_blocking=True) * 2
        view, encoded, departure = machine.encode(made)
        del made
        departure.wait()
        del departure
        next_owner = torch.full((ELEMENTS,), 7.0, device=DEVICE, dtype=torch.bfloat16)
        back = machine.decode(view, encoded)
        found.append(back * 1)
        del back, encoded, next_owner
        next_owner = torch.full((ELEMENTS,), 9.0, device=DEVICE, dtype=torch.bfloat16)
        del next_owner
    found = on_host(found)
    torch.accelerator.synchronize()
    return found


def decoded_elsewhere(machine: Machine) -> list[torch.Tensor]:
    """Encoded and waited for on one stream, decoded on another that waited for nothing."""
    a, b = torch.Stream(device=DEVICE), torch.Stream(device=DEVICE)
    with a:
        made = values(1).to(DEVICE, non_blocking=True) * 2
        view, encoded, departure = machine.encode(made)
        del made
        departure.wait()
    with b:
        found = on_host([machine.decode(view, encoded) * 1])
    torch.accelerator.synchronize()
    return found


def swapped(machine: Machine) -> list[torch.Tensor]:
    """Encoded, sent to the host, and back, twice."""
    found = []
    for seed in range(2):
        made = values(seed).to(DEVICE, non_blocking=True) * 2
        view, encoded, departure = machine.encode(made, swap=True)
        del made
        departure.wait()
        next_owner = torch.full((ELEMENTS,), 7.0, device=DEVICE, dtype=torch.bfloat16)
        machine.copies.settle()
        back = machine.decode(view, encoded)
        found.append(back * 1)
        del back, encoded, next_owner
    found = on_host(found)
    torch.accelerator.synchronize()
    return found


def arena_used_again(machine: Machine) -> list[torch.Tensor]:
    """A frame that overflowed is decoded on one stream; on another the chunk is used again.

    In an arena of ONE_FRAME, of whichever memory.
    """
    a, b = torch.Stream(device=DEVICE), torch.Stream(device=DEVICE)
    with a:
        first = values(1).to(DEVICE) * 2
    with b:
        second = values(2, scale=1e3).to(DEVICE) * 2
    torch.accelerator.synchronize()
    with a:
        view, encoded, departure = machine.encode(first)
        del first
        departure.wait()
        one = machine.decode(view, encoded) * 1
        del encoded, departure
    with b:
        view, encoded, departure = machine.encode(second)
        del second
        departure.wait()
        two = machine.decode(view, encoded) * 1
        found = on_host([two])
    with a:
        found += on_host([one])
    torch.accelerator.synchronize()
    assert machine.lane.arena_statistics()["resets"] == 1, "the chunk was not used again"
    return found


def arena_used_again_in_pinned_memory(machine: Machine) -> list[torch.Tensor]:
    """The same, where the arena's memory is the host's."""
    return arena_used_again(machine)


def pinned_memory_given_back(machine: Machine) -> list[torch.Tensor]:
    """While a frame that overflowed is decoded on one stream, its arena's memory goes to a copy.

    In an arena of ONE_FRAME of pinned memory.
    """
    a, b = torch.Stream(device=DEVICE), torch.Stream(device=DEVICE)
    first = values(1).to(DEVICE) * 2
    filler = torch.full((ONE_FRAME,), 7, device=DEVICE, dtype=torch.uint8)
    torch.accelerator.synchronize()
    with a:
        view, encoded, departure = machine.encode(first)
        del first
        departure.wait()
        back = machine.decode(view, encoded) * 1
        del encoded, departure
    machine.lane.trim_arena()
    with b:
        block = machine.arena_pool.native.allocate(ONE_FRAME)
        machine.copies.send(native.StorageRef(filler), block).synchronize()
    with a:
        found = on_host([back])
    torch.accelerator.synchronize()
    return found


def decoded_into_used_memory(machine: Machine) -> list[torch.Tensor]:
    """The output gets memory that compute has still to write for its last owner."""
    made = values(1).to(DEVICE, non_blocking=True) * 2
    view, encoded, departure = machine.encode(made)
    del made
    departure.wait()
    last_owner = torch.full((ELEMENTS,), 7.0, device=DEVICE, dtype=torch.bfloat16)
    del last_owner
    found = on_host([machine.decode(view, encoded) * 1])
    torch.accelerator.synchronize()
    return found


def frame_dropped_while_it_is_decoded(machine: Machine) -> list[torch.Tensor]:
    """The frame's memory belongs to somebody else before the decode has been waited for."""
    found = []
    for swap in (False, True):
        made = values(1).to(DEVICE, non_blocking=True) * 2
        view, encoded, departure = machine.encode(made, var_capacity=None, swap=swap)
        departure.wait()
        del departure
        storage, arrival = machine.lane.decode(encoded)
        del encoded
        next_owner = torch.full((encoded_nbytes(),), 9, device=DEVICE, dtype=torch.uint8)
        arrival.wait()
        found.append(view.rebuild(storage, False) * 1)
        del made, next_owner, storage, arrival
    found = on_host(found)
    torch.accelerator.synchronize()
    return found


def header_read_late(machine: Machine) -> list[torch.Tensor]:
    """A frame is dropped as soon as its encode has been waited for, its header still under way."""
    kept = []
    for seed in range(3):
        made = values(seed).to(DEVICE, non_blocking=True) * 2
        _, encoded, departure = machine.encode(made, var_capacity=None)
        departure.wait()
        del encoded, departure
        kept.append(torch.full((encoded_nbytes(),), seed, device=DEVICE, dtype=torch.uint8))
        kept.append(made)
        del made
    found = on_host(kept)
    torch.accelerator.synchronize()
    return found


def encoded_nbytes() -> int:
    """Bytes of a frame with room for the worst case."""
    return int(native.frame_sizes(BF16, DENSE, ELEMENTS).max_nbytes)


def reports_read(machine: Machine) -> list[torch.Tensor]:
    """What the host reads of headers, as numbers: 0 where the header has not arrived."""
    found = []
    for seed in range(3):
        made = values(seed, scale=10.0**seed).to(DEVICE, non_blocking=True) * 2
        _, encoded, departure = machine.encode(made, var_capacity=None)
        departure.wait()
        encoded.report()  # too early, on a machine whose events tell the truth
        torch.accelerator.synchronize()
        report = encoded.report()
        numbers = (report.elements, report.var_used, report.center_sum)
        found.append(torch.tensor([number % 2**31 for number in numbers]))
        del made, encoded, departure
    return found


# ---------------------------------------------------------------- broken on purpose
def drop(waiter: Callable[[Machine], Any], source: Callable[[Machine], Any]) -> Any:
    return lambda machine: mutations.drop_waits(waiter=waiter(machine), source=source(machine))


class OutputsOfTheDecodeStream:
    """Edge 12: what comes back belongs to the decode stream's memory instead of compute's.

    Nor does the allocator hear who uses it, which would make up for that.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.hits = 0
        self.unheard = mutations.drop_record_stream()

    @contextlib.contextmanager
    def decoding(self) -> Iterator[None]:
        own, elsewhere = decode_stream(self.machine), compute_streams(self.machine)
        with mutations.allocate_on(own, when=elsewhere) as mutation:
            yield
            self.hits += mutation.hits

    def __enter__(self) -> OutputsOfTheDecodeStream:
        self.unheard.__enter__()
        self.machine.around_decode = self.decoding
        return self

    def __exit__(self, *exception: Any) -> None:
        self.unheard.__exit__(*exception)


@dataclass(frozen=True)
class Edge:
    """One edge, what breaks exactly it, and a program in which nothing else makes up for it."""

    number: str
    name: str
    broken: Callable[[Machine], Any]
    program: Program
    shows_as_data: bool = True
    arena: int = 1 << 20
    pinned: bool = False  # so many bytes of the host, and none of the device

    def __str__(self) -> str:
        return f"{self.number} {self.name}"


#: Whose arena is in pinned memory: programs for codecs whose kernels reach it.
IN_PINNED_MEMORY = (arena_used_again_in_pinned_memory, pinned_memory_given_back)

EDGES = [
    Edge("1, 2", "producer, frame -> encode", drop(encode_stream, compute_streams), let_go_at_once),
    Edge("3", "encode -> original freed", drop(compute_streams, encode_stream), let_go_at_once),
    # A stale header is a wrong report, and the next program's memory is read.
    Edge("4", "encode -> header", drop(control_stream, encode_stream), reports_read),
    Edge("5", "encode -> copy", drop(send_stream, encode_stream), swapped),
    Edge("6", "encode -> decode", drop(decode_stream, encode_stream), decoded_elsewhere),
    Edge("7", "output -> decode", drop(decode_stream, compute_streams), decoded_into_used_memory),
    Edge("8", "fetch -> decode", drop(decode_stream, fetch_stream), swapped),
    Edge("9", "decode -> consumer", drop(compute_streams, decode_stream), let_go_at_once),
    # The header that is read is only that of a frame that nobody has any more.
    Edge(
        "10",
        "header -> frame freed",
        drop(compute_streams, control_stream),
        header_read_late,
        shows_as_data=False,
    ),
    Edge(
        "11",
        "decode -> arena used again",
        drop(encode_stream, decode_stream),
        arena_used_again,
        arena=ONE_FRAME,
    ),
    Edge(
        "11",
        "decode -> pinned arena used again",
        drop(encode_stream, decode_stream),
        arena_used_again_in_pinned_memory,
        arena=ONE_FRAME,
        pinned=True,
    ),
    Edge("12", "consumer -> output freed", OutputsOfTheDecodeStream, let_go_at_once),
    Edge(
        "13",
        "decode -> pinned memory given back",
        drop(encode_stream, decode_stream),
        pinned_memory_given_back,
        arena=ONE_FRAME,
        pinned=True,
    ),
    Edge(
        "13",
        "the block's ticket -> its next owner",
        drop(send_stream, encode_stream),
        pinned_memory_given_back,
        arena=ONE_FRAME,
        pinned=True,
    ),
]


def machine_for(program: Program) -> Machine:
    edge = next((edge for edge in EDGES if edge.program is program), None)
    if edge is None:
        return Machine()
    if edge.pinned:
        return Machine(arena_budget=0, arena_chunk=edge.arena, pinned=edge.arena)
    return Machine(arena_budget=edge.arena)


def observe(schedule: Any, program: Program, broken: Any = None) -> Observation:
    seen = Observation()

    def body() -> None:
        machine = machine_for(program)
        with broken(machine) if broken else contextlib.nullcontext() as mutation:
            try:
                seen.results = program(machine)
                torch.accelerator.synchronize()
            finally:
                seen.hits = getattr(mutation, "hits", 0)

    try:
        with laboratory(schedule) as lab:
            try:
                body()
            except (RuntimeError, IndexError) as error:
                if broken is None:
                    raise
                seen.error = str(error)
            seen.reports = lab.forgive()
    except LaboratoryError as error:
        if broken is None or error.leaks:
            raise
        seen.reports += error.reports
    return seen


@functools.cache
def expected(program: Program) -> list[torch.Tensor]:
    """What it gives under the friendliest schedule, where nothing is broken."""
    results = observe(EAGER, program).results
    assert results is not None
    return results
