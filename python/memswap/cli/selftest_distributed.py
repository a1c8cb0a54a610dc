"""``python -m memswap selftest --distributed``: one tiny exchange per lane, on every rank."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

import memswap
from memswap.cli.table import render_table
from memswap.parallel.comm import Comm, ProcessGroupComm, ReduceOp, ranks_that_differ


def run(arguments: argparse.Namespace) -> int:
    """Check the ranks that torchrun started; rank 0 prints. The exit status is 0 if all is well."""
    if "RANK" not in os.environ:
        print(
            "memswap selftest --distributed: found no ranks; start them with torchrun, as in\n"
            "  torchrun --nproc-per-node 2 -m memswap selftest --distributed",
            file=sys.stderr,
        )
        return 2
    device = _device()
    dist.init_process_group(
        timeout=timedelta(seconds=arguments.timeout),
        device_id=None if device.type == "cpu" else device,
    )
    comm = ProcessGroupComm()
    configuration = f"memswap {memswap.__version__}, torch {torch.__version__}, {device.type}"
    results = list(check_lanes(comm, device, configuration))
    failed = [(name, wrong) for name, wrong in results if wrong]
    if comm.rank == 0:
        rows = [(name, "FAILED" if wrong else "ok") for name, wrong in results]
        print(f"{comm.size} ranks, {dist.get_backend_config()}, {configuration}")
        print(render_table(("exchange, as rank 0 sees it", "result"), rows), flush=True)
    for name, wrong in failed:  # every rank speaks for itself: the others may be out of reach
        print(f"memswap selftest: {name}: {wrong}", file=sys.stderr, flush=True)
    if not failed:
        dist.barrier()  # nobody leaves while another one still exchanges
        dist.destroy_process_group()
    return 1 if failed else 0


def _device() -> torch.device:
    """This rank's accelerator, or the CPU."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu")
    device = torch.device(accelerator.type, int(os.environ.get("LOCAL_RANK", "0")))
    torch.accelerator.set_device_index(device.index)
    return device


# --- a trial of each collective -------------------------------------------------------------------

#: Elements that each rank sends to each other rank in a trial.
COUNT = 1024

#: What a collective gave, and what it should have given.
Results = list[tuple[torch.Tensor, torch.Tensor]]


def check_lanes(
    comm: Comm, device: torch.device, configuration: str = ""
) -> Iterator[tuple[str, str]]:
    """Try each collective once, with known values, and compare.

    A process group that hangs, drops or mixes up data shows itself here, at the start and with a
    name, and not as a loss that goes wrong on the second day.

    Args:
        comm: the group to check. All of its ranks call this.
        device: where the tensors are.
        configuration: what has to be the same on all ranks; compared by its hash.

    Yields:
        The name of a check, and what was wrong ("" if nothing).
    """
    trial = _Trial(comm, device)
    checks: dict[str, Callable[[], Results]] = {
        "all-gather": partial(trial.all_gather, COUNT),
        "several all-gathers in one": partial(trial.all_gather, COUNT, 3),
        "reduce-scatter": partial(trial.reduce_scatter, "avg", COUNT),
        "several reduce-scatters in one": partial(trial.reduce_scatter, "sum", COUNT, 3),
        "several all-reduces in one": partial(trial.all_reduce, COUNT, 3),
        "all-to-all": trial.all_to_all,
        "all-to-all, unequal parts": trial.all_to_all_uneven,
        "broadcast": trial.broadcast,
    }
    for name, check in checks.items():
        try:
            wrong = [_differs(*pair, comm) for pair in check()]
        except Exception as error:
            yield name, f"{type(error).__name__}: {error}"
            return  # the ranks may not agree on where they are now
        yield name, next(filter(None, wrong), "")
    other = ranks_that_differ(comm, device, configuration)
    wrong_here = f"rank {comm.rank} has {configuration!r}; ranks {other} do not" if other else ""
    yield "same configuration on all ranks", wrong_here


class _Trial:
    """The collectives of one group with known values."""

    def __init__(self, comm: Comm, device: torch.device) -> None:
        self.comm, self.device = comm, device

    def sent_by(self, rank: int, count: int = COUNT) -> torch.Tensor:
        """What a rank sends: numbers that no other rank sends, none of them zero."""
        values = torch.arange(1, count + 1, dtype=torch.float32, device=self.device)
        return values + rank * 2 * count

    def sent(self, count: int = COUNT) -> list[torch.Tensor]:
        """What all ranks send."""
        return [self.sent_by(rank, count) for rank in range(self.comm.size)]

    def empty(self, count: int) -> torch.Tensor:
        """Room for so many numbers."""
        return torch.empty(count, device=self.device)

    def all_gather(self, *counts: int) -> Results:
        outputs = [self.empty(count * self.comm.size) for count in counts]
        inputs = [self.sent_by(self.comm.rank, count) for count in counts]
        self.comm.all_gather(outputs, inputs, label="selftest").wait()
        return [(out, torch.cat(self.sent(n))) for out, n in zip(outputs, counts, strict=True)]

    def reduce_scatter(self, op: ReduceOp, *counts: int) -> Results:
        outputs = [self.empty(count) for count in counts]
        inputs = [torch.cat(self.sent(count)) for count in counts]  # all ranks send the same
        self.comm.reduce_scatter(outputs, inputs, op=op, label="selftest").wait()
        terms = self.comm.size if op == "sum" else 1
        own = [self.sent_by(self.comm.rank, count) * terms for count in counts]
        return list(zip(outputs, own, strict=True))

    def all_reduce(self, *counts: int) -> Results:
        tensors = [self.sent_by(self.comm.rank, count) for count in counts]
        self.comm.all_reduce(tensors, op="sum", label="selftest").wait()
        sums = [torch.stack(self.sent(count)).sum(0) for count in counts]
        return list(zip(tensors, sums, strict=True))

    def all_to_all(self) -> Results:
        size, rank = self.comm.size, self.comm.rank
        output = self.empty(COUNT * size)
        self.comm.all_to_all(output, self.sent_by(rank, COUNT * size)).wait()
        parts = [one.view(size, -1)[rank] for one in self.sent(COUNT * size)]
        return [(output, torch.cat(parts))]

    def all_to_all_uneven(self) -> Results:
        rank, own = self.comm.rank, self.comm.rank + 1  # rank r gets r + 1 numbers from everybody
        splits = [to + 1 for to in range(self.comm.size)]
        begin, count = sum(splits[:rank]), sum(splits)
        output = self.empty(own * len(splits))
        input = self.sent_by(rank, count)
        self.comm.all_to_all(output, input, [own] * len(splits), splits).wait()
        return [(output, torch.cat([one[begin : begin + own] for one in self.sent(count)]))]

    def broadcast(self) -> Results:
        last = self.comm.size - 1
        tensor = self.sent_by(self.comm.rank)
        self.comm.broadcast(tensor, last).wait()
        return [(tensor, self.sent_by(last))]


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
