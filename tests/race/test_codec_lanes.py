"""StreamCodecLane: every edge of an encode, right under every schedule, seen failing when broken.

[Note: Every edge of an encode] in csrc/codec/stream_codec_lane.h numbers the edges. Each has a
mutation of the simulated machine that removes its wait, and a program in which nothing else makes
up for it. The detector must report it, and where the table says so, data must come out wrong.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from helpers import same_bits
from race_workloads import DEVICE, EAGER, MATRIX, Observation, new_pool, on_host

from memswap._native import native
from simdev import _C, LaboratoryError, laboratory, mutations

BF16, DENSE = 1, 0
FRAME_MAGIC = b"MSF1"
ELEMENTS = 20_000  # three tiles, the last one short
TIGHT = 64  # units of var: too few for any tile, so all payloads overflow
ONE_FRAME = 16 << 10  # bytes of an arena with room for the worst case of one such frame
LAZY = next(schedule for schedule in MATRIX if schedule.policy == "lazy")

Program = Callable[["Machine"], list[torch.Tensor]]


def values(seed: int, scale: float = 1.0) -> torch.Tensor:
    """What a layer might save, on the host."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(ELEMENTS, generator=generator) * scale).bfloat16()


class Machine:
    """A codec lane, a lane for copies and a pool, on the simulated device."""

    def __init__(self, arena_budget: int = 1 << 20, arena_chunk: int = 1 << 18) -> None:
        self.lane = native.StreamCodecLane(
            DEVICE, arena_budget=arena_budget, arena_chunk=arena_chunk
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
                storage, BF16, DENSE, var_capacity, self.copies, self.pool.native
            )
        else:
            encoding = self.lane.encode(storage, BF16, DENSE, var_capacity)
        assert encoding is not None, self.lane.last_refusal
        return view, *encoding

    def decode(self, view: Any, encoded: Any) -> torch.Tensor:
        with self.around_decode():
            storage, arrival = self.lane.decode(encoded)
        arrival.wait()
        return view.rebuild(storage, False)


def encode_stream(machine: Machine) -> tuple[int, int]:
    stream_id, device_index, _ = machine.lane.encode_stream
    return device_index, stream_id


def decode_stream(machine: Machine) -> tuple[int, int]:
    stream_id, device_index, _ = machine.lane.decode_stream
    return device_index, stream_id


def control_stream(machine: Machine) -> tuple[int, int]:
    stream_id, device_index, _ = machine.lane.control_stream
    return device_index, stream_id


def send_stream(machine: Machine) -> tuple[int, int]:
    stream_id, device_index, _ = machine.copies.send_stream
    return device_index, stream_id


def fetch_stream(machine: Machine) -> tuple[int, int]:
    stream_id, device_index, _ = machine.copies.fetch_stream
    return device_index, stream_id


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

    In an arena of ONE_FRAME.
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
    return int(native.frame_layout(BF16, DENSE, ELEMENTS).max_nbytes)


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

    def __str__(self) -> str:
        return f"{self.number} {self.name}"


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
    Edge("12", "consumer -> output freed", OutputsOfTheDecodeStream, let_go_at_once),
]


def arena_of(program: Program) -> int:
    return next((edge.arena for edge in EDGES if edge.program is program), 1 << 20)


def observe(schedule: Any, program: Program, broken: Any = None) -> Observation:
    seen = Observation()

    def body() -> None:
        machine = Machine(arena_budget=arena_of(program))
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


_expected: dict[Program, list[torch.Tensor]] = {}


def expected(program: Program) -> list[torch.Tensor]:
    if program not in _expected:
        results = observe(EAGER, program).results
        assert results is not None
        _expected[program] = results
    return _expected[program]


@pytest.mark.own_laboratory
@pytest.mark.one_schedule
@pytest.mark.parametrize("edge", EDGES, ids=str)
def test_a_broken_edge_of_an_encode_is_caught(edge: Edge) -> None:
    right = expected(edge.program)
    seen = {str(schedule): observe(schedule, edge.program, edge.broken) for schedule in MATRIX}
    struck = {name: one for name, one in seen.items() if one.hits}
    assert struck, f"edge {edge}: the mutation never struck"
    assert any(one.reports for one in struck.values()), f"edge {edge}: the detector said nothing"
    wrong = [name for name, one in struck.items() if one.differs_from(right)]
    assert bool(wrong) or not edge.shows_as_data, f"edge {edge}: no wrong data anywhere"


@pytest.mark.own_laboratory
@pytest.mark.one_schedule
@pytest.mark.parametrize(
    "program",
    [
        let_go_at_once,
        decoded_elsewhere,
        decoded_into_used_memory,
        swapped,
        arena_used_again,
        frame_dropped_while_it_is_decoded,
        header_read_late,
        reports_read,
    ],
    ids=lambda program: program.__name__,
)
def test_an_unbroken_lane_is_silent_and_right_under_every_schedule(program: Program) -> None:
    for schedule in MATRIX:
        seen = observe(schedule, program)
        assert not seen.reports, f"{schedule}: {seen.reports[:3]}"
        assert not seen.differs_from(expected(program)), f"{schedule}: data differ"


@pytest.mark.own_laboratory
@pytest.mark.one_schedule
def test_a_report_that_was_read_too_early_is_noticed() -> None:
    """Events that claim to have passed: the host takes a header that has not arrived."""
    seen = observe(LAZY, reports_read, lambda _: mutations.lying_queries())
    assert seen.hits
    assert seen.differs_from(expected(reports_read)), "a header was read before it had arrived"


# ---------------------------------------------------------------- what the programs stand on
def test_the_programs_give_back_what_was_encoded() -> None:
    machine = Machine()
    for program in (let_go_at_once, swapped):
        for seed, back in enumerate(program(machine)):
            assert same_bits(back, values(seed) * 2)
    assert machine.lane.decode_status() == 0


def test_frames_that_overflow_come_back_bit_for_bit() -> None:
    machine = Machine()
    tensors = [values(seed, scale=10.0**seed) for seed in range(4)]
    encodings = []
    for tensor in tensors:
        encodings.append(machine.encode(tensor.to(DEVICE)))
    for _, _, departure in encodings:
        departure.wait()
    torch.accelerator.synchronize()
    for tensor, (view, encoded, _) in zip(tensors, encodings, strict=True):
        assert same_bits(machine.decode(view, encoded).cpu(), tensor)
        assert encoded.report().overflow_used > 0, "nothing overflowed, so this tested nothing"
    assert machine.lane.decode_status() == 0


def test_a_frame_that_was_overwritten_is_told_once_and_never_waited_for() -> None:
    machine = Machine()
    memory = machine.pool.native.allocate(1 << 16).data_ptr  # where the first block will be
    view, encoded, departure = machine.encode(values(0).to(DEVICE), swap=True)
    departure.wait()
    torch.accelerator.synchronize()
    assert machine.lane.take_decode_status() == 0
    assert ctypes.string_at(memory, 4) == FRAME_MAGIC, "this would overwrite something else"
    ctypes.memset(memory, 0, encoded.nbytes)
    machine.decode(view, encoded)
    told = []
    for _ in range(4):  # read back behind the decode, and seen by a later call
        torch.accelerator.synchronize()
        before = _C.counters()["host_syncs"]
        told.append(machine.lane.take_decode_status())
        assert _C.counters()["host_syncs"] == before, "asking waited for the device"
    assert [status != 0 for status in told].count(True) == 1, told
    assert machine.lane.decode_status() == 0, "it is cleared once it has been told"


def test_an_encode_without_room_in_the_arena_is_refused_and_nothing_starts() -> None:
    machine = Machine(arena_budget=ONE_FRAME // 2)
    tensor = values(0).to(DEVICE)
    before = _C.counters()["enqueued"]
    assert machine.lane.encode(native.StorageRef(tensor), BF16, DENSE, TIGHT) is None
    assert "no room for the worst case" in machine.lane.last_refusal
    assert _C.counters()["enqueued"] == before
    assert machine.lane.encode(native.StorageRef(tensor), BF16, DENSE, None) is not None, (
        "a frame with room for its own worst case needs no arena"
    )
    machine.lane.settle()


def test_credits_cover_a_tile_that_leaves_nearly_all_of_var_unused() -> None:
    generator = torch.Generator().manual_seed(1)
    noise = torch.randint(-(2**15), 2**15, (ELEMENTS,), dtype=torch.int16, generator=generator)
    tensor = noise.view(torch.bfloat16)
    layout = native.frame_layout(BF16, DENSE, ELEMENTS)
    tile = 8 * layout.max_var_units // layout.blocks
    # Every whole tile of noise is that long, so none fits.
    room = 128 + 8 * (layout.max_var_units + tile)
    machine = Machine(arena_budget=room, arena_chunk=room)
    view, encoded, departure = machine.encode(tensor.to(DEVICE), var_capacity=tile - 1)
    departure.wait()
    torch.accelerator.synchronize()
    second = machine.lane.encode(native.StorageRef(tensor.to(DEVICE)), BF16, DENSE, tile - 1)
    assert second is None, "two frames were promised room that only one can have"
    assert encoded.report().status == 0
    assert encoded.report().overflow_used > layout.max_var_units - (tile - 1)
    assert same_bits(machine.decode(view, encoded).cpu(), tensor)
    assert machine.lane.decode_status() == 0


def test_a_lane_may_end_right_after_a_decode_that_overflowed_nothing() -> None:
    machine = Machine()
    capacity = native.frame_layout(BF16, DENSE, ELEMENTS).max_var_units - 8  # never needed
    view, encoded, departure = machine.encode(values(0).to(DEVICE), var_capacity=capacity)
    departure.wait()
    torch.accelerator.synchronize()
    assert encoded.report().overflow_used == 0
    back = machine.decode(view, encoded)
    del view, encoded, departure
    machine.lane = None  # the detector reports if the arena goes while the decode may look at it
    gc.collect()
    assert same_bits(back.cpu(), values(0))


def test_credits_come_back_when_the_host_learns_what_was_used() -> None:
    machine = Machine(arena_budget=64 << 10, arena_chunk=64 << 10)
    tensor = values(0).to(DEVICE)
    capacity = native.frame_layout(BF16, DENSE, ELEMENTS).max_var_units - 8  # never needed
    for _ in range(20):  # each sets a tile aside; together they would not fit
        _, encoded, departure = machine.encode(tensor, var_capacity=capacity)
        departure.wait()
        torch.accelerator.synchronize()
        assert encoded.report().overflow_used == 0
        assert encoded.overflow_nbytes == 0
        del encoded, departure
    now = machine.lane.arena_statistics()
    assert now["set_aside_bytes"] == 0 and now["resets"] == 0 and now["chunks"] == 1


@pytest.mark.parametrize("swap", [False, True])
def test_a_host_without_credit_waits_for_the_oldest_encode_if_a_room_was_set(swap: bool) -> None:
    """Whatever is encoded, overflows take the bytes that a plan has for them, and no more."""
    layout = native.frame_layout(BF16, DENSE, ELEMENTS)
    capacity = layout.max_var_units - 8  # never needed
    most = layout.most_overflow_units(capacity, native.codec_spare_tiles(DEVICE))
    room = 128 + 2 * 8 * most
    machine = Machine(arena_budget=1 << 24, arena_chunk=1 << 24)
    machine.lane.set_overflow_room(room)
    tensors = [values(seed) for seed in range(6)]
    made = [machine.encode(one.to(DEVICE), var_capacity=capacity, swap=swap) for one in tensors]
    assert machine.lane.arena_statistics()["reserved_bytes"] == room
    for (view, encoded, departure), tensor in zip(made, tensors, strict=True):
        departure.wait()
        assert encoded.device_nbytes == encoded.nbytes, "overflow counts once, with the room"
        encoded.wait_sent()
        assert encoded.device_nbytes == (0 if swap else encoded.nbytes)
        assert same_bits(machine.decode(view, encoded).cpu(), tensor)
        assert encoded.device_nbytes == (0 if swap else encoded.nbytes)
    tensor = tensors[0].to(DEVICE)
    waits = _C.counters()["host_syncs"]
    assert machine.lane.encode(native.StorageRef(tensor), BF16, DENSE, 0) is None
    assert _C.counters()["host_syncs"] == waits, "no wait can help what the room never holds"


def test_a_chunk_is_used_again_when_nobody_has_a_share_of_it() -> None:
    machine = Machine(arena_budget=ONE_FRAME)
    for seed in range(5):
        view, encoded, departure = machine.encode(values(seed).to(DEVICE))
        departure.wait()
        assert same_bits(machine.decode(view, encoded).cpu(), values(seed))
        del encoded, departure
    assert machine.lane.arena_statistics()["resets"] == 4
    assert machine.lane.trim_arena() == ONE_FRAME


@pytest.mark.parametrize("swap", [False, True])
def test_a_watch_tells_what_was_found_when_the_frame_is_gone(swap: bool) -> None:
    machine = Machine()
    _, encoded, departure = machine.encode(values(0).to(DEVICE), swap=swap)
    watch = encoded.watch()
    departure.wait()
    del encoded, departure
    torch.accelerator.synchronize()
    assert watch.report().elements == ELEMENTS and watch.report().overflow_used > 0
    machine.copies.settle()
    assert machine.lane.arena_statistics()["live_shares"] == 0


def test_the_arena_may_grow_and_shrink() -> None:
    machine = Machine(arena_budget=0)
    tensor = values(0).to(DEVICE)
    assert machine.lane.encode(native.StorageRef(tensor), BF16, DENSE, TIGHT) is None
    machine.lane.set_arena_budget(1 << 20)
    view, encoded, departure = machine.encode(tensor)
    machine.lane.set_arena_budget(0)
    departure.wait()
    assert same_bits(machine.decode(view, encoded).cpu(), values(0))
    assert machine.lane.trim_arena() == 0, "a frame points into the chunk"
    torch.accelerator.synchronize()
    assert encoded.report() is not None
    del encoded, departure
    assert machine.lane.trim_arena() > 0
    assert machine.lane.encode(native.StorageRef(tensor), BF16, DENSE, TIGHT) is None


def test_a_steady_step_waits_for_nothing_on_the_host() -> None:
    machine = Machine()
    inputs = [values(seed).to(DEVICE) for seed in range(3)]
    torch.accelerator.synchronize()

    def step() -> None:
        encodings = [machine.encode(tensor * 2) for tensor in inputs]
        for _, _, departure in encodings:
            departure.wait()
        for view, encoded, _ in encodings:
            machine.decode(view, encoded)

    step()
    torch.accelerator.synchronize()
    before = _C.counters()["host_syncs"]
    for _ in range(3):
        step()
    assert _C.counters()["host_syncs"] == before, "the host waited for the device in a steady step"
    torch.accelerator.synchronize()


@pytest.mark.parametrize("swap", [False, True])
def test_a_host_that_is_far_ahead_needs_no_more_memory_with_every_step(swap: bool) -> None:
    machine = Machine()
    tensor = values(0).to(DEVICE)
    torch.accelerator.synchronize()

    def step() -> None:
        view, encoded, departure = machine.encode(tensor * 2, swap=swap)
        departure.wait()
        machine.copies.settle()
        del departure
        machine.decode(view, encoded)

    for _ in range(3):
        step()
    before = _C.counters()["device_allocations"]
    for _ in range(20):
        step()
    assert _C.counters()["device_allocations"] == before, "memory that nobody lets go of"
    torch.accelerator.synchronize()


def test_encoded_storages_may_be_dropped_at_any_time() -> None:
    machine = Machine()
    for seed in range(3):
        for when in range(4):
            view, encoded, departure = machine.encode(values(seed).to(DEVICE), swap=when % 2 == 1)
            if when == 0:
                del encoded, departure
                continue
            storage, arrival = machine.lane.decode(encoded)
            del encoded
            if when == 1:
                del departure, storage, arrival
                continue
            del departure
            arrival.wait()
            assert same_bits(view.rebuild(storage, False).cpu(), values(seed))
            del storage, arrival
    gc.collect()
    machine.lane.settle()


def test_the_originals_that_leave_are_bounded() -> None:
    machine = Machine()
    machine.lane.set_max_leaving_bytes(2 * 2 * ELEMENTS)
    kept = []
    for seed in range(6):
        kept.append(machine.encode(values(seed).to(DEVICE)))
        assert machine.lane.leaving_bytes() <= 2 * 2 * ELEMENTS
    machine.lane.settle()
    assert machine.lane.leaving_bytes() == 0


def test_without_pinned_memory_an_encode_is_refused() -> None:
    machine = Machine()
    tensor = values(0).to(DEVICE)
    torch.accelerator.synchronize()
    _C.set_pinned_budget(0)
    assert machine.lane.encode(native.StorageRef(tensor), BF16, DENSE, None) is None
    assert "no pinned memory" in machine.lane.last_refusal


def test_without_device_memory_an_encode_is_refused() -> None:
    machine = Machine()
    tensor = values(0).to(DEVICE)
    torch.accelerator.synchronize()
    _C.set_capacity(DEVICE.index, _C.memory_stats(DEVICE.index)["reserved"])
    assert machine.lane.encode(native.StorageRef(tensor), BF16, DENSE, None) is None
    assert "no memory for a frame" in machine.lane.last_refusal
