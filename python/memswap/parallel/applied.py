"""AppliedContext: what ContextParallel does around one attention module.

[Note: Early launches] A projection's exchange is launched when the projection returns, before
anybody has said what attention will get. The launch is kept under the identity of the tensor that
the projection returned, weakly: several microbatches have one each, and one that attention never
saw before its tensor died is waited for at the next opportunity, since its buffers are in use until
then. Attention takes it only if it gets that very tensor in that version. A view, a rotated or
normalized copy, an edited tensor is another value, and using the launch for it would be silently
wrong; it takes the ordinary path. So does a recomputation of the attention alone, whose launch has
been used up.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.utils.weak import WeakTensorKeyDictionary

from memswap.parallel.attention import causal_mask
from memswap.parallel.context_mesh import ContextMesh
from memswap.parallel.exchange import Pending, exchange
from memswap.parallel.layouts import HeadPlan, Layout
from memswap.parallel.redistribute import (
    GatherSequence,
    HeadsToSequence,
    SequenceToHeads,
    take,
)

if TYPE_CHECKING:
    from memswap.parallel.context import ContextParallel

Role = Literal["q", "k", "v", "kv", "qkv"]
Packing = Literal["separate", "kv", "qkv"]

#: The tensors that attention gets, by packing.
ROLES: dict[Packing, tuple[Role, ...]] = {
    "separate": ("q", "k", "v"),
    "kv": ("q", "kv"),
    "qkv": ("qkv",),
}


class AppliedContext:
    """The hooks of a :class:`ContextParallel` on one attention module.

    Attributes:
        module: the attention module.
        calls: how often it has run.
        early: how many of its exchanges were launched by a projection.
    """

    def __init__(
        self,
        style: ContextParallel,
        mesh: ContextMesh,
        module: nn.Module,
        projections: Mapping[str, nn.Module | None],
    ) -> None:
        self.module = module
        self.calls = 0
        self.early = 0
        self._style = style
        self._mesh = mesh
        self._heads = style.heads
        self._roles = ROLES[style.packing]
        self._launched: dict[Role, Any] = {role: WeakTensorKeyDictionary() for role in self._roles}
        unknown = sorted(set(projections) - set(self._roles))
        if unknown:
            raise TypeError(f"ContextParallel: found projections {unknown}, expected {self._roles}")
        if "qkv" in self._roles and mesh.gather is not None:
            raise NotImplementedError(
                "ContextParallel: q, k and v packed in one tensor cannot get different lengths, "
                "which gathering keys gives them; use packing='kv', or ulysses on the whole mesh"
            )
        self._early_roles = [
            role
            for role in self._roles
            if projections.get(role) is not None
            and (mesh.heads is not None or (mesh.gather is not None and role != "q"))
        ]
        self._orphans: list[Pending] = []
        self._warned = False
        if self._early_roles and style.heads is None:
            raise ValueError(
                "ContextParallel: a projection launches before the queries are known; say "
                "ContextParallel(heads=number of query heads)"
            )
        self._names = list(inspect.signature(module.forward).parameters)
        self._handles = [
            module.register_forward_pre_hook(self._before, with_kwargs=True),
            module.register_forward_hook(self._after),
        ]
        for role in self._early_roles:
            projection = projections[role]
            if projection is not None:
                self._handles.append(projection.register_forward_hook(self._launch_hook(role)))

    def remove(self) -> None:
        """Take the hooks away; the module sees its own rank's tokens again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._drop_orphans()
        if self in self._style.applied:
            self._style.applied.remove(self)

    def query_ranges(self, tokens: int) -> tuple[tuple[int, int], ...]:
        """Which ranges of the sequence the queries are that attention gets.

        Args:
            tokens: how many of the sequence this rank holds outside attention.
        """
        length = self._length("q", tokens)
        return self._mesh.row_shards(length).ranges[self._mesh.row]

    def _launch_hook(self, role: Role) -> Callable[[nn.Module, Any, Any], None]:
        def launch(module: nn.Module, args: Any, output: Any) -> None:
            layout = self._layout(role)
            plain = isinstance(output, torch.Tensor) and not isinstance(output, DTensor)
            if not plain or output.ndim != layout.ndim:
                what = list(output.shape) if isinstance(output, torch.Tensor) else type(output)
                self._warn(f"{role}'s projection returned {what}, not {layout.ndim} dimensions")
                return
            if output.is_inference():  # has no version
                return
            self._drop_orphans()
            pending = self._first(role, output)
            if pending is not None:
                self._launched[role][output] = _Early(pending, output, self._orphans)

        return launch

    def _take_early(self, role: Role, tensor: torch.Tensor) -> Pending | None:
        """The launch that is of this very tensor: see [Note: Early launches]."""
        launched: _Early | None = self._launched[role].pop(tensor, None)
        if launched is not None and launched.is_of(tensor):
            self.early += 1
            return launched.take()
        del launched  # an orphan now
        self._drop_orphans()
        recomputed = torch._C._current_graph_task_id() != -1
        if role in self._early_roles and not recomputed and not tensor.is_inference():
            self._warn(f"attention got another {role} than its projection returned, or edited it")
        return None

    def _drop_orphans(self) -> None:
        """Wait for launches that nobody wants: their buffers are in use until then."""
        while self._orphans:
            self._orphans.pop(0).discard()

    def _warn(self, what: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"ContextParallel on {type(self.module).__name__}: {what}; the exchange that was "
                "launched early is not used. Name the last module before attention in apply(q=, "
                "k=, v=), or none",
                stacklevel=2,
            )

    def _first(self, role: Role, tensor: torch.Tensor) -> Pending | None:
        """Launch the first exchange of an input; None where it has none."""
        mesh, layout = self._mesh, self._layout(role)
        length = self._length(role, tensor.size(layout.seq_dim))
        if mesh.heads is None:
            return self._gather(role, tensor, length)
        if role in ("q", "qkv"):
            heads = self._plan(None).queries()
        else:
            heads = self._plan(tensor.size(layout.head_dim)).keys()
        lengths = mesh.rank_shards(length).lengths
        spec = SequenceToHeads(mesh.heads, heads, lengths, layout.seq_dim, layout.head_dim)
        return exchange(tensor, spec, label=role)

    def _gather(self, role: Role, tensor: torch.Tensor, length: int) -> Pending | None:
        mesh = self._mesh
        if mesh.gather is None or role == "q":
            return None
        shards = mesh.row_shards(length)
        spec = GatherSequence(mesh.gather, shards, self._layout(role).seq_dim)
        return exchange(tensor, spec, label=role)

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        args, kwargs = list(args), dict(kwargs)
        places = [self._place(which, args, kwargs) for which in self._style.qkv]
        given = {
            role: self._local(role, where[key])
            for role, (where, key) in zip(self._roles, places, strict=True)
        }
        result = self._exchanged(given, kwargs)
        for (where, key), role in zip(places, self._roles, strict=True):
            where[key] = result[role]
        self.calls += 1
        return tuple(args), kwargs

    def _exchanged(
        self, given: dict[Role, torch.Tensor], kwargs: dict[str, Any]
    ) -> dict[Role, torch.Tensor]:
        """The inputs as attention gets them; all launches first, then the waits."""
        mesh = self._mesh
        kv_heads = self._count_heads(given)
        lengths = {
            role: self._length(role, tensor.size(self._layout(role).seq_dim))
            for role, tensor in given.items()
        }
        first, last = self._roles[0], self._roles[-1]
        queries = given[first]
        tokens = queries.size(self._layout(first).seq_dim)
        self._offer(kwargs, tokens, lengths[last], queries.device)
        pending: dict[Role, Pending | None] = {}
        for role, tensor in given.items():
            pending[role] = self._take_early(role, tensor) or self._first(role, tensor)
        result = dict(given)
        if mesh.heads is not None and mesh.gather is not None:
            for role in self._roles[1:]:  # k is gathered while the first exchange of v arrives
                one = pending[role]
                assert one is not None
                result[role] = one.wait()
                pending[role] = self._gather(role, result[role], lengths[role])
        for role, one in pending.items():
            if one is not None:
                result[role] = one.wait()
        if mesh.heads is not None and kv_heads is not None:
            places = self._plan(kv_heads).expansion(mesh.heads.rank)
            if places is not None:
                for role in self._roles[1:]:
                    result[role] = take(result[role], self._layout(role).head_dim, places)
        return result

    def _count_heads(self, given: dict[Role, torch.Tensor]) -> int | None:
        """Keep the number of query heads; that of keys, None if it is the same by packing."""
        found = {role: tensor.size(self._layout(role).head_dim) for role, tensor in given.items()}
        heads = found[self._roles[0]]
        if self._heads not in (None, heads):
            raise ValueError(f"ContextParallel: found {heads} query heads, expected {self._heads}")
        others = [found[role] for role in self._roles[1:]]
        if len(set(others)) > 1:
            raise ValueError(
                f"ContextParallel: found {others[0]} key heads and {others[1]} value heads, "
                "expected as many"
            )
        self._heads = heads
        kv_heads = others[0] if others else None
        if self._mesh.heads is not None:
            self._plan(kv_heads)  # raises before anything is sent
        return kv_heads

    def _after(self, module: nn.Module, args: Any, output: Any) -> Any:
        if not isinstance(output, torch.Tensor) or isinstance(output, DTensor):
            raise TypeError(
                f"ContextParallel: {type(module).__name__} returned {type(output).__name__}, "
                "expected one tensor in the layout of the queries"
            )
        mesh, layout = self._mesh, self._style.layout
        if output.ndim != layout.ndim:
            raise ValueError(
                f"ContextParallel: {type(module).__name__} returned shape {list(output.shape)}, "
                f"expected the {layout.ndim} dimensions of the queries"
            )
        if mesh.heads is not None:
            output = self._sent_back(output)
        if self._style.use_local_output:
            return output
        placements = [Shard(layout.seq_dim)] * mesh.device_mesh.ndim
        return DTensor.from_local(output, mesh.device_mesh, placements, run_check=False)

    def _sent_back(self, output: torch.Tensor) -> torch.Tensor:
        """From this rank's heads to this rank's tokens."""
        mesh, layout = self._mesh, self._style.layout
        assert mesh.heads is not None
        length = self._style.sequence_length
        if length is None:
            length = output.size(layout.seq_dim) * mesh.rows
        spec = HeadsToSequence(
            mesh.heads,
            self._plan(None).queries(),
            mesh.rank_shards(length).lengths,
            layout.seq_dim,
            layout.head_dim,
        )
        return exchange(output, spec, label="o").wait()

    def _plan(self, kv_heads: int | None) -> HeadPlan:
        assert self._heads is not None and self._mesh.heads is not None
        return HeadPlan(self._heads, kv_heads or self._heads, self._mesh.heads.size)

    def _layout(self, role: Role) -> Layout:
        layout = self._style.layout
        return layout.packed() if role in ("kv", "qkv") else layout

    def _length(self, role: Role, tokens: int) -> int:
        """The whole sequence's length."""
        style, queries = self._style, role in ("q", "qkv")
        given = style.sequence_length if queries else style.kv_sequence_length
        return self._mesh.whole_length(tokens, given, f"ContextParallel, {role}")

    def _offer(self, kwargs: dict[str, Any], tokens: int, keys: int, device: torch.device) -> None:
        """Fill the keyword arguments that say where the queries are; refuse what would lie."""
        style = self._style
        if self._mesh.gather is not None and kwargs.get("is_causal"):
            raise ValueError(
                "ContextParallel: is_causal=True means another mask where keys are gathered, since "
                "queries are a part of the sequence; use causal_attention with "
                "ContextParallel(ranges=...), or ContextParallel(mask=...)"
            )
        for name in (style.ranges, style.mask):
            if name is not None and kwargs.get(name) is not None:
                raise ValueError(
                    f"ContextParallel: found argument {name!r}, which the style is to fill; pass "
                    "None, or name no such argument in the style"
                )
        if style.ranges is not None:
            kwargs[style.ranges] = self.query_ranges(tokens)
        if style.mask is not None:
            shards = self._mesh.row_shards(self._length("q", tokens))
            queries = shards.positions(self._mesh.row, device)
            kwargs[style.mask] = causal_mask(queries, torch.arange(keys, device=device))

    def _local(self, role: Role, tensor: Any) -> torch.Tensor:
        """This rank's part of an input; a DTensor must be cut as the style would cut it."""
        layout = self._layout(role)
        if isinstance(tensor, DTensor):
            mesh = self._mesh.device_mesh
            expected = (Shard(layout.seq_dim),) * mesh.ndim
            if (
                tensor.device_mesh != mesh
                or tensor.placements != expected
                or self._style.balance != "contiguous"
            ):
                raise ValueError(
                    f"ContextParallel: {role} is a DTensor with {tensor.placements} on "
                    f"{tensor.device_mesh}, expected {expected} on {mesh} and "
                    "balance='contiguous'; or pass this rank's own tensor (to_local())"
                )
            tensor = tensor.to_local()
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"ContextParallel: {role} is a {type(tensor).__name__}, expected a torch.Tensor"
            )
        if tensor.ndim != layout.ndim:
            raise ValueError(
                f"ContextParallel: found {role} of shape {list(tensor.shape)}, expected "
                f"{layout.ndim} dimensions; check layout= and packing="
            )
        return tensor

    def _place(self, which: int | str, args: list[Any], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Where an argument is: a list and an index, or a dict and a name."""
        place = (
            which
            if isinstance(which, int)
            else (self._names.index(which) if which in self._names else len(args))
        )
        if place < len(args):
            return args, place
        name = (
            which
            if isinstance(which, str)
            else (self._names[place] if place < len(self._names) else None)
        )
        if name in kwargs:
            return kwargs, name
        raise TypeError(
            f"ContextParallel: {type(self.module).__name__} was called without argument {which!r}; "
            f"found {len(args)} positional ones and {sorted(kwargs)}; say which with qkv=(...)"
        )


class _Early:
    """An early launch, with what the tensor was like; one that dies untaken is an orphan."""

    def __init__(self, pending: Pending, tensor: torch.Tensor, orphans: list[Pending]) -> None:
        self._pending: Pending | None = pending
        self._version = tensor._version
        self._had_grad = _wants_grad(tensor)
        self._orphans = orphans

    def is_of(self, tensor: torch.Tensor) -> bool:
        return tensor._version == self._version and self._had_grad >= _wants_grad(tensor)

    def take(self) -> Pending | None:
        pending, self._pending = self._pending, None
        return pending

    def __del__(self) -> None:
        if self._pending is not None:
            self._orphans.append(self._pending)


def _wants_grad(tensor: torch.Tensor) -> bool:
    return bool(tensor.requires_grad and torch.is_grad_enabled())
