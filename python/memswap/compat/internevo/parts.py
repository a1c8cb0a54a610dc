"""Parts of weights: rows that this rank holds, gathered whole for a use; gradients reduced.

[Note: What runs beside what]
- A gather is launched before the compute that runs beside it, and waited for by the use.
- A use takes the whole weight away: from then on the caller alone holds it, and its memory is free
  when the caller lets go. What is to be used again soon (recomputed, then differentiated) is kept.
- A whole gradient is given to a reduce-scatter, and autograd a stand-in of negative zeros: x + -0.0
  has the bits of x for every x, so adding the reduced rows later gives their bits, and adding
  nothing leaves what had been accumulated.
- Which gather follows which depends on the program alone, so it is the same on all ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass, field
from typing import Any
from weakref import ReferenceType, finalize

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from memswap._native import native
from memswap.compat.internevo.raw import Allocate, reduction_named
from memswap.engine.training import before_optimizer_steps
from memswap.parallel.comm import Comm, Ticket

#: Whole gradients on their way at once, at most; their memory is free when they have been waited
#: for. Two blocks of a Llama have twelve.
AT_MOST = 12


@dataclass(eq=False)
class Part:
    """A weight or a bias of which this rank has the rows, and its whole form if that is there."""

    name: str
    tensor: ReferenceType[torch.Tensor]
    holder: ReferenceType[nn.Module] | None = None
    """The module that has it, where that is known."""
    allocate: Allocate | None = None
    """Makes room for the whole; None: torch's allocator."""
    whole: torch.Tensor | None = None
    ticket: Ticket | None = None
    gathered: tuple[int, int] | None = None
    """Version and address of the rows when the whole was gathered."""

    def state(self) -> tuple[int, int] | None:
        """Changes when somebody edits the rows, or puts others into their place."""
        tensor = self.tensor()
        return None if tensor is None else (tensor._version, tensor.data_ptr())

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has this part's rows: autograd may give back another object."""
        own = self.tensor()
        if own is None:
            return False
        return own is tensor or (
            own.data_ptr() == tensor.data_ptr()
            and own.shape == tensor.shape
            and own.dtype == tensor.dtype
        )


class Gathers:
    """Gathers of parts, under way or done; each is used once."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._here: dict[Part, None] = {}

    def launch(self, part: Part) -> None:
        """Gather the part, unless that is under way or done."""
        rows = part.tensor()
        if part.whole is not None or rows is None:
            return
        shape = torch.Size((rows.shape[0] * self._comm.size, *rows.shape[1:]))
        with torch.no_grad(), torch.inference_mode(False):
            rows = rows.detach().contiguous()
            whole = rows.new_empty(shape) if part.allocate is None else part.allocate(shape, rows)
        part.gathered = part.state()
        part.ticket = self._comm.all_gather([whole], [rows], label=part.name)
        part.whole = whole
        self._here[part] = None

    def use(self, part: Part, *, keep: bool = False) -> torch.Tensor:
        """The whole weight of the rows as they are now, behind its gather."""
        if part.whole is not None and part.gathered != part.state():
            self.drop(part)
        self.launch(part)
        assert part.whole is not None and part.ticket is not None
        whole = part.whole
        part.ticket.wait()
        if not keep:
            self.drop(part)
        return whole

    def drop(self, part: Part) -> None:
        """Nobody will use what was gathered."""
        if part.ticket is not None:
            part.ticket.wait()
        part.whole = part.ticket = part.gathered = None
        self._here.pop(part, None)

    def drop_all(self) -> None:
        """Of every part."""
        for part in list(self._here):
            self.drop(part)


@dataclass(eq=False)
class _Arriving:
    """The reduced rows of one gradient: of several uses of a weight, their sum."""

    outputs: list[torch.Tensor] = field(default_factory=list)
    tickets: list[Ticket] = field(default_factory=list)
    collected: bool = False
    """Whether somebody has asked for it, who adds it to the parameter's gradient."""

    def wait(self) -> None:
        """The first output has the sum."""
        while self.tickets:
            self.tickets[0].wait()
            del self.tickets[0]
        with torch.no_grad():
            while len(self.outputs) > 1:
                self.outputs[0].add_(self.outputs.pop(1))


class Reductions(MutableMapping[str, "tuple[torch.Tensor, Ticket] | None"]):
    """Gradients under way, as ``reduce_scatter_handlers`` has them: name to rows and handle.

    Whoever asks for one waits for its handle and adds it to the parameter's gradient, which is
    negative zeros until then. What nobody has asked for is summed with that of the next backward.

    Args:
        comm: of the ranks that share the weights.
        forget: called with each buffer of reduced rows that this holds no longer and that nobody
            has said to be free.
    """

    def __init__(self, comm: Comm, forget: Callable[[torch.Tensor], None]) -> None:
        self._comm = comm
        self._forget = forget
        self._arriving: dict[str, _Arriving | None] = {}
        self._parameters: dict[str, ReferenceType[torch.Tensor]] = {}
        self._under_way: deque[Ticket] = deque()
        self._guard: finalize[[], Reductions] | None = None

    def __getitem__(self, name: str) -> tuple[torch.Tensor, Ticket] | None:
        one = self._arriving[name]
        if one is None:
            return None
        one.collected = True
        return one.outputs[0], one

    def __setitem__(self, name: str, value: tuple[torch.Tensor, Ticket] | None) -> None:
        if value is not None:
            raise ValueError(
                f"reduce_scatter_handlers[{name!r}]: found {type(value).__name__}, expected None: "
                "the communicator fills it in, and None says that it was collected"
            )
        self._replace(name, None)

    def __delitem__(self, name: str) -> None:
        self._replace(name, None)
        del self._arriving[name]

    def __contains__(self, name: object) -> bool:
        return name in self._arriving  # asking for the value would be collecting it

    def __iter__(self) -> Iterator[str]:
        return iter(self._arriving)

    def __len__(self) -> int:
        return len(self._arriving)

    def launch(self, part: Part, whole: torch.Tensor, op: Any, allocate: Allocate | None) -> None:
        """Reduce a whole gradient of a part; waits for the oldest if too many are under way.

        Args:
            part: this rank's rows of a parameter.
            whole: the gradient of all rows, ``[ranks * rows, ...]``.
            op: AVG or SUM.
            allocate: makes the memory for the result; None: torch's allocator.
        """
        while len(self._under_way) >= AT_MOST:
            self._under_way.popleft().wait()
        shape = torch.Size((whole.shape[0] // self._comm.size, *whole.shape[1:]))
        output = whole.new_empty(shape) if allocate is None else allocate(shape, whole)
        ticket = self._comm.reduce_scatter(
            [output], [whole.contiguous()], op=reduction_named(op), label=f"{part.name} gradient"
        )
        one = self._arriving.get(part.name)
        if one is None or one.collected:
            one = self._replace(part.name, _Arriving())
        if one.outputs:
            self._forget(output)  # the first one is what is handed out, and freed by its index
        one.outputs.append(output)
        one.tickets.append(ticket)
        self._under_way.append(ticket)
        self._parameters[part.name] = part.tensor

    def collect(self, done: Callable[[torch.Tensor], None] = lambda output: None) -> None:
        """Add what nobody has asked for to the gradients of the parameters.

        Args:
            done: called with each buffer of reduced rows that is not needed any more.
        """
        for name, one in list(self._arriving.items()):
            if one is None or one.collected:
                continue
            one.wait()
            parameter = self._parameters[name]()
            if parameter is not None and parameter.grad is not None:
                with torch.no_grad():
                    parameter.grad.add_(one.outputs[0])
            done(one.outputs[0])
            self._replace(name, None)
        self._under_way.clear()

    def _replace(self, name: str, one: _Arriving | None) -> Any:
        before = self._arriving.get(name)
        self._arriving[name] = one
        for buffer in before.outputs if before is not None else ():
            self._forget(buffer)
        return one

    def abandon(self) -> None:
        """Wait for what nobody has asked for, and forget it: its backward failed."""
        for name, one in list(self._arriving.items()):
            if one is not None and not one.collected:
                one.wait()
                self._replace(name, None)

    # --- nothing is lost in silence ---------------------------------------------------------------

    def guard(self) -> None:
        """Have optimizers refuse to step before the gradients of their parameters are collected."""
        self._guard = before_optimizer_steps(self._before_step)

    def _before_step(self, optimizer: Optimizer) -> None:
        waiting = {
            id(self._parameters[name]()): name
            for name, one in self._arriving.items()
            if one is not None and not one.collected
        }
        own = [one for group in optimizer.param_groups for one in group["params"]]
        found = [waiting[id(one)] for one in own if id(one) in waiting]
        if found:
            raise RuntimeError(
                f"{type(optimizer).__name__}.step(): found {len(found)} parameters whose gradients "
                f"wait in reduce_scatter_handlers ({found[0]!r} is one), expected them in "
                "parameter.grad; for each, wait for the handle and add the tensor to the "
                "parameter's grad, or call communicator.collect_gradients() after backward"
            )


def stand_in(rows: torch.Size, like: torch.Tensor) -> torch.Tensor:
    """Negative zeros without memory: what stands for a gradient that is on its way."""
    return like.new_full((), -0.0).expand(rows)


def accumulates(parameter: torch.Tensor) -> bool:
    """Whether this backward adds to the parameter's ``grad``: ``torch.autograd.grad`` does not."""
    if not parameter.is_leaf or not parameter.requires_grad:
        return False
    node = torch.autograd.graph.get_gradient_edge(parameter).node
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # what torch says of a leaf that torch.autograd.grad was asked for
        return False


def is_watched(parameter: torch.Tensor) -> bool:
    """Whether hooks of the parameter, or of its accumulator, look at its gradient before then."""
    return bool(
        parameter._backward_hooks
        or parameter._post_accumulate_grad_hooks
        or native.accumulator_has_hooks(parameter)
    )
