"""Parts of weights gathered ahead of their use; without blocks, by the order of the uses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from memswap.compat.internevo.parts import (
    Gathers,
    Part,
    Reductions,
    accumulates,
    is_watched,
    stand_in,
)
from memswap.compat.internevo.pool import MemoryPool
from memswap.compat.internevo.raw import Done, FirstUses, check_whole, gather_rows, reduce_rows
from memswap.engine.autograd import graph_task
from memswap.engine.training import BackwardPass
from memswap.parallel.comm import Comm, Ticket

#: Without blocks: so many of the next uses are gathered ahead.
USES_AHEAD = 4


class Ahead(ABC):
    """Gathers ahead of their use, and reductions that are waited for late.

    Args:
        comm: of the ranks that share the weights.
        pool: of buffers; None: torch's allocator.
    """

    def __init__(self, comm: Comm, pool: MemoryPool | None) -> None:
        self.comm = comm
        self.pool = pool
        self.first_uses = FirstUses(comm)
        self.gathers = Gathers(comm)
        self.reductions = Reductions(comm, lambda one: None if pool is None else pool.forget(one))
        self.backward = BackwardPass(self._end_backward, self._abandon)

    @abstractmethod
    def part(self, tensor: torch.Tensor, module: nn.Module | None, is_bias: bool) -> Part | None:
        """The part that a tensor is, or None if it is gathered when it is asked for.

        Args:
            tensor: this rank's rows of a weight or bias.
            module: whose it is; None: the caller did not say.
            is_bias: whether it is the module's bias.
        """

    @abstractmethod
    def use(self, part: Part) -> torch.Tensor:
        """The whole of it; and gathers what comes after it."""

    @abstractmethod
    def deferred(self, parameter: torch.Tensor) -> bool:
        """Whether the parameter's gradient may come after backward has passed it."""

    @abstractmethod
    def backward_ended(self) -> None:
        """The outermost backward has."""

    def weight(self, tensor: torch.Tensor, module: nn.Module | None, is_bias: bool) -> torch.Tensor:
        """The whole weight or bias of which ``tensor`` has this rank's rows.

        Args:
            tensor: this rank's rows, ``[rows, ...]``.
            module: whose it is; None: the caller did not say.
            is_bias: whether it is the module's bias.

        Returns:
            ``[ranks * rows, ...]``.
        """
        self.backward.look()
        part = self.part(tensor, module, is_bias)
        if part is not None:
            return self.use(part)
        self.first_uses.compare(tensor, module, is_bias)
        return gather_rows(self.comm, tensor)

    def gradient(
        self,
        tensor: torch.Tensor,
        module: nn.Module | None,
        is_bias: bool,
        async_op: bool,
        reduce_op: Any,
    ) -> tuple[torch.Tensor, Ticket]:
        """What stands for the reduced gradient, or the gradient itself where it cannot be late.

        Args:
            tensor: the whole gradient, ``[ranks * rows, ...]``.
            module: whose it is; None: the caller did not say.
            is_bias: whether it is the gradient of the module's bias.
            async_op: whether to return before the rows are there.
            reduce_op: AVG or SUM.

        Returns:
            ``[rows, ...]``, and what to wait for.
        """
        part = None if module is None else self.known(module, is_bias)
        parameter = None if part is None else part.tensor()
        check_whole(self.comm, tensor, None if parameter is None else parameter.shape)
        if part is None or parameter is None or graph_task() == -1 or not self.deferred(parameter):
            return reduce_rows(self.comm, tensor, async_op, reduce_op)
        self.backward.look()
        self.reductions.launch(part, tensor, reduce_op, self._room())
        return stand_in(parameter.shape, tensor), Done()

    @abstractmethod
    def known(self, module: nn.Module, is_bias: bool) -> Part | None:
        """The part that a module was seen to have."""

    def _abandon(self) -> None:
        """The last backward raised."""
        self.gathers.drop_all()
        self.reductions.abandon()

    def _end_backward(self) -> None:
        self.gathers.drop_all()
        self.backward_ended()

    def collect(self) -> None:
        """Add reduced gradients that nobody has asked for to those of the parameters."""
        self.reductions.collect(
            lambda buffer: None if self.pool is None else self.pool.free(buffer)
        )

    def _room(self) -> Callable[[torch.Size, torch.Tensor], torch.Tensor] | None:
        return None if self.pool is None else self.pool.allocate_reduced


class Uses:
    """Which part is used after which two, as learnt. A wrong guess costs time, never a result.

    Two, because a checkpoint comes by its weights twice in backward, once in each direction.
    """

    def __init__(self) -> None:
        self._after: WeakKeyDictionary[Part, WeakKeyDictionary[Part, ref[Part]]]
        self._after = WeakKeyDictionary()
        self._last: tuple[Part | None, Part | None] = None, None
        self.opener: Part | None = None

    def scope(self, part: Part) -> None:
        """It is used now."""
        before, last = self._last
        if last is None:
            self.opener = part
        else:
            self._after.setdefault(last, WeakKeyDictionary())[before or last] = ref(part)
        self._last = last, part

    def pause(self) -> None:
        """A pass has ended: what comes next follows nobody."""
        self._last = None, None
        self.opener = None

    def upcoming(self, count: int) -> list[Part]:
        """The next ``count`` uses, as far as they are known."""
        before, last = self._last
        found: list[Part] = []
        while last is not None and len(found) < count:
            known = self._after.get(last)
            one = None if known is None else known.get(before or last)
            after = None if one is None else one()
            if after is None:
                break
            found.append(after)
            before, last = last, after
        return found


class AheadByOrder(Ahead):
    """Gathers the next few uses, in the order of the last step. Its first step gathers when used.

    Gradients are in ``parameter.grad`` when backward ends.
    """

    def __init__(self, comm: Comm, pool: MemoryPool | None) -> None:
        super().__init__(comm, pool)
        self._of_modules: WeakKeyDictionary[nn.Module, dict[bool, Part]] = WeakKeyDictionary()
        self._of_tensors = WeakTensorKeyDictionary()
        self._forward, self._backward = Uses(), Uses()
        self._uses: WeakKeyDictionary[Part, int] = WeakKeyDictionary()
        """In this backward."""
        self._uses_before: WeakKeyDictionary[Part, int] = WeakKeyDictionary()
        """In the last one."""
        self._count = 0

    def part(self, tensor: torch.Tensor, module: nn.Module | None, is_bias: bool) -> Part | None:
        parts = self._of_tensors if module is None else self._of_modules.setdefault(module, {})
        key: Any = tensor if module is None else is_bias
        part: Part | None = parts.get(key)
        if part is not None and part.is_of(tensor):
            return part
        if not isinstance(tensor, nn.Parameter):
            return None  # made for this use: the next one will have another
        self.first_uses.compare(tensor, module, is_bias)
        if part is not None:
            self.gathers.drop(part)
        name = f"{'bias' if is_bias else 'weight'} {self._count}"
        self._count += 1
        part = parts[key] = Part(name, ref(tensor))
        if self.pool is not None:
            part.allocate = self.pool.allocate_like
        return part

    def known(self, module: nn.Module, is_bias: bool) -> Part | None:
        return self._of_modules.get(module, {}).get(is_bias)

    def use(self, part: Part) -> torch.Tensor:
        uses, keep = self._forward, False
        if self.backward.runs:
            uses = self._backward
            self._uses[part] = count = self._uses.get(part, 0) + 1
            keep = count < self._uses_before.get(part, 1)
        elif part is uses.opener:  # a pass begins; what the last one gathered in vain is old
            self.gathers.drop_all()
            uses.pause()
        uses.scope(part)
        self.gathers.launch(part)
        for after in uses.upcoming(USES_AHEAD):
            self.gathers.launch(after)
        return self.gathers.use(part, keep=keep)

    def deferred(self, parameter: torch.Tensor) -> bool:
        return accumulates(parameter) and not is_watched(parameter)

    def backward_ended(self) -> None:
        self._uses_before, self._uses = self._uses, WeakKeyDictionary()
        self._forward.pause()
        self._backward.pause()
        self.collect()
