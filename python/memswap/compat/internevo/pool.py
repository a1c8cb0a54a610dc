"""MemoryPool: buffers for gathered weights and reduced gradients, handed out by hand.

A buffer that somebody still holds is never handed out again: whoever holds a tensor on its storage
keeps it, so there is nothing to trace and no parity of block numbers to trust.
"""

from __future__ import annotations

import torch

from memswap.errors import SlotError
from memswap.parallel.fsdp2 import PooledAllGather

#: Buffers of a shape for weights that no model named: one in use, and those gathered ahead.
_LIKE = 6


class ISPCommModelConfig:
    """What the buffers of a :class:`MemoryPool` look like.

    Args:
        dtype: of the buffers.
        device: where they are; None: this process's accelerator, or the CPU.
        activation_checkpointing: part of the blocks that is recomputed, 0 to 1; told by
            :class:`ISPOverlapState` only. What is recomputed is seen when it happens.
        module_shapes: shapes of whole weights by module name; :class:`ISPCommunicator` fills them
            in.
    """

    def __init__(
        self,
        dtype: torch.dtype = torch.half,
        device: torch.device | None = None,
        activation_checkpointing: float = 0.0,
        module_shapes: dict[str, torch.Size] | None = None,
    ) -> None:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        self.dtype = dtype
        self.device = device or accelerator or torch.device("cpu")
        self.activation_checkpointing = activation_checkpointing
        self.module_shapes = module_shapes or {}


class MemoryPool:
    """Two buffers for each module's gathered weight, and buffers for reduced gradients.

    Args:
        model_conf: dtype, device and shapes.
        with_bias: whether there are buffers for biases, too.
    """

    def __init__(self, model_conf: ISPCommModelConfig, with_bias: bool = False) -> None:
        self._conf = model_conf
        self._with_bias = with_bias
        self._gathers: dict[tuple[str, bool], PooledAllGather] = {}
        self._others: dict[tuple[torch.Size, torch.dtype], PooledAllGather] = {}
        self._reduces: dict[int, torch.Tensor] = {}
        """By index, which is no other buffer's in any pool."""
        self.reduce_allocations = 0
        """Times memory was allocated for reduced gradients."""

    @property
    def allocations(self) -> int:
        """Times memory was allocated for gathered weights."""
        pools = [*self._others.values(), *self._gathers.values()]
        return sum(one.allocations for one in pools)

    def allocate_constant_zero(self, size: tuple[int, ...] | torch.Size) -> torch.Tensor:
        """Zeros that nobody can write to: one element, seen as many."""
        zero = torch.zeros((), dtype=self._conf.dtype, device=self._conf.device)
        return zero.expand(size)

    def allocate_all_gather_memory(
        self, block_index: int, module_name: str, is_bias: bool = False
    ) -> torch.Tensor:
        """Room for a module's whole weight; uninitialized.

        Args:
            block_index: the block that asks. A third one at once gets memory beside the buffers.
            module_name: as in ``module_shapes``, which must fit this block's module.
            is_bias: its bias instead.
        """
        shape = self._conf.module_shapes.get(module_name)
        if shape is None:
            raise ValueError(
                f"MemoryPool: found no shape of module {module_name!r} (block {block_index}); "
                f"there are {sorted(self._conf.module_shapes)}"
            )
        if is_bias and not self._with_bias:
            raise ValueError(
                "MemoryPool: made without biases; say MemoryPool(conf, with_bias=True)"
            )
        whole = torch.empty(0, dtype=self._conf.dtype, device=self._conf.device)
        return self.allocate_gathered(module_name, is_bias, shape[:1] if is_bias else shape, whole)

    def allocate_gathered(
        self, module_name: str, is_bias: bool, shape: torch.Size, like: torch.Tensor
    ) -> torch.Tensor:
        """Room for a whole weight of the modules of a name; dtype and device of ``like``.

        Args:
            module_name: of the modules.
            is_bias: whether it is for a bias.
            shape: of the whole weight.
            like: a tensor of its dtype and device.
        """
        kept = self._gathers.setdefault((module_name, is_bias), PooledAllGather(slots=2))
        return kept.allocate(shape, dtype=like.dtype, device=like.device)

    def allocate_like(self, shape: torch.Size, like: torch.Tensor) -> torch.Tensor:
        """Room for a whole weight of which ``like`` is a part; uninitialized."""
        kept = self._others.setdefault((shape, like.dtype), PooledAllGather(slots=_LIKE))
        return kept.allocate(shape, dtype=like.dtype, device=like.device)

    def allocate_reduce_scatter_memory(self, key: tuple[int, ...] | torch.Size) -> torch.Tensor:
        """A buffer of shape ``key``; uninitialized. Its ``index`` is what to free it by."""
        like = torch.empty(0, dtype=self._conf.dtype, device=self._conf.device)
        return self.allocate_reduced(torch.Size(key), like)

    def allocate_reduced(self, shape: torch.Size, like: torch.Tensor) -> torch.Tensor:
        """The same, of the dtype and on the device of ``like``."""
        for buffer in self._reduces.values():
            fits = (buffer.shape, buffer.dtype, buffer.device) == (shape, like.dtype, like.device)
            if buffer.idle and fits:
                break
        else:
            buffer = torch.empty(shape, dtype=like.dtype, device=like.device)
            buffer.index = id(buffer)
            self._reduces[id(buffer)] = buffer
            self.reduce_allocations += 1
        buffer.idle = False
        return buffer

    def lends(self, index: int) -> bool:
        """Whether this pool's buffer ``index`` is in use."""
        buffer = self._reduces.get(index)
        return buffer is not None and not buffer.idle

    def free_reduce_scatter_memory(self, key: tuple[int, ...] | torch.Size, index: int) -> None:
        """The buffer of shape ``key`` with this ``index`` is not needed any more.

        Raises:
            SlotError: this pool has not lent such a buffer.
        """
        if not self.lends(index) or self._reduces[index].shape != torch.Size(key):
            raise SlotError(
                f"MemoryPool: found no buffer of shape {tuple(key)} with index {index} in use; "
                "was it freed already, or is it another pool's?"
            )
        self._reduces[index].idle = True

    def free(self, buffer: torch.Tensor) -> None:
        """A buffer of reduced gradients, if it is this pool's and in use."""
        if self.lends(id(buffer)):
            buffer.idle = True

    def forget(self, buffer: torch.Tensor) -> None:
        """A buffer in use is whose it is now; the pool will not hand it out again."""
        if self.lends(id(buffer)):
            del self._reduces[id(buffer)]

    def reset_lazy_pools(self) -> None:
        """Give back the memory of reduce-scatter buffers that nobody uses."""
        for index, buffer in list(self._reduces.items()):
            if buffer.idle:
                del self._reduces[index]
