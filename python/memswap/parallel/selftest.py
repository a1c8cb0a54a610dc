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


#: What a collective gave, and what it should have given.
Results = list[tuple[torch.Tensor, torch.Tensor]]


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
    checks: dict[str, Callable[[Comm, torch.device], Results]] = {
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
            wrong = [_differs(*pair, comm) for pair in check(comm, device)]
        except Exception as error:
            yield name, f"{type(error).__name__}: {error}"
            return  # the ranks may not agree on where they are now
        yield name, next(filter(None, wrong), "")
    other = ranks_that_differ(comm, device, configuration)
    wrong_here = f"rank {comm.rank} has {configuration!r}; ranks {other} do not" if other else ""
    yield "same configuration on all ranks", wrong_here


def _differs(found: torch.Tensor, expected: torch.Tensor, comm: Comm) -> str:
    """What this rank has instead of what it should have; nothing if they are equal."""
    if torch.equal(found, expected):
        return ""
    place = int((found != expected).nonzero()[0])
    what = found[place].item() if found.any() else "zeros only"
    return (
        f"rank {comm.rank} of {comm.size} found {what} at element {place} of {found.numel()}, "
        f"expected {expected[place].item()}; check the driver and the version of the communication "
        "library on its node"
    )


def _sent_by(rank: int, device: torch.device, count: int = COUNT) -> torch.Tensor:
    """What a rank sends: numbers that no other rank sends, none of them zero."""
    return torch.arange(1, count + 1, dtype=torch.float32, device=device) + rank * 2 * count


def _all_gather(comm: Comm, device: torch.device, counts: list[int]) -> Results:
    outputs = [torch.empty(count * comm.size, device=device) for count in counts]
    inputs = [_sent_by(comm.rank, device, count) for count in counts]
    comm.all_gather(outputs, inputs, label="selftest").wait()
    return [
        (output, torch.cat([_sent_by(rank, device, count) for rank in range(comm.size)]))
        for output, count in zip(outputs, counts, strict=True)
    ]


def _reduce_scatter(comm: Comm, device: torch.device, counts: list[int], op: ReduceOp) -> Results:
    outputs = [torch.empty(count, device=device) for count in counts]
    inputs = [
        torch.cat([_sent_by(rank, device, count) for rank in range(comm.size)]) for count in counts
    ]
    comm.reduce_scatter(outputs, inputs, op=op, label="selftest").wait()
    terms = comm.size if op == "sum" else 1  # all ranks send the same
    return [
        (output, _sent_by(comm.rank, device, count) * terms)
        for output, count in zip(outputs, counts, strict=True)
    ]


def _all_reduce(comm: Comm, device: torch.device) -> Results:
    counts = (COUNT, 3)
    tensors = [_sent_by(comm.rank, device, count) for count in counts]
    comm.all_reduce(tensors, op="sum", label="selftest").wait()
    return [
        (tensor, torch.stack([_sent_by(rank, device, count) for rank in range(comm.size)]).sum(0))
        for tensor, count in zip(tensors, counts, strict=True)
    ]


def _all_to_all(comm: Comm, device: torch.device) -> Results:
    count = COUNT * comm.size
    output = torch.empty(count, device=device)
    comm.all_to_all(output, _sent_by(comm.rank, device, count)).wait()
    sent = [_sent_by(rank, device, count).view(comm.size, -1) for rank in range(comm.size)]
    return [(output, torch.cat([one[comm.rank] for one in sent]))]


def _all_to_all_uneven(comm: Comm, device: torch.device) -> Results:
    own = comm.rank + 1  # rank r gets r + 1 numbers from everybody
    splits = [to + 1 for to in range(comm.size)]
    begin, count = sum(splits[: comm.rank]), sum(splits)
    output = torch.empty(own * comm.size, device=device)
    comm.all_to_all(output, _sent_by(comm.rank, device, count), [own] * comm.size, splits).wait()
    sent = [_sent_by(rank, device, count) for rank in range(comm.size)]
    return [(output, torch.cat([one[begin : begin + own] for one in sent]))]


def _broadcast(comm: Comm, device: torch.device) -> Results:
    last = comm.size - 1
    tensor = _sent_by(comm.rank, device)
    comm.broadcast(tensor, last).wait()
    return [(tensor, _sent_by(last, device))]


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
