"""InFlight: a launched collective; Box: those of one exchange; and who is told of arrivals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Protocol

import torch

from memswap.engine.autograd import graph_task
from memswap.parallel.comm import Ticket

#: The forward calls that are told when an exchange arrives, the innermost last, each with its
#: callback. Calls nest as the thread's call stack does, so this is empty between calls.
_listeners: ContextVar[tuple[tuple[object, Callable[[], None]], ...]] = ContextVar(
    "listeners", default=()
)


def listen(who: object, on_arrival: Callable[[], None]) -> None:
    """The forward call ``who`` begins; ``on_arrival()`` is called when exchanges arrive in it."""
    _listeners.set((*_listeners.get(), (who, on_arrival)))


def listen_no_more(who: object) -> None:
    """The forward call ``who`` has ended, and with it every call inside that was cut short."""
    listening = _listeners.get()
    for place in reversed(range(len(listening))):
        if listening[place][0] is who:
            _listeners.set(listening[:place])
            return


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
    """The collectives of one exchange that are in flight between Start and Finish, both ways.

    Tensors and their gradients have the shapes that the map says this rank holds before and after
    it (redistribute.py), and the same dtype on both sides.

    Args:
        spec: the map.
        label: of its collective; the adjoint's is ``"LABEL gradient"``.
        observe: is told of each launch.
    """

    def __init__(self, spec: Redistribution, label: str, observe: Observer | None) -> None:
        self.spec = spec
        self.label = label
        self._observe = observe
        self._arriving: InFlight | None = None
        self._gradients: list[InFlight] = []
        self._zeros: tuple[int, torch.Tensor] | None = None

    @property
    def in_flight(self) -> bool:
        """Whether the exchange was launched and its result was not waited for yet."""
        return self._arriving is not None

    @property
    def shape(self) -> torch.Size | None:
        """The shape of the tensor that is in flight; None where that is not known."""
        return None if self._arriving is None else self._arriving.shape

    def launch(self, tensor: torch.Tensor) -> None:
        """Launch the exchange of a tensor."""
        self._arriving = self._launch(self.spec, tensor, self.label)

    def finish(self) -> torch.Tensor:
        """Wait, then the tensor that arrived. It can be taken once."""
        arriving, self._arriving = self._arriving, None
        if arriving is None:
            raise RuntimeError(f"exchange {self.label!r}: nothing is in flight")
        return arriving.finish()

    def arrive(self) -> torch.Tensor:
        """Like :meth:`finish`, for a consumer: also tells the innermost call that listens."""
        result = self.finish()
        listening = _listeners.get()
        if listening:
            listening[-1][1]()
        return result

    def launch_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """Launch the adjoint; returns zeros without memory, for autograd to hand on instead."""
        self.drop_gradients()
        self._add_gradient(gradient)
        zeros = gradient.new_zeros(()).expand(gradient.shape)
        self._zeros = graph_task(), zeros
        return zeros

    def launch_rest(self, gradient: torch.Tensor) -> None:
        """Launch the adjoint of a gradient, unless it is the zeros that this backward handed on."""
        (task, zeros), self._zeros = self._zeros or (-1, None), None
        if task != graph_task():
            self.drop_gradients()
        elif gradient is zeros:
            return
        self._add_gradient(gradient)

    def finish_gradients(self) -> torch.Tensor:
        """Wait, then the gradient of the tensor that Start was given."""
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
        """Wait for gradients that an exception left in flight, and forget them."""
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
