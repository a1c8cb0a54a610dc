"""ISPCommunicator: blocks whose weights are gathered just in time, by memswap.parallel.shard."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from memswap.compat.internevo.pool import ISPCommModelConfig, MemoryPool
from memswap.compat.internevo.raw import Done, gather_rows, mesh_of, reduce_rows
from memswap.engine.autograd import graph_task
from memswap.errors import SlotError
from memswap.parallel.comm import Comm, Ticket
from memswap.parallel.schedule import ShardContext
from memswap.parallel.shard import shard

#: Submodules of a block before whose forward the next block is gathered, by the end of their name.
OUTPUT_PROJECTIONS = ("out_proj", "wo")


@dataclass
class ISPOverlapState:
    """What a chunk of the model consists of. Nothing is decided by it."""

    num_blocks: int = 0
    ckpt_block_num: int = 0
    isp_outs: list[nn.Module] = field(default_factory=list)
    """Modules at which the next block is gathered."""
    isp_modules: list[nn.Module] = field(default_factory=list)
    """Modules that have parameters of their own."""
    index_to_isp_modules: dict[int, list[nn.Module]] = field(default_factory=dict)
    index_to_block: dict[int, nn.Module] = field(default_factory=dict)
    module_to_index: dict[nn.Module, int] = field(default_factory=dict)


class ISPCommunicator:
    """Shards the blocks of a model, each a unit that is gathered while the one before it computes.

    Blocks are the elements of the outermost ``nn.ModuleList`` of the model, or of each chunk, under
    whatever name. Any modules may be in them. Their weights are whole on every rank when this is
    called, and DTensors of the ranks' parts afterwards: make the optimizer then. What is outside of
    blocks stays as it is: give it to ``shard(model, mesh, context=communicator.context)`` or to the
    communicators of embedding and head.

    Args:
        model: a model, or a list of the chunks of a virtual pipeline. None: the weights are parts
            that the caller made; :meth:`weight_hook` and :meth:`grad_hook` do what they say.
        model_conf: see :class:`ISPCommModelConfig`; gets the shapes of the weights.
        overlap: gather the next block ahead of its use.
        enable_memory_pool: gather into two fixed slots; otherwise torch's caching allocator.
        process_group: ranks that share the weights; None: all.
        context: units to schedule these with: those of another communicator (experts, whose
            communicator is made first, and the dense part around them).

    Raises:
        ValueError: the model has no ``nn.ModuleList``.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module] | None,
        model_conf: ISPCommModelConfig,
        overlap: bool = False,
        enable_memory_pool: bool = False,
        process_group: dist.ProcessGroup | None = None,
        *,
        context: ShardContext | None = None,
    ) -> None:
        slots = 2 if enable_memory_pool else None
        self.process_group = process_group
        self.overlap = overlap
        self.model_conf = model_conf
        self.context = context or ShardContext(slots=slots, prefetch=overlap)
        self.memory_pool = MemoryPool(model_conf, with_bias=True) if enable_memory_pool else None
        group = dist.group.WORLD if process_group is None else process_group
        self._comm: Comm = self.context.comm(group)
        self._states: list[ISPOverlapState] = []
        self._chunk = 0
        self._blocks: list[nn.Module] = []
        chunks = _chunks(model)
        if chunks:
            self._mesh = mesh_of(process_group, chunks[0])
        for chunk in chunks:
            self._states.append(self._shard_chunk(chunk))

    def communication_mode(self) -> str:
        """``"wp"``: callers ask for it, to know which hooks they call."""
        return "wp"

    @property
    def is_forward(self) -> bool:
        """Whether this thread is outside of backward; derived, so that nobody can forget it."""
        return graph_task() == -1

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
        something with ``wait()``. Other results but None raise TypeError: they would mean nothing.
        """
        if not callable(prerequisite_func):
            raise TypeError(
                f"found {type(prerequisite_func).__name__}, expected a function of a block"
            )

        def before(name: str, block: nn.Module) -> Any:
            return prerequisite_func(block) if self.is_forward else None

        for block in self._blocks:
            self.context.before_fetch(partial(before, block=block), of=block)

    @property
    def reduce_scatter_handlers(self) -> Mapping[str, tuple[torch.Tensor, Ticket]]:
        """Reductions under way, ``"UNIT.parameter"`` to reduced rows and handle; read only.

        Empty outside of backward: the gradients are in ``grad`` of the parameters then, so an
        optimizer has nothing to collect.
        """
        found: dict[str, tuple[torch.Tensor, Ticket]] = {}
        for one in self.context.reductions_under_way:
            names = {id(p): name for m in one.unit.modules for name, p in m.named_parameters()}
            for member, output in zip(one.members, one.outputs, strict=True):
                shown = member.full if one.unit.exposed else member.sharded
                found[f"{one.unit.name}.{names[id(shown)]}"] = (output, one.ticket)
        return found

    def weight_hook(
        self,
        tensor: torch.Tensor,
        async_op: bool = False,
        module: nn.Module | None = None,
        is_bias: bool = False,
    ) -> torch.Tensor:
        """The whole weight: ``tensor`` itself inside of a block, else gathered from its parts.

        It is there when this returns, whatever ``async_op`` says: there is no handle to wait for.
        """
        pool = self.memory_pool
        allocate = None if pool is None else pool.allocate_like
        return gather_rows(self._comm, tensor, allocate)

    def grad_hook(
        self,
        tensor: torch.Tensor,
        async_op: bool = False,
        module: nn.Module | None = None,
        reduce_op: Any = dist.ReduceOp.AVG,
        is_bias: bool = False,
    ) -> tuple[torch.Tensor, Ticket]:
        """What to return as the weight's gradient, and a handle to wait for before it is used.

        The gradient itself inside of a block (``module`` says so), whose unit reduces it; else this
        rank's rows, reduced.
        """
        if module is not None and any(module in state.module_to_index for state in self._states):
            return tensor, Done()
        return reduce_rows(self._comm, tensor, async_op, reduce_op)

    def _shard_chunk(self, chunk: nn.Module) -> ISPOverlapState:
        blocks = list(_blocks(chunk))
        if not blocks:
            found = [type(child).__name__ for child in chunk.children()]
            raise ValueError(
                f"ISPCommunicator: found no nn.ModuleList of blocks in {type(chunk).__name__} "
                f"(it has {', '.join(found) or 'no children'}); put the blocks into one, or call "
                "memswap.parallel.shard on them"
            )
        state = ISPOverlapState(num_blocks=len(blocks))
        state.ckpt_block_num = int(self.model_conf.activation_checkpointing * len(blocks))
        for index, block in enumerate(blocks):
            self._describe(state, index, block)
            names = [name for name, _ in block.named_modules()]
            anchors = [name for name in names if name.split(".")[-1] in OUTPUT_PROJECTIONS]
            shard(
                block,
                self._mesh,
                reshard_after_forward=True,
                anchor=anchors[0] if anchors else None,
                context=self.context,
            )
            state.isp_outs += [block.get_submodule(name) for name in anchors]
        self._blocks += blocks
        return state

    def _describe(self, state: ISPOverlapState, index: int, block: nn.Module) -> None:
        state.index_to_block[index] = block
        own = state.index_to_isp_modules[index] = []
        for name, module in block.named_modules():
            if not list(module.parameters(recurse=False)):
                continue
            own.append(module)
            state.module_to_index[module] = index
            weight = getattr(module, "weight", None)
            if isinstance(weight, torch.Tensor):
                self.model_conf.module_shapes.setdefault(name, weight.shape)
        state.isp_modules += own


class ISPCommunicatorSchedulerHook:
    """Callbacks of a scheduler. Weights and gradients need none of them.

    Args:
        overlap_handler: the communicator, or a wrapper of several.
        zero_optim: an optimizer; its ``accumulate_left_grads_after_backward``, if it has one, is
            called after each backward.
        chunk: returns the virtual pipeline's current chunk.
    """

    def __init__(
        self,
        overlap_handler: ISPCommunicator | ISPCommunicatorWrapper,
        zero_optim: Any = None,
        *,
        chunk: Callable[[], int] | None = None,
    ) -> None:
        self._handler = overlap_handler
        self._zero_optim = zero_optim
        self._chunk = chunk

    def before_forward(self, scheduler: Any, inputs: Any) -> None:
        """Switch to the current chunk."""
        self._switch()

    def after_forward(self, scheduler: Any, outputs: Any) -> None:
        """Nothing: a block drops its weights when it has run."""

    def before_criterion(self, scheduler: Any, outputs: Any, label: Any) -> None:
        """Nothing."""

    def after_criterion(self, scheduler: Any, loss: Any) -> None:
        """Nothing."""

    def before_backward(self, scheduler: Any, outputs: Any, outputs_grad: Any) -> None:
        """Switch to the current chunk; that this is a backward is seen when it begins."""
        self._switch()

    def after_backward(self, scheduler: Any, inputs_grad: Any) -> None:
        """Let the optimizer collect, and give back buffers of reduced gradients."""
        collect = getattr(self._zero_optim, "accumulate_left_grads_after_backward", None)
        if collect is not None:
            collect()
        for communicator in self._communicators():
            if communicator.memory_pool is not None:
                communicator.memory_pool.reset_lazy_pools()

    def post_helper_func(self, scheduler: Any, outputs: Any, label: Any) -> None:
        """Nothing."""

    def _communicators(self) -> list[ISPCommunicator]:
        handler = self._handler
        return [handler] if isinstance(handler, ISPCommunicator) else list(handler)

    def _switch(self) -> None:
        if self._chunk is not None:
            for communicator in self._communicators():
                communicator.switch_current_model_chunk(self._chunk())


class ISPCommunicatorWrapper:
    """Several communicators as one: the dense part's and the experts'."""

    def __init__(self) -> None:
        self._communicators: dict[int, ISPCommunicator] = {}

    def __iter__(self) -> Iterator[ISPCommunicator]:
        return iter(self._communicators.values())

    def set_communicator(self, index: int, communicator: ISPCommunicator) -> None:
        """Add one, or put it in another one's place."""
        self._communicators[index] = communicator

    def get_communicator(self, index: int) -> ISPCommunicator:
        """The one with an index. ValueError: there is none."""
        if index not in self._communicators:
            raise ValueError(
                f"ISPCommunicatorWrapper: found no communicator {index}; set were "
                f"{sorted(self._communicators)}"
            )
        return self._communicators[index]

    @property
    def reduce_scatter_handlers(self) -> Mapping[str, tuple[torch.Tensor, Ticket]]:
        """Those of all communicators."""
        return ChainMap(*(dict(one.reduce_scatter_handlers) for one in self))

    def register_prerequisite_for_forward_prefetch_hooks(
        self, prerequisite_func: Callable[[nn.Module], Any]
    ) -> None:
        """For the blocks of each communicator."""
        for one in self:
            one.register_prerequisite_for_forward_prefetch_hooks(prerequisite_func)

    def free_reduce_scatter_memory(self, key: tuple[int, ...], index: int) -> None:
        """Free a buffer in the pool that lent it, and in no other."""
        for pool in self._pools():
            if pool.lends(index):
                pool.free_reduce_scatter_memory(key, index)
                return
        raise SlotError(f"ISPCommunicatorWrapper: no pool has lent a buffer with index {index}")

    def reset_lazy_pools(self) -> None:
        """For the pool of each communicator."""
        for pool in self._pools():
            pool.reset_lazy_pools()

    def _pools(self) -> list[MemoryPool]:
        return [one.memory_pool for one in self if one.memory_pool is not None]


def _chunks(model: nn.Module | Sequence[nn.Module] | None) -> list[nn.Module]:
    if model is None:
        return []
    if isinstance(model, nn.Module) and not isinstance(model, nn.ModuleList):
        return [model]
    return list(model)


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Elements of the outermost lists."""
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield from _blocks(child)
