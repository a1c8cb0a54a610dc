"""manage_optimizer: an optimizer's state is away between its steps, and streams through in them.

[Note: How a step is found]
`Optimizer` calls an instance's own pre-hooks and post-hooks around the class's `step`
(`register_step_pre_hook`, `register_step_post_hook`), whoever has wrapped `step` on the instance: a
learning-rate scheduler made before or after, a GradScaler, a profiler. A pre-hook may give `step`
other arguments, and `self` is one of them: it gets a view of the optimizer ([Note: A step in
chunks] in step.py). Replacing `optimizer.step` would lose to schedulers, which may have
bound the class's function by then; so would another class of the optimizer, which would show. All
hooks belong to one optimizer; nothing of torch is patched.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch.optim import Optimizer

from memswap.engine.action import Action
from memswap.engine.pools import Endurance
from memswap.engine.transfers import check_pool
from memswap.engine.uncopied import Uncopied
from memswap.engine.units import format_bytes, parse_bytes
from memswap.errors import MemswapError
from memswap.optimizers.saved_state import loaded, on_host, plain_getstate
from memswap.optimizers.state import StateMover, away_of, plain_tensors
from memswap.optimizers.step import (
    PARTS,
    StateStream,
    chunks_of,
    is_view,
    moving_bytes,
    new_view,
    parameters_of,
    state_of,
    steps_in_parts,
    storages_that_stay,
    uncompiled,
    view_class,
    why_whole,
)
from memswap.planning.policy import answers_unknown, named_action

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from memswap.engine.transfers import Pool

#: The share of its state that an optimizer may have on the device in a step, and bounds in bytes.
#: Copies of some MiB keep a link or a disk busy; more than that only takes memory.
ROOM_SHARE, LEAST_ROOM, MOST_ROOM = 1 / 8, 48 << 20, 768 << 20

_ATTRIBUTE = "_memswap_managed"

#: What can be done with state: no operator makes it again.
ACTIONS = tuple(one for one in Action if one is not Action.RECOMPUTE)


class OptimizerStepError(MemswapError, RuntimeError):
    """A step in chunks turned out not to be the optimizer's step, or cannot be made now."""


@dataclass(frozen=True)
class OptimizerStatistics:
    """What a managed optimizer's state has done. Bytes are of raw state unless told otherwise."""

    steps: int
    """Steps since it is managed."""
    chunks: int
    """Chunks of the last step; 0: all state came back before it."""
    state_bytes: int
    """All tensors of the state, counters included."""
    away_bytes: int
    """Those that are away now."""
    pool_bytes: int
    """What they take of a pool: raw bytes, or frames."""
    frame_bytes: int
    """What they take of the device, as frames."""
    kept: dict[str, int]
    """Bytes that stayed in the last step, by reason."""
    room_bytes: int
    """What a step may have on the device."""
    peak_bytes: int
    """What the last step had on the device at most."""
    sent_bytes: int
    """Bytes sent away so far."""
    brought_bytes: int
    """Bytes brought back so far."""
    last_step_s: float
    """Seconds of the host that the last step took, hooks of this manager included."""


@answers_unknown
def manage_optimizer(
    optimizer: Optimizer,
    action: Action | str | None = None,
    pool: Pool | None = None,
    *,
    room: int | str | None = None,
    chunked: bool | None = None,
    min_bytes: int | str = 4096,
) -> ManagedOptimizer:
    """Keep an optimizer's state away between its steps, and stream it through the device in them.

    Nothing else changes: `optimizer` is the same object, with schedulers, scalers, hooks, closures,
    `state_dict` and `load_state_dict`, and every step gives the same bits. Parameters' state goes
    away as soon as there is some. In `step()` it comes back a chunk of parameters at a time: the
    next chunk arrives and the last one leaves while this one is stepped. Counters, such as Adam's
    `step`, stay.

    `optimizer.state_dict()` has copies in host memory of what is away. Other code that looks at
    state tensors between steps gets an error that says so; `with managed.present():` has them all.

    Args:
        optimizer: a `torch.optim.Optimizer`, of torch's or not.
        action: `Action.SWAP` (default on an accelerator: to pinned host memory), `ENCODE` (default
            on a CPU: as frames, losslessly) or `ENCODE_SWAP`; `KEEP` leaves everything in place.
            Its name will do: ``"swap"``.
        pool: where the bytes go. Default: pinned host memory for an accelerator. A
            :class:`memswap.DiskPool` puts a CPU's state in a file (the default action is SWAP
            then).
        room: most bytes that state takes of the device in a step, such as ``"1GiB"``: two chunks,
            each of which comes and goes in two halves. Default: an eighth of the state, at least
            48 MiB and at most 768 MiB. Two parameters that follow each other and whose state is
            longer than this take what they have.
        chunked: whether steps go chunk by chunk. Default: for optimizers of torch.optim but LBFGS.
            Others bring all of their state back before `step()` and send it away after it, because
            an optimizer may compute something over all of its parameters; True says that this one
            handles group after group, and that its step over some parameters depends on no others.
        min_bytes: shorter tensors stay.

    Returns:
        What reports about it, and ends it. It need not be kept: the optimizer does.

    Raises:
        TypeError: no optimizer, no action or no pool, or ``chunked`` no bool.
        ValueError: the optimizer is managed already, no action has that name, or sizes cannot be
            read.
        NotImplementedError: the pool cannot serve the state's device in this version.
    """
    check_optimizer(optimizer, "manage_optimizer()")
    if action is not None:
        action = named_action(action, "manage_optimizer", ACTIONS)
    if hasattr(optimizer, _ATTRIBUTE):
        raise ValueError(
            "manage_optimizer(): this optimizer is managed already; call remove() on what the "
            "first call returned before managing it in another way"
        )
    if chunked is not None and not isinstance(chunked, bool):
        raise TypeError(f"manage_optimizer(chunked={chunked!r}): expected True, False or None")
    check_pool(pool)
    for parameter in parameters_of(optimizer):
        check_pool(pool, parameter.device)
    room_bytes = None if room is None else parse_bytes(room, "manage_optimizer(room=...)")
    least_bytes = parse_bytes(min_bytes, "manage_optimizer(min_bytes=...)")
    return ManagedOptimizer(optimizer, action, pool, room_bytes, chunked, least_bytes)


def check_optimizer(optimizer: object, caller: str) -> None:
    """Raise TypeError for what is no optimizer."""
    if not isinstance(optimizer, Optimizer) or not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        raise TypeError(
            f"{caller}: found {type(optimizer).__name__}, expected a "
            "torch.optim.Optimizer that was made (not its class, nor the model). Of a wrapper "
            "around one, give what it wraps (its `.optimizer`)."
        )


def managed_optimizer(optimizer: Optimizer) -> ManagedOptimizer | None:
    """What :func:`manage_optimizer` returned for an optimizer that is managed now; else None."""
    managed: ManagedOptimizer | None = vars(optimizer).get(_ATTRIBUTE)
    return managed


class ManagedOptimizer(Uncopied):
    """An optimizer whose state is away between steps. Made by :func:`memswap.manage_optimizer`.

    Args:
        optimizer: whose state it is.
        action: what is done with state; None: what suits its device.
        pool: where the bytes go; None: a default pool of the device.
        room_bytes: most bytes of the device in a step; None: a share of the state.
        chunked: whether steps go chunk by chunk; None: for classes that are known to.
        min_bytes: shorter tensors stay.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        action: Action | None,
        pool: Pool | None,
        room_bytes: int | None,
        chunked: bool | None,
        min_bytes: int,
    ) -> None:
        self._optimizer = ref(optimizer)  # which owns this
        self._mover = StateMover(action, pool, min_bytes)
        self._room_bytes = room_bytes
        self._known = steps_in_parts(type(optimizer))
        self._chunked = self._known if chunked is None else chunked
        self._why_whole = "" if self._chunked else why_whole(type(optimizer), chunked)
        self._view_class = view_class(type(optimizer)) if self._chunked else None
        self._stream: StateStream | None = None
        self._groups: list[dict[str, Any]] = []
        self._before: list[dict[str, Any]] = []
        self._chunk_groups: list[int] = []
        self._present = 0
        self._staying: frozenset[int] = frozenset()  # parameters, by id
        self._steps = self._chunks = 0
        self._peak_bytes = 0
        self._began_s = self._last_step_s = 0.0
        self._endurance = Endurance(pool)
        self._handles: list[RemovableHandle] = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
            optimizer.register_state_dict_post_hook(self._state_dict),
            optimizer.register_load_state_dict_pre_hook(self._before_load),
            optimizer.register_load_state_dict_post_hook(self._after_load),
        ]
        attributes: Any = optimizer.__dict__
        attributes[_ATTRIBUTE] = self
        # Pickling and copying ask the instance. What they get is the optimizer without memswap.
        attributes["__getstate__"] = plain_getstate(ref(optimizer))
        self._send_all(optimizer)

    # --- for the user -----------------------------------------------------------------------------

    @property
    def chunked(self) -> bool:
        """Whether steps go chunk by chunk."""
        return self._chunked

    @property
    def encodes(self) -> bool:
        """Whether state that is away is in frames where it was."""
        return self._mover.encodes

    @property
    def peak_bytes(self) -> int:
        """What the last step had on the device at most; 0 where steps do not go by chunks."""
        return self._peak_bytes

    @contextmanager
    def present(self) -> Iterator[None]:
        """All state is in its tensors for the time of a `with` block, on the device, at once.

        A step inside the block finds it there, and leaves it there.

        Raises:
            TransferError: some of it cannot be read back.
        """
        optimizer = self._alive()
        self._end_interrupted()
        self._present += 1
        try:
            self._bring_all(optimizer)
            yield
        finally:
            self._present -= 1
            if not self._present and self._handles:
                self._send_all(optimizer)

    def remove(self) -> None:
        """Bring all state back and leave the optimizer as it was before. Safe to call twice.

        Raises:
            TransferError: some of it cannot be read back. The optimizer is still managed.
        """
        optimizer = self._optimizer()
        if optimizer is None or not self._handles:
            return
        self._end_interrupted()
        self._bring_all(optimizer)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for name in (_ATTRIBUTE, "__getstate__"):
            optimizer.__dict__.pop(name, None)

    def keep(self, nbytes: int) -> None:
        """Have the state of the first parameters stay on the device, as many as have so few bytes.

        What was away comes with the next step; what stayed and is to go leaves at once.

        Args:
            nbytes: most bytes that stay; 0: none, as at first.
        """
        optimizer = self._alive()
        before, self._staying = self._staying, self._first(optimizer, nbytes)
        if before - self._staying and not self._present:
            self._end_interrupted()
            self._send_all(optimizer)

    def sizes(self) -> tuple[int, ...]:
        """Bytes of each parameter's state that may be away, in the order in which they stay."""
        optimizer = self._alive()
        return tuple(self._movable(optimizer, one) for one in parameters_of(optimizer))

    def staying_bytes(self) -> int:
        """Bytes of state on the device that `keep` has there."""
        optimizer = self._alive()
        return sum(
            self._movable(optimizer, one, here=True)
            for one in parameters_of(optimizer)
            if id(one) in self._staying
        )

    def _movable(self, optimizer: Optimizer, parameter: torch.Tensor, here: bool = False) -> int:
        """Bytes of a parameter's state that are away or could be; `here`: that are not away."""
        nbytes = 0
        for tensor in state_of(optimizer, parameter):
            away = away_of(tensor)
            if away is not None:
                nbytes += 0 if here else away.nbytes
            elif self._mover.may_move(tensor):
                nbytes += tensor.numel() * tensor.element_size()
        return nbytes

    def _first(self, optimizer: Optimizer, nbytes: int) -> frozenset[int]:
        found = []
        for parameter in parameters_of(optimizer):
            nbytes -= self._movable(optimizer, parameter)
            if nbytes < 0:
                break
            found.append(id(parameter))
        return frozenset(found)

    def statistics(self) -> OptimizerStatistics:
        """What the state has done up to now."""
        optimizer = self._alive()
        total = away_bytes = pool_bytes = frame_bytes = 0
        for tensor in _all_state(optimizer):
            away = away_of(tensor)
            total += tensor.numel() * tensor.element_size()
            if away is not None:
                away_bytes += away.nbytes
                pool_bytes += away.form.pool_nbytes
                frame_bytes += away.form.device_nbytes
        return OptimizerStatistics(
            steps=self._steps,
            chunks=self._chunks,
            state_bytes=total,
            away_bytes=away_bytes,
            pool_bytes=pool_bytes,
            frame_bytes=frame_bytes,
            kept=dict(self._mover.kept),
            room_bytes=self._room_of(optimizer),
            peak_bytes=self._peak_bytes,
            sent_bytes=self._mover.sent_bytes,
            brought_bytes=self._mover.brought_bytes,
            last_step_s=self._last_step_s,
        )

    def report(self) -> str:
        """Where the state is, how steps go and what stays, in words."""
        now = self.statistics()
        name = type(self._alive()).__name__
        lines = [f"{name}: {format_bytes(now.state_bytes)} of state, {self._where(now)}"]
        if self._why_whole:
            lines.append(f"steps: all state comes back before and leaves after: {self._why_whole}")
        elif now.steps:
            lines.append(
                f"steps: in {now.chunks} chunk(s), at most {format_bytes(now.peak_bytes)} of state "
                f"on the device (room: {format_bytes(now.room_bytes)})"
            )
        else:
            lines.append(f"steps: none yet; room: {format_bytes(now.room_bytes)}")
        lines += self._endurance.line(self._mover.written_bytes(), "a step")
        lines += self._mover.describe_pools()
        for reason, nbytes in sorted(now.kept.items(), key=lambda item: -item[1]):
            lines.append(f"stays: {format_bytes(nbytes)} ({reason})")
        return "\n".join(lines)

    @staticmethod
    def _where(now: OptimizerStatistics) -> str:
        if not now.away_bytes:
            return "nothing away"
        places = [f"{format_bytes(now.away_bytes)} away"]
        if now.pool_bytes:
            places.append(f"{format_bytes(now.pool_bytes)} in the pool")
        if now.frame_bytes:
            places.append(f"{format_bytes(now.frame_bytes)} as frames")
        return ": ".join([places[0], ", ".join(places[1:])])

    def __repr__(self) -> str:
        optimizer = self._optimizer()
        name = "gone" if optimizer is None else type(optimizer).__name__
        return f"<memswap.ManagedOptimizer of {name}, {self._steps} steps>"

    # --- a step -----------------------------------------------------------------------------------

    @uncompiled
    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if is_view(optimizer) or self._present:  # a class whose step calls its base's; all is here
            return None
        self._began_s = time.perf_counter()
        _refuse_capture(optimizer)
        self._end_interrupted()
        self._mover.begin_step()
        if self._view_class is None:
            self._bring_all(optimizer)
            return None
        room_bytes = self._room_of(optimizer)
        chunks = chunks_of(optimizer, max(room_bytes // PARTS, 1), self._staying)
        self._stream = StateStream(
            optimizer, self._mover, chunks, room_bytes, self._known, self._staying
        )
        self._groups = self._stream.groups()
        self._before = [dict(group) for group in self._groups]
        self._chunk_groups = [chunk.group for chunk in chunks]
        return (new_view(self._view_class, optimizer, self._groups), *args[1:]), kwargs

    @uncompiled
    def _after_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if is_view(optimizer) or self._present:
            return
        stream = self._stream
        if stream is None:
            self._send_all(optimizer)
            self._chunks = 0
        else:
            stream.end()
            self._stream = None
            self._chunks, self._peak_bytes = len(self._groups), stream.peak_bytes
            self._write_back(optimizer)
        self._steps += 1
        self._endurance.count()
        self._last_step_s = time.perf_counter() - self._began_s

    def _write_back(self, optimizer: Optimizer) -> None:
        """What the step wrote into its groups belongs into the optimizer's.

        Raises:
            OptimizerStepError: chunks of one group do not agree on it.
        """
        groups, self._groups = self._groups, []
        before, self._before = self._before, []
        written: dict[tuple[int, str], Any] = {}
        for number, now, then in zip(self._chunk_groups, groups, before, strict=True):
            for key, value in now.items():
                if key in ("params", "param_names") or then.get(key, _NOTHING) is value:
                    continue
                known = written.setdefault((number, key), value)
                if known is not value and not _equal(known, value):
                    raise OptimizerStepError(
                        f"{type(optimizer).__name__} computes {key!r} of a parameter group over "
                        f"all of its parameters (chunks found {known!r} and {value!r}), so that it "
                        "cannot step chunk by chunk: this step was wrong. Load the state from "
                        "before it, and manage the optimizer without chunked=True."
                    )
        for (number, key), value in written.items():
            optimizer.param_groups[number][key] = value

    def _end_interrupted(self) -> None:
        """The last step may have raised: what it had on the device goes away."""
        if self._stream is not None:
            self._stream.end()
            self._stream = None

    def _room_of(self, optimizer: Optimizer) -> int:
        if self._room_bytes is not None:
            return self._room_bytes
        total = sum(moving_bytes(optimizer, one) for one in parameters_of(optimizer))
        return min(max(int(total * ROOM_SHARE), LEAST_ROOM), MOST_ROOM)

    def _bring_all(self, optimizer: Optimizer) -> None:
        tensors = list(_all_state(optimizer))
        try:
            for tensor in tensors:
                self._mover.begin_return(tensor)
            for tensor in tensors:
                self._mover.bring(tensor)
        finally:
            for tensor in tensors:  # after an error; the others are here
                self._mover.cancel_return(tensor)

    def _send_all(self, optimizer: Optimizer) -> None:
        self._mover.begin_step()
        not_these = storages_that_stay(optimizer)
        room_bytes = self._room_of(optimizer)
        for number, parameter in enumerate(optimizer.state):
            if id(parameter) in self._staying:
                continue
            for which, tensor in enumerate(state_of(optimizer, parameter)):
                while self._mover.leaving_bytes > room_bytes and self._mover.wait_oldest():
                    pass
                self._mover.send(tensor, f"all.{number}.{which}", not_these)
        self._mover.settle()

    # --- state_dict, load_state_dict --------------------------------------------------------------

    def _state_dict(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        self._end_interrupted()
        return on_host(state_dict)

    def _before_load(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        self._end_interrupted()
        return state_dict if self._present else loaded(optimizer, state_dict, self._mover)

    def _after_load(self, optimizer: Optimizer) -> None:
        if not self._present:
            self._send_all(optimizer)

    def _alive(self) -> Optimizer:
        optimizer = self._optimizer()
        if optimizer is None:
            raise RuntimeError("the optimizer that this managed is gone")
        return optimizer


_NOTHING = object()


def _all_state(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    for value in optimizer.state.values():
        yield from plain_tensors(value)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and torch.equal(a, b)
    return bool(a == b)


def _refuse_capture(optimizer: Optimizer) -> None:
    kinds = {one.device.type for one in parameters_of(optimizer)}
    if "cuda" in kinds and torch.cuda.is_current_stream_capturing():
        raise OptimizerStepError(
            "a step of a managed optimizer is captured into a CUDA graph, whose replays would move "
            "no state. Call remove() before capturing, or do not capture the step."
        )
