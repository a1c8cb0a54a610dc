"""ISPCommunicator: weights gathered just in time, whether its modules hold parts or whole ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import nn

from memswap._native import native
from memswap._warn import UsersLine
from memswap.compat.internevo.ahead import Ahead, AheadByOrder
from memswap.compat.internevo.blocks import AheadByBlocks, Members
from memswap.compat.internevo.pool import ISPCommModelConfig, MemoryPool
from memswap.compat.internevo.raw import (
    Done,
    FirstUses,
    WPCommunicator,
    compare_parts,
    gather_rows,
    mesh_of,
    reduce_rows,
)
from memswap.compat.internevo.structure import (
    ISPOverlapState,
    blocks_of,
    chunks_of,
    hold_parts,
    holders_of,
    outputs_of,
)
from memswap.engine.autograd import graph_task
from memswap.parallel.comm import Comm, Ticket
from memswap.parallel.schedule import ShardContext
from memswap.parallel.shard import ROWS, shard

#: Name of a weight to its reduced rows and their handle; None once that was collected.
Handlers: TypeAlias = MutableMapping[str, "tuple[torch.Tensor, Ticket] | None"]


class ISPCommunicator(WPCommunicator):
    """Gathers the weights of a model's blocks just in time, and reduces their gradients.

    Blocks are the elements of the outermost ``nn.ModuleList`` of the model, or of each chunk, under
    whatever name. What is in them decides what happens:

    - *Parts*: linear layers of the user's own that hold rows of their weights and call
      :meth:`weight_hook` and :meth:`grad_hook`. With ``overlap``, the next block is gathered at
      ``out_proj`` or ``wo`` of the present one, in backward the module before, and gradients wait
      in :attr:`reduce_scatter_handlers` for the optimizer. Everything else in the blocks is left
      alone.
    - *Whole weights*, the same on every rank: any modules, torch's own for one. Each block becomes
      a unit of :func:`memswap.parallel.shard`; make the optimizer then. What is outside of blocks
      stays as it is: give it to ``shard(model, mesh, context=communicator.context)`` or to the
      communicators of embedding and head.

    Args:
        model: a model, or a list of the chunks of a virtual pipeline. None: hooks that hold parts,
            without blocks: with ``overlap``, the next few uses are gathered ahead, as the last step
            had them, and gradients are in ``parameter.grad`` when backward ends.
        model_conf: see :class:`ISPCommModelConfig`; gets the shapes of the weights.
        overlap: gather ahead of the use, and wait for reductions late.
        enable_memory_pool: gather into fixed buffers; otherwise torch's caching allocator.
        process_group: ranks that share the weights; None: all.
        weights: ``"parts"`` or ``"whole"``; None: parts, if most elements of the blocks' matrices
            are ``weight`` of modules with a ``forward`` that is not torch's, or with fewer rows
            than ``out_features``.
        context: makes the Comm of the group; whole weights are scheduled with its units, those of
            another communicator (experts, whose communicator is made first, and the dense part
            around them).

    Raises:
        ValueError: the model has no ``nn.ModuleList``; ``weights="parts"`` and no module with a
            weight.
        RankMismatchError: another rank holds parts of other shapes or dtypes.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module] | None,
        model_conf: ISPCommModelConfig,
        overlap: bool = False,
        enable_memory_pool: bool = False,
        process_group: dist.ProcessGroup | None = None,
        *,
        weights: Literal["parts", "whole"] | None = None,
        context: ShardContext | None = None,
    ) -> None:
        if weights not in (None, "parts", "whole"):
            raise ValueError(
                f"ISPCommunicator: found weights={weights!r}, expected 'parts', 'whole' or None"
            )
        slots = 2 if enable_memory_pool else None
        self.process_group = process_group
        self.overlap = overlap
        self.enable_memory_pool = enable_memory_pool
        self.model_conf = model_conf
        self.context = context or ShardContext(slots=slots, prefetch=overlap)
        self.memory_pool = MemoryPool(model_conf, with_bias=True) if enable_memory_pool else None
        group = dist.group.WORLD if process_group is None else process_group
        self._comm: Comm = self.context.comm(group)
        self._first_uses = FirstUses(self._comm)
        self._said_forward = True
        self._told_of_result = False
        self._states: list[ISPOverlapState] = []
        self._chunk = 0
        self._ahead: Ahead | None = None
        chunks = chunks_of(model)
        found = [blocks_of(chunk) for chunk in chunks]
        self._blocks = [block for blocks in found for block in blocks]
        every = weights == "parts"
        self._parts = every or (weights is None and hold_parts(self._blocks, self._comm.size))
        if every and chunks and not any(holders_of(block, every) for block in self._blocks):
            raise ValueError(
                "ISPCommunicator: found no module with a weight in the blocks, expected linear "
                "layers that hold parts (weights='parts')"
            )
        if not chunks:
            if overlap and self._comm.size > 1:
                self._ahead = AheadByOrder(self._comm, self.memory_pool)
        elif self._parts:
            self._follow_blocks(chunks, found, every)
        else:
            self._mesh = mesh_of(process_group, chunks[0])
            for blocks in found:
                self._states.append(self._shard_blocks(blocks))

    @property
    def is_forward(self) -> bool:
        """Whether this is forward: as was assigned, and never inside of a backward.

        Nothing is decided by it: that a backward runs is seen from autograd.
        """
        return self._said_forward and graph_task() == -1

    @is_forward.setter
    def is_forward(self, value: bool) -> None:
        self._said_forward = value

    @property
    def overlap_state(self) -> ISPOverlapState:
        """That of the current chunk."""
        if not self._states:
            raise ValueError("ISPCommunicator: made without a model, it has no chunks")
        return self._states[self._chunk]

    def switch_current_model_chunk(self, chunk_id: int) -> None:
        """Say which chunk :attr:`overlap_state` is about; weights follow what runs."""
        if not 0 <= chunk_id < len(self._states):
            raise ValueError(
                f"switch_current_model_chunk(): found chunk {chunk_id} of {len(self._states)}"
            )
        self._chunk = chunk_id

    def register_prerequisite_for_forward_prefetch_hooks(
        self, prerequisite_func: Callable[[nn.Module], Any]
    ) -> None:
        """Call ``prerequisite_func(block)`` before a block is gathered in forward.

        It waits for what has to be there first (a broadcast of updated parameters), or returns
        something with ``wait()``. Another result decides nothing, and is told once. Parts without
        ``overlap`` are gathered where they are used, and nothing is called.

        Raises:
            TypeError: it cannot be called.
            ValueError: the communicator was made without a model.
        """
        if not callable(prerequisite_func):
            raise TypeError(
                f"found {type(prerequisite_func).__name__}, expected a function of a block"
            )

        if not self._states:
            raise ValueError(
                "ISPCommunicator: made without a model, it has no blocks to wait for; give it the "
                f"model, or call {getattr(prerequisite_func, '__name__', 'the function')} before "
                "forward"
            )
        line = UsersLine.here()

        def before(name: str, block: nn.Module) -> Any:
            if graph_task() != -1:
                return None
            result = prerequisite_func(block)
            if result is None or hasattr(result, "wait"):
                return result
            if not self._told_of_result:
                self._told_of_result = True
                line.warn(
                    f"memswap: a prerequisite returned {type(result).__name__}, which decides "
                    "nothing: the block is gathered. Return None, or something with wait()"
                )
            return None

        if isinstance(self._ahead, AheadByBlocks):
            self._ahead.before_block.append(partial(before, ""))
        elif not self._parts:
            for block in self._blocks:
                self.context.before_fetch(partial(before, block=block), of=block)

    @property
    def reduce_scatter_handlers(self) -> Handlers:
        """Gradients under way: name to this rank's reduced rows and their handle.

        With parts and ``overlap``, ``parameter.grad`` is negative zeros after backward, and whoever
        asks for ``parameter.isp_reduce_scatter_name`` here waits for the handle, adds the rows to
        the gradient and sets the entry to None. Rows of the pool have an ``index``, to free them
        by. An optimizer of torch refuses to step before; :meth:`collect_gradients` does all that.

        Otherwise gradients are in ``grad`` of the parameters after backward: this has
        ``"UNIT.parameter"`` in a backward, to look at, and is empty outside of it.
        """
        if self._ahead is not None:
            return self._ahead.reductions
        found: Handlers = {}
        for one in self.context.reductions_under_way:
            names = {id(p): name for m in one.unit.modules for name, p in m.named_parameters()}
            for member, output in zip(one.members, one.outputs, strict=True):
                shown = member.full if one.unit.exposed else member.sharded
                found[f"{one.unit.name}.{names[id(shown)]}"] = (output, one.ticket)
        return found

    def collect_gradients(self) -> None:
        """Add to the parameters' ``grad`` what nobody asked :attr:`reduce_scatter_handlers` for.

        For training loops that have no optimizer to do it. Call it after each backward or after the
        last of several, which are summed.
        """
        if self._ahead is not None:
            self._ahead.collect()

    def weight_hook(
        self,
        tensor: torch.Tensor,
        async_op: bool = False,
        module: nn.Module | None = None,
        is_bias: bool = False,
    ) -> torch.Tensor:
        """See :meth:`WPCommunicator.weight_hook`; gathering ahead goes by ``module``."""
        if native.is_lent(tensor):
            return tensor
        if self._ahead is not None:
            return self._ahead.weight(tensor, module, is_bias)
        self._first_uses.compare(tensor, module, is_bias)
        pool = self.memory_pool
        return gather_rows(self._comm, tensor, None if pool is None else pool.allocate_like)

    def grad_hook(
        self,
        tensor: torch.Tensor,
        async_op: bool = False,
        module: nn.Module | None = None,
        reduce_op: Any = dist.ReduceOp.AVG,
        is_bias: bool = False,
    ) -> tuple[torch.Tensor, Ticket]:
        """See :meth:`WPCommunicator.grad_hook`.

        With ``overlap``, a stand-in for the rows is returned: :attr:`reduce_scatter_handlers`.
        """
        if self._ahead is not None:
            return self._ahead.gradient(tensor, module, is_bias, async_op, reduce_op)
        if not self._parts and any(module in one.module_to_index for one in self._states):
            return tensor, Done()
        return reduce_rows(self._comm, tensor, async_op, reduce_op)

    def _follow_blocks(
        self, chunks: Sequence[nn.Module], found: Sequence[Sequence[nn.Module]], every: bool
    ) -> None:
        """Blocks with parts."""
        told: list[tuple[nn.Module, list[Members], int]] = []
        for chunk, blocks in zip(chunks, found, strict=True):
            state = self._state(len(blocks))
            members: list[Members] = []
            for index, block in enumerate(blocks):
                holders, outputs = holders_of(block, every), list(outputs_of(block).values())
                self._describe(state, index, block, holders, ranks=self._comm.size)
                state.isp_outs += outputs
                members.append((block, holders, outputs))
                for name, holder in holders.items():
                    holder.isp_name = name
                    for end in ("weight", "bias"):
                        parameter = holder._parameters.get(end)
                        if parameter is not None:
                            full = f"{len(self._states)}.{index}.{name}.{end}"
                            parameter.isp_reduce_scatter_name = full
                            setattr(parameter, ROWS, "an ISPCommunicator")
            self._states.append(state)
            told.append((chunk, members, state.ckpt_block_num))
        if self._comm.size == 1:
            return
        settings = (self.overlap, self.enable_memory_pool, [one[2] for one in told])
        shown = [f"options: {settings}"]
        device = torch.device("cpu")
        for holder in (one for state in self._states for one in state.isp_modules):
            self._first_uses.seen(holder)
            for one in holder.parameters(recurse=False):
                device = one.device
                shown.append(f"{one.isp_reduce_scatter_name}: {list(one.shape)} {one.dtype}")
        compare_parts(self._comm, device, "\n".join(shown))
        if self.overlap:
            self._ahead = ahead = AheadByBlocks(self._comm, self.memory_pool)
            for chunk, members, checkpointed in told:
                ahead.add_chunk(chunk, members, checkpointed)

    def _shard_blocks(self, blocks: Sequence[nn.Module]) -> ISPOverlapState:
        """Blocks with whole weights: units."""
        state = self._state(len(blocks))
        for index, block in enumerate(blocks):
            own = {
                name: module
                for name, module in block.named_modules()
                if list(module.parameters(recurse=False))
            }
            self._describe(state, index, block, own)
            outputs = outputs_of(block)
            shard(
                block,
                self._mesh,
                reshard_after_forward=True,
                anchor=next(iter(outputs), None),
                context=self.context,
            )
            state.isp_outs += outputs.values()
        return state

    def _state(self, blocks: int) -> ISPOverlapState:
        share = self.model_conf.activation_checkpointing
        return ISPOverlapState(num_blocks=blocks, ckpt_block_num=int(share * blocks))

    def _describe(
        self,
        state: ISPOverlapState,
        index: int,
        block: nn.Module,
        own: Mapping[str, nn.Module],
        ranks: int = 1,
    ) -> None:
        state.index_to_block[index] = block
        state.index_to_isp_modules[index] = list(own.values())
        for name, module in own.items():
            state.module_to_index[module] = index
            weight = getattr(module, "weight", None)
            if isinstance(weight, torch.Tensor):
                shape = torch.Size((weight.shape[0] * ranks, *weight.shape[1:]))
                self.model_conf.module_shapes.setdefault(name, shape)
        state.isp_modules += own.values()
