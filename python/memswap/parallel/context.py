"""ContextParallel: attention over a sequence that is cut among ranks, as a ParallelStyle."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any
from weakref import ReferenceType, finalize, ref

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle
from torch.optim.optimizer import Optimizer
from torch.utils._python_dispatch import _disable_current_modes

from memswap.engine.autograd import differentiable, in_backward
from memswap.engine.training import BackwardPass, before_optimizer_steps
from memswap.errors import RankMismatchError
from memswap.hooks.module_hooks import AtEnd, ModuleHooks
from memswap.parallel.applied import AppliedContext
from memswap.parallel.arriving import ArrivingTensor
from memswap.parallel.comm import ranks_that_differ
from memswap.parallel.context_style import ContextMesh, ContextStyle


class ContextParallel(ContextStyle, ParallelStyle):  # type: ignore[misc]
    """Attention whose inputs are cut along the sequence, each rank holding a part.

    Ulysses: queries, keys and values go from a part of the sequence with all heads to the whole
    sequence with a part of the heads; the output goes back. Gather: queries stay, keys and values
    are gathered. Both at once on a 2-D mesh. Any number of heads (at least ``ulysses``), any number
    of key/value heads that divides it.

    Applied to the module that computes attention proper, ``forward(q, k, v, ...)``, by
    ``parallelize_module`` or :meth:`apply`. One style belongs to one mesh.

    Args:
        ulysses: ranks that share the heads. None: all of a 1-D mesh, the second dimension of a 2-D
            one. 1: gather only. A divisor of a 1-D mesh's size: neighbouring ranks share heads. The
            rest of the mesh gathers keys and values. 1, or the number of all ranks, takes a 2-D
            mesh as one line of ranks.
        layout: "bshd", "bnsd", "sbhd", or "thd" for packed sequences (``cu_seqlens`` of all ranks'
            tokens; the module still gets it as the caller passes it). With ``ulysses=1`` heads and
            their size may be one dimension, where they are neighbours.
        balance: "headtail" gives the ranks that gather equal work in causal attention: each holds
            one chunk of the sequence's first half and its mirror image. Cut the batch with
            :meth:`shard_batch`. "queries" leaves parts contiguous: queries are exchanged on their
            way into attention, and its output back.
        packing: "kv" if keys and values are one tensor, "qkv" if all three are (as many heads
            each): with a dimension of 2 or 3 before that of the heads. One collective.
        qkv: which arguments of ``forward`` these tensors are, by place or name; None: the first.
        unpacked: with packing="qkv" where keys are gathered: names of the keyword arguments,
            ("q", "kv") or ("q", "k", "v"), by which ``forward`` takes what was one tensor, since
            there are more keys than queries then. The packed argument becomes None.
        heads: number of query heads. None: found when the queries come; keys that are projected
            before them are launched early from the second forward on.
        sequence_length: tokens of the whole sequence (queries). None: as many on each rank.
        kv_sequence_length: the same for keys and values; None with ``sequence_length`` given means
            that length.
        ranges: name of a keyword argument of ``forward`` that gets the ``(start, stop)`` ranges of
            its queries in the sequence, for :func:`causal_attention`.
        mask: name of a keyword argument that gets the causal mask, bool ``[queries, keys]``.
        verify: where keys are gathered and neither ``ranges`` nor ``mask`` is given, try on random
            tokens, before the first exchange, whether the module gives a part of the queries the
            result that they have among all queries. Causal ``scaled_dot_product_attention`` and
            ``torch.tril`` or ``triu`` of ``[queries, keys]`` do, by [Note: Placed queries]; what
            does not is refused. Tried are a few tokens, and sequences as long as the call's, again
            where a longer one comes: that takes two forwards of attention over one whole sequence.
            False takes your word for it.
        model: what it is applied in. If its first step ends and a module that the style was applied
            to has not run, that is an error. Without it, no hook sees a step in which none of
            them ran, but for :meth:`check`.
        use_local_output: False returns a ``DTensor`` with ``Shard`` of the sequence on each
            dimension of the mesh. DTensor inputs with these placements are taken in either case.
            For even, contiguous parts only: a DTensor can say no other.
        comm: makes the Comm of a process group.

    Raises:
        ValueError: no such layout, balance or number of ranks.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.applied: list[AppliedContext] = []
        self.first_step = FirstStep(self.check)
        self._mesh: ContextMesh | None = None
        self._batches = 0
        self._compared = False

    def apply(
        self,
        module: nn.Module,
        mesh: DeviceMesh,
        **projections: nn.Module | None,
    ) -> AppliedContext:
        """Apply to an attention module; the handle tells what it did and removes it.

        Args:
            module: computes attention; its forward takes query, key and value.
            mesh: 1-D, or 2-D (gather, ulysses). Where ``ulysses`` asks for groups that it does not
                have, its ranks make them here, in the order in which styles are applied; others
                take part only if the default group is bound to a device (``device_id=``).
            **projections: by tensor (``q=``, ``k=``, ``v=``, ``kv=``, ``qkv=``): modules whose
                output goes to attention as it is, such as a norm, a rotary embedding or
                ``nn.Sequential(linear, nn.Unflatten(...))``. Their exchange is launched when they
                return. Where attention gets something else, or a tensor edited since, that launch
                is dropped with one warning and the ordinary path taken. And ``o=``: the module
                that uses attention's output first, rearranged at most. The output's exchange is
                waited for there: attention returns a tensor that is still arriving. Whatever else
                uses it waits as well, with one warning.

        Raises:
            ValueError: the mesh does not fit the style.
            TypeError: a projection of no such tensor; something else than a mesh.
            NotImplementedError: ``packing="qkv"`` on a mesh that gathers, without ``unpacked``.
        """
        if not isinstance(mesh, DeviceMesh):
            raise TypeError(
                f"ContextParallel: found a {type(mesh).__name__}, expected a DeviceMesh"
            )
        if self._mesh is None:
            self._mesh = ContextMesh.of(mesh, self.ulysses, self.balance, self.comm)
        elif self._mesh.device_mesh != mesh:
            raise ValueError(
                f"this ContextParallel is applied on {self._mesh.device_mesh}, found {mesh}; make "
                "another one for another mesh"
            )
        applied = AppliedContext(
            self,
            self._mesh,
            module,
            projections,
            compare_ranks=self._compare_ranks,
            follow=self.first_step.follow,
            removed=self.applied.remove,
        )
        self.applied.append(applied)
        named = [one for one in projections.values() if one is not None]
        self.first_step.expect([module, *named])
        if self.model is not None:
            self.first_step.watch(self.model)
        return applied

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.apply(module, device_mesh)
        return module

    def check(self) -> None:
        """Raises unless every module that the style was applied to has run since.

        Called at the end of the first step: of the first backward pass of the style's ``model`` or
        of a module that it was applied to; before the first step of an optimizer that has one of
        their or the projections' parameters; by :meth:`mean_loss`; and by :meth:`shard_batch` from
        the second batch on.

        Raises:
            RuntimeError: the style was applied to nothing, or to modules that never ran.
        """
        never = [one for one in self.applied if not one.calls]
        if never or not self.applied:
            what = ", ".join(self._name(one.module) for one in never) or "no module at all"
            raise RuntimeError(
                f"ContextParallel is applied to {what} ({len(never)} of {len(self.applied)} never "
                "ran): the sequence was not exchanged there and attention saw this rank's tokens "
                "only; apply it to the module whose forward gets query, key and value"
            )

    def _compare_ranks(self, applied: AppliedContext, tensor: torch.Tensor, label: str) -> None:
        """Before the first exchange, whether all ranks are set up alike: or else they would hang.

        Raises:
            RankMismatchError: they are not.
        """
        if self._compared:
            return
        self._compared = True
        settings = (
            f"layout {self.layout}, balance {self.balance}, lengths {self.sequence_length} and "
            f"{self.kv_sequence_length}, heads {self.heads}, {len(self.applied)} modules"
        )
        text = f"{settings}; {applied.describe_for(tensor, label)}"
        # A checkpoint that keeps collectives would miss this one when it recomputes.
        with _disable_current_modes():
            for comm in (self.mesh.heads, self.mesh.gather):
                if comm is not None and (others := ranks_that_differ(comm, tensor.device, text)):
                    raise RankMismatchError(
                        f"rank {comm.rank} attends in another way than ranks {others} of its "
                        "group; the style's options and the tensors' shapes must agree. Here they "
                        f"are: {text}"
                    )

    def _name(self, module: nn.Module) -> str:
        """The module's type, and where it is in the models that are watched."""
        for model in self.first_step.watched:
            for name, one in model.named_modules():
                if one is module and name:
                    return f"{name} ({type(module).__name__})"
        return type(module).__name__

    def shard_batch(
        self,
        batch: Mapping[str, Any],
        *,
        seq_dim: int = 1,
        labels: str | None = None,
        ignore_index: int = -100,
        whole: Collection[str] = (),
        keys: bool = False,
    ) -> dict[str, Any]:
        """This rank's part of a batch that every rank has whole.

        Args:
            batch: name to value; tensors with more than ``seq_dim`` dimensions are cut (to
                contiguous ones), everything else is passed on.
            seq_dim: dimension of the tokens, the same for all tensors.
            labels: name of the labels to shift by one place to the left before the cut, since a
                rank's last label is another rank's first token; the last becomes ``ignore_index``.
                Compare with unshifted logits then.
            ignore_index: the label that counts for nothing.
            whole: names of tensors to pass on uncut, such as ``cu_seqlens``.
            keys: the batch is what keys and values are computed from, in cross-attention
                (``kv_sequence_length``).

        Returns:
            The parts, and ``"positions"``: int64 ``[tokens]``, for position embeddings.

        Raises:
            RuntimeError: see :meth:`check`.
            ValueError: the sequence cannot be cut as the style says.
        """
        mesh = self.mesh
        if not keys:
            if self._batches:
                self.check()
            self._batches += 1
        sequence_length = self.kv_sequence_length if keys else self.sequence_length
        if "positions" in batch:
            raise ValueError("shard_batch: found 'positions' in the batch, which is what it adds")
        cut = {
            name: value
            for name, value in batch.items()
            if isinstance(value, torch.Tensor) and value.ndim > seq_dim and name not in whole
        }
        if labels is not None and labels not in cut:
            raise ValueError(f"shard_batch(labels={labels!r}): found {sorted(cut)} to cut")
        lengths = {name: value.size(seq_dim) for name, value in cut.items()}
        if len(set(lengths.values())) != 1:
            raise ValueError(
                f"shard_batch: found tokens {lengths} in dimension {seq_dim}, expected tensors of "
                "one length; name those that have no such dimension in whole=(...)"
            )
        (length,) = set(lengths.values())
        ranks = mesh.rows * mesh.columns
        if length != sequence_length and (sequence_length is not None or length % ranks):
            raise ValueError(
                f"shard_batch: found {length} tokens for {ranks} ranks and sequence_length="
                f"{sequence_length}; a length that the ranks do not divide has to be said: "
                "ContextParallel(sequence_length=...)"
            )
        if sequence_length is None:
            mesh.whole_length(length // ranks, None, "shard_batch")
        parts: dict[str, Any] = dict(batch)
        device = next(iter(cut.values())).device
        places = mesh.rank_shards(length).positions(mesh.column, device)
        for name, value in cut.items():
            if name == labels:
                last = torch.full_like(value.narrow(seq_dim, 0, 1), ignore_index)
                value = torch.cat([value.narrow(seq_dim, 1, length - 1), last], dim=seq_dim)
            parts[name] = value.index_select(seq_dim, places.to(value.device))
        parts["positions"] = places
        return parts

    def mean_loss(
        self, total: torch.Tensor, tokens: int | torch.Tensor, *, gradients: str = "sum"
    ) -> torch.Tensor:
        """The mean over all ranks' tokens of a loss that each rank has summed over its own.

        A mean of ranks' means is wrong where they count differently many tokens.

        Args:
            total: scalar, the sum of this rank's losses (``reduction="sum"``).
            tokens: how many this rank summed (labels that are not ignored).
            gradients: "sum" if the ranks' gradients will be added, "avg" if averaged (FSDP, DDP).

        Returns:
            A scalar, the same bits on every rank (NaN if nobody has a token); its gradient is that
            of this rank's tokens.

        Raises:
            RuntimeError: see :meth:`check`.
            ValueError: ``gradients`` is neither, or the loss is no scalar.
        """
        mesh = self.mesh
        self.check()
        if gradients not in ("sum", "avg"):
            raise ValueError(f"mean_loss(gradients={gradients!r}): expected 'sum' or 'avg'")
        if total.ndim:
            raise ValueError(
                f"mean_loss: found a loss of shape {list(total.shape)}, expected the scalar sum of "
                "this rank's losses"
            )
        wide = torch.float64
        sums = torch.stack(
            [
                total.detach().to(wide),
                torch.as_tensor(tokens, device=total.device).detach().to(wide),
            ]
        )
        for comm in (mesh.heads, mesh.gather):
            if comm is not None:
                everyone = sums.new_empty(comm.size * 2)
                comm.all_gather([everyone], [sums], label="mean_loss").wait()
                sums = everyone.view(comm.size, 2).sum(0)
        ranks = mesh.rows * mesh.columns if gradients == "avg" else 1
        factor = (ranks / sums[1]).to(total.dtype)
        mean: torch.Tensor = _MeanOfAll.apply(total, (sums[0] / sums[1]).to(total.dtype), factor)
        return mean

    @property
    def mesh(self) -> ContextMesh:
        """The ranks.

        Raises:
            RuntimeError: the style has not been applied.
        """
        if self._mesh is None:
            self.check()
        assert self._mesh is not None
        return self._mesh


class _MeanOfAll(torch.autograd.Function):  # type: ignore[misc]
    """The mean as value, this rank's share as gradient."""

    @staticmethod
    def forward(
        ctx: Any, total: torch.Tensor, value: torch.Tensor, factor: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(factor)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (factor,) = ctx.saved_tensors
        return gradient * factor, None, None


class FirstStep:
    """Calls ``check`` at the end of the first step of the models that it watches.

    That is the end of the first backward pass that reaches a watched module's output; of modules
    whose outputs need no gradient, their second forward; and the first step of an optimizer that
    has a parameter of a module that is expected to run, before it writes anything. A check that
    raises is made again at the end of the next step; one that does not is the last.
    """

    def __init__(self, check: Callable[[], None]) -> None:
        self._check = check
        self._watched: list[nn.Module] = []
        self._hooks = ModuleHooks()
        self._without_graph: set[nn.Module] = set()
        self._pass = BackwardPass(self._finish, lambda: None)
        self._active = False
        self._expected: list[ReferenceType[nn.Module]] = []
        self._optimizers: finalize[[], FirstStep] | None = None

    @property
    def watched(self) -> tuple[nn.Module, ...]:
        """The models whose first step is awaited."""
        return tuple(self._watched)

    def expect(self, modules: list[nn.Module]) -> None:
        """Await the first step of these modules, which are new and have to run in it."""
        self._active = True
        self._expected += map(ref, modules)
        if self._optimizers is None and any(True for one in modules for _ in one.parameters()):
            self._optimizers = before_optimizer_steps(self._before_step)

    def watch(self, module: nn.Module) -> None:
        """Notice the end of this model's first step."""
        if module not in self._watched:
            self._watched.append(module)
            self._hooks.add(module, None, self._before, abandons_raised=True)

    def follow(self, output: Any) -> bool:
        """Have the gradients of an output tell that a backward has begun. Whether there are any."""
        found = differentiable(output)
        if self._active:
            for tensor in found:
                if not isinstance(tensor, ArrivingTensor):  # a hook would make it wait
                    tensor.register_hook(self._in_backward)
        return bool(found)

    def end(self) -> None:
        """Take all hooks off: the first step is over."""
        self._hooks.remove()
        self._watched.clear()
        self._without_graph.clear()
        self._expected.clear()
        self._active = False
        if self._optimizers is not None:
            self._optimizers()
            self._optimizers = None

    def _before(self, key: object, module: nn.Module, args: Any, kwargs: Any) -> AtEnd:
        if module in self._without_graph and not in_backward():
            self._finish()
        return AtEnd(partial(self._after, module))

    def _after(self, module: nn.Module, output: Any) -> None:
        if not in_backward() and not self.follow(output):
            self._without_graph.add(module)

    def _in_backward(self, gradient: torch.Tensor) -> None:
        if self._active:
            self._pass.look()

    def _before_step(self, optimizer: Optimizer) -> None:
        expected = [one() for one in self._expected]
        own = {id(weight) for one in expected if one is not None for weight in one.parameters()}
        if any(id(weight) in own for group in optimizer.param_groups for weight in group["params"]):
            self._finish()

    def _finish(self) -> None:
        if self._active:
            self._check()
            self.end()
