"""The ends of a model whose sequence is cut among ranks: embedding and head."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from memswap.compat.internevo.raw import Done, WPCommunicator, gather_rows, mesh_of, reduce_rows
from memswap.parallel.comm import Comm, ProcessGroupComm, Ticket
from memswap.parallel.layouts import HeadPlan, SequenceShards
from memswap.parallel.redistribute import GatherSequence, HeadsToSequence, SequenceToHeads
from memswap.parallel.schedule import ShardContext
from memswap.parallel.shard import ShardedModule, shard

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
        self._sequence: Comm = ProcessGroupComm(seq_process_group)
        self._retain_out_sharded = retain_out_sharded

    def communication_mode(self) -> str:
        """``"wp"``: what an end of the model asks for."""
        return "wp"

    def weight_hook(
        self,
        tensor: torch.Tensor,
        async_op: bool = False,
        module: nn.Module | None = None,
        is_bias: bool = False,
    ) -> torch.Tensor:
        """The whole weight of this rank's rows, or ``tensor`` if ``shard`` has gathered it.

        It is there when this returns, whatever ``async_op`` says: there is no handle to wait for.
        """
        return gather_rows(self._weights, tensor)

    def grad_hook(
        self,
        tensor: torch.Tensor,
        async_op: bool = False,
        module: nn.Module | None = None,
        reduce_op: Any = dist.ReduceOp.AVG,
        is_bias: bool = False,
    ) -> tuple[torch.Tensor, Ticket]:
        """This rank's rows of the reduced gradient, and its handle.

        Where ``shard`` has the module, the unit reduces: the gradient passes.
        """
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
    """Shards embeddings, each gathered for forward and not again for backward.

    Gradients arrive as everywhere with :func:`memswap.parallel.shard`: reduced in each backward, or
    in the last of several microbatches with ``module.set_requires_gradient_sync``.

    Args:
        parallel_mode: the process group that shares the weights; None: all ranks.
        context: shares it with other units, as ``ISPCommunicator.context``.
    """

    def __init__(
        self,
        parallel_mode: dist.ProcessGroup | None = None,
        *,
        context: ShardContext | None = None,
    ) -> None:
        self.parallel_mode = parallel_mode
        self._context = context or ShardContext()

    def register_module_hook(self, module: nn.Module) -> None:
        """Shard an embedding's weight, as a whole on every rank until now.

        Along the vocabulary if the module says ``vocab_parallel``, along its width otherwise.
        """
        dim = 0 if getattr(module, "vocab_parallel", False) else 1
        shard(
            module,
            mesh_of(self.parallel_mode, module),
            unshard_in_backward=False,
            shard_placement_fn=lambda parameter: Shard(dim) if parameter.ndim > dim else None,
            context=self._context,
        )

    def grad_reduce_hook(self, param: torch.Tensor) -> None:
        """Have the reduced gradient of a registered module's parameter in ``param.grad``.

        After a backward it is there already; inside one, this waits for what is under way.

        Raises:
            ValueError: the parameter is not one of a registered module.
        """
        mine = (one.sharded for unit in self._context.scheduled for one in unit.members)
        if not isinstance(param, DTensor) or all(one is not param for one in mine):
            raise ValueError(
                "grad_reduce_hook(): found a parameter of no registered module; expected one that "
                "module.parameters() gives after register_module_hook(module)"
            )
        self._context.finish_reductions()
