"""Comm: the few collectives that memswap needs, with tickets; torch.distributed behind it.

A Comm is one lane: one process group, on which every rank launches the same collectives in the same
order. Everything above this file knows collectives by this protocol only, so tests can put another
one in its place: one that is late, one that writes down what happens, one that pretends.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
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


class ProcessGroupComm(Comm):
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
