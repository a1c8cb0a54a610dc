"""AppliedContext: what ContextParallel does around one attention module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.overrides import _get_current_function_mode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from memswap._warn import warn
from memswap.engine.autograd import in_backward
from memswap.hooks.module_hooks import AtBegin, AtEnd, ModuleHooks
from memswap.parallel.arriving import ArrivingTensor
from memswap.parallel.attention import Lengths, PlacedQueries, causal_mask
from memswap.parallel.attention_exchanges import AttentionExchanges, EarlyLaunches
from memswap.parallel.context_style import Arguments, ContextMesh, ContextStyle, Role
from memswap.parallel.exchange import Pending
from memswap.parallel.gathered import GatheredAttention

if TYPE_CHECKING:
    from types import FrameType


class AppliedContext:
    """The hooks of a :class:`ContextParallel` on one attention module.

    Args:
        style: its options.
        mesh: its ranks.
        module: the attention module.
        projections: whose outputs go into attention, by role, and the one that gets its output.
        compare_ranks: is called before each exchange, with this, the tensor and the label.
        follow: is told each output of the attention.
        removed: is told when :meth:`remove` is called first.

    Attributes:
        module: the attention module.
        calls: how often it has run.
        early: how many of its exchanges were launched by a projection.
        late: how many of its outputs were waited for by the output projection.
        exchanges: those that it makes.
    """

    def __init__(
        self,
        style: ContextStyle,
        mesh: ContextMesh,
        module: nn.Module,
        projections: Mapping[str, nn.Module | None],
        *,
        compare_ranks: Callable[[AppliedContext, torch.Tensor, str], None],
        follow: Callable[[torch.Tensor], object],
        removed: Callable[[AppliedContext], None],
    ) -> None:
        self.module = module
        self.calls = 0
        self.early = 0
        self.late = 0
        self.exchanges = AttentionExchanges(style, mesh, partial(compare_ranks, self))
        self._style = style
        self._follow = follow
        self._removed = removed
        self._mesh = mesh
        self._roles = self.exchanges.roles
        self._early = EarlyLaunches()
        self._skipped: set[Role] = set()
        self._warned: set[str] = set()
        unknown = sorted(set(projections) - {*self._roles, "o"})
        if unknown:
            raise TypeError(
                f"ContextParallel: found projections {unknown}, expected {(*self._roles, 'o')}"
            )
        if self.exchanges.parts_ways and style.unpacked is None:
            raise NotImplementedError(
                "ContextParallel: where keys are gathered there are more of them than queries, and "
                "one packed tensor has one length. If forward can take them apart, say by which "
                "arguments: unpacked=('q', 'kv') or ('q', 'k', 'v'). If not, use packing='kv', or "
                "ulysses on the whole mesh"
            )
        early = {
            role: projection
            for role in self._roles
            if (projection := projections.get(role)) is not None and self.exchanges.moves(role)
        }
        self._early_roles = tuple(early)
        self._arguments = Arguments(module, style)
        self._gathered: GatheredAttention | None = None
        if mesh.gather is not None and style.ranges is None and style.mask is None:
            self._gathered = GatheredAttention(module, self.exchanges, self._arguments)
        self._hooks = ModuleHooks(partial(_refuse_copy, type(module).__name__))
        self._hooks.add(module, None, self._attends, abandons_raised=True)
        for role, projection in early.items():
            self._hooks.add(projection, role, self._projects, abandons_raised=True)
        output = projections.get("o")
        self._output_is_late = output is not None and self.exchanges.moves_output
        if output is not None and self._output_is_late:
            self._hooks.add(output, None, self._reached)

    def remove(self) -> None:
        """Take the hooks away; the module sees its own rank's tokens again."""
        if self._hooks:
            self._removed(self)
        self._hooks.remove()
        self._early.drop_orphans()

    def describe_for(self, tensor: torch.Tensor, label: str) -> str:
        """What must be the same on all ranks, of this module and its first exchange."""
        shape = list(tensor.shape)
        shape[self.exchanges.layout("kv" if label in ("kv", "qkv") else "q").seq_dim] = -1
        return (
            f"{type(self.module).__name__}: {label} of {shape} {tensor.dtype}, roles "
            f"{self._roles}, launched early {self._early_roles}, late output "
            f"{self._output_is_late}"
        )

    def _projects(self, role: Role, module: nn.Module, args: Any, kwargs: Any) -> AtEnd:
        """A projection is called: what it returns is launched."""
        return AtEnd(partial(self._launch, role))

    def _launch(self, role: Role, output: Any) -> None:
        layout = self.exchanges.layout(role)
        plain = isinstance(output, torch.Tensor) and not isinstance(output, DTensor)
        if not plain or not self.exchanges.fits(role, output):
            what = list(output.shape) if isinstance(output, torch.Tensor) else type(output)
            self._warn_early(f"{role}'s projection returned {what}, not {layout.ndim} dimensions")
            return
        if output.is_inference():  # has no version
            return
        self._early.drop_orphans()
        if role == self._roles[0] and self.exchanges.heads is None:
            self.exchanges.heads = output.size(layout.head_dim)
        if self.exchanges.heads is None and self._mesh.heads is not None:
            self._skipped.add(role)  # in the first pass, keys that come before queries
            return
        self.exchanges.cause = f"{role}'s projection"
        pending = self.exchanges.first(role, output)
        if pending is not None:
            self._early.keep(role, output, pending)

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
            warn(f"ContextParallel on {type(self.module).__name__}: {what}")

    def _attends(self, key: object, module: nn.Module, args: Any, kwargs: Any) -> AttentionCall:
        return AttentionCall(self, args, kwargs)

    def begin(self, args: list[Any], kwargs: dict[str, Any]) -> Lengths:
        """Exchange what attention is called with, and put what arrived in its place.

        Returns:
            The queries and keys that attention gets.

        Raises:
            ValueError: sizes that do not fit, or attention that would be wrong.
            TypeError: there is no such argument, or it is no tensor.
        """
        places = self._arguments.places(args, kwargs)
        given = {role: self._local(role, where[key]) for role, (where, key) in places.items()}
        self.exchanges.cause = "attention"
        lengths = self.exchanges.lengths(given)
        result = self._exchanged(given, lengths, args, kwargs)
        self._arguments.hand_out(result, args, kwargs)
        self.calls += 1
        return lengths

    @property
    def places_queries(self) -> bool:
        """Whether attention has to be told of where its queries are ([Note: Placed queries])."""
        return self._gathered is not None

    def _exchanged(
        self,
        given: dict[Role, torch.Tensor],
        whole: Lengths,
        args: list[Any],
        kwargs: dict[str, Any],
    ) -> dict[Role, torch.Tensor]:
        """The inputs as attention gets them; all launches first, then the waits."""
        mesh = self._mesh
        kv_heads = self.exchanges.count_heads(given)
        lengths = {
            role: self.exchanges.length(role, tensor.size(self.exchanges.layout(role).seq_dim))
            for role, tensor in given.items()
        }
        last = self._roles[-1]
        self._offer(args, kwargs, whole, given[last].device)
        cut_keys = self._gathered is not None and self._gathered.verify(given, whole, args, kwargs)
        pending = {
            self.exchanges.apart(role, tensor)[-1][0] if mesh.heads is None else role: (
                self._take_early(role, tensor) or self.exchanges.first(role, tensor)
            )
            for role, tensor in given.items()
        }
        result = dict(part for one in given.items() for part in self.exchanges.apart(*one))
        if mesh.heads is not None and mesh.gather is not None:
            for role in self._roles:  # k is gathered while the first exchange of v arrives
                if role != "q" or mesh.moves_queries:
                    one = pending.pop(role)
                    assert one is not None
                    self.exchanges.cause = f"arrival of {role}"
                    for part, tensor in self.exchanges.apart(role, one.wait()):
                        result[part] = tensor
                        pending[part] = self.exchanges.gather(part, tensor, lengths[role])
        elif self.exchanges.parts_ways and mesh.moves_queries:
            pending["q"] = self.exchanges.gather("q", result["q"], lengths[last])
        for role, one in pending.items():
            if one is not None:
                result[role] = one.wait()
        if kv_heads is not None:
            for role in self._roles[1:]:
                result[role] = self.exchanges.expanded(role, result[role], kv_heads)
        if cut_keys:
            for part in result.keys() - {"q"}:
                dim = self.exchanges.layout(part).seq_dim
                result[part] = result[part].narrow(dim, 0, whole.stop)
        return result

    def end(self, output: Any) -> Any:
        """What the caller of attention gets: its output, on its way back to this rank's tokens.

        Raises:
            TypeError, ValueError: it is not in the layout of the queries.
        """
        if self._gathered is not None:
            self._gathered.ended()
        tensors, structure = tree_flatten(output)
        places = [i for i, one in enumerate(tensors) if isinstance(one, torch.Tensor)]
        own = [tensors[i] for i in places]
        if not own or any(isinstance(one, DTensor) for one in own):
            kinds = ", ".join(type(one).__name__ for one in tensors) or type(output).__name__
            raise TypeError(
                f"ContextParallel: {type(self.module).__name__} returned {kinds}, expected a "
                "tensor, or tensors, in the layout of the queries"
            )
        self._check_outputs(own)
        self._follow(output)
        if self.exchanges.moves_output:
            own = self._sent_back(own)
        if not self._style.use_local_output:
            mesh = self._mesh.device_mesh
            placements = [Shard(self._style.dims.seq_dim)] * mesh.ndim
            own = [DTensor.from_local(one, mesh, placements, run_check=False) for one in own]
        for i, one in zip(places, own, strict=True):
            tensors[i] = one
        return tree_unflatten(tensors, structure)

    def _check_outputs(self, outputs: list[torch.Tensor]) -> None:
        """Those that are exchanged, and the first in any case, are in the queries' layout."""
        layout = self._style.dims
        dims = layout.seq_dim, layout.head_dim
        first = outputs[0]
        for i, one in enumerate(outputs if self.exchanges.moves_output else outputs[:1]):
            fits = self.exchanges.fits("q", one)
            if not fits or any(one.size(dim) != first.size(dim) for dim in dims):
                like = list(first.shape) if i else "the queries"
                raise ValueError(
                    f"ContextParallel: {type(self.module).__name__} returned shape "
                    f"{list(one.shape)} (tensor {i} of {len(outputs)}), expected the "
                    f"{layout.ndim} dimensions of the queries, with tokens and heads as {like} "
                    f"has them in dimensions {dims}"
                )

    def _sent_back(self, outputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """From this rank's heads, or others' queries, to this rank's tokens."""
        self._early.drop_orphans()
        self.exchanges.cause = "attention"
        pending = [
            self.exchanges.back(one, f"o {i}" if i else "o") for i, one in enumerate(outputs)
        ]
        if not self._output_is_late or not self._style.use_local_output:
            return [one.wait() for one in pending]
        return [
            one.arriving(first_use=self._used_before, orphans=self._early.orphans)
            for one in pending
        ]

    def _reached(self, key: object, module: nn.Module, args: Any, kwargs: Any) -> AtBegin:
        """The output projection is called: its input may wait there."""

        def reach(tensor: ArrivingTensor) -> torch.Tensor:
            tensor.expect()
            self.late += 1
            # A linear layer waits itself, when its weight's part of backward has its place.
            return tensor if isinstance(module, nn.Linear) else tensor.arrived()

        return AtBegin(tree_map_only(ArrivingTensor, reach, (args, kwargs)))

    def _used_before(self, name: str) -> None:
        self._warn(
            "late",
            f"{name} used attention's output before the projection that apply(o=) names; it was "
            "waited for there. Name the module that uses it first, or none",
        )

    def _offer(
        self,
        args: list[Any],
        kwargs: dict[str, Any],
        whole: Lengths,
        device: torch.device,
    ) -> None:
        """Fill the keyword arguments that say where the queries are; refuse what would lie."""
        style = self._style
        given = self._arguments.by_name(args, kwargs)
        for name in ("is_causal", "causal"):
            told = style.ranges or style.mask
            if self._mesh.gather is not None and told is not None and given.get(name) is True:
                raise ValueError(
                    f"ContextParallel: {name}=True means another mask where keys are gathered, "
                    f"since queries are a part of the sequence; {told!r} says which: leave "
                    f"{name} away, or name no {told!r} in the style"
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
            kwargs[style.ranges] = whole.ranges
        if style.mask is not None:
            queries = whole.positions.to(device)
            kwargs[style.mask] = causal_mask(queries, torch.arange(whole.keys, device=device))

    def _local(self, role: Role, tensor: Any) -> torch.Tensor:
        """This rank's part of an input; a DTensor must be cut as the style would cut it."""
        layout = self.exchanges.layout(role)
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
        if not self.exchanges.fits(role, tensor):
            raise ValueError(
                f"ContextParallel: found {role} of shape {list(tensor.shape)}, expected "
                f"{layout.ndim} dimensions; check layout= and packing="
            )
        return tensor


class AttentionCall:
    """One call of an attention module: the scope that ModuleHooks tells of begin and end.

    Args:
        applied: what is applied to the module.
        args: of its forward.
        kwargs: the same by name.
    """

    def __init__(self, applied: AppliedContext, args: Any, kwargs: Any) -> None:
        self._applied = applied
        self._inputs: tuple[list[Any], dict[str, Any]] | None = (list(args), dict(kwargs))
        self._placed: PlacedQueries | None = None

    def enter(self, call: FrameType | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Exchange its inputs; what attention is to get."""
        inputs, self._inputs = self._inputs, None  # they may be gone before the call ends
        assert inputs is not None
        args, kwargs = inputs
        lengths = self._applied.begin(args, kwargs)
        if self._applied.places_queries:
            self._placed = PlacedQueries(lengths, call=call)
            self._placed.__enter__()
        return tuple(args), kwargs

    def leave(self, output: Any) -> Any:
        """Exchange its output; what the caller is to get."""
        self.abandon()
        return self._applied.end(output)

    def abandon(self) -> None:
        """It has raised or was interrupted, or has ended: other calls mean their own queries."""
        placed, self._placed = self._placed, None
        # After an interrupt others may have modes above it; it does nothing more then.
        if placed is not None and _get_current_function_mode() is placed:
            placed.__exit__(None, None, None)


def _refuse_copy(name: str) -> None:
    raise NotImplementedError(
        f"ContextParallel on {name}: its hooks belong to process groups and cannot be copied; copy "
        "the model first, and apply a style to the copy"
    )
