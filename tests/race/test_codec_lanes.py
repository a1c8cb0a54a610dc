"""StreamCodecLane: reports, credits, arenas, refusals, and what a steady step costs."""

from __future__ import annotations

import ctypes
import gc
from typing import Any

import pytest
import torch
from codec_machine import BF16, DENSE, ELEMENTS, FRAME_MAGIC, ONE_FRAME, TIGHT, Machine, values
from helpers import same_bits
from race_workloads import DEVICE

from memswap._native import native
from simdev import _C


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
    assert machine.lane.encode(native.StorageRef(tensor), (BF16, DENSE, TIGHT)) is None
    assert "no room for the worst case" in machine.lane.last_refusal
    assert _C.counters()["enqueued"] == before
    assert machine.lane.encode(native.StorageRef(tensor), (BF16, DENSE, None)) is not None, (
        "a frame with room for its own worst case needs no arena"
    )
    machine.lane.settle()


def test_credits_cover_a_tile_that_leaves_nearly_all_of_var_unused() -> None:
    tensor = noise(1)
    layout = native.frame_sizes(BF16, DENSE, ELEMENTS)
    tile = 8 * layout.max_var_units // layout.blocks
    # Every whole tile of noise is that long, so none fits.
    room = 128 + 8 * (layout.max_var_units + tile)
    machine = Machine(arena_budget=room, arena_chunk=room)
    view, encoded, departure = machine.encode(tensor.to(DEVICE), var_capacity=tile - 1)
    departure.wait()
    torch.accelerator.synchronize()
    second = machine.lane.encode(native.StorageRef(tensor.to(DEVICE)), (BF16, DENSE, tile - 1))
    assert second is None, "two frames were promised room that only one can have"
    assert encoded.report().status == 0
    assert encoded.report().overflow_used > layout.max_var_units - (tile - 1)
    assert same_bits(machine.decode(view, encoded).cpu(), tensor)
    assert machine.lane.decode_status() == 0


def overflowed_nothing(machine: Machine) -> tuple[Any, Any]:
    """A frame that might have overflowed and, as the host knows by now, has not."""
    capacity = native.frame_sizes(BF16, DENSE, ELEMENTS).max_var_units - 8  # never needed
    view, encoded, departure = machine.encode(values(0).to(DEVICE), var_capacity=capacity)
    departure.wait()
    torch.accelerator.synchronize()
    assert encoded.report().overflow_used == 0
    return view, encoded


def test_a_lane_may_end_right_after_a_decode_that_overflowed_nothing() -> None:
    machine = Machine()
    view, encoded = overflowed_nothing(machine)
    back = machine.decode(view, encoded)
    del view, encoded
    machine.lane = None  # the detector reports if the arena goes while the decode may look at it
    gc.collect()
    assert same_bits(back.cpu(), values(0))


def test_a_lane_may_end_while_what_decodes_found_is_read_back() -> None:
    machine = Machine()
    view, encoded, departure = machine.encode(values(0).to(DEVICE), var_capacity=None)
    departure.wait()
    back = machine.decode(view, encoded)
    machine.lane.take_decode_status()
    del view, encoded, departure
    machine.lane = None
    gc.collect()
    # The detector reports if others get pinned memory that the copy may still write to.
    torch.empty(1, pin_memory=True)
    assert same_bits(back.cpu(), values(0))


def test_a_frame_that_overflowed_nothing_keeps_no_memory_of_the_arena() -> None:
    machine = Machine()
    view, encoded = overflowed_nothing(machine)
    before = torch.accelerator.memory_allocated()
    trimmed = machine.lane.trim_arena()
    assert before - torch.accelerator.memory_allocated() == trimmed > 0
    back = machine.decode(view, encoded)  # and reads nothing there
    del view, encoded
    assert same_bits(back.cpu(), values(0))


def test_credits_come_back_when_the_host_learns_what_was_used() -> None:
    machine = Machine(arena_budget=64 << 10, arena_chunk=64 << 10)
    tensor = values(0).to(DEVICE)
    capacity = native.frame_sizes(BF16, DENSE, ELEMENTS).max_var_units - 8  # never needed
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
    layout = native.frame_sizes(BF16, DENSE, ELEMENTS)
    capacity = layout.max_var_units - 8  # never needed
    tile = 8 * layout.max_var_units // layout.blocks  # one may leave its room in var unused
    most = layout.max_var_units - capacity + tile
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
    assert machine.lane.encode(native.StorageRef(tensor), (BF16, DENSE, 0)) is None
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


def noise(seed: int) -> torch.Tensor:
    """What does not shrink at all."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**15), 2**15, (ELEMENTS,), dtype=torch.int16, generator=generator)
    return bits.view(torch.bfloat16)


def test_the_worst_case_of_many_frames_is_in_pinned_memory_and_nobody_waits() -> None:
    """A host that is far ahead of the device, and every frame as long as its tensor."""
    machine = Machine(arena_budget=0, arena_chunk=64 << 10, pinned=1 << 20)
    tensors = [noise(seed) for seed in range(12)]
    on_device = [tensor.to(DEVICE) for tensor in tensors]
    torch.accelerator.synchronize()
    waits = _C.counters()["host_syncs"]
    made = [machine.encode(tensor) for tensor in on_device]
    del on_device
    for _, encoded, departure in made:
        departure.wait()
        assert encoded.overflow_nbytes == 0, "pinned memory counts as the device's"
    assert _C.counters()["host_syncs"] == waits, "the host waited for a header"
    arena = machine.lane.arena_statistics()
    assert arena["reserved_bytes"] == 128 * arena["chunks"], "more of the device than cursors"
    assert arena["pinned_bytes"] == machine.arena_pool.native.statistics()["in_use_bytes"] > 0
    for (view, encoded, _), tensor in zip(made, tensors, strict=True):
        assert same_bits(machine.decode(view, encoded).cpu(), tensor)
    assert machine.lane.decode_status() == 0
    torch.accelerator.synchronize()
    assert all(encoded.report().overflow_used > 0 for _, encoded, _ in made), "this tested nothing"
    del made, encoded, view
    machine.lane.trim_arena()
    torch.accelerator.synchronize()
    assert machine.arena_pool.native.statistics()["in_use_bytes"] == 0


def test_the_devices_memory_serves_where_no_more_can_be_pinned() -> None:
    machine = Machine(arena_chunk=ONE_FRAME, pinned=ONE_FRAME)
    made = [machine.encode(values(seed).to(DEVICE)) for seed in range(3)]
    arena = machine.lane.arena_statistics()
    assert arena["pinned_bytes"] == ONE_FRAME < arena["reserved_bytes"]
    for seed, (view, encoded, departure) in enumerate(made):
        departure.wait()
        assert encoded.overflow_nbytes == 0 or seed > 0
        assert same_bits(machine.decode(view, encoded).cpu(), values(seed))
    refusals = machine.arena_pool.native.statistics()["refusals"]
    assert refusals == 1, "the system is asked for pinned memory by every encode"
    del made, encoded, view, departure
    machine.lane.set_arena_budget(0)  # a new forward: there may be some again
    view, encoded, departure = machine.encode(values(3).to(DEVICE))
    departure.wait()
    assert same_bits(machine.decode(view, encoded).cpu(), values(3))


def test_a_room_that_a_plan_set_is_the_devices_and_without_it_memory_is_pinned_again() -> None:
    machine = Machine(arena_chunk=ONE_FRAME, pinned=4 * ONE_FRAME)
    machine.lane.set_overflow_room(ONE_FRAME)
    view, encoded, departure = machine.encode(values(0).to(DEVICE))
    departure.wait()
    arena = machine.lane.arena_statistics()
    assert (arena["reserved_bytes"], arena["pinned_bytes"]) == (ONE_FRAME, 0)
    assert same_bits(machine.decode(view, encoded).cpu(), values(0))
    machine.lane.set_overflow_room(None)
    view, encoded, departure = machine.encode(values(1).to(DEVICE))
    departure.wait()
    assert machine.lane.arena_statistics()["pinned_bytes"] > 0
    assert same_bits(machine.decode(view, encoded).cpu(), values(1))


def test_the_arena_may_grow_and_shrink() -> None:
    machine = Machine(arena_budget=0)
    tensor = values(0).to(DEVICE)
    assert machine.lane.encode(native.StorageRef(tensor), (BF16, DENSE, TIGHT)) is None
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
    assert machine.lane.encode(native.StorageRef(tensor), (BF16, DENSE, TIGHT)) is None


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
    assert machine.lane.encode(native.StorageRef(tensor), (BF16, DENSE, None)) is None
    assert "no pinned memory" in machine.lane.last_refusal


def test_without_device_memory_an_encode_is_refused() -> None:
    machine = Machine()
    tensor = values(0).to(DEVICE)
    torch.accelerator.synchronize()
    _C.set_capacity(DEVICE.index, _C.memory_stats(DEVICE.index)["reserved"])
    assert machine.lane.encode(native.StorageRef(tensor), (BF16, DENSE, None)) is None
    assert "no memory for a frame" in machine.lane.last_refusal
