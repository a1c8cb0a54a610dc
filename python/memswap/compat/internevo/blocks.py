"""Parts of weights gathered by the blocks of a model: the next block beside the present one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import ref

import torch
from torch import nn

from memswap.compat.internevo.ahead import Ahead
from memswap.compat.internevo.parts import Part, accumulates
from memswap.compat.internevo.pool import MemoryPool
from memswap.engine.autograd import graph_task
from memswap.hooks.module_hooks import AtEnd, ModuleHooks
from memswap.parallel.comm import Comm

if TYPE_CHECKING:
    from types import FrameType

#: On a module: whether it has called a communicator for its weight.
_CALLED = "_isp_gathers_its_weight"


#: A block, its modules that hold parts by their names in it, and its output projections.
Members: TypeAlias = tuple[nn.Module, dict[str, nn.Module], Sequence[nn.Module]]


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
        #: A module may be a block's output projection and hold a part as well.
        self._of_chunks, self._of_blocks, self._of_outputs, self._of_holders = (
            ModuleHooks(_refuse_copy) for _ in range(4)
        )
        self.reductions.guard()

    def add_chunk(
        self,
        chunk: nn.Module,
        blocks: Sequence[Members],
        checkpointed: int,
    ) -> None:
        """The blocks of a chunk.

        Args:
            chunk: the model, or a stage of it.
            blocks: see :data:`Members`.
            checkpointed: how many of them, from the first, backward will compute again.
        """
        own: list[Block] = []
        self._of_chunks.add(chunk, None, self._chunk_begins)
        for index, (module, holders, outputs) in enumerate(blocks):
            parts = {holder: self._parts(name, holder) for name, holder in holders.items()}
            own.append(Block(module, index, parts, holders, bool(outputs), index < checkpointed))
            place = own, own[-1], index == len(blocks) - 1
            self._of_blocks.add(module, place, self._block_begins, abandons_raised=True)
            for output in outputs:
                self._of_outputs.add(output, place, self._output_begins)
            for holder in holders.values():
                self.first_uses.seen(holder)
                self._of_holders.add(holder, None, self._holder_begins, abandons_raised=True)
        self._chunks.append(own)
        self._find_places()

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
        if self.backward.runs and not again and before is not None:
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

    def _chunk_begins(self, key: object, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.backward.look()
        if graph_task() == -1:
            self.gathers.drop_all()  # gathered in vain by the last forward

    def _block_begins(
        self, place: tuple[list[Block], Block, bool], module: nn.Module, args: Any, kwargs: Any
    ) -> AtEnd | None:
        blocks, block, is_last = place
        self.backward.look()
        block.recomputed = block.recomputed or graph_task() != -1
        self._gather(blocks, block.index)
        if not block.anchored:
            self._at_anchor(blocks, block)
        return AtEnd(partial(self._last_block_ends, blocks)) if is_last else None

    def _output_begins(
        self, place: tuple[list[Block], Block, bool], module: nn.Module, args: Any, kwargs: Any
    ) -> None:
        self._at_anchor(*place[:2])

    def _at_anchor(self, blocks: list[Block], block: Block) -> None:
        """This is where a block's neighbour is gathered."""
        if graph_task() == -1:
            self._gather(blocks, block.index + 1)
        elif block.index > 0 and blocks[block.index - 1].recomputed:
            self._gather(blocks, block.index - 1)

    def _last_block_ends(self, blocks: list[Block], output: Any) -> None:
        taken = {holder: name for block in blocks for name, holder in block.taken.items()}
        if self._silent.isdisjoint(taken) or any(getattr(one, _CALLED, False) for one in taken):
            return
        raise ValueError(
            "ISPCommunicator: found that the blocks have run and that none of "
            f"{sorted(set(taken.values()))} in them called weight_hook(weight, module=self): "
            "their weights were taken for parts, expected linear layers that gather their own. If "
            "the weights are whole on every rank, pass weights='whole'"
        )

    def _holder_begins(self, key: object, module: nn.Module, args: Any, kwargs: Any) -> HolderCall:
        return HolderCall(self, module)

    def holder_begins(self, holder: nn.Module) -> None:
        """A module that holds parts is about to run."""
        if graph_task() != -1:
            self._recomputing.add(holder)

    def holder_ends(self, holder: nn.Module) -> None:
        """It has run, or raised, or was interrupted."""
        self._recomputing.discard(holder)

    def holder_has_run(self, holder: nn.Module) -> None:
        """Whether it has called this communicator for its weight is known now."""
        block = self._block_of.get(holder)
        if holder in self._callers or block is None:
            return
        self._silent.add(holder)
        for part in block.holders.pop(holder).values():  # it uses its weight as it is
            self.gathers.drop(part)
        self._find_places()


class HolderCall:
    """One call of a module that holds parts: the scope that ModuleHooks tells of begin and end."""

    def __init__(self, gathering: AheadByBlocks, holder: nn.Module) -> None:
        self._gathering = gathering
        self._holder = holder

    def enter(self, call: FrameType | None) -> None:
        """The call begins."""
        self._gathering.holder_begins(self._holder)

    def leave(self, output: Any) -> None:
        """It ends."""
        self.abandon()
        if output is not None:
            self._gathering.holder_has_run(self._holder)

    def abandon(self) -> None:
        """It has raised, or was interrupted."""
        self._gathering.holder_ends(self._holder)


def _refuse_copy() -> None:
    raise NotImplementedError(
        "ISPCommunicator: its hooks belong to process groups and cannot be copied; copy the model "
        "first, and make a communicator for the copy"
    )
