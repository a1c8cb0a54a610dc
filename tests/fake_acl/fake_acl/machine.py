"""The machine under torch_npu, under the names that simdev's laboratory knows (`simdev._C`).

torch_npu keeps calls in a task queue of the host before they reach the driver. Whatever looks at
the machine, or changes how it works, first lets that queue run empty; otherwise a call made before
would be seen, or broken, after.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from . import _C

Policy = _C.Policy
Check = _C.Check
device_count: int = _C.device_count
#: Torch's ids of torch_npu's streams lie below this; not every number is a stream.
pool_streams = 1024


def drain() -> None:
    """Waits until the task queue has handed all it holds to the driver (not until it has run)."""
    # The address of a stream is given out only once the queue is empty.
    torch.npu.current_stream().npu_stream  # noqa: B018


# ---------------------------------------------------------------- schedules and the detector
def set_policy(policy: Any, seed: int) -> None:
    drain()
    _C.set_policy(policy, seed)


def set_check(check: Any) -> None:
    drain()
    # What it finds is found on the thread of the task queue, where an exception would be an error
    # of the device and end the process's use of it. So reports are always collected.
    _C.set_check(_C.Check.collect if check == _C.Check.throw_ else check)


def take_reports() -> list[str]:
    drain()
    return list(_C.take_reports())


def quiesce() -> str | None:
    drain()
    error: str | None = _C.quiesce()
    # A free that waited for a recorded stream is completed by the next allocation.
    torch.empty(1, device="npu")
    drain()
    return _C.quiesce() or error


host_access = _C.host_access


def ascend_codec() -> Any:
    """memswap's codec for Ascend, its kernels on the emulator; a capsule for register_codec."""
    return _C.ascend_codec()


def kernel_launches() -> dict[str, int]:
    """How often each AscendC kernel was launched."""
    drain()
    return dict(_C.kernel_launches())


@contextlib.contextmanager
def lost_launches(kernel: str) -> Iterator[None]:
    """Launches of this AscendC kernel say that all is well, and nothing runs."""
    drain()
    _C.lose_launches_of(kernel)
    try:
        yield
    finally:
        drain()
        _C.lose_launches_of("")


def set_stream_delay_us(device: int, stream: int, us: float) -> None:
    """Delays belong to the schedule `free`, which is not used here."""


def rewind_stream_pool() -> None:
    """torch_npu hands out its streams in turn, and nobody can rewind that."""


# ---------------------------------------------------------------- memory
def empty_cache(device: int) -> None:
    drain()
    with torch.npu.device(device):
        torch.npu.synchronize()
        torch.npu.empty_cache()


def pinned_empty_cache() -> None:
    _C.empty_pinned_cache()


def last_serial() -> int:
    return int(_C.last_serial())


def live_blocks(after_serial: int) -> list[tuple[int, int, bool, int, int]]:
    """(bytes, serial, pinned, device, stream) of memory that tensors hold.

    Pinned memory is cached by an allocator that does not say what is live: none is listed.
    """
    return [(size, n, False, device, 0) for size, n, device in _C.live_tensors(after_serial)]


set_capacity = _C.set_capacity
memory_stats = _C.memory_stats
pinned_stats = _C.pinned_stats
reset_peak = _C.reset_peak
fail_device_requests = _C.fail_device_requests
fail_pinned_requests = _C.fail_pinned_requests
set_pinned_budget = _C.set_pinned_budget


# ---------------------------------------------------------------- counters and virtual time
def counters() -> dict[str, int]:
    drain()
    return dict(_C.counters())


def synchronize_device(device: int) -> None:
    torch.npu.synchronize(device)


def host_virtual_us() -> float:
    drain()
    return float(_C.host_virtual_us())


def reset_counters() -> None:
    drain()
    _C.reset_counters()


set_cost_model = _C.set_cost_model
reset_virtual_time = _C.reset_virtual_time
operator_counts = _C.operator_counts


# ---------------------------------------------------------------- mutations
def mutate_drop_waits(waiters: Any, sources: Any) -> int:
    drain()
    return int(_C.mutate_drop_waits(waiters, sources))


def mutate_drop_synchronizes(sources: Any) -> int:
    drain()
    return int(_C.mutate_drop_synchronizes(sources))


def mutate_lying_queries(sources: Any = None) -> int:
    drain()
    return int(_C.mutate_lying_queries(sources))


def mutate_drop_record_stream() -> int:
    """The caching allocator is told that recorded streams have passed, whether they have or not."""
    drain()
    return int(_C.mutate_drop_record_stream())


@dataclass
class _AllocateOn:
    before: torch.Stream
    hits: int


#: Mutations that only torch_npu's own interface can make. Their ids are negative.
_allocating: dict[int, _AllocateOn] = {}


def mutate_allocate_on(tagged: tuple[int, int], current: Any) -> int:
    """What is allocated now belongs to another stream, and its free to that stream's order.

    torch_npu's allocator takes the current stream, so that is changed. memswap then tells the
    allocator which stream uses the memory, so the allocator is lied to as well, until the
    laboratory ends.
    """
    drain()
    before = torch.npu.current_stream()
    strikes = current is None or (before.device_index, before.stream_id) in current
    if strikes:
        device, stream = tagged
        torch.npu.set_stream(_stream(device, stream))
        _C.mutate_drop_record_stream()
    identifier = -1 - len(_allocating)
    _allocating[identifier] = _AllocateOn(before, int(strikes))
    return identifier


def _stream(device: int, stream: int) -> torch.Stream:
    return torch.npu.Stream(
        stream_id=stream, device_index=device, device_type=torch._C._autograd.DeviceType.PrivateUse1
    )


def mutation_hits(identifier: int) -> int:
    if identifier < 0:
        return _allocating[identifier].hits
    drain()
    return int(_C.mutation_hits(identifier))


def remove_mutation(identifier: int) -> None:
    drain()
    if identifier < 0:
        torch.npu.set_stream(_allocating[identifier].before)
    else:
        _C.remove_mutation(identifier)


def clear_mutations() -> None:
    _allocating.clear()
    _C.clear_mutations()


# ---------------------------------------------------------------- faults
def calls() -> dict[str, int]:
    """How often each ACL function was called."""
    drain()
    return dict(_C.call_counts())


def events() -> dict[str, int]:
    """How many events were made, by creating function and flag."""
    drain()
    return dict(_C.event_counts())


@contextlib.contextmanager
def faults_of(call: str, *, after: int = 0, n: int = 1, code: int = 507000) -> Iterator[None]:
    """The next `n` calls of an ACL function fail with `code`, after `after` good ones."""
    drain()
    _C.fail_calls(call, after, n, code)
    try:
        yield
    finally:
        _C.fail_calls(call, 0, 0, 0)


def device_lost() -> None:
    """Every call fails from now on, and nothing that was enqueued runs."""
    _C.lose_device()
