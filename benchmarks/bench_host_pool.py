"""What pooled host memory costs: bytes nobody can use, and time per allocation.

The sizes are the storages that blocks of Llama-3-8B save for backward. On an accelerator the other
side is torch's pinned allocator, which rounds to powers of two; on a CPU it is ``torch.empty``.
Both allocate all blocks of a step, then drop them all, as a forward and a backward do; the first
step takes the memory from the system and later ones find it in their caches.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from common import chosen_device, make_parser, pinned_bytes, summarize, write_result

import memswap
from memswap.cli.bench.timing import alternate
from memswap.cli.table import render_table
from memswap.engine.units import format_bytes


def llama_block_bytes(tokens: int) -> list[int]:
    """Bytes of the storages that a block saves: bf16 activations, fp32 statistics."""
    hidden, key_value, feed_forward = (tokens * width * 2 for width in (4096, 8 * 128, 14336))
    norm = tokens * 4
    return [
        *(hidden, norm, hidden, hidden, key_value, key_value, hidden, 32 * norm),
        *(hidden, hidden, norm, hidden, *[feed_forward] * 4),
    ]


def step_s(allocate: Callable[[int], Any], sizes: list[int]) -> float:
    """Seconds of allocating every size and of dropping everything again."""
    began = time.perf_counter()
    held = [allocate(size) for size in sizes]
    served = all(block is not None for block in held)
    held.clear()
    elapsed_s = time.perf_counter() - began
    if not served:
        raise SystemExit("the pool refused an allocation: this machine needs fewer --layers")
    return elapsed_s


def waste_of(tokens: int, layers: int, device: torch.device) -> dict[str, float]:
    """Waste of a model's blocks, as shares of the bytes asked for."""
    pool = memswap.HostPool("1TiB", device=device)
    sizes = llama_block_bytes(tokens) * layers
    before = pinned_bytes(device)
    held = [pool.native.allocate(size) for size in sizes]
    now = pool.statistics()
    after = pinned_bytes(device)
    asked = now.in_use_bytes
    result = {
        "asked_bytes": asked,
        "refused": sum(block is None for block in held),
        "rounding": now.waste_bytes / asked,
        "holes": (now.free_bytes - now.largest_free_bytes) / asked,
        "reserved": now.reserved_bytes / asked - 1,
        "power_of_two": sum(1 << (size - 1).bit_length() for size in sizes) / sum(sizes) - 1,
    }
    if before is not None and after is not None and device.type != "cpu":
        result["pinned_by_torch_bytes"] = after - before
    held.clear()
    pool.trim()
    return result


def main() -> None:
    parser = make_parser(__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 5000])
    parser.add_argument("--layers", type=int, default=4, help="blocks of the model")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    device = chosen_device(arguments.device)
    on_cpu = device.type == "cpu"

    waste = {tokens: waste_of(tokens, arguments.layers, device) for tokens in arguments.tokens}
    shares = ("rounding", "holes", "reserved", "power_of_two")
    print(f"waste over {arguments.layers} blocks, % of the bytes asked for")
    print(
        render_table(
            ["tokens", "asked", "rounding", "holes", "all reserved", "powers of two"],
            [
                [str(tokens), format_bytes(row["asked_bytes"])]
                + [f"{100 * row[share]:.2f}" for share in shares]
                for tokens, row in waste.items()
            ],
        )
    )

    sizes = [size for tokens in arguments.tokens for size in llama_block_bytes(tokens)]
    pool = memswap.HostPool("1TiB", device=device)
    peer = "torch.empty" if on_cpu else "torch.empty(pin_memory=True)"
    allocators: dict[str, Callable[[int], Any]] = {
        "memswap.HostPool": pool.native.allocate,
        peer: lambda size: torch.empty(size, dtype=torch.uint8, pin_memory=not on_cpu),
    }
    first_s = {name: step_s(allocate, sizes) for name, allocate in allocators.items()}
    acquired = pool.statistics().slabs_acquired
    collected = alternate(
        {
            name: lambda allocate=allocate: step_s(allocate, sizes)
            for name, allocate in allocators.items()
        },
        arguments.rounds,
    )
    grown = pool.statistics().slabs_acquired - acquired
    count = len(sizes)
    print(f"\n{device}: {count} blocks, medians of {arguments.rounds} alternating runs")
    print(
        render_table(
            ["", "first step, us per block", "later steps, us per block"],
            [
                [
                    name,
                    f"{first_s[name] / count * 1e6:.2f}",
                    f"{statistics.median(seconds) / count * 1e6:.2f}",
                ]
                for name, seconds in collected.items()
            ],
        )
    )
    print(f"slabs taken from the system after the first step: {grown}")
    write_result(
        arguments.json,
        device,
        {
            "baseline": peer,
            "options": {"tokens": arguments.tokens, "layers": arguments.layers},
            "waste": {str(tokens): row for tokens, row in waste.items()},
            "first_us_per_block": {name: s / count * 1e6 for name, s in first_s.items()},
            "later_s_per_step": {name: summarize(seconds) for name, seconds in collected.items()},
            "slabs_after_first_step": grown,
        },
    )


if __name__ == "__main__":
    main()
