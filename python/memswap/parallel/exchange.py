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

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.autograd.function import once_differentiable

from memswap.engine.autograd import graph_task
from memswap.parallel.arriving import Arrival, FirstUse, arriving
from memswap.parallel.comm import Ticket
from memswap.parallel.running import exchange_arrived


class InFlight:
    """A launched collective and what becomes of its output.

    Args:
        ticket: of the collective.
        unpack: gives the result once the collective has been waited for.
        shape: of the result; None where it is not known beforehand.
    """

    def __init__(
        self,
        ticket: Ticket,
        unpack: Callable[[], torch.Tensor],
        shape: Sequence[int] | None = None,
    ) -> None:
        self._ticket = ticket
        self._unpack = unpack
        self.shape = None if shape is None else torch.Size(shape)

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


#: Called at each launch: the map, its label, what this rank sends.
Observer = Callable[[Redistribution, str, torch.Tensor], None]


class Box:
    """What is in flight between Start and Finish, in either direction."""

    def __init__(self, spec: Redistribution, label: str, observe: Observer | None) -> None:
        self.spec = spec
        self.label = label
        self._observe = observe
        self._arriving: InFlight | None = None
        self._gradients: list[InFlight] = []
        self._zeros: tuple[int, torch.Tensor] | None = None

    @property
    def in_flight(self) -> bool:
        """Whether the result has not been waited for."""
        return self._arriving is not None

    @property
    def shape(self) -> torch.Size | None:
        """Of what is in flight, if that is known."""
        return None if self._arriving is None else self._arriving.shape

    def launch(self, tensor: torch.Tensor) -> None:
        self._arriving = self._launch(self.spec, tensor, self.label)

    def finish(self) -> torch.Tensor:
        arriving, self._arriving = self._arriving, None
        if arriving is None:
            raise RuntimeError(f"exchange {self.label!r}: nothing is in flight")
        return arriving.finish()

    def launch_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """Launch the adjoint; zeros of the gradient's shape, without memory, to stand for it."""
        self.drop_gradients()
        self._add_gradient(gradient)
        zeros = gradient.new_zeros(()).expand(gradient.shape)
        self._zeros = graph_task(), zeros
        return zeros

    def launch_rest(self, gradient: torch.Tensor) -> None:
        """Launch the adjoint of what came beside the zeros of this backward pass."""
        (task, zeros), self._zeros = self._zeros or (-1, None), None
        if task != graph_task():
            self.drop_gradients()
        elif gradient is zeros:
            return
        self._add_gradient(gradient)

    def finish_gradients(self) -> torch.Tensor:
        """Wait; the gradient of what Start was given."""
        gradients, self._gradients = self._gradients, []
        if not gradients:
            raise RuntimeError(
                f"exchange {self.label!r}: no gradient is in flight; it was taken twice at once, "
                "or backward was entered from the middle of the exchange"
            )
        total = gradients[0].finish()
        for other in gradients[1:]:
            total = total + other.finish()
        return total

    def drop_gradients(self) -> None:
        """Those that an exception left behind."""
        gradients, self._gradients = self._gradients, []
        for one in gradients:
            one.finish()

    def _add_gradient(self, gradient: torch.Tensor) -> None:
        label = f"{self.label} gradient"
        self._gradients.append(self._launch(self.spec.adjoint(), gradient, label))

    def _launch(self, spec: Redistribution, tensor: torch.Tensor, label: str) -> InFlight:
        in_flight = spec.launch(tensor, label)
        if self._observe is not None:
            self._observe(spec, label, tensor)
        return in_flight


class _Start(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, box: Box) -> torch.Tensor:
        ctx.box = box
        box.launch(tensor)
        return tensor.new_empty(0)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, token: torch.Tensor) -> Any:
        return ctx.box.finish_gradients(), None


class _Finish(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, box: Box) -> torch.Tensor:
        ctx.box = box
        result = box.finish()
        exchange_arrived()
        return result

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.box.launch_gradient(gradient)
        return gradient.new_empty(0), None


class Pending:
    """An exchange on its way; :func:`exchange` makes it."""

    def __init__(self, token: torch.Tensor, box: Box) -> None:
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

    def arriving(
        self,
        *,
        first_use: FirstUse | None = None,
        orphans: list[Callable[[], object]] | None = None,
    ) -> torch.Tensor:
        """A tensor that waits where it is first used: see [Note: Arriving tensors].

        ``flatten``, ``transpose`` and the like do not use it. A linear layer that is the first to
        use it computes its input's gradient before its weight's, which goes on beside the exchange
        of the former. In inference mode, and under ``torch.compile``, the plain tensor.

        Args:
            first_use: called with a function's name where that function makes it wait, unless
                :meth:`ArrivingTensor.expect` was called before.
            orphans: gets a function for what dies unused; it has to be called, and waits.
        """
        shape = self._box.shape
        if (
            self._token is None
            or shape is None
            or torch.is_inference_mode_enabled()
            or torch.compiler.is_compiling()
        ):
            return self.wait()
        self._result = arriving(
            self._token, self._box, shape, Arrival(self._box, first_use, orphans)
        )
        self._token = None
        return self._result

    def discard(self) -> None:
        """Wait and forget: for an exchange that turned out not to be wanted."""
        if self._token is not None:
            self._token = None
            self._box.finish()


def exchange(
    tensor: torch.Tensor,
    spec: Redistribution,
    *,
    label: str = "exchange",
    observe: Observer | None = None,
) -> Pending:
    """Launch a redistribution of ``tensor`` among the ranks; ``wait()`` gives the result.

    Differentiable once, in the same manner: see [Note: The token edge]. Every rank of the group
    launches the same exchanges in the same order, and waits for (or discards) each of them.

    Args:
        tensor: this rank's part. It may be edited or freed as soon as this call returns.
        spec: where the parts go: :class:`SequenceToHeads`, :class:`HeadsToSequence`,
            :class:`GatherSequence`, :class:`ReduceScatterSequence`.
        label: names the collective in errors, logs and profiles; the adjoint's is
            ``"LABEL gradient"``.
        observe: called at each launch, also of the adjoint, with the map, its label and what this
            rank sends.

    Raises:
        ValueError: the tensor does not have the shape that the spec says this rank holds.
    """
    box = Box(spec, label, observe)
    return Pending(_Start.apply(tensor, box), box)
