"""Promises of HostPool and of the sizes that people write."""

from __future__ import annotations

import dataclasses
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pool_contents import assert_bytes_come_back

from memswap._native import native
from memswap.engine.pools import HostPool, PoolStatistics
from memswap.engine.units import format_bytes, parse_bytes

MIB = 2**20


def cpu_pool(budget: int | str | None = "8GiB", slab: int | str = "64MiB") -> HostPool:
    return HostPool(budget, slab, device="cpu")


# --- sizes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("24GiB", 24 * 2**30),
        ("512 MiB", 512 * MIB),
        ("1.5GB", 1_500_000_000),
        ("0.5kib", 512),
        (" 4096 B ", 4096),
        ("0", 0),
        ("1_000 B", 1000),
        ("2TB", 2 * 10**12),
        (7, 7),
        (0, 0),
    ],
)
def test_sizes_are_read_as_people_write_them(text: int | str, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize(
    "wrong", ["", "GiB", "24", "-1GiB", "12 parsecs", "1e9", "3 4", 1.5, None, True]
)
def test_a_size_that_cannot_be_read_is_named(wrong: object) -> None:
    with pytest.raises(ValueError, match="expected a size in bytes such as 24GiB") as caught:
        parse_bytes(wrong)  # type: ignore[arg-type]
    assert repr(wrong) in str(caught.value)


def test_a_negative_size_is_refused() -> None:
    with pytest.raises(ValueError, match="negative, found -1"):
        parse_bytes(-1)


@given(st.integers(0, 2**53 - 1))
def test_no_byte_is_lost_in_a_long_number(nbytes: int) -> None:
    assert parse_bytes(f"{nbytes}B") == nbytes
    assert parse_bytes(f"{nbytes}.0 KiB") == nbytes * 1024


def test_sizes_are_printed_with_a_unit() -> None:
    assert [format_bytes(n) for n in (512, 1536, 3 * 2**30, 2**41)] == [
        "512 B",
        "1.5 KiB",
        "3.00 GiB",
        "2048.00 GiB",
    ]


# --- waste ----------------------------------------------------------------------------------------


def llama_block_bytes(tokens: int) -> list[int]:
    """Storages saved by a block of hidden 4096, feed-forward 14336, 8 key-value heads of 128."""
    hidden, key_value, feed_forward = (tokens * width * 2 for width in (4096, 8 * 128, 14336))
    statistics = tokens * 4
    return [
        *(hidden, statistics, hidden, hidden, key_value, key_value, hidden, 32 * statistics),
        *(hidden, hidden, statistics, hidden, *[feed_forward] * 4),
    ]


@pytest.mark.parametrize("tokens", [8192, 5000])
def test_waste_is_under_three_percent(tokens: int) -> None:
    pool = cpu_pool()
    sizes = llama_block_bytes(tokens)
    blocks = [pool.native.allocate(size) for size in sizes]
    assert all(blocks)
    waste = pool.statistics().waste_bytes / sum(sizes)
    power_of_two = sum(1 << (size - 1).bit_length() for size in sizes) / sum(sizes) - 1
    print(f"{tokens} tokens: waste {waste:.4%}, rounded to powers of two {power_of_two:.1%}")
    assert waste <= 0.03, f"{waste:.1%} of the pinned memory holds nothing"
    assert waste < power_of_two


# --- refusals -------------------------------------------------------------------------------------


def test_a_spent_budget_is_none_and_counted() -> None:
    pool = cpu_pool("1MiB", "256KiB")
    kept = [pool.native.allocate(256 * 1024) for _ in range(4)]
    assert all(kept)
    assert pool.native.allocate(1) is None, "the budget was passed"
    statistics = pool.statistics()
    assert statistics.refusals == 1
    assert "budget of 1048576 bytes is spent" in statistics.last_refusal
    assert statistics.reserved_bytes == MIB
    kept.pop()
    assert pool.native.allocate(256 * 1024) is not None, "returned memory is not used again"


def test_a_budget_that_is_no_power_of_two_can_be_used_whole() -> None:
    pool = cpu_pool(3 * MIB, "2MiB")
    assert pool.native.allocate(3 * MIB) is not None


@pytest.mark.skipif(torch.xpu.is_available(), reason="needs a backend that this machine lacks")
def test_memory_that_cannot_be_pinned_is_a_refusal_with_its_reason() -> None:
    pool = native.make_host_pool(torch.device("xpu:0"), None, MIB, pageable=False)
    assert pool.allocate(10) is None
    statistics = PoolStatistics(**pool.statistics())
    assert statistics.refusals == 1
    assert "could not get a slab of 1048576 bytes" in statistics.last_refusal
    assert "XPU" in statistics.last_refusal, "the system's own words are missing"
    assert "frame #" not in statistics.last_refusal, "a backtrace is no reason"


@pytest.mark.skipif(torch.xpu.is_available(), reason="needs a backend that this machine lacks")
def test_ordinary_memory_serves_where_none_can_be_pinned() -> None:
    pool = native.make_host_pool(torch.device("xpu:0"), 2 * MIB, MIB)
    block = pool.allocate(10)
    assert block is not None
    statistics = PoolStatistics(**pool.statistics())
    assert statistics.pageable_bytes == MIB
    assert "XPU" in statistics.why_pageable, "the system's own words are missing"
    assert pool.allocate(2 * MIB) is None, "the budget is for both kinds of memory"


def test_a_size_beyond_any_memory_is_a_refusal() -> None:
    assert cpu_pool().native.allocate(2**63) is None


# --- reuse ----------------------------------------------------------------------------------------


def test_memory_is_used_again_exactly() -> None:
    pool = cpu_pool()
    block = pool.native.allocate(12345)
    address = block.data_ptr
    del block
    assert pool.native.allocate(12345).data_ptr == address
    assert pool.statistics().slabs_acquired == 1


def test_a_steady_state_takes_nothing_from_the_system() -> None:
    pool = cpu_pool(slab="1MiB")
    lane = native.WorkerLane(workers=2)
    sizes = [1, 511, 4097, 100_000, 300_000, 700_001]
    acquired = []
    for _ in range(6):
        storages = [native.StorageRef(torch.zeros(size, dtype=torch.uint8)) for size in sizes]
        blocks = [pool.native.allocate(storage.nbytes) for storage in storages]
        sent = [lane.send(*pair) for pair in zip(storages, blocks, strict=True)]
        fetched = [lane.fetch(block) for block in blocks]
        for ticket in (*sent, *(ticket for _, ticket in fetched)):
            ticket.wait()
        del blocks
        acquired.append(pool.statistics().slabs_acquired)
    assert acquired[1:] == acquired[:-1], f"slabs were still taken after warm-up: {acquired}"


def test_trim_returns_what_nothing_uses() -> None:
    pool = cpu_pool(slab="1MiB")
    kept = pool.native.allocate(MIB // 2)
    dropped = pool.native.allocate(MIB // 2), pool.native.allocate(MIB // 2)
    assert pool.trim() == 0
    del dropped
    assert pool.trim() == MIB
    del kept
    assert pool.trim() == MIB
    assert pool.statistics().reserved_bytes == 0


def test_reserve_takes_memory_before_it_is_needed() -> None:
    pool = cpu_pool("16MiB", "1MiB")
    assert pool.reserve("8MiB")
    statistics = pool.statistics()
    assert statistics.reserved_bytes >= 8 * MIB
    assert statistics.grown_in_background == statistics.slabs
    block = pool.native.allocate(MIB)
    assert block is not None
    assert pool.statistics().slabs_acquired == statistics.slabs_acquired
    assert pool.reserve(), "the whole budget could not be reserved"
    assert pool.statistics().reserved_bytes == 16 * MIB
    assert not pool.reserve("1GiB"), "more than the budget was reserved"
    assert "budget" in pool.statistics().last_refusal


def test_statistics_are_plain_and_frozen() -> None:
    pool = cpu_pool()
    block = pool.native.allocate(1000)
    statistics = pool.statistics()
    assert (statistics.in_use_bytes, statistics.waste_bytes, statistics.blocks) == (1000, 24, 1)
    assert statistics.free_bytes == statistics.largest_free_bytes == 64 * MIB - 1024
    with pytest.raises(dataclasses.FrozenInstanceError):
        statistics.blocks = 5  # type: ignore[misc]
    assert repr(pool) == "<HostPool 1000 B in use, 64.0 MiB reserved, budget 8.00 GiB>"
    del block
    assert pool.statistics().peak_bytes == 1000


def test_a_device_that_is_not_there_is_refused_and_not_found_out_at_each_block() -> None:
    for device in ("meta", "xpu:0"):
        with pytest.raises(ValueError, match=f"device='{device}'.*this torch sees the CPU"):
            HostPool("1MiB", device=device)


@pytest.mark.parametrize("size", [2**63, 2**70, "9999999 TiB"])
def test_more_bytes_than_can_be_addressed_are_a_value_error(size: int | str) -> None:
    for arguments in ({"budget": size}, {"budget": "1MiB", "slab": size}):
        with pytest.raises(ValueError, match="no machine has"):
            HostPool(device="cpu", **arguments)  # type: ignore[arg-type]


def test_the_default_budget_leaves_the_machine_its_memory() -> None:
    assert 0 < HostPool(device="cpu").budget_bytes < 2**50


def test_a_node_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="a node of this machine"):
        HostPool("1MiB", numa=4096, device="cpu")


def test_memory_bound_to_a_node_works_like_any_other() -> None:
    pool = HostPool("4MiB", "1MiB", numa=0, device="cpu")
    data = torch.arange(1000)
    block = pool.native.allocate(data.nbytes)
    block.write(data)
    back = torch.empty_like(data)
    block.read(back)
    assert torch.equal(back, data)
    assert pool.numa_node == 0


def test_unknown_pci_devices_have_no_node() -> None:
    assert native.numa_node_of_pci("ffff:ff:1f.7") is None
    assert native.numa_nodes() >= 1


# --- contents -------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [0, 1, 511, 512, 4097, 10 * MIB + 3])
def test_bytes_come_back_as_they_were(nbytes: int) -> None:
    data = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    assert_bytes_come_back(cpu_pool(), data, fence_nbytes=512)


def test_a_tensor_of_another_length_is_refused() -> None:
    block = cpu_pool().native.allocate(16)
    with pytest.raises(ValueError, match="expected 16 bytes, found 8"):
        block.write(torch.zeros(8, dtype=torch.uint8))
    with pytest.raises(ValueError, match="contiguous"):
        block.read(torch.zeros(32, dtype=torch.uint8)[::2])


def test_blocks_outlive_their_pool() -> None:
    pool = cpu_pool()
    block = pool.native.allocate(8)
    del pool
    block.write(torch.tensor([42]))
    back = torch.empty(1, dtype=torch.int64)
    block.read(back)
    assert back.item() == 42


def test_threads_share_a_pool() -> None:
    pool = cpu_pool("8MiB", "1MiB")
    wrong: list[str] = []

    def work(seed: int) -> None:
        random = torch.Generator().manual_seed(seed)
        held: list[tuple[torch.Tensor, object]] = []
        for _ in range(300):
            nbytes = int(torch.randint(1, 200_000, (), generator=random))
            block = pool.native.allocate(nbytes)
            if block is None or len(held) > 8:
                while held:
                    data, old = held.pop()
                    back = torch.empty_like(data)
                    old.read(back)  # type: ignore[attr-defined]
                    if not torch.equal(back, data):
                        wrong.append(f"thread {seed}: another owner wrote into a live block")
                continue
            data = torch.full((nbytes,), seed, dtype=torch.uint8)
            block.write(data)
            held.append((data, block))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong[0]
    assert pool.statistics().blocks == 0
    assert pool.statistics().reserved_bytes <= 8 * MIB
