"""The ends of a model whose sequence is cut among ranks: embedding and head."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from memswap._native import native
from memswap.compat.internevo.raw import (
    Done,
    FirstUses,
    WPCommunicator,
    gather_rows,
    group_of,
    mesh_of,
    reduce_rows,
)
from memswap.hooks.module_hooks import ModuleHooks
from memswap.parallel.comm import Comm, ProcessGroupComm, Ticket
from memswap.parallel.layouts import HeadPlan, SequenceShards
from memswap.parallel.redistribute import GatherSequence, HeadsToSequence, SequenceToHeads
from memswap.parallel.schedule import ShardContext
from memswap.parallel.shard import ROWS, ShardedModule, shard

if TYPE_CHECKING:
    from types import FrameType

#: Of logits: batch, sequence, vocabulary.
_SEQUENCE, _VOCABULARY = 1, 2


class HeadWeightParallelCommunicator(WPCommunicator):
    """For a head that gathers its own weight and turns its output, ``[batch, tokens, words]``.

    Args:
        weight_process_group: ranks that share the weight's rows; None: all.
        seq_process_group: ranks that share the sequence, as many tokens each; None: all.
        retain_out_sharded: the output is the whole sequence with this rank's words; otherwise with
            all of them, the same on every rank.
    """

    def __init__(
        self,
        weight_process_group: dist.ProcessGroup | None = None,
        seq_process_group: dist.ProcessGroup | None = None,
        retain_out_sharded: bool = True,
    ) -> None:
        self._weights: Comm = ProcessGroupComm(weight_process_group)
        self._first_uses = FirstUses(self._weights)
        self._sequence: Comm = ProcessGroupComm(seq_process_group)
        self._retain_out_sharded = retain_out_sharded

    def weight_hook(
        self,
        tensor: torch.Tensor,
        async_op: bool = False,
        module: nn.Module | None = None,
        is_bias: bool = False,
    ) -> torch.Tensor:
        """See :meth:`WPCommunicator.weight_hook`."""
        if not native.is_lent(tensor):
            self._first_uses.compare(tensor, module, is_bias)
        return gather_rows(self._weights, tensor)

    def grad_hook(
        self,
        tensor: torch.Tensor,
        async_op: bool = False,
        module: nn.Module | None = None,
        reduce_op: Any = dist.ReduceOp.AVG,
        is_bias: bool = False,
    ) -> tuple[torch.Tensor, Ticket]:
        """See :meth:`WPCommunicator.grad_hook`."""
        if isinstance(module, ShardedModule):
            return tensor, Done()
        return reduce_rows(self._weights, tensor, async_op, reduce_op)

    def output_hook(
        self, output: torch.Tensor, async_op: bool = False
    ) -> tuple[torch.Tensor, Ticket]:
        """From this rank's tokens to the whole sequence."""
        tokens = output.size(_SEQUENCE) * self._sequence.size
        if not self._retain_out_sharded:
            shards = SequenceShards.cut(tokens, self._sequence.size)
            gather = GatherSequence(self._sequence, shards, _SEQUENCE)
            return gather.launch(output, "logits").finish(), Done()
        words = output.size(_VOCABULARY)
        turn = SequenceToHeads(self._sequence, *self._parts(tokens, words), _SEQUENCE, _VOCABULARY)
        whole = turn.launch(self._grouped(output, words), "logits").finish()
        return whole.flatten(_VOCABULARY), Done()

    def grad_output_hook(
        self, grad_output: torch.Tensor, async_op: bool = False
    ) -> tuple[torch.Tensor, Ticket]:
        """The way back: from the whole sequence to this rank's tokens."""
        tokens, ranks = grad_output.size(_SEQUENCE), self._sequence.size
        if not self._retain_out_sharded:  # every rank has the same one
            return grad_output.chunk(ranks, _SEQUENCE)[self._sequence.rank].contiguous(), Done()
        count = torch.tensor([grad_output.size(_VOCABULARY)], device=grad_output.device)
        counts = count.new_empty(ranks)
        self._sequence.all_gather([counts], [count], label="words").wait()
        words = int(counts.sum())
        back = HeadsToSequence(self._sequence, *self._parts(tokens, words), _SEQUENCE, _VOCABULARY)
        whole = back.launch(self._grouped(grad_output, words), "logits gradient").finish()
        return whole.flatten(_VOCABULARY), Done()

    def _grouped(self, tensor: torch.Tensor, words: int) -> torch.Tensor:
        """Words of a rank as one head, so that a head is many words and not one."""
        ranks = self._sequence.size
        size = words // ranks if words % ranks == 0 else 1
        return tensor.unflatten(_VOCABULARY, (-1, size))

    def _parts(
        self, tokens: int, words: int
    ) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
        """Per rank, its heads as :meth:`_grouped` makes them, and its tokens."""
        ranks = self._sequence.size
        heads = ranks if words % ranks == 0 else words
        return HeadPlan(heads, heads, ranks).queries(), SequenceShards.cut(tokens, ranks).lengths


class EmbeddingWeightParallelCommunicator:
    """Gathers embeddings for forward, and not again for backward, whose gradients it reduces.

    An embedding holds a part of its weight, or a whole one on every rank, which is sharded then.
    Gradients arrive in each backward, so that nobody counts microbatches; of whole weights, in the
    last of several with ``module.set_requires_gradient_sync``.

    Args:
        parallel_mode: the ranks that share the weights: a process group, a DeviceMesh, or a
            ``ParallelMode`` of InternEvo, whose context is asked. None: all ranks.
        context: shares whole weights with other units, as ``ISPCommunicator.context``; makes the
            Comm of the group.

    Raises:
        TypeError: ``parallel_mode`` is neither of these.
    """

    def __init__(self, parallel_mode: Any = None, *, context: ShardContext | None = None) -> None:
        self.parallel_mode = parallel_mode
        self._context = context or ShardContext()
        self._group = group_of(parallel_mode)
        self._embeddings: list[nn.Module] = []  # those that hold parts
        self._hooks = ModuleHooks(_refuse_copy)

    def register_module_hook(self, module: nn.Module) -> None:
        """Have an embedding's weight gathered for each forward.

        It is cut along the vocabulary if the module says ``vocab_parallel``, along its width
        otherwise. ``num_embeddings`` and ``embedding_dim`` (or ``embed_dim``) of the module say
        whether the weight is whole.

        Raises:
            ValueError: the weight has neither the shape of a whole nor that of a part.
        """
        dim = 0 if getattr(module, "vocab_parallel", False) else 1
        group = dist.group.WORLD if self._group is None else self._group
        comm = self._context.comm(group)
        weight = module.weight
        width = getattr(module, "embedding_dim", getattr(module, "embed_dim", None))
        whole = [getattr(module, "num_embeddings", None), width]
        part = list(weight.shape)
        part[dim] *= comm.size
        if part == whole and comm.size > 1:
            self._embeddings.append(module)
            setattr(weight, ROWS, "an EmbeddingWeightParallelCommunicator")
            self._hooks.add(module, (comm, dim), _EmbeddingCall.of)
        elif list(weight.shape) == whole:
            shard(
                module,
                mesh_of(self._group, module),
                unshard_in_backward=False,
                shard_placement_fn=lambda one: Shard(dim) if one.ndim > dim else None,
                context=self._context,
            )
        else:
            raise ValueError(
                f"register_module_hook(): found a weight of shape {list(weight.shape)} in "
                f"{type(module).__name__} with num_embeddings, embedding_dim {whole}; expected "
                f"that shape, or a part of it along dimension {dim} for each of {comm.size} ranks"
            )

    def grad_reduce_hook(self, param: torch.Tensor) -> None:
        """Have the reduced gradient of a registered module's parameter in ``param.grad``.

        After a backward it is there already; inside one, this waits for what is under way.

        Raises:
            ValueError: the parameter is not one of a registered module.
        """
        if any(one._parameters["weight"] is param for one in self._embeddings):
            return
        mine = (one.sharded for unit in self._context.units for one in unit.members)
        if not isinstance(param, DTensor) or all(one is not param for one in mine):
            raise ValueError(
                "grad_reduce_hook(): found a parameter of no registered module; expected one that "
                "module.parameters() gives after register_module_hook(module)"
            )
        self._context.finish_reductions()


class _EmbeddingCall:
    """One call of an embedding that holds a part of its weight, and has the whole meanwhile."""

    def __init__(self, module: nn.Module, comm: Comm, dim: int) -> None:
        self._module, self._comm, self._dim = module, comm, dim

    @classmethod
    def of(
        cls, place: tuple[Comm, int], module: nn.Module, args: Any, kwargs: Any
    ) -> _EmbeddingCall:
        return cls(module, *place)

    def enter(self, call: FrameType | None) -> None:
        part = self._module._parameters["weight"]
        # What a module's __dict__ has is found before its parameters, which stay as they are.
        self._module.__dict__["weight"] = _Whole.apply(part, self._comm, self._dim)

    def leave(self, output: object) -> None:
        self.abandon()

    def abandon(self) -> None:
        self._module.__dict__.pop("weight", None)


def _refuse_copy() -> None:
    raise NotImplementedError(
        "EmbeddingWeightParallelCommunicator: its hooks belong to process groups and cannot be "
        "copied; copy the model first, and register the copy's embedding"
    )


class _Whole(torch.autograd.Function):  # type: ignore[misc]
    """The ranks' parts along a dimension; its gradient is this rank's part of their mean."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, comm: Comm, dim: int) -> torch.Tensor:
        ctx.comm, ctx.dim = comm, dim
        return gather_rows(comm, part.movedim(dim, 0)).movedim(0, dim)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        whole = gradient.movedim(ctx.dim, 0)
        rows, _ = reduce_rows(ctx.comm, whole, False, dist.ReduceOp.AVG)
        return rows.movedim(0, ctx.dim), None, None
