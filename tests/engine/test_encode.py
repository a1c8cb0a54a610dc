"""ENCODE and ENCODE_SWAP: what they do to memory, and what happens when they cannot."""

from __future__ import annotations

import ctypes
import warnings
from collections import deque
from typing import Any

import pytest
import torch
from helpers import (
    Remember,
    assert_nothing_left,
    collect,
    flush_autograd,
    let_sends_end,
    look,
    random,
)

import memswap
from memswap import Action, Policy
from memswap._native import native
from memswap.engine import transfers

ENCODE = Policy(action=Action.ENCODE, min_bytes=1)
ENCODE_SWAP = Policy(action=Action.ENCODE_SWAP, min_bytes=1)
ROWS, WIDTH = 64, 1024  # 128 KiB of bfloat16: eight tiles

each_encoding = pytest.mark.parametrize("policy", [ENCODE, ENCODE_SWAP], ids=["encode", "both"])


def normal(device: torch.device, seed: int = 0, dtype=torch.bfloat16) -> torch.Tensor:
    return random(device, ROWS, WIDTH, seed=seed).to(dtype)


def noise(device: torch.device, seed: int = 0) -> torch.Tensor:
    """Every bit pattern alike: nothing to gain."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**15), 2**15, (ROWS, WIDTH), generator=generator, dtype=torch.int16)
    return bits.view(torch.bfloat16).to(device)


def zeros_mostly(device: torch.device, seed: int = 0) -> torch.Tensor:
    made = normal(device, seed)
    return made * (random(device, ROWS, WIDTH, seed=seed + 1) > 0.5)


def step(engine: memswap.saved_tensors, device: torch.device, make: Any, count: int = 4) -> None:
    """Saves `count` tensors of `make(device, seed)`; in backward they must look as they did."""
    seen: list[Any] = []
    x = torch.zeros(4, device=device, requires_grad=True)
    with engine:
        for seed in range(count):
            x = Remember.apply(x, seen, make(device, seed))
    let_sends_end(engine, device)
    x.sum().backward()
    del x
    flush_autograd(device)
    assert seen == [look(make(device, seed)) for seed in reversed(range(count))]
    del seen
    let_sends_end(engine, device)


@pytest.fixture
def engine_of(new_pool: Any, device: torch.device) -> Any:
    def make(policy: Policy, **options: Any) -> memswap.saved_tensors:
        options.setdefault("pool", new_pool() if policy.action is Action.ENCODE_SWAP else None)
        return memswap.saved_tensors(policy, prefetch_bytes=0, **options)

    return make


@each_encoding
def test_frames_take_two_thirds_of_a_bfloat16_tensor(device, engine_of, policy) -> None:
    engine = engine_of(policy)
    for _ in range(3):
        step(engine, device, normal)
    stats = engine.stats()
    assert stats.encoded_storages == stats.moved_storages == 12
    assert stats.encoded_bytes == stats.moved_bytes == 12 * ROWS * WIDTH * 2
    assert 1.4 < stats.ratio < 1.6
    assert not stats.kept
    assert_nothing_left(stats)


def test_frames_on_the_device_are_resident_and_frames_in_a_pool_are_away(device, engine_of) -> None:
    raw = ROWS * WIDTH * 2
    for policy in (ENCODE, ENCODE_SWAP):
        engine = engine_of(policy)
        step(engine, device, normal)  # the first capacity is a guess
        x = torch.zeros(4, device=device, requires_grad=True)
        with engine:
            x = Remember.apply(x, [], normal(device))
        held = let_sends_end(engine, device)
        frame = held.resident_bytes if policy is ENCODE else held.away_bytes
        assert 0.6 * raw < frame < 0.75 * raw
        assert 0 in (held.resident_bytes, held.away_bytes)
        del x
        collect()
        flush_autograd(device)
        assert_nothing_left(engine.stats())


@pytest.mark.cpu_only
def test_default_on_a_cpu_is_to_encode_and_with_a_file_to_swap(device, new_pool) -> None:
    engine = memswap.saved_tensors(Policy(min_bytes=1))
    step(engine, device, normal)
    assert engine.stats().encoded_storages == 4
    pool = memswap.HostPool(device="cpu")
    engine = memswap.saved_tensors(Policy(min_bytes=1), pool=pool)
    step(engine, device, normal)
    assert engine.stats().encoded_storages == 4
    assert pool.statistics().peak_bytes > 0, "the pool that was given holds no frames"
    engine = memswap.saved_tensors(Policy(min_bytes=1), pool=new_pool())
    step(engine, device, normal)
    assert engine.stats().encoded_storages == 0
    assert engine.stats().moved_storages == 4


@pytest.mark.accelerator
def test_default_on_an_accelerator_is_to_swap(device, new_pool) -> None:
    engine = memswap.saved_tensors(Policy(min_bytes=1), pool=new_pool())
    step(engine, device, normal)
    assert engine.stats().encoded_storages == 0
    assert engine.stats().moved_storages == 4


def test_what_is_gone_is_counted_as_gone_while_much_else_is_held() -> None:
    """As autocast's cache holds the casts of all weights until the forward has ended."""
    cpu = torch.device("cpu")
    held = [normal(cpu, seed) for seed in range(40)]
    in_use: deque[torch.Tensor] = deque(maxlen=2)  # each until two others have been saved
    seen: list[Any] = []
    x = torch.zeros(4, requires_grad=True)
    with memswap.saved_tensors(ENCODE) as saved:
        for one in held:
            x = Remember.apply(x, seen, one)
        for seed in range(40, 80):
            in_use.append(normal(cpu, seed))
            x = Remember.apply(x, seen, in_use[-1])
    stats = saved.stats()
    late = (stats.peak_resident_bytes - stats.resident_bytes) / held[0].nbytes
    assert late <= 1, f"{late:.1f} storages were counted that had gone"
    x.sum().backward()
    assert len(seen) == 80


def test_what_does_not_shrink_is_encoded_once_and_kept_from_then_on(device, engine_of) -> None:
    engine = engine_of(ENCODE)
    step(engine, device, noise)
    assert engine.stats().encoded_storages == 4, "nobody could know"
    engine.reset_stats()
    for _ in range(3):
        step(engine, device, noise)
    stats = engine.stats()
    assert stats.moved_storages == 0
    assert stats.kept["does not shrink"].tensors == 12


def test_what_does_not_shrink_is_swapped_as_it_is_where_there_is_a_pool(device, engine_of) -> None:
    engine = engine_of(ENCODE_SWAP)
    step(engine, device, noise)
    engine.reset_stats()
    step(engine, device, noise)
    stats = engine.stats()
    assert stats.moved_storages == 4 and stats.encoded_storages == 0
    assert not stats.kept


def test_tensors_too_small_for_a_frame_are_not_even_tried(device, engine_of) -> None:
    engine = engine_of(ENCODE)
    step(engine, device, lambda device, seed: random(device, 16, seed=seed))
    assert engine.stats().kept["does not shrink"].tensors == 4


@each_encoding
def test_statistics_that_jump_cost_bytes_and_no_bits(device, engine_of, policy) -> None:
    """What the last step says about the next one may be wrong in every way."""
    engine = engine_of(policy)
    constant = lambda device, seed: torch.full((ROWS, WIDTH), 1.5, device=device).bfloat16()  # noqa: E731
    for make in (constant, normal, zeros_mostly, normal, constant, noise, normal, zeros_mostly):
        step(engine, device, make)
    assert_nothing_left(engine.stats())


@each_encoding
@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.float32, torch.float64, torch.complex64, torch.int64, torch.bool]
)
@pytest.mark.usefixtures("every_tensor_is_encoded")
def test_other_dtypes_come_back_bit_for_bit(device, engine_of, policy, dtype) -> None:
    engine = engine_of(policy)
    for _ in range(2):
        step(engine, device, lambda device, seed: random(device, 33, 77, seed=seed, dtype=dtype))
    assert engine.stats().encoded_storages == 8


@each_encoding
@pytest.mark.parametrize("first", ["mask", "noise"])
def test_bools_that_are_neither_0_nor_1_cost_bytes_and_no_bits(
    device, engine_of, policy, first
) -> None:
    """Of a tensor of bools, a frame has room for bitmaps; whatever else they are goes elsewhere."""

    def mask(device: torch.device, seed: int) -> torch.Tensor:
        return random(device, ROWS, WIDTH, seed=seed, dtype=torch.bool)

    def noise(device: torch.device, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        made = torch.randint(0, 256, (ROWS, WIDTH), generator=generator, dtype=torch.uint8)
        return made.to(device).view(torch.bool)

    engine = engine_of(policy)
    for make in (mask, noise, mask) if first == "mask" else (noise, mask):
        step(engine, device, make)
    assert engine.stats().encoded_storages >= 4
    assert_nothing_left(engine.stats())


@each_encoding
def test_many_zeros_make_a_smaller_frame(device, engine_of, policy) -> None:
    """From the first time on where a sample can be looked at, elsewhere from the second."""
    engine = engine_of(policy)
    ratios = []
    for _ in range(3):
        engine.reset_stats()
        step(engine, device, zeros_mostly)
        ratios.append(engine.stats().ratio)
    assert ratios[1] > 2.5, f"no sparse frames: {ratios}"
    if device.type == "cpu":
        assert ratios[0] == ratios[1], f"the first frame was not sparse: {ratios}"
    else:
        assert ratios[1] > 1.3 * ratios[0], f"no sparse frames: {ratios}"


@pytest.mark.cpu_only
def test_a_pool_without_room_keeps_and_says_so(device) -> None:
    pool = memswap.HostPool(budget="1MiB", slab="1MiB", device="cpu")
    engine = memswap.saved_tensors(ENCODE, pool=pool, prefetch_bytes=0)
    with pytest.warns(UserWarning, match="stays on cpu"):
        step(engine, device, normal, count=40)
    stats = engine.stats()
    assert stats.kept["codec room"].tensors > 0 and stats.encoded_storages > 0
    step(engine, device, normal)
    assert engine.stats().encoded_storages >= stats.encoded_storages + 4, "room came back unused"


@pytest.mark.accelerator
@pytest.mark.filterwarnings("ignore:memswap. a storage")
def test_an_arena_without_room_keeps_and_swaps_instead(device, engine_of, monkeypatch) -> None:
    monkeypatch.setattr(transfers, "FIRST_ARENA_BYTES", 0)
    monkeypatch.setattr(transfers, "ARENA_SHARE", 0.0)

    def open_codec_lane(device: torch.device, frames: Any = None) -> Any:
        return native.StreamCodecLane(device, arena_budget=0)

    monkeypatch.setattr(transfers, "open_codec_lane", open_codec_lane)
    engine = engine_of(ENCODE)
    step(engine, device, normal)
    assert engine.stats().kept["codec room"].tensors == 4
    engine = engine_of(ENCODE_SWAP)
    step(engine, device, normal)
    stats = engine.stats()
    assert stats.moved_storages == 4 and stats.encoded_storages == 0 and not stats.kept


@pytest.mark.accelerator
def test_a_shortage_of_the_first_forward_is_counted_and_one_that_lasts_is_told(
    device, engine_of, monkeypatch
) -> None:
    def open_codec_lane(device: torch.device, frames: Any = None) -> Any:
        return native.StreamCodecLane(device, arena_budget=0)

    monkeypatch.setattr(transfers, "FIRST_ARENA_BYTES", 0)
    monkeypatch.setattr(transfers, "ARENA_SHARE", 0.0)
    monkeypatch.setattr(transfers, "open_codec_lane", open_codec_lane)
    engine = engine_of(ENCODE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(engine, device, normal)
    assert engine.stats().kept["codec room"].tensors == 4
    with pytest.warns(UserWarning, match="no room for the worst case"):
        step(engine, device, normal)
    engine = engine_of(ENCODE_SWAP)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(engine, device, normal)
    with pytest.warns(UserWarning, match="is swapped as it is: .*no room for the worst case"):
        step(engine, device, normal)
    assert not engine.stats().kept


@pytest.mark.parametrize("action", [Action.ENCODE, Action.ENCODE_SWAP])
def test_a_device_without_a_codec_keeps_or_swaps(device, engine_of, action, monkeypatch) -> None:
    class Native:
        codec_name = staticmethod(lambda device: None)

        def __getattr__(self, name: str) -> Any:
            return getattr(native, name)

    monkeypatch.setattr(transfers, "native", Native())
    engine = engine_of(Policy(action=action, min_bytes=1))
    step(engine, device, normal)
    stats = engine.stats()
    assert stats.encoded_storages == 0
    if action is Action.ENCODE:
        assert stats.kept["no codec"].tensors == 4
    else:
        assert stats.moved_storages == 4


@each_encoding
def test_an_edit_after_encoding_is_autograds_error(device, engine_of, policy) -> None:
    engine = engine_of(policy)
    x = normal(device).float().requires_grad_()
    with engine:
        made = x * 2
        out = made.sin()
    let_sends_end(engine, device)
    made.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    del out, made
    collect()


@each_encoding
def test_a_function_chooses_among_actions(device, engine_of, policy, new_pool) -> None:
    actions = [Action.KEEP, Action.ENCODE, Action.SWAP, Action.ENCODE_SWAP]
    asked: list[Action] = []

    def choose(tensor: torch.Tensor, info: memswap.TensorInfo) -> Action:
        asked.append(actions[len(asked) % 4])
        return asked[-1]

    engine = engine_of(Policy(fn=choose, min_bytes=1), pool=new_pool())
    step(engine, device, normal, count=8)
    stats = engine.stats()
    assert stats.kept["policy"].tensors == 2
    assert stats.moved_storages == 6 and stats.encoded_storages == 4
    assert_nothing_left(stats)


@pytest.mark.few_schedules
@each_encoding
def test_many_steps_leave_nothing_behind(device, new_pool, policy) -> None:
    pool = new_pool()
    if device.type == "cpu" and policy is ENCODE:
        pool = memswap.HostPool(device="cpu", slab="1MiB")
    engine = memswap.saved_tensors(policy, pool=pool)
    for number in range(30):
        step(engine, device, (normal, zeros_mostly, noise)[number % 3])
    (sent_by,) = engine._engine._transfers.all()
    assert_nothing_left(engine.stats())
    assert pool.statistics().blocks == 0
    assert not sent_by.awaited_reports, "a report is waited for that will never come"
    assert len(sent_by.expectations) == 4
    if device.type != "cpu":
        assert sent_by.codec_lane.arena_statistics()["live_shares"] == 0


@pytest.mark.cpu_only
def test_a_processor_encodes_and_decodes_when_asked_and_not_ahead(device) -> None:
    engine = memswap.saved_tensors(ENCODE, prefetch_bytes="1GiB")
    seen: list[Any] = []
    x = torch.zeros(4, device=device, requires_grad=True)
    with engine:
        for seed in range(4):
            x = Remember.apply(x, seen, normal(device, seed))
    (sent_by,) = engine._engine._transfers.all()
    assert sent_by.codec_lane.leaving_bytes() == 0, "an encode was left for later"
    x.sum().backward()
    assert engine.stats().stalls == 4, "something was decoded before it was asked for"


@pytest.mark.one_schedule
def test_a_frame_that_was_overwritten_in_the_pool_is_an_error(device) -> None:
    pool = memswap.HostPool(budget="8MiB", slab="1MiB", device=device)
    memory = pool.native.allocate(1 << 16).data_ptr  # where the first block will be
    # On a CPU a frame that is encoded where it is lives in the pool that was given.
    policy = ENCODE if device.type == "cpu" else ENCODE_SWAP
    engine = memswap.saved_tensors(policy, pool=pool, prefetch_bytes=0)
    x = normal(device).requires_grad_()
    with engine:
        loss = (x * 1).sin().sum()
    let_sends_end(engine, device)
    assert ctypes.string_at(memory, 4) == b"MSF1", "this would overwrite something else"
    ctypes.memset(memory, 0, 1024)
    with pytest.raises(memswap.TransferError, match=r"go back to a checkpoint|brought back"):
        loss.backward()
        del loss
        for _ in range(3):  # an accelerator's decodes are heard of later
            flush_autograd(device)
            if device.type != "cpu":
                torch.accelerator.synchronize()
            with engine:
                (x * 1).sin().sum().backward()


@pytest.mark.parametrize("rows", [5, 3000])
def test_encode_of_one_tensor_chooses_the_shape_on_any_device(device, rows) -> None:
    """3000 rows: a sample of them. 5: all."""
    for made in (
        torch.randn(rows, 1000),
        torch.randn(rows, 1000).relu().bfloat16(),
        torch.ones(rows, 1000),
        torch.ones(rows, 1000, dtype=torch.bool).tril(),
        torch.randn(rows, 1000).bfloat16().float(),
    ):
        on_host = memswap.encode(made)
        frame = memswap.encode(made.to(device))
        assert frame.nbytes == on_host.nbytes
        back = memswap.decode(frame).cpu()
        assert torch.equal(back.view(torch.uint8), made.view(torch.uint8))
