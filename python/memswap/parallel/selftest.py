"""One tiny exchange per lane: does this group's network do what it should?

A process group that hangs, drops or mixes up data shows itself here, at the start and with a name,
and not as a loss that goes wrong on the second day.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from functools import partial

import torch

from memswap.parallel.comm import Comm, ReduceOp

#: Elements that each rank sends to each other rank.
COUNT = 1024


def check_lanes(
    comm: Comm, device: torch.device, configuration: str = ""
) -> Iterator[tuple[str, str]]:
    """Try each collective once, with known values, and compare.

    Args:
        comm: the group to check. All of its ranks call this.
        device: where the tensors are.
        configuration: what has to be the same on all ranks; compared by its hash.

    Yields:
        The name of a check, and what was wrong ("" if nothing).
    """
    checks: dict[str, Callable[[Comm, torch.device], str]] = {
        "all-gather": partial(_all_gather, counts=[COUNT]),
        "several all-gathers in one": partial(_all_gather, counts=[COUNT, 3]),
        "reduce-scatter": partial(_reduce_scatter, counts=[COUNT], op="avg"),
        "several reduce-scatters in one": partial(_reduce_scatter, counts=[COUNT, 3], op="sum"),
        "several all-reduces in one": _all_reduce,
        "all-to-all": _all_to_all,
        "all-to-all, unequal parts": _all_to_all_uneven,
        "broadcast": _broadcast,
    }
    for name, check in checks.items():
        try:
            yield name, check(comm, device)
        except Exception as error:
            yield name, f"{type(error).__name__}: {error}"
            return  # the ranks may not agree on where they are now
    yield "same configuration on all ranks", _same(comm, device, configuration)


def _differs(found: torch.Tensor, expected: torch.Tensor, comm: Comm) -> str:
    """Nothing if they are equal; else what this rank has instead."""
    if torch.equal(found, expected):
        return ""
    place = int((found != expected).nonzero()[0])
    what = found[place].item() if found.any() else "zeros only"
    return (
        f"rank {comm.rank} of {comm.size} found {what} at element {place} of {found.numel()}, "
        f"expected {expected[place].item()}; check the driver and the version of the communication "
        "library on its node"
    )


def _mine(comm: Comm, device: torch.device, rank: int, count: int = COUNT) -> torch.Tensor:
    """What a rank sends: numbers that no other rank sends, none of them zero."""
    return torch.arange(1, count + 1, dtype=torch.float32, device=device) + rank * 2 * count


def _all_gather(comm: Comm, device: torch.device, counts: list[int]) -> str:
    outputs = [torch.empty(count * comm.size, device=device) for count in counts]
    inputs = [_mine(comm, device, comm.rank, count) for count in counts]
    comm.all_gather(outputs, inputs, label="selftest").wait()
    for output, count in zip(outputs, counts, strict=True):
        expected = torch.cat([_mine(comm, device, rank, count) for rank in range(comm.size)])
        if wrong := _differs(output, expected, comm):
            return wrong
    return ""


def _reduce_scatter(comm: Comm, device: torch.device, counts: list[int], op: ReduceOp) -> str:
    outputs = [torch.empty(count, device=device) for count in counts]
    inputs = [
        torch.cat([_mine(comm, device, rank, count) for rank in range(comm.size)])
        for count in counts
    ]
    comm.reduce_scatter(outputs, inputs, op=op, label="selftest").wait()
    terms = comm.size if op == "sum" else 1  # all ranks send the same
    for output, count in zip(outputs, counts, strict=True):
        if wrong := _differs(output, _mine(comm, device, comm.rank, count) * terms, comm):
            return wrong
    return ""


def _all_reduce(comm: Comm, device: torch.device) -> str:
    tensors = [_mine(comm, device, comm.rank, count) for count in (COUNT, 3)]
    comm.all_reduce(tensors, op="sum", label="selftest").wait()
    for tensor, count in zip(tensors, (COUNT, 3), strict=True):
        expected = torch.stack([_mine(comm, device, rank, count) for rank in range(comm.size)])
        if wrong := _differs(tensor, expected.sum(0), comm):
            return wrong
    return ""


def _all_to_all(comm: Comm, device: torch.device) -> str:
    output = torch.empty(COUNT * comm.size, device=device)
    comm.all_to_all(output, _mine(comm, device, comm.rank, COUNT * comm.size)).wait()
    expected = torch.cat(
        [
            _mine(comm, device, rank, COUNT * comm.size).view(comm.size, -1)[comm.rank]
            for rank in range(comm.size)
        ]
    )
    return _differs(output, expected, comm)


def _all_to_all_uneven(comm: Comm, device: torch.device) -> str:
    splits = [to + 1 for to in range(comm.size)]  # rank r gets r + 1 numbers from everybody
    begin = sum(splits[: comm.rank])
    output = torch.empty((comm.rank + 1) * comm.size, device=device)
    received = [comm.rank + 1] * comm.size
    sent = _mine(comm, device, comm.rank, sum(splits))
    comm.all_to_all(output, sent, received, splits).wait()
    expected = torch.cat(
        [
            _mine(comm, device, rank, sum(splits))[begin : begin + comm.rank + 1]
            for rank in range(comm.size)
        ]
    )
    return _differs(output, expected, comm)


def _broadcast(comm: Comm, device: torch.device) -> str:
    last = comm.size - 1
    tensor = _mine(comm, device, comm.rank)
    comm.broadcast(tensor, last).wait()
    return _differs(tensor, _mine(comm, device, last), comm)


def _same(comm: Comm, device: torch.device, configuration: str) -> str:
    other = ranks_that_differ(comm, device, configuration)
    return f"rank {comm.rank} has {configuration!r}; ranks {other} do not" if other else ""


def ranks_that_differ(comm: Comm, device: torch.device, text: str) -> list[int]:
    """The ranks of a group that have another text than this one; all of its ranks call this.

    Args:
        comm: the group.
        device: of the tensors that are exchanged.
        text: compared by its hash.
    """
    digest = hashlib.sha256(text.encode()).digest()[:8]
    mine = torch.tensor(list(digest), dtype=torch.float32, device=device)
    output = torch.empty(len(digest) * comm.size, device=device)
    comm.all_gather([output], [mine], label="configuration").wait()
    texts = output.view(comm.size, -1)
    return [rank for rank, one in enumerate(texts) if not torch.equal(one, mine)]
