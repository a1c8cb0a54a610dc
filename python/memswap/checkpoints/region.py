"""One checkpoint region: what the operators of its forward gave, and how that is replayed.

A region is the ``context_fn`` of :func:`torch.utils.checkpoint.checkpoint`. Its two contexts are
dispatch modes: the first runs under the forward and saves what the policy says; the second runs
under the recomputation and gives it back instead of running the operators.

[Note: Replay] The n-th call of an operator in the recomputation is the n-th call of it in the
forward. What it gives back is a new tensor each time, without autograd's marks, so a region can be
recomputed any number of times: after ``retain_graph``, for two losses, for a double backward.
Nothing is consumed; the graph owns the region (through torch's frame), and the region what it
saved. Three kinds of operators need more than their output:

- One whose output lies on an argument's storage (a view) is always run again, and so is one that
  turns its argument into a view (`squeeze_`, `t_`). That costs nothing, and its output is again an
  alias of the argument, saved or recomputed.
- One that writes its arguments (in place, ``out=``, a collective of c10d) is replayed by copying
  what it wrote into the arguments of the recomputation.
- One that draws random numbers moves the generators on. So does its replay: whatever draws after it
  draws what it drew in the forward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from torch.utils.checkpoint import SAC_IGNORED_OPS

from memswap._native import native
from memswap.checkpoints.policy import CheckpointPolicy, Decide, is_collective
from memswap.engine.action import Action
from memswap.engine.autograd import plain_parts, tensors_in
from memswap.engine.handle import Handle
from memswap.engine.hook_scope import HookScope
from memswap.errors import InplaceEditError, RecomputeError

if TYPE_CHECKING:
    from memswap._C import WeakStorage

_ACTIONS = {
    CheckpointPolicy.MUST_SWAP: Action.SWAP,
    CheckpointPolicy.MUST_ENCODE: Action.ENCODE,
}
_RECOMPUTE = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


@dataclass(eq=False)
class Region:
    """What one call of a checkpointed function saved."""

    decide: Decide
    """The policy."""
    scope: HookScope
    """Through which outputs leave."""
    keeps_random_state: bool
    """Whether generators move on where an operator is not run again."""
    checks: bool
    """Whether the arguments of a replayed operator must look as they did."""
    calls: Counter[Any] = field(default_factory=Counter)
    """How often the forward called each operator."""
    saved: dict[Any, dict[int, _Call]] = field(default_factory=dict)
    """Operator -> number of the call -> what it gave, where that was saved."""
    _writing: list[_Held] = field(default_factory=list)
    _why_written: str = ""
    _holders: dict[int, tuple[WeakStorage, list[_Call]]] = field(default_factory=dict)
    """Storage -> the calls whose output lies on it. A weak storage keeps its key."""

    def contexts(self) -> tuple[TorchDispatchMode, TorchDispatchMode]:
        """The ``context_fn`` of this one region."""
        return _Forward(self), _Replay(self)

    def take(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """An operator of the forward gave this.

        Args:
            op: the operator.
            args: what it was called with.
            kwargs: the same by name.
            output: what it gave: a tensor, or several in whatever nests them.
        """
        number = self.calls[op]
        self.calls[op] += 1
        written = written_by(op, args, kwargs)
        if written and self._holders:
            self._notice_edits(written)
        policy = self.decide(op, args, kwargs, output)
        if policy in _RECOMPUTE or torch.Tag.inplace_view in getattr(op, "tags", ()):
            return
        if not written and shares_storage(output, (args, kwargs)):
            return
        reason = "collective" if is_collective(op) else "written in place" if written else ""
        wanted = self._action_of(policy)
        refused = reason if wanted is not Action.KEEP else ""
        self._pack_with(Action.KEEP if reason else wanted, refused)
        self._why_written = refused
        random = self.keeps_random_state and draws(op)
        call = _Call(self, op, policy, args, kwargs, output, written, random)
        self.saved.setdefault(op, {})[number] = call
        self._writing = call.written
        for part in _parts((output, written)):
            key = native.storage_key(part)
            if key:
                weak = native.WeakStorage(native.StorageRef(part))
                self._holders.setdefault(key, (weak, []))[1].append(call)

    def end_write(self) -> None:
        """The last operator has returned through autograd, which counts versions up."""
        if self._writing:
            self._pack_with(Action.KEEP, self._why_written)
        for held in self._writing:
            held.count(self.scope)
        self._writing = []

    def recall(self, op: Any, number: int) -> _Call | None:
        """What the forward's call of that number gave; None: run the operator."""
        saved = self.saved.get(op)
        if saved is None:
            return None
        if number >= self.calls[op]:
            raise RecomputeError(
                f"{op} ran {self.calls[op]} time(s) in the forward of a checkpointed function and "
                "more often when it was run again for backward, so it is not known which output "
                "belongs where; make the function do the same each time, or let the policy "
                f"recompute {op}"
            )
        return saved.get(number)

    def _notice_edits(self, written: list[torch.Tensor]) -> None:
        """An operator writes these: what was saved of their storages is there no more.

        Version counters do not tell it of parts that count for themselves (`unsafe_chunk`).
        """
        for part in _parts(written):
            for call in self._holders.pop(native.storage_key(part), (None, ()))[1]:
                call.overwritten = True

    def _action_of(self, policy: CheckpointPolicy) -> Action | None:
        """What is done with an output; None: what the plan says that counts it."""
        if policy is CheckpointPolicy.PREFER_SAVE and self.scope.engine.planning.directed:
            return None
        return _ACTIONS.get(policy, Action.KEEP)

    def _pack_with(self, action: Action | None, refused: str) -> None:
        """What is packed next leaves so, or stays; `refused`: why it does so against the policy.

        Args:
            action: of the scope; None: what a plan says.
            refused: empty where the policy says so itself.
        """
        self.scope.action, self.scope.why_kept = action, refused or "policy"


class _Mode(TorchDispatchMode):  # type: ignore[misc]
    """What the forward and its recomputation run under."""

    supports_higher_order_operators = True

    def __init__(self, region: Region) -> None:
        super().__init__()
        self.region = region

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled functions inside the region stay compiled."""
        return True


class _Forward(_Mode):
    """Watches the forward."""

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self.region.end_write()

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = {} if kwargs is None else kwargs
        self.region.end_write()
        output = op(*args, **kwargs)
        if op not in SAC_IGNORED_OPS:
            self.region.take(op, args, kwargs, output)
        return output


class _Replay(_Mode):
    """Gives back what was saved."""

    def __init__(self, region: Region) -> None:
        super().__init__(region)
        self.calls: Counter[Any] = Counter()

    def __enter__(self) -> _Replay:
        self.calls.clear()
        super().__enter__()
        return self

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = {} if kwargs is None else kwargs
        if op in SAC_IGNORED_OPS:
            return op(*args, **kwargs)
        number = self.calls[op]
        self.calls[op] += 1
        call = self.region.recall(op, number)
        if call is None or call.may_run_again():
            return op(*args, **kwargs)
        return call.replay(args, kwargs)


class _Call:
    """One call of an operator whose output was saved."""

    __slots__ = ("leaves", "looks", "op", "overwritten", "policy", "random", "spec", "written")

    def __init__(
        self,
        region: Region,
        op: Any,
        policy: CheckpointPolicy,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
        written: list[torch.Tensor],
        random: bool,
    ) -> None:
        self.op = op
        self.policy = policy
        #: A later operator of the forward wrote to what this one gave.
        self.overwritten = False
        # `out=` may have been resized: how it looked before is not known.
        self.looks = looks(args, kwargs, but=written) if region.checks else None
        flat, self.spec = tree_flatten(output)
        self.written = [_Held(tensor) for tensor in written]
        self.leaves: list[Any] = []
        for leaf in flat:
            if isinstance(leaf, torch.Tensor):
                place = next((i for i, one in enumerate(written) if one is leaf), None)
                self.leaves.append(_held(leaf, region.scope) if place is None else _Argument(place))
            else:
                self.leaves.append(leaf)
        self.random = random_states(flat + written) if random else []

    def may_run_again(self) -> bool:
        """Whether the output was edited since, and the policy only preferred to save it."""
        return self.policy is CheckpointPolicy.PREFER_SAVE and (
            self.overwritten
            or any(held.edited for held in (*self.written, *self.leaves) if isinstance(held, _Held))
        )

    def replay(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the operator gave in the forward, and what it did to its arguments."""
        arguments = written_by(self.op, args, kwargs)
        found = None if self.looks is None else looks(args, kwargs, but=arguments)
        if found != self.looks:
            raise RecomputeError(
                f"the arguments of {self.op} look different when a checkpointed function is run "
                f"again for backward: found {found}, expected {self.looks} as in its "
                "forward; make the function do the same each time"
            )
        try:
            if self.overwritten:
                raise InplaceEditError("an operator of the function writes to a part of it.")
            for argument, held in zip(arguments, self.written, strict=True):
                content = held.unpack()
                if argument.numel() == 0:  # `out=` gets its size from the operator
                    argument.resize_(content.shape)
                argument.copy_(content)
            output = self.spec.unflatten(
                [_unpacked(leaf, arguments) for leaf in self.leaves],
            )
        except InplaceEditError as error:
            raise InplaceEditError(
                f"what {self.op} gave in a checkpointed function was edited in place, but the "
                f"policy says {self.policy.name}: {error} Or let the policy recompute {self.op}."
            ) from error
        set_random_states(self.random)
        return output


class _Argument:
    """An output that is one of the arguments that the operator writes."""

    __slots__ = ("place",)

    def __init__(self, place: int) -> None:
        self.place = place


class _Held:
    """A tensor that was saved, here or wherever the engine says, and whether it was edited since.

    Args:
        handle: what the engine returned for it, if it was asked.
    """

    __slots__ = ("_counter", "_handle", "_tensor", "_version")

    def __init__(self, tensor: torch.Tensor, handle: Handle | None = None) -> None:
        # Below autograd a detached tensor does not share its version counter with the original.
        self._counter = None if tensor.is_inference() else native.VersionGuard(tensor)
        self._version = self._found()
        self._handle = handle
        self._tensor: torch.Tensor | None = None
        if handle is None:
            self._tensor = tensor.detach()
        elif isinstance(handle, native.Handle) and handle.stays:
            self._tensor = handle.tensor  # the engine asks whether others hold a storage

    def count(self, scope: HookScope) -> None:
        """What is there now is what was saved: the engine counts it."""
        self._version = self._found()
        assert self._tensor is not None, "what an operator writes stays"
        if not self._tensor.is_inference():
            self._handle = scope.pack(self._tensor)

    @property
    def edited(self) -> bool:
        return self._found() != self._version

    def _found(self) -> int:
        return 0 if self._counter is None else self._counter.current_version

    def unpack(self) -> torch.Tensor:
        tensor = self._tensor
        if tensor is None:
            assert self._handle is not None
            return self._handle.unpack()
        if self.edited:
            described = f"{tensor.type()} {list(tensor.shape)} on {tensor.device}"
            native.raise_inplace_edit(described, self._found(), self._version)
        if self._handle is not None:
            self._handle.unpack()  # the timeline moves on
        # A new one each time: autograd will mark it as the operator's output.
        return tensor.detach()


def _held(tensor: torch.Tensor, scope: HookScope) -> _Held:
    """How an output waits: here, or wherever the engine says."""
    return _Held(tensor, None if tensor.is_inference() else scope.pack(tensor))


def _unpacked(leaf: Any, arguments: list[torch.Tensor]) -> Any:
    if isinstance(leaf, _Argument):
        return arguments[leaf.place]
    return leaf.unpack() if isinstance(leaf, _Held) else leaf


# --- operators --------------------------------------------------------------------------------


def looks(
    args: tuple[Any, ...], kwargs: dict[str, Any], but: list[torch.Tensor]
) -> list[tuple[tuple[int, ...], str]]:
    """Shape and dtype of each tensor among the arguments, `but` for some.

    Args:
        args: of a call, in whatever nests tensors.
        kwargs: the same by name.
        but: tensors that are left out.
    """
    return [
        (tuple(one.shape), str(one.dtype))
        for one in tensors_in((args, kwargs))
        if not any(one is other for other in but)
    ]


def shares_storage(output: Any, arguments: Any) -> bool:
    """Whether an output lies on the storage of an argument."""
    keys = {key for key in map(native.storage_key, _parts(arguments)) if key}
    return any(native.storage_key(part) in keys for part in _parts(output))


def _parts(tree: Any) -> Iterator[torch.Tensor]:
    for tensor in tensors_in(tree):
        yield from plain_parts(tensor)


def written_by(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The arguments that an operator writes.

    Schemas say so, except those of c10d: there, an operator whose name ends in an underscore writes
    its first argument (torch/csrc/distributed/c10d/Ops.cpp).

    Args:
        op: the operator.
        args: what it was called with.
        kwargs: the same by name.
    """
    schema = getattr(op, "_schema", None)
    if schema is None:
        return []
    if op.namespace == "c10d" and op.overloadpacket.__name__.endswith("_"):
        return list(tensors_in(args[0] if args else kwargs[schema.arguments[0].name]))
    if not schema.is_mutable:
        return []
    written: list[torch.Tensor] = []
    for place, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found = args[place] if place < len(args) else kwargs.get(argument.name)
            written += tensors_in(found)
    return written


def draws(op: Any) -> bool:
    """Whether an operator draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(op, "tags", ())


# States are tensors: no mode around the region may take copying them for the program's work.
_without_modes = torch._C._DisableTorchDispatch


def random_states(leaves: list[Any]) -> list[tuple[torch.device, torch.Tensor]]:
    """The states of the generators of the devices of these tensors."""
    devices = {leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)}
    with _without_modes():
        return [(device, _generators(device).get_rng_state(*_index(device))) for device in devices]


def set_random_states(states: list[tuple[torch.device, torch.Tensor]]) -> None:
    """Move generators to where they were in the forward."""
    with _without_modes():
        for device, state in states:
            _generators(device).set_rng_state(state, *_index(device))


def _generators(device: torch.device) -> Any:
    return torch if device.type == "cpu" else torch.get_device_module(device)


def _index(device: torch.device) -> tuple[torch.device, ...]:
    return () if device.type == "cpu" else (device,)
