"""Comm: the few collectives that memswap needs, with tickets; torch.distributed behind it.

A Comm is one lane: one process group, on which every rank launches the same collectives in the same
order. Everything above this file knows collectives by this protocol only, so tests can put another
one in its place: one that is late, one that writes down what happens, one that pretends.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

ReduceOp = Literal["avg", "sum"]

_REDUCTIONS = {"avg": dist.ReduceOp.AVG, "sum": dist.ReduceOp.SUM}

# torch 2.13 renamed these two; the old names warn.
all_gather_tensor = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Ticket(Protocol):
    """The completion of a collective: see [Note: Tickets of collectives]."""

    def wait(self) -> None:
        """Order the current stream after the collective (on a CPU: block until it is done)."""


class Comm(Protocol):
    """Collectives among the ranks of one process group.

    Tensors are contiguous and on the group's device. A collective reads its inputs and writes its
    outputs at any time between the call and the end of ``Ticket.wait()``; until then nobody else
    may touch them. ``label`` names the collective in errors, logs and profiles.
    """

    @property
    def rank(self) -> int:
        """This process's rank in the group."""

    @property
    def size(self) -> int:
        """Number of ranks in the group."""

    def all_gather(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], *, label: str = ""
    ) -> Ticket:
        """Gather several tensors of all ranks, in one collective.

        Args:
            outputs: ``outputs[i]`` gets the ranks' ``inputs[i]``, one after another along
                dimension 0.
            inputs: this rank's tensors. The sizes of ``inputs[i]`` agree on all ranks.
            label: names the collective.
        """

    def reduce_scatter(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        *,
        op: ReduceOp = "avg",
        label: str = "",
    ) -> Ticket:
        """Reduce several tensors of all ranks and scatter the result, in one collective.

        Args:
            outputs: ``outputs[i]`` gets this rank's part, along dimension 0, of the reduction of
                the ranks' ``inputs[i]``.
            inputs: this rank's tensors; dimension 0 of ``inputs[i]`` is ``size`` times that of
                ``outputs[i]``.
            op: "avg" or "sum".
            label: names the collective.
        """

    def all_to_all(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
        *,
        label: str = "",
    ) -> Ticket:
        """Send a part of a tensor to each rank, and receive one from each.

        Args:
            output: part ``j``, along dimension 0, is what rank ``j`` sent to this rank.
            input: part ``j``, along dimension 0, goes to rank ``j``.
            output_splits: rows of each part of ``output``; None: they are equal.
            input_splits: rows of each part of ``input``; None: they are equal.
            label: names the collective.
        """

    def all_reduce(
        self, tensors: Sequence[torch.Tensor], *, op: ReduceOp = "avg", label: str = ""
    ) -> Ticket:
        """Reduce several tensors of all ranks in place, in one collective.

        Args:
            tensors: ``tensors[i]`` becomes the reduction of the ranks' ``tensors[i]``.
            op: "avg" or "sum".
            label: names the collective.
        """

    def broadcast(self, tensor: torch.Tensor, source: int, *, label: str = "") -> Ticket:
        """Send one rank's tensor to all.

        Args:
            tensor: on other ranks than ``source``, is overwritten by what that rank has.
            source: a rank of this group.
            label: names the collective.
        """


# [Note: Tickets of collectives]
# c10d launches a collective behind the current stream's work and Work.wait() puts the current
# stream behind the collective; on gloo, wait() blocks, and a reduce-scatter writes its output only
# then. So a ticket
# - owns the Work and every tensor of the collective until it has been waited: nothing is freed or
#   reused on the word of a comment;
# - calls Work.wait() until it has returned, and once it has raised never again: for gloo, a second
#   call then says that all is well. The consumer, and whoever frees the tensors, use the stream
#   that waited: memswap waits on the compute stream only;
# - is never polled: is_completed() and futures say nothing useful on gloo.
class WorkTicket:
    """The ticket of a torch.distributed collective."""

    def __init__(self, work: Any, tensors: Sequence[torch.Tensor]) -> None:
        self._work = work
        self._tensors = tuple(tensors)
        self._failure: str | None = None

    def wait(self) -> None:
        """
        Raises:
            RuntimeError: the collective has failed, in this call or in an earlier one.
        """
        if self._failure is not None:
            raise RuntimeError(
                f"what this collective was to write is not there, it has failed: {self._failure}"
            )
        if self._work is None:
            return
        try:
            self._work.wait()
        except Exception as error:  # an interrupt ends the wait, not the collective
            self._failure = f"{type(error).__name__}: {error}"
            self._work, self._tensors = None, ()
            raise
        self._work, self._tensors = None, ()


class ProcessGroupComm:
    """The collectives of a torch.distributed process group: NCCL, HCCL, gloo. See :class:`Comm`.

    Args:
        group: the process group; None is the default one.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group: dist.ProcessGroup = dist.group.WORLD if group is None else group
        if self.group is None or self.group == dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError(
                "ProcessGroupComm: this process is in no such process group; call "
                "torch.distributed.init_process_group (torchrun sets it up) and pass a group that "
                "this rank belongs to"
            )

    @property
    def rank(self) -> int:
        return int(self.group.rank())

    @property
    def size(self) -> int:
        return int(self.group.size())

    def all_gather(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], *, label: str = ""
    ) -> Ticket:
        for output, input in zip(outputs, inputs, strict=True):
            _check_sizes("all_gather", label, output.numel(), input.numel() * self.size)
        return self._launch(all_gather_tensor, outputs, inputs, label or "all_gather")

    def reduce_scatter(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        *,
        op: ReduceOp = "avg",
        label: str = "",
    ) -> Ticket:
        for output, input in zip(outputs, inputs, strict=True):
            _check_sizes("reduce_scatter", label, output.numel() * self.size, input.numel())
        launch = partial(_reduce_scatter, op=_REDUCTIONS[op])
        return self._launch(launch, outputs, inputs, label or "reduce_scatter")

    def all_to_all(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
        *,
        label: str = "",
    ) -> Ticket:
        launch = partial(
            dist.all_to_all_single,
            output_split_sizes=None if output_splits is None else list(output_splits),
            input_split_sizes=None if input_splits is None else list(input_splits),
        )
        return self._launch(launch, [output], [input], label or "all_to_all")

    def all_reduce(
        self, tensors: Sequence[torch.Tensor], *, op: ReduceOp = "avg", label: str = ""
    ) -> Ticket:
        def launch(tensor: torch.Tensor, same: torch.Tensor, **options: Any) -> Any:
            return dist.all_reduce(tensor, op=_REDUCTIONS[op], **options)

        return self._launch(launch, tensors, tensors, label or "all_reduce")

    def broadcast(self, tensor: torch.Tensor, source: int, *, label: str = "") -> Ticket:
        def launch(tensor: torch.Tensor, same: torch.Tensor, **options: Any) -> Any:
            return dist.broadcast(tensor, group_src=source, **options)

        return self._launch(launch, [tensor], [tensor], label or "broadcast")

    def _launch(
        self,
        launch: Callable[..., Any],
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        label: str,
    ) -> WorkTicket:
        # Through .data: a buffer that a collective fills is no in-place edit for autograd.
        pairs = [(out.data, own.data) for out, own in zip(outputs, inputs, strict=True)]
        launch = partial(launch, group=self.group, async_op=True)
        with torch.profiler.record_function(f"memswap::{label}"):
            if len(pairs) == 1:
                work = launch(*pairs[0])
            else:
                with _coalescing_manager(group=self.group, async_ops=True) as work:
                    for pair in pairs:
                        launch(*pair)
        return WorkTicket(work, [tensor for pair in pairs for tensor in pair])


def _check_sizes(collective: str, label: str, found: int, expected: int) -> None:
    """Refuse a collective whose buffers on this rank do not fit: on the network it would hang."""
    if found != expected:
        raise ValueError(
            f"{collective} {label!r}: found {found} elements, expected {expected}; outputs and "
            "inputs must fit the size of the group"
        )


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
