"""When parts of weights are gathered: by the blocks of a model, or by the order of their uses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
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
from memswap.compat.internevo.raw import Done, check_rows, check_whole, gather_rows, reduce_rows
from memswap.engine.autograd import graph_task
from memswap.engine.untraced import untraced
from memswap.errors import RankMismatchError
from memswap.parallel.comm import Comm, Ticket
from memswap.parallel.selftest import ranks_that_differ

#: Without blocks: so many of the next uses are gathered ahead.
USES_AHEAD = 4

#: On a module: whether it has called a communicator for its weight.
_CALLED = "_isp_gathers_its_weight"


def compare_parts(comm: Comm, device: torch.device, what: str) -> None:
    """RankMismatchError: ranks hold other parts than this one. All of them call this."""
    if others := ranks_that_differ(comm, device, what):
        raise RankMismatchError(
            f"rank {comm.rank} holds other parts of weights than ranks {others} of its group: "
            "modules, shapes, dtypes and options of the communicator must agree on all ranks. "
            f"Here they are:\n{what}"
        )


class Ahead(ABC):
    """Gathers ahead of their use, and reductions that are waited for late.

    Args:
        comm: of the ranks that share the weights.
        pool: of buffers; None: torch's allocator.
    """

    def __init__(self, comm: Comm, pool: MemoryPool | None) -> None:
        self.comm = comm
        self.pool = pool
        self.gathers = Gathers(comm)
        self.reductions = Reductions(comm, lambda one: None if pool is None else pool.forget(one))
        self._in_backward = False

    @abstractmethod
    def part(self, tensor: torch.Tensor, module: nn.Module | None, is_bias: bool) -> Part | None:
        """The part that a tensor is, or None if it is gathered when it is asked for."""

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
        """The whole weight or bias of which ``tensor`` has this rank's rows."""
        self.enter()
        part = self.part(tensor, module, is_bias)
        return gather_rows(self.comm, tensor) if part is None else self.use(part)

    def gradient(
        self,
        tensor: torch.Tensor,
        module: nn.Module | None,
        is_bias: bool,
        async_op: bool,
        reduce_op: Any,
    ) -> tuple[torch.Tensor, Ticket]:
        """What stands for the reduced gradient, or the gradient itself where it cannot be late."""
        part = None if module is None else self.known(module, is_bias)
        parameter = None if part is None else part.tensor()
        check_whole(self.comm, tensor, None if parameter is None else parameter.shape)
        if part is None or parameter is None or graph_task() == -1 or not self.deferred(parameter):
            return reduce_rows(self.comm, tensor, async_op, reduce_op)
        self.enter()
        self.reductions.launch(part, tensor, reduce_op, self._room())
        return stand_in(parameter.shape, tensor), Done()

    @abstractmethod
    def known(self, module: nn.Module, is_bias: bool) -> Part | None:
        """The part that a module was seen to have."""

    def enter(self) -> None:
        """Something happens, in forward or in backward."""
        if graph_task() == -1:
            if self._in_backward:  # it raised
                self._in_backward = False
                self.gathers.drop_all()
                self.reductions.abandon()
        elif not self._in_backward:
            # The first event of a backward is always in the outermost graph task.
            self._in_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        self._in_backward = False
        self.gathers.drop_all()
        self.backward_ended()

    def collect(self) -> None:
        """Add reduced gradients that nobody has asked for to those of the parameters."""
        self.reductions.collect(
            lambda buffer: None if self.pool is None else self.pool.free(buffer)
        )

    def _room(self) -> Callable[[torch.Size, torch.Tensor], torch.Tensor] | None:
        return None if self.pool is None else self.pool.allocate_reduced


# --- without blocks -------------------------------------------------------------------------------


class Uses:
    """Which part is used after which two, as learnt. A wrong guess costs time, never a result.

    Two, because a checkpoint comes by its weights twice in backward, once in each direction.
    """

    def __init__(self) -> None:
        self._after: WeakKeyDictionary[Part, WeakKeyDictionary[Part, ref[Part]]]
        self._after = WeakKeyDictionary()
        self._last: tuple[Part | None, Part | None] = None, None
        self.opener: Part | None = None

    def visit(self, part: Part) -> None:
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
        check_rows("weight_hook()", tensor)
        if part is not None:
            self.gathers.drop(part)
        name = f"{'bias' if is_bias else 'weight'} {self._count}"
        self._count += 1
        shown = f"{name}: {list(tensor.shape)} {tensor.dtype}"
        compare_parts(self.comm, tensor.device, shown)
        part = parts[key] = Part(name, ref(tensor))
        if self.pool is not None:
            part.allocate = self.pool.allocate_like
        return part

    def known(self, module: nn.Module, is_bias: bool) -> Part | None:
        return self._of_modules.get(module, {}).get(is_bias)

    def use(self, part: Part) -> torch.Tensor:
        uses, keep = self._forward, False
        if self._in_backward:
            uses = self._backward
            self._uses[part] = count = self._uses.get(part, 0) + 1
            keep = count < self._uses_before.get(part, 1)
        elif part is uses.opener:  # a pass begins; what the last one gathered in vain is old
            self.gathers.drop_all()
            uses.pause()
        uses.visit(part)
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


# --- by blocks ------------------------------------------------------------------------------------


@dataclass(eq=False)
class Block:
    """A block of a model and its modules that hold parts, in their order."""

    module: nn.Module
    index: int
    holders: dict[nn.Module, dict[bool, Part]]
    """By module: its weight (False) and its bias (True)."""
    taken: dict[str, nn.Module]
    """The modules that it was made with, by name."""
    anchored: bool
    """Whether it has an output projection, before which its neighbour is gathered."""
    recomputed: bool
    """Whether backward computes it again: said beforehand, or seen."""


class AheadByBlocks(Ahead):
    """Gathers the next block at an output projection; in backward, the module before.

    Events are those of InternEvo: the first block at its own forward; block i + 1 at the output
    projection of block i, behind the exchanges of its attention; where i is computed again in
    backward, block i - 1 at that place; otherwise in backward the module before the present one.
    Reduced gradients wait in :attr:`reductions` for who collects them.
    """

    def __init__(self, comm: Comm, pool: MemoryPool | None) -> None:
        super().__init__(comm, pool)
        self.before_block: list[Callable[[nn.Module], Any]] = []
        """Called with a block before it is gathered in forward."""
        self._chunks: list[list[Block]] = []
        self._block_of: dict[nn.Module, Block] = {}
        self._before: dict[nn.Module, nn.Module] = {}
        """Of a module that holds parts, the one before it in its chunk."""
        self._callers: set[nn.Module] = set()
        self._silent: set[nn.Module] = set()
        """Modules that ran and did not call this communicator: they use their weight as it is, or
        another communicator gathers it."""
        self._recomputing: set[nn.Module] = set()
        """Modules that backward runs forward again now."""
        self.reductions.guard()

    def add_chunk(
        self,
        chunk: nn.Module,
        blocks: Sequence[tuple[nn.Module, dict[str, nn.Module], Sequence[nn.Module]]],
        checkpointed: int,
    ) -> None:
        """The blocks of a chunk.

        Args:
            chunk: the model, or a stage of it.
            blocks: each with its modules that hold parts, by name, and its output projections.
            checkpointed: how many of them, from the first, backward will compute again.
        """
        own: list[Block] = []
        chunk.register_forward_pre_hook(self._chunk_begins)
        for index, (module, holders, outputs) in enumerate(blocks):
            parts = {holder: self._parts(name, holder) for name, holder in holders.items()}
            own.append(Block(module, index, parts, holders, bool(outputs), index < checkpointed))
            module.register_forward_pre_hook(partial(self._block_begins, own, own[-1]))
            for output in outputs:
                output.register_forward_pre_hook(partial(self._at_anchor, own, own[-1]))
            for holder in holders.values():
                holder.register_forward_pre_hook(self._holder_begins)
                holder.register_forward_hook(self._holder_ends, always_call=True)
        if blocks:
            blocks[-1][0].register_forward_hook(partial(self._last_block_ends, own))
        self._chunks.append(own)
        self._find_places()

    def compare(self, settings: object) -> None:
        """RankMismatchError: another rank has other parts. All ranks call this."""
        shown = [f"options: {settings}"]
        device = torch.device("cpu")
        for block in (block for own in self._chunks for block in own):
            for part in (part for parts in block.holders.values() for part in parts.values()):
                tensor = part.tensor()
                assert tensor is not None
                device = tensor.device
                shown.append(f"{part.name}: {list(tensor.shape)} {tensor.dtype}")
        compare_parts(self.comm, device, "\n".join(shown))

    def part(self, tensor: torch.Tensor, module: nn.Module | None, is_bias: bool) -> Part | None:
        if module is not None:
            self._callers.add(module)
            setattr(module, _CALLED, True)
        part = None if module is None else self.known(module, is_bias)
        return part if part is not None and part.is_of(tensor) else None

    def known(self, module: nn.Module, is_bias: bool) -> Part | None:
        block = self._block_of.get(module)
        return None if block is None else block.holders[module].get(is_bias)

    def use(self, part: Part) -> torch.Tensor:
        holder = None if part.holder is None else part.holder()
        if holder is None or holder not in self._block_of:
            return self.gathers.use(part)
        again = holder in self._recomputing
        weight = self._block_of[holder].holders[holder][False]
        whole = self.gathers.use(part, keep=again and part is weight)  # backward needs no bias
        before = self._before.get(holder)
        if self._in_backward and not again and before is not None:
            block = self._block_of[before]
            if not block.recomputed:  # else it comes as a whole, before it is computed again
                self.gathers.launch(block.holders[before][False])
        return whole

    def deferred(self, parameter: torch.Tensor) -> bool:
        return accumulates(parameter)

    def backward_ended(self) -> None:
        self._recomputing.clear()

    def _parts(self, name: str, holder: nn.Module) -> dict[bool, Part]:
        parts: dict[bool, Part] = {}
        for is_bias, end in ((False, "weight"), (True, "bias")):
            tensor = holder._parameters.get(end)
            if tensor is not None:
                part = Part(tensor.isp_reduce_scatter_name, ref(tensor), ref(holder))
                parts[is_bias] = part
                if self.pool is not None:
                    part.allocate = partial(self.pool.allocate_gathered, name, is_bias)
        return parts

    def _find_places(self) -> None:
        self._block_of.clear()
        self._before.clear()
        for blocks in self._chunks:
            before: nn.Module | None = None
            for block in blocks:
                for holder in block.holders:
                    self._block_of[holder] = block
                    if before is not None:
                        self._before[holder] = before
                    before = holder

    def _gather(self, blocks: list[Block], index: int) -> None:
        """Launch the gathers of a block that are not under way."""
        if not 0 <= index < len(blocks):
            return
        block = blocks[index]
        missing = [
            part
            for parts in block.holders.values()
            for part in parts.values()
            if part.whole is None
        ]
        if missing and graph_task() == -1:
            for prerequisite in self.before_block:
                awaited = prerequisite(block.module)
                if awaited is not None:
                    awaited.wait()
        for part in missing:
            self.gathers.launch(part)

    # --- what hooks call --------------------------------------------------------------------------

    @untraced
    def _chunk_begins(self, module: nn.Module, args: Any) -> None:
        self.enter()
        if graph_task() == -1:
            self.gathers.drop_all()  # gathered in vain by the last forward

    @untraced
    def _block_begins(
        self, blocks: list[Block], block: Block, module: nn.Module, args: Any
    ) -> None:
        self.enter()
        block.recomputed = block.recomputed or graph_task() != -1
        self._gather(blocks, block.index)
        if not block.anchored:
            self._at_anchor(blocks, block, module, args)

    @untraced
    def _at_anchor(self, blocks: list[Block], block: Block, module: nn.Module, args: Any) -> None:
        if graph_task() == -1:
            self._gather(blocks, block.index + 1)
        elif block.index > 0 and blocks[block.index - 1].recomputed:
            self._gather(blocks, block.index - 1)

    @untraced
    def _last_block_ends(
        self, blocks: list[Block], module: nn.Module, args: Any, output: Any
    ) -> None:
        taken = {holder: name for block in blocks for name, holder in block.taken.items()}
        if self._silent.isdisjoint(taken) or any(getattr(one, _CALLED, False) for one in taken):
            return
        raise ValueError(
            f"ISPCommunicator: found that the blocks have run and that none of {sorted(set(taken.values()))} "
            "in them called weight_hook(weight, module=self): their weights were taken for parts, "
            "expected linear layers that gather their own. If the weights are whole on every rank, "
            "pass weights='whole'"
        )

    @untraced
    def _holder_begins(self, module: nn.Module, args: Any) -> None:
        if graph_task() != -1:
            self._recomputing.add(module)

    @untraced
    def _holder_ends(self, module: nn.Module, args: Any, output: Any) -> None:
        self._recomputing.discard(module)
        block = self._block_of.get(module)
        if output is None or module in self._callers or block is None:
            return  # it raised, or it is as it should be
        self._silent.add(module)
        for part in block.holders.pop(module).values():  # it uses its weight as it is
            self.gathers.drop(part)
        self._find_places()
