"""AppliedContext: what ContextParallel does around one attention module."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_map_only

from memswap.engine.autograd import in_backward
from memswap.parallel.arguments import Arguments
from memswap.parallel.arriving import ArrivingTensor
from memswap.parallel.attention import causal_mask
from memswap.parallel.context_mesh import ContextMesh
from memswap.parallel.early import EarlyLaunches
from memswap.parallel.exchange import Pending, exchange
from memswap.parallel.layouts import HeadPlan, Layout
from memswap.parallel.redistribute import (
    GatherSequence,
    HeadsToSequence,
    MoveSequence,
    SequenceExchange,
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


class ExchangeLaunch(NamedTuple):
    """One exchange of an attention module, as it was launched last."""

    collective: str
    label: str
    lane: str
    """The dimension of the mesh."""
    nbytes: int
    """What this rank gave, in bytes."""
    cause: str
    times: int
    """How often, so far."""


class AppliedContext:
    """The hooks of a :class:`ContextParallel` on one attention module.

    Attributes:
        module: the attention module.
        calls: how often it has run.
        early: how many of its exchanges were launched by a projection.
        late: how many of its outputs were waited for by the output projection.
        launches: by collective and label, in the order in which they came first.
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
        self.late = 0
        self.launches: dict[tuple[str, str], ExchangeLaunch] = {}
        self._style = style
        self._mesh = mesh
        self._heads = style.heads
        self._roles = ROLES[style.packing]
        self._early = EarlyLaunches()
        self._skipped: set[Role] = set()
        self._warned: set[str] = set()
        self._cause = "attention"
        unknown = sorted(set(projections) - {*self._roles, "o"})
        if unknown:
            raise TypeError(
                f"ContextParallel: found projections {unknown}, expected {(*self._roles, 'o')}"
            )
        self._unpacks = "qkv" in self._roles and mesh.gather is not None
        if self._unpacks and style.unpacked is None:
            raise NotImplementedError(
                "ContextParallel: where keys are gathered there are more of them than queries, and "
                "one packed tensor has one length. If forward can take them apart, say by which "
                "arguments: unpacked=('q', 'kv') or ('q', 'k', 'v'). If not, use packing='kv', or "
                "ulysses on the whole mesh"
            )
        early = {
            role: projection
            for role in self._roles
            if (projection := projections.get(role)) is not None
            and (mesh.heads or (mesh.gather and (role != "q" or mesh.moves_queries)))
        }
        self._early_roles = tuple(early)
        self._arguments = Arguments(module)
        self._handles = [
            module.register_forward_pre_hook(self._before, with_kwargs=True),
            module.register_forward_hook(self._after),
        ]
        for role, projection in early.items():
            self._handles.append(projection.register_forward_hook(self._launch_hook(role)))
        output = projections.get("o")
        self._output_is_late = output is not None and (mesh.heads is not None or mesh.moves_queries)
        if output is not None and self._output_is_late:
            hook = output.register_forward_pre_hook(self._reached, with_kwargs=True)
            self._handles.append(hook)

    def remove(self) -> None:
        """Take the hooks away; the module sees its own rank's tokens again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._early.drop_orphans()
        if self in self._style.applied:
            self._style.applied.remove(self)

    def __deepcopy__(self, memo: object) -> AppliedContext:
        raise NotImplementedError(
            f"ContextParallel on {type(self.module).__name__}: its hooks belong to process groups "
            "and cannot be copied; copy the model first, and apply a style to the copy"
        )

    def describe_for(self, tensor: torch.Tensor, label: str) -> str:
        """What must be the same on all ranks, of this module and its first exchange."""
        shape = list(tensor.shape)
        shape[self._layout("kv" if label in ("kv", "qkv") else "q").seq_dim] = -1
        return (
            f"{type(self.module).__name__}: {label} of {shape} {tensor.dtype}, roles "
            f"{self._roles}, launched early {self._early_roles}, late output "
            f"{self._output_is_late}"
        )

    def query_ranges(self, tokens: int) -> tuple[tuple[int, int], ...]:
        """Which ranges of the sequence the queries are that attention gets.

        Args:
            tokens: how many of the sequence this rank holds outside attention.
        """
        length = self._length("q", tokens)
        return self._mesh.query_shards(length).ranges[self._mesh.row]

    def _launch_hook(self, role: Role) -> Callable[[nn.Module, Any, Any], None]:
        def launch(module: nn.Module, args: Any, output: Any) -> None:
            layout = self._layout(role)
            plain = isinstance(output, torch.Tensor) and not isinstance(output, DTensor)
            if not plain or output.ndim != layout.ndim:
                what = list(output.shape) if isinstance(output, torch.Tensor) else type(output)
                self._warn_early(
                    f"{role}'s projection returned {what}, not {layout.ndim} dimensions"
                )
                return
            if output.is_inference():  # has no version
                return
            self._early.drop_orphans()
            if role == self._roles[0] and self._heads is None:
                self._heads = output.size(layout.head_dim)
            if self._heads is None and self._mesh.heads is not None:
                self._skipped.add(role)  # in the first pass, keys that come before queries
                return
            self._cause = f"{role}'s projection"
            pending = self._first(role, output)
            if pending is not None:
                self._early.keep(role, output, pending)

        return launch

    def _take_early(self, role: Role, tensor: torch.Tensor) -> Pending | None:
        pending = self._early.take(role, tensor)
        if pending is not None:
            self.early += 1
        elif role in self._skipped:
            self._skipped.remove(role)
        elif role in self._early_roles and not in_backward() and not tensor.is_inference():
            self._warn_early(
                f"attention got another {role} than its projection returned, or edited it"
            )
        return pending

    def _warn_early(self, what: str) -> None:
        self._warn(
            "early",
            f"{what}; the exchange that was launched early is not used. Name the last module "
            "before attention in apply(q=, k=, v=), or none",
        )

    def _warn(self, which: str, what: str) -> None:
        if which not in self._warned:
            self._warned.add(which)
            warnings.warn(f"ContextParallel on {type(self.module).__name__}: {what}", stacklevel=3)

    def _exchange(self, tensor: torch.Tensor, spec: SequenceExchange, label: str) -> Pending:
        self._style.compare_ranks(self, tensor, label)
        lane, cause = self._mesh.name_of(spec.comm), self._cause

        def observe(spec: Any, label: str, sent: torch.Tensor) -> None:
            key = spec.collective, label
            times = self.launches[key].times + 1 if key in self.launches else 1
            why = "backward" if label.endswith("gradient") else cause
            self.launches[key] = ExchangeLaunch(*key, lane, sent.nbytes, why, times)

        return exchange(tensor, spec, label=label, observe=observe)

    def _first(self, role: Role, tensor: torch.Tensor) -> Pending | None:
        """Launch the first exchange of an input; None where it has none."""
        mesh, layout = self._mesh, self._layout(role)
        length = self._length(role, tensor.size(layout.seq_dim))
        if mesh.heads is None:
            return self._gather(*self._apart(role, tensor)[-1], length)
        if role in ("q", "qkv"):
            heads = self._plan(None).queries()
        else:
            heads = self._plan(tensor.size(layout.head_dim)).keys()
        lengths = mesh.rank_shards(length).lengths
        spec = SequenceToHeads(mesh.heads, heads, lengths, layout.seq_dim, layout.head_dim)
        return self._exchange(tensor, spec, role)

    def _apart(self, role: Role, tensor: torch.Tensor) -> list[tuple[Role, torch.Tensor]]:
        """An input as queries, and keys with values, where these two part ways."""
        if role != "qkv" or not self._unpacks:
            return [(role, tensor)]
        dim = self._style.layout.head_dim
        return [("q", tensor.select(dim, 0)), ("kv", tensor.narrow(dim, 1, 2))]

    def _gather(self, role: Role, tensor: torch.Tensor, length: int) -> Pending | None:
        """Launch the exchange over the column; queries stay where they are, or are moved."""
        mesh, dim = self._mesh, self._layout(role).seq_dim
        if mesh.gather is None or (role == "q" and not mesh.moves_queries):
            return None
        shards = mesh.row_shards(length)
        if role == "q":
            move = MoveSequence(mesh.gather, shards, mesh.query_shards(length), dim)
            return self._exchange(tensor, move, role)
        return self._exchange(tensor, GatherSequence(mesh.gather, shards, dim), role)

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        args, kwargs = list(args), dict(kwargs)
        places = [self._arguments.find(which, args, kwargs) for which in self._style.qkv]
        given = {
            role: self._local(role, where[key])
            for role, (where, key) in zip(self._roles, places, strict=True)
        }
        self._cause = "attention"
        result = self._exchanged(given, args, kwargs)
        if self._unpacks:
            self._hand_out_apart(result, places[0], kwargs)
        else:
            for (where, key), role in zip(places, self._roles, strict=True):
                where[key] = result[role]
        self.calls += 1
        return tuple(args), kwargs

    def _hand_out_apart(
        self, result: dict[Role, torch.Tensor], packed: tuple[Any, Any], kwargs: dict[str, Any]
    ) -> None:
        where, key = packed
        where[key] = None
        names = self._style.unpacked
        assert names is not None
        dim = self._style.layout.head_dim
        apart = [result["q"], result["kv"]]
        if len(names) == 3:
            apart[1:] = result["kv"].unbind(dim)
        kwargs.update(zip(names, apart, strict=True))

    def _exchanged(
        self, given: dict[Role, torch.Tensor], args: list[Any], kwargs: dict[str, Any]
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
        self._offer(args, kwargs, tokens, lengths[last], queries.device)
        pending = {
            self._apart(role, tensor)[-1][0] if mesh.heads is None else role: (
                self._take_early(role, tensor) or self._first(role, tensor)
            )
            for role, tensor in given.items()
        }
        result = dict(part for one in given.items() for part in self._apart(*one))
        if mesh.heads is not None and mesh.gather is not None:
            for role in self._roles:  # k is gathered while the first exchange of v arrives
                if role != "q" or mesh.moves_queries:
                    one = pending.pop(role)
                    assert one is not None
                    self._cause = f"arrival of {role}"
                    for part, tensor in self._apart(role, one.wait()):
                        result[part] = tensor
                        pending[part] = self._gather(part, tensor, lengths[role])
        elif self._unpacks and mesh.moves_queries:
            pending["q"] = self._gather("q", result["q"], lengths[last])
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
        self._style.first_step.follow(output)
        if mesh.heads is not None or mesh.moves_queries:
            output = self._sent_back(output)
        if self._style.use_local_output:
            return output
        placements = [Shard(layout.seq_dim)] * mesh.device_mesh.ndim
        return DTensor.from_local(output, mesh.device_mesh, placements, run_check=False)

    def _sent_back(self, output: torch.Tensor) -> torch.Tensor:
        """From this rank's heads, or others' queries, to this rank's tokens."""
        mesh, layout = self._mesh, self._style.layout
        length = self._style.sequence_length
        if length is None:
            length = output.size(layout.seq_dim) * mesh.rows
        self._early.drop_orphans()
        self._cause = "attention"
        if mesh.moves_queries:
            assert mesh.gather is not None
            shards = mesh.query_shards(length), mesh.row_shards(length)
            move = MoveSequence(mesh.gather, *shards, layout.seq_dim)
            pending = self._exchange(output, move, "o")
        if mesh.heads is not None:
            if mesh.moves_queries:
                output = pending.wait()
            spec = HeadsToSequence(
                mesh.heads,
                self._plan(None).queries(),
                mesh.rank_shards(length).lengths,
                layout.seq_dim,
                layout.head_dim,
            )
            pending = self._exchange(output, spec, "o")
        if not self._output_is_late or not self._style.use_local_output:
            return pending.wait()
        return pending.arriving(first_use=self._used_before, orphans=self._early.orphans)

    def _reached(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """The output projection is called: its input may wait there."""

        def reach(tensor: ArrivingTensor) -> torch.Tensor:
            tensor.expect()
            self.late += 1
            # A linear layer may wait by itself; of others nobody knows whether they could.
            return tensor if isinstance(module, nn.Linear) else tensor.arrived()

        return tree_map_only(ArrivingTensor, reach, (args, kwargs))

    def _used_before(self, name: str) -> None:
        self._warn(
            "late",
            f"{name} used attention's output before the projection that apply(o=) names; it was "
            "waited for there. Name the module that uses it first, or none",
        )

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

    def _offer(
        self,
        args: list[Any],
        kwargs: dict[str, Any],
        tokens: int,
        keys: int,
        device: torch.device,
    ) -> None:
        """Fill the keyword arguments that say where the queries are; refuse what would lie."""
        style = self._style
        given = self._arguments.by_name(args, kwargs)
        for name in ("is_causal", "causal"):
            if self._mesh.gather is not None and given.get(name) is True:
                raise ValueError(
                    f"ContextParallel: {name}=True means another mask where keys are gathered, "
                    "since queries are a part of the sequence; use causal_attention with "
                    "ContextParallel(ranges=...), or ContextParallel(mask=...)"
                )
        for filled in (style.ranges, style.mask):
            if filled is None:
                continue
            if self._arguments.by_place(filled, args) or kwargs.get(filled) is not None:
                raise ValueError(
                    f"ContextParallel: found argument {filled!r}, which the style is to fill; pass "
                    "None by name, or leave it away; or name no such argument in the style"
                )
        if style.ranges is not None:
            kwargs[style.ranges] = self.query_ranges(tokens)
        if style.mask is not None:
            shards = self._mesh.query_shards(self._length("q", tokens))
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
                or self._style.balance == "headtail"
            ):
                raise ValueError(
                    f"ContextParallel: {role} is a DTensor with {tensor.placements} on "
                    f"{tensor.device_mesh}, expected {expected} on {mesh} and "
                    "balance other than 'headtail'; or pass this rank's own tensor (to_local())"
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
