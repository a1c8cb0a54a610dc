"""Comms for tests: late, recording, pretended. Each is a memswap.parallel.comm.Comm.

- LateComm finds orders that only a slow network would: nothing happens until wait().
- Recording writes launches and waits into an EventLog, together with whatever the test notes.
- FakeComm is any rank of any number of ranks without a process group: for schedules, not values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from memswap.parallel.comm import Comm, ReduceOp, Ticket


class EventLog:
    """What happened, in order: ``log("F0")``, ``log.events``."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def __call__(self, event: str) -> None:
        self.events.append(event)

    def index(self, event: str, nth: int = 0) -> int:
        """Where an event happened for the nth time; fails with the whole log."""
        places = [i for i, one in enumerate(self.events) if one == event]
        assert len(places) > nth, f"{event!r} ({nth}) did not happen; log: {self.events}"
        return places[nth]

    def count(self, prefix: str) -> int:
        return sum(event.startswith(prefix) for event in self.events)

    def before(self, first: str, second: str) -> bool:
        return self.index(first) < self.index(second)

    def assert_all_waited(self) -> None:
        """Each launch was waited for. Of a log with the events of a Recording and no others."""
        launched = [event for event in self.events if not event.startswith("wait ")]
        assert launched, "nothing was launched"
        for event in set(launched):
            assert self.events.count(f"wait {event}") == launched.count(event), event


def poison(tensor: torch.Tensor) -> None:
    """Fill with bytes that no test expects: NaN in every floating-point type."""
    tensor.data.view(-1).view(torch.uint8).fill_(0xFF)


class LateTicket:
    """Does its work in wait(), once."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work: Callable[[], None] | None = work

    def wait(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            work()


#: A collective of another Comm, given its outputs and its inputs.
Collective = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], Ticket]


class CommAround:
    """Another Comm, whose collectives are all launched in one place: a subclass's `launch`."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm

    @property
    def rank(self) -> int:
        return self._comm.rank

    @property
    def size(self) -> int:
        return self._comm.size

    def launch(
        self,
        event: str,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        collective: Collective,
    ) -> Ticket:
        """Launch `collective(outputs, inputs)`, now or later; `event` is its name and label."""
        raise NotImplementedError

    def all_gather(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], *, label: str = ""
    ) -> Ticket:
        return self.launch(
            f"all_gather {label}",
            outputs,
            inputs,
            lambda o, i: self._comm.all_gather(o, i, label=label),
        )

    def reduce_scatter(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        *,
        op: ReduceOp = "avg",
        label: str = "",
    ) -> Ticket:
        return self.launch(
            f"reduce_scatter {label}",
            outputs,
            inputs,
            lambda o, i: self._comm.reduce_scatter(o, i, op=op, label=label),
        )

    def all_to_all(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
        *,
        label: str = "",
    ) -> Ticket:
        return self.launch(
            f"all_to_all {label}",
            [output],
            [input],
            lambda o, i: self._comm.all_to_all(
                o[0], i[0], output_splits, input_splits, label=label
            ),
        )

    def all_reduce(
        self, tensors: Sequence[torch.Tensor], *, op: ReduceOp = "avg", label: str = ""
    ) -> Ticket:
        return self.launch(
            f"all_reduce {label}",
            tensors,
            tensors,
            lambda o, i: self._comm.all_reduce(o, op=op, label=label),
        )

    def broadcast(self, tensor: torch.Tensor, source: int, *, label: str = "") -> Ticket:
        return self.launch(
            f"broadcast {label}",
            [tensor],
            [tensor],
            lambda o, i: self._comm.broadcast(o[0], source, label=label),
        )


class LateComm(CommAround):
    """The worst legal network: nothing happens until wait(), and outputs are poison until then.

    Inputs are read in wait(), so a buffer that was reused too early sends what it holds by then.
    The ranks have to wait in the same order, which they do when they run the same program.
    """

    def launch(
        self,
        event: str,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        collective: Collective,
    ) -> Ticket:
        outputs = [output.data for output in outputs]
        inputs = [input.data for input in inputs]
        read = {input.untyped_storage()._cdata for input in inputs}
        for output in outputs:
            if output.untyped_storage()._cdata not in read:  # in place: the input is in the output
                poison(output)
        return LateTicket(lambda: collective(outputs, inputs).wait())


class Recording(CommAround):
    """Another Comm, with every launch and wait written into a log.

    Events: ``"all_gather LABEL"`` when launched, ``"wait all_gather LABEL"`` when first waited.
    """

    def __init__(self, comm: Comm, log: EventLog) -> None:
        super().__init__(comm)
        self.log = log

    def launch(
        self,
        event: str,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        collective: Collective,
    ) -> Ticket:
        event = event.strip()
        self.log(event)
        ticket = collective(outputs, inputs)

        def wait() -> None:
            self.log(f"wait {event}")
            ticket.wait()

        return LateTicket(wait)


class FakeComm:
    """Rank ``rank`` of ``size`` ranks that all hold the same bytes; nothing is sent.

    Values are right where every rank has the same inputs. For all-to-all with unequal parts there
    is no such value; the output is zeros.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def all_gather(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], *, label: str = ""
    ) -> Ticket:
        def work() -> None:
            for output, input in zip(outputs, inputs, strict=True):
                output.data.view(self.size, -1).copy_(input.data.reshape(1, -1))

        return LateTicket(work)

    def reduce_scatter(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        *,
        op: ReduceOp = "avg",
        label: str = "",
    ) -> Ticket:
        def work() -> None:
            for output, input in zip(outputs, inputs, strict=True):
                mine = input.data.view(self.size, -1)[self.rank]
                output.data.view(-1).copy_(mine if op == "avg" else mine * self.size)

        return LateTicket(work)

    def all_to_all(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
        *,
        label: str = "",
    ) -> Ticket:
        def work() -> None:
            if output_splits is None and input_splits is None:
                output.data.view(self.size, -1).copy_(
                    input.data.view(self.size, -1)[self.rank].expand(self.size, -1)
                )
            else:
                output.data.zero_()

        return LateTicket(work)

    def all_reduce(
        self, tensors: Sequence[torch.Tensor], *, op: ReduceOp = "avg", label: str = ""
    ) -> Ticket:
        def work() -> None:
            for tensor in tensors if op == "sum" else ():
                tensor.data.mul_(self.size)

        return LateTicket(work)

    def broadcast(self, tensor: torch.Tensor, source: int, *, label: str = "") -> Ticket:
        return LateTicket(lambda: None)
