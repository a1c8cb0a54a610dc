"""One step of an optimizer whose state streams through the device, chunk of parameters by chunk.

[Note: A step in chunks]
The optimizer's own `step` runs once, with all of its hooks, its closure and its profiler range.
What is different is the object that it runs on: a view of the optimizer, which has everything in
common with it (one `__dict__`) but `param_groups`. There each group stands several times, each time
with some of its parameters, a chunk. Whoever looks into such a chunk's list of parameters finds
their state on the device: looking lets the last chunk's state leave, and starts the next one's
return.

So an optimizer that handles one group after another streams its state without knowing. Nothing of
the optimizer itself is changed for the time of a step, so there is nothing to put back when it
raises.

The device holds two chunks of half its `room` each, and each goes in two halves, which are the
chunks of this file: while one half is stepped, the one before is leaving and the next one or two
arrive. On an accelerator the next half's memory is allocated and its fetch started before this
one's kernels are launched, so that the fetch does not wait for them (edge 4 of [Note: Every edge of
a swap] in csrc/lane/stream_lane.h). The memory of what left is let go of behind this one's kernels
(edge 2), or earlier where there is no room otherwise.

A parameter is never divided. Where the state of two that follow each other is longer than the room,
these two are what the device holds: one is stepped, and tensor by tensor the next one's state
arrives in the memory of the last one's, as that has left ([Note: Memory from hand to hand] in
state.py). Where their tensors differ in length, the memory goes by way of the allocator:
then kernels wait for that copy, and a step takes the link's time and theirs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeVar

import torch
from torch.optim import Optimizer

from memswap._native import native
from memswap.optimizers.state import StateMover, away_of, local_bytes, plain_tensors

if TYPE_CHECKING:
    from collections.abc import Sequence

    Function = TypeVar("Function", bound=Callable[..., Any])

    def uncompiled(function: Function) -> Function:
        """Runs as it is where `step` is compiled."""
        ...
else:
    uncompiled = torch._disable_dynamo

#: Whose step over some of their parameters is their step over all, in parts: each of their updates
#: looks at one parameter, its gradient, its state and the group's numbers.
#: tests/engine/test_optimizers.py proves it for each.
STEPS_IN_PARTS = (
    "ASGD",
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Muon",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
    "SparseAdam",
)

#: Parts of the room that one chunk may fill: one is stepped, one leaves, two arrive.
PARTS = 4

#: State of parameters that have none yet, in bytes of the parameter: two moments of its dtype.
USUAL_STATE = 2


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some parameters of one group, which are stepped together."""

    group: int
    first: int
    """Place of the first one in its group."""
    parameters: list[torch.Tensor]
    nbytes: int
    """Of their state that moves."""


def steps_in_parts(kind: type[Optimizer]) -> bool:
    """Whether a class steps as one of `STEPS_IN_PARTS` does: it inherits what they do."""
    for name in STEPS_IN_PARTS:
        known = getattr(torch.optim, name, None)
        if known is None or not issubclass(kind, known):
            continue
        if all(
            inspect.unwrap(getattr(kind, method)) is inspect.unwrap(getattr(known, method))
            for method in ("step", "_init_group")
            if hasattr(known, method)
        ):
            return True
    return False


def why_whole(kind: type[Optimizer], chunked: bool | None) -> str:
    """Why an optimizer steps over all of its parameters at once.

    Args:
        kind: its class, which does not step in parts.
        chunked: what the user said of it; None: nothing.
    """
    if chunked is False:
        return "chunked=False"
    if issubclass(kind, torch.optim.LBFGS):
        return "LBFGS steps over all parameters at once"
    return (
        f"{kind.__module__}.{kind.__name__} is not known to step over some parameters as over all; "
        "chunked=True says that it does"
    )


def parameters_of(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """Those of all of its groups, in their order."""
    for group in optimizer.param_groups:
        yield from group["params"]


def state_of(optimizer: Optimizer, parameter: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors of a parameter's state; none where it has no state yet."""
    found = optimizer.state.get(parameter)
    return [] if found is None else list(plain_tensors(found))


def storages_that_stay(optimizer: Optimizer) -> set[int]:
    """Keys of storages that are in the state and never leave it.

    Those of parameters and gradients, which are no state; and those of tensors that several
    parameters have in their state, such as the quantization tables of 8-bit optimizers.
    """
    keys: set[int] = set()
    for parameter in parameters_of(optimizer):
        for one in (parameter, parameter.grad):
            if one is not None and one.layout is torch.strided:
                keys.update(native.storage_key(part) for part in plain_tensors(one))
    seen: set[int] = set()
    for value in optimizer.state.values():
        for tensor in plain_tensors(value):
            if id(tensor) in seen:
                keys.add(native.storage_key(tensor))
            seen.add(id(tensor))
    return keys


def moving_bytes(optimizer: Optimizer, parameter: torch.Tensor) -> int:
    """Bytes of a parameter's state that come and go; a guess where it has none yet."""
    found = state_of(optimizer, parameter)
    if not found:
        return USUAL_STATE * local_bytes(parameter)
    away = [away_of(tensor) for tensor in found]
    return sum(
        one.nbytes if one is not None else tensor.numel() * tensor.element_size()
        for one, tensor in zip(away, found, strict=True)
        if tensor.numel() > 1
    )


def chunks_of(
    optimizer: Optimizer, chunk_bytes: int, staying: frozenset[int] = frozenset()
) -> list[Chunk]:
    """All parameters in their order, in chunks of at most `chunk_bytes`, or of one parameter.

    Those whose state stays are in chunks as well, for what a step allocates.

    Args:
        optimizer: whose parameters they are.
        chunk_bytes: most bytes of state in a chunk.
        staying: parameters whose state stays, by `id`.
    """
    chunks: list[Chunk] = []
    for number, group in enumerate(optimizer.param_groups):
        first, nbytes, moving = 0, 0, 0
        parameters = group["params"]
        for place, parameter in enumerate(parameters):
            more = moving_bytes(optimizer, parameter)
            if place > first and nbytes + more > chunk_bytes:
                chunks.append(Chunk(number, first, parameters[first:place], moving))
                first, nbytes, moving = place, 0, 0
            nbytes += more
            moving += 0 if id(parameter) in staying else more
        chunks.append(Chunk(number, first, parameters[first:], moving))
    return chunks


class _Parameters(list[torch.Tensor]):
    """The parameters of one chunk. Whoever looks at them has their state on the device."""

    def __init__(self, parameters: list[torch.Tensor], arrive: Callable[[], None]) -> None:
        super().__init__(parameters)
        self._arrive = arrive

    def __iter__(self) -> Iterator[torch.Tensor]:
        self._arrive()
        return super().__iter__()

    def __reversed__(self) -> Iterator[torch.Tensor]:
        self._arrive()
        return super().__reversed__()

    def __getitem__(self, place: SupportsIndex | slice) -> Any:
        self._arrive()
        return super().__getitem__(place)


class StateStream:
    """The state of an optimizer on its way through the device, for the time of one step.

    Args:
        optimizer: whose step it is.
        mover: moves single tensors.
        chunks: of all parameters.
        room_bytes: what the state may take of the device; more where two chunks that follow each
            other are longer, because single parameters are.
        with_gradient_only: parameters without a gradient are not stepped, so their state stays
            away.
        staying: parameters, by `id`, whose state stays on the device.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        mover: StateMover,
        chunks: Sequence[Chunk],
        room_bytes: int,
        with_gradient_only: bool,
        staying: frozenset[int] = frozenset(),
    ) -> None:
        self._optimizer = optimizer
        self._staying = staying
        self._mover = mover
        self._chunks = chunks
        # One chunk is stepped while the next one arrives, however long single parameters are.
        sizes = [chunk.nbytes for chunk in chunks]
        longest = max((sum(sizes[at : at + 2]) for at in range(len(sizes))), default=0)
        self._room_bytes = max(room_bytes, longest)
        self._with_gradient_only = with_gradient_only
        self._current: int | None = None
        self._arriving: dict[int, int] = {}
        self._visited: set[int] = set()
        self._not_these: set[int] = set()
        #: Most bytes of state on the device at a time.
        self.peak_bytes = 0

    def groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups as the view has them: once for each chunk."""
        made = []
        for number, chunk in enumerate(self._chunks):
            group = dict(self._optimizer.param_groups[chunk.group])
            group["params"] = _Parameters(chunk.parameters, partial(self.enter, number))
            if "param_names" in group:
                last = chunk.first + len(chunk.parameters)
                group["param_names"] = group["param_names"][chunk.first : last]
            made.append(group)
        return made

    @uncompiled
    def enter(self, number: int) -> None:
        """The step is about to use this chunk's state, and no other one's."""
        if number == self._current:
            return
        self._retire()
        self._arriving.pop(number, None)
        self._current = number
        self._visited.add(number)
        self._make_room(0)
        self._start(number)
        for ahead in range(number + 1, len(self._chunks)):
            if ahead in self._arriving:
                continue
            share = sum(self._arriving.values()) + self._chunks[ahead].nbytes
            most = min(self._room_bytes // 2, self._room_bytes - self._chunks[number].nbytes)
            if self._arriving and share > most:
                break
            if not self._start(ahead):
                break
        self._note_peak()
        for tensor in self._stepped(number):
            self._mover.bring(tensor)

    def end(self) -> None:
        """The step is over, well or badly: everything is away, or on its way."""
        self._retire()
        for number in (
            self._visited | self._arriving.keys()
        ):  # after an error, the current one's too
            for tensor in self._states(number):
                self._mover.cancel_return(tensor)
        self._arriving.clear()
        self._mover.kept = {}  # as it is in the end, each once
        for number in sorted(self._visited):  # what others still looked at when its chunk left
            self._send(number)
        self._visited.clear()
        self._mover.settle()

    def _held(self) -> int:
        """Bytes of the chunk that is stepped, of those that arrive, and of what is leaving."""
        current = 0 if self._current is None else self._chunks[self._current].nbytes
        return current + sum(self._arriving.values()) + self._mover.leaving_bytes

    def _make_room(self, nbytes: int) -> None:
        while self._held() + nbytes > self._room_bytes and self._mover.wait_oldest():
            pass

    def _start(self, number: int) -> bool:
        """Start bringing a chunk's state back, each tensor once there is room for it.

        Returns:
            Whether any of it comes; not where the device has no memory for all of it.
        """
        ahead, started = number != self._current, 0
        for tensor in self._stepped(number):
            try:
                started += self._begin_return(tensor, ahead)
            except torch.OutOfMemoryError:  # it comes when it is needed
                for other in self._stepped(number):
                    self._mover.cancel_return(other)
                self._arriving.pop(number, None)
                return False
            if ahead and started:
                self._arriving[number] = started
                self._note_peak()
        return started > 0

    def _begin_return(self, tensor: torch.Tensor, ahead: bool) -> int:
        if not ahead:
            return self._mover.begin_return(tensor)
        nbytes = self._mover.returning_bytes(tensor)
        if self._held() + nbytes > self._room_bytes and (taken := self._mover.take_over(tensor)):
            return taken
        self._make_room(nbytes)
        return self._mover.begin_return(tensor)

    def _retire(self) -> None:
        """The chunk that was stepped leaves."""
        number, self._current = self._current, None
        if number is not None:
            if not self._not_these:
                self._not_these = storages_that_stay(self._optimizer)
            self._send(number)
            self._note_peak()

    def _send(self, number: int) -> None:
        chunk = self._chunks[number]
        for place, parameter in enumerate(chunk.parameters, start=chunk.first):
            if id(parameter) in self._staying:
                continue
            for which, tensor in enumerate(state_of(self._optimizer, parameter)):
                name = f"{chunk.group}.{place}.{which}"
                self._mover.send(tensor, name, self._not_these)

    def _states(self, number: int) -> Iterator[torch.Tensor]:
        for parameter in self._chunks[number].parameters:
            yield from state_of(self._optimizer, parameter)

    def _stepped(self, number: int) -> Iterator[torch.Tensor]:
        """State tensors of a chunk that the step will look at."""
        for parameter in self._chunks[number].parameters:
            if parameter.grad is not None or not self._with_gradient_only:
                yield from state_of(self._optimizer, parameter)

    def _note_peak(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self._held())


# ---------------------------------------------------------------- the view
class _HasGroups:
    """What a view has that its optimizer has not."""

    __slots__ = ()


def view_class(kind: type[Optimizer]) -> type[Optimizer]:
    """A class of views of optimizers of a class: `param_groups` is the view's own."""

    def get(view: Any) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = view._memswap_groups
        return groups

    def set_own(view: Any, groups: list[dict[str, Any]]) -> None:
        view.__dict__["param_groups"] = groups  # the optimizer's

    members = {
        "__slots__": ("_memswap_groups",),
        "__module__": kind.__module__,
        "__doc__": kind.__doc__,
        "param_groups": property(get, set_own),
    }
    made: type[Optimizer] = type.__call__(type(kind), kind.__name__, (kind, _HasGroups), members)
    return made


def is_view(optimizer: object) -> bool:
    """Whether this is the view of a step that is under way."""
    return isinstance(optimizer, _HasGroups)


def new_view(
    kind: type[Optimizer], optimizer: Optimizer, groups: list[dict[str, Any]]
) -> Optimizer:
    """A view (of `view_class`) of an optimizer: all attributes are shared but the groups.

    Args:
        kind: what `view_class` made of the optimizer's class.
        optimizer: that is looked at.
        groups: that the view has in place of its own.
    """
    view: Any = object.__new__(kind)
    view.__dict__ = optimizer.__dict__
    view._memswap_groups = groups
    optimizer_view: Optimizer = view
    return optimizer_view
