"""exchange: a differentiable redistribution that is launched now and waited later, both ways.

[Note: The token edge] An exchange is two autograd nodes. Start launches the collective and returns
an empty tensor, the token; Finish takes the token, waits, and returns what arrived. In backward
Finish launches the adjoint and Start waits for it, so whatever autograd runs between the two nodes
runs while the gradient travels; autograd runs the later nodes first, so the gradients of q, k and v
are all launched before the first is waited. What is in flight lies in a box that both nodes own and
never on the edge: a gradient has to look like its forward tensor there, and hooks or anomaly mode
would read it before it has arrived. Start's gradient is an ordinary gradient of the input: autograd
adds it to those of the input's other consumers.

Neither node saves a tensor, so there is nothing for saved-tensor hooks to move while a collective
reads or writes it; what is sent is always a copy. Nothing lives outside the graph: any number of
exchanges are in flight at once, and a checkpointed region launches and waits its own when it is
recomputed. Wait on the stream on which the exchange was launched, and use the result from there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.autograd.function import once_differentiable

from memswap.parallel.comm import Ticket
from memswap.parallel.running import exchange_arrived


class InFlight:
    """A launched collective and what becomes of its output."""

    def __init__(self, ticket: Ticket, unpack: Callable[[], torch.Tensor]) -> None:
        self._ticket = ticket
        self._unpack = unpack

    def finish(self) -> torch.Tensor:
        """Wait, then the result: contiguous, on storage of its own."""
        self._ticket.wait()
        return self._unpack()


class Redistribution(Protocol):
    """A linear map of a tensor that the ranks of a group share, done by one collective."""

    def launch(self, tensor: torch.Tensor, label: str) -> InFlight:
        """Copy what is to be sent and launch; ``tensor`` is free at once.

        Raises:
            ValueError: the tensor is not the part that this rank should hold.
        """

    def adjoint(self) -> Redistribution:
        """The transposed map: what gradients go through."""


class _Box:
    """What is in flight between Start and Finish, in whichever direction."""

    def __init__(self, spec: Redistribution, label: str) -> None:
        self.spec = spec
        self.label = label
        self._in_flight: InFlight | None = None

    def launch(self, spec: Redistribution, tensor: torch.Tensor, label: str) -> None:
        if self._in_flight is not None:  # an exception came between an earlier launch and its wait
            self.finish()
        self._in_flight = spec.launch(tensor, label)

    def finish(self) -> torch.Tensor:
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is None:
            raise RuntimeError(
                f"exchange {self.label!r}: nothing is in flight; its gradient was taken twice at "
                "once, or backward was entered from the middle of the exchange"
            )
        return in_flight.finish()


class _Start(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, box: _Box) -> torch.Tensor:
        ctx.box = box
        box.launch(box.spec, tensor, box.label)
        return tensor.new_empty(0)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, token: torch.Tensor) -> Any:
        return ctx.box.finish(), None


class _Finish(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, box: _Box) -> torch.Tensor:
        ctx.box = box
        result = box.finish()
        exchange_arrived()
        return result

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        box: _Box = ctx.box
        box.launch(box.spec.adjoint(), gradient, f"{box.label} gradient")
        return gradient.new_empty(0), None


class Pending:
    """An exchange on its way; :func:`exchange` makes it."""

    def __init__(self, token: torch.Tensor, box: _Box) -> None:
        self._token: torch.Tensor | None = token
        self._box = box
        self._result: torch.Tensor | None = None

    def wait(self) -> torch.Tensor:
        """What arrived: contiguous, in the layout of the input. A second call gives it again."""
        if self._result is None:
            assert self._token is not None
            self._result = _Finish.apply(self._token, self._box)
            self._token = None
        assert self._result is not None
        return self._result

    def discard(self) -> None:
        """Wait and forget: for an exchange that turned out not to be wanted."""
        if self._token is not None:
            self._token = None
            self._box.finish()


def exchange(tensor: torch.Tensor, spec: Redistribution, *, label: str = "exchange") -> Pending:
    """Launch a redistribution of ``tensor`` among the ranks; ``wait()`` gives the result.

    Differentiable once, in the same manner: see [Note: The token edge]. Every rank of the group
    launches the same exchanges in the same order, and waits for (or discards) each of them.

    Args:
        tensor: this rank's part. It may be edited or freed as soon as this call returns.
        spec: where the parts go: :class:`SequenceToHeads`, :class:`HeadsToSequence`,
            :class:`GatherSequence`, :class:`ReduceScatterSequence`.
        label: names the collective in errors, logs and profiles; the adjoint's is
            ``"LABEL gradient"``.

    Raises:
        ValueError: the tensor does not have the shape that the spec says this rank holds.
    """
    box = _Box(spec, label)
    return Pending(_Start.apply(tensor, box), box)
