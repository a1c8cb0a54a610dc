"""What drives several communicators: a scheduler's callbacks, and a wrapper around them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableMapping
from typing import Any

import torch
from torch import nn

from memswap.compat.internevo.pool import MemoryPool
from memswap.compat.internevo.weights import Handlers, ISPCommunicator
from memswap.errors import SlotError
from memswap.parallel.comm import Ticket


class ISPCommunicatorSchedulerHook:
    """Callbacks of a scheduler. Weights and gradients need none of them.

    Args:
        overlap_handler: the communicator, or a wrapper of several.
        zero_optim: an optimizer; its ``accumulate_left_grads_after_backward`` and, unless its
            ``skip_grad_reduce``, its ``reduce_left_grads_after_backward``, where it has them, are
            called after each backward of a communicator with ``overlap``.
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
        """Switch to the current chunk, in forward."""
        self._switch(True)

    def after_forward(self, scheduler: Any, outputs: Any) -> None:
        """Nothing: a block drops its weights when it has run."""

    def before_criterion(self, scheduler: Any, outputs: Any, label: Any) -> None:
        """Nothing.

        Args:
            scheduler: InternEvo's.
            outputs: of the model.
            label: of the batch.
        """

    def after_criterion(self, scheduler: Any, loss: Any) -> None:
        """Nothing."""

    def before_backward(self, scheduler: Any, outputs: Any, outputs_grad: Any) -> None:
        """Switch to the current chunk, in backward.

        Args:
            scheduler: InternEvo's.
            outputs: of the model.
            outputs_grad: their gradients.
        """
        self._switch(False)

    def after_backward(self, scheduler: Any, inputs_grad: Any) -> None:
        """Let the optimizer collect gradients that are under way, and give back their buffers."""
        communicators = self._communicators()
        if self._zero_optim is not None and any(one.overlap for one in communicators):
            collect = getattr(self._zero_optim, "accumulate_left_grads_after_backward", None)
            reduce = getattr(self._zero_optim, "reduce_left_grads_after_backward", None)
            if collect is not None:
                collect()
            if reduce is not None and not getattr(self._zero_optim, "skip_grad_reduce", False):
                reduce()
        for communicator in communicators:
            communicator.is_forward = True
            if communicator.memory_pool is not None:
                communicator.memory_pool.reset_lazy_pools()

    def post_helper_func(self, scheduler: Any, outputs: Any, label: Any) -> None:
        """Nothing.

        Args:
            scheduler: InternEvo's.
            outputs: of the model.
            label: of the batch.
        """

    def _communicators(self) -> list[ISPCommunicator]:
        handler = self._handler
        return [handler] if isinstance(handler, ISPCommunicator) else list(handler)

    def _switch(self, forward: bool) -> None:
        for communicator in self._communicators():
            communicator.is_forward = forward
            if self._chunk is not None:
                communicator.switch_current_model_chunk(self._chunk())


class ISPCommunicatorWrapper:
    """Several communicators as one: the dense part's and the experts'.

    Args:
        isp_communicators: the first ones, with indices from 0.
    """

    def __init__(self, isp_communicators: Iterable[ISPCommunicator] = ()) -> None:
        self._communicators = dict(enumerate(isp_communicators))

    def __iter__(self) -> Iterator[ISPCommunicator]:
        return iter(self._communicators.values())

    @property
    def isp_communicators(self) -> list[ISPCommunicator]:
        """All, by their index."""
        return [one for _, one in sorted(self._communicators.items())]

    @property
    def memory_pools(self) -> list[MemoryPool]:
        """Those of communicators that have one."""
        return [one.memory_pool for one in self.isp_communicators if one.memory_pool is not None]

    @property
    def enable_memory_pool(self) -> bool:
        """Whether a communicator has one."""
        return bool(self.memory_pools)

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
    def reduce_scatter_handlers(self) -> Handlers:
        """Those of all communicators; what is set is set where the name is."""
        return _Joined([one.reduce_scatter_handlers for one in self.isp_communicators])

    def register_prerequisite_for_forward_prefetch_hooks(
        self, prerequisite_func: Callable[[nn.Module], Any]
    ) -> None:
        """For the blocks of each communicator."""
        for one in self:
            one.register_prerequisite_for_forward_prefetch_hooks(prerequisite_func)

    def free_reduce_scatter_memory(self, key: tuple[int, ...], index: int) -> None:
        """Free a buffer in the pool that lent it, and in no other."""
        for pool in self.memory_pools:
            if pool.lends(index):
                pool.free_reduce_scatter_memory(key, index)
                return
        raise SlotError(f"ISPCommunicatorWrapper: no pool has lent a buffer with index {index}")

    def reset_lazy_pools(self) -> None:
        """For the pool of each communicator."""
        for pool in self.memory_pools:
            pool.reset_lazy_pools()


class _Joined(MutableMapping[str, "tuple[torch.Tensor, Ticket] | None"]):
    """Several mappings as one. A name belongs to the first that has it."""

    def __init__(self, maps: list[Handlers]) -> None:
        self._maps = maps

    def _of(self, name: str) -> Handlers:
        for one in self._maps:
            if name in one:
                return one
        raise KeyError(name)

    def __getitem__(self, name: str) -> tuple[torch.Tensor, Ticket] | None:
        return self._of(name)[name]

    def __setitem__(self, name: str, value: tuple[torch.Tensor, Ticket] | None) -> None:
        self._of(name)[name] = value

    def __delitem__(self, name: str) -> None:
        del self._of(name)[name]

    def __iter__(self) -> Iterator[str]:
        return (name for one in self._maps for name in one)

    def __len__(self) -> int:
        return sum(map(len, self._maps))
