"""A few fixed buffers for FSDP2's all-gathers: a plug-in for those who stay with fully_shard."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from memswap._native import native
from memswap.parallel.comm import all_gather_tensor


@dataclass(slots=True, eq=False)  # a buffer is itself, whatever is in it
class _Buffer:
    """Memory for one all-gather at a time."""

    memory: torch.Tensor
    holders: int
    """References to its storage when nobody uses it."""

    @property
    def free(self) -> bool:
        """Whether nobody but this buffer refers to its storage."""
        return bool(native.count_holders(self.memory)[1] == self.holders)


class PooledAllGather:
    """FSDP2's all-gather, into buffers that are used again and again.

    FSDP2 gathers a layer into a temporary buffer and copies the parameters out of it. It drops that
    buffer when the copies are ordered before the stream that gathers next; then nobody else holds
    its storage, which is how it is known to be free.

    Args:
        slots: buffers. One more all-gather at once than that gets memory of its own.
    """

    def __init__(self, slots: int = 2) -> None:
        if slots < 1:
            raise ValueError(f"slots={slots}: expected at least 1")
        self.slots = slots
        self.allocations = 0
        """Times memory was allocated, slots and others."""
        self._buffers: list[_Buffer] = []

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Memory for the output of an all-gather; FSDP2 calls this.

        Args:
            size: elements per dimension.
            dtype: of the output.
            device: of the output.
        """
        shape = torch.Size(int(one) for one in size)
        nbytes = shape.numel() * dtype.itemsize
        fitting = [one for one in self._buffers if one.memory.device == torch.device(device)]
        for buffer in fitting:
            if buffer.free and buffer.memory.numel() >= nbytes:
                return buffer.memory[:nbytes].view(dtype).view(shape)
        self.allocations += 1
        memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        if len(self._buffers) == self.slots:
            small = next((one for one in fitting if one.free), None)
            if small is None:
                return memory.view(dtype).view(shape)
            self._buffers.remove(small)
        memory.untyped_storage()  # torch keeps this object once it was asked for: it counts as one
        self._buffers.append(_Buffer(memory, native.count_holders(memory)[1]))
        return memory.view(dtype).view(shape)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Any:
        """Called by FSDP2: the all-gather itself."""
        return all_gather_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


def pool_all_gathers(model: torch.nn.Module, slots: int = 2) -> PooledAllGather:
    """Let all FSDP2 modules of a model gather into the same few buffers.

    Returns:
        The pool. Its buffers live as long as a module uses it.

    Raises:
        ValueError: the model has no module that ``fully_shard`` has sharded.
    """
    pool = PooledAllGather(slots)
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not modules:
        raise ValueError(
            "pool_all_gathers(): found no FSDP2 module; call torch.distributed.fsdp.fully_shard "
            "first (memswap.parallel.shard has slots of its own: ShardContext(slots=2))"
        )
    for module in modules:
        module.set_custom_all_gather(pool)
    return pool
