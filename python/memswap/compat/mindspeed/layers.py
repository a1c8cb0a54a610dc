"""MindSpeed's view of one layer: what it saved, and ways to encode and decode that by hand."""

from __future__ import annotations

import enum
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias
from weakref import ref

import torch

from memswap._native import native
from memswap.engine.action import Action, TensorInfo
from memswap.engine.handle import Handle, unpack
from memswap.engine.hook_scope import HookScope
from memswap.planning.policy import Policy
from memswap.windows import Windows

if TYPE_CHECKING:
    from memswap._C import Entry, EntryReference, Span
    from memswap.engine.engine import Engine

LayerKey: TypeAlias = Hashable
"""``(uuid of the layer, absolute order)``; anything that can be the key of a dict."""

Filter: TypeAlias = Callable[[torch.Tensor], bool]


class TensorState(enum.Enum):
    """Where a tensor's bytes are."""

    NORMAL = "normal"
    COMPRESS = "compress"


class SharedBuffers(list[object]):
    """Where MindSpeed keeps buffers that encodes share. Frames own their memory: it stays empty."""


class Calls:
    """Calls of functions that are windows, in one pass of a layer after the other."""

    __slots__ = ("_now", "latest")

    def __init__(self) -> None:
        self._now = 0
        self.latest = 0
        """Of the last pass that is over."""

    def begin(self) -> None:
        """A pass begins."""
        self.latest, self._now = self._now, 0

    def add(self) -> None:
        """One more in the present pass."""
        self._now += 1


class LayerActivationManager:
    """The tensors of one layer's forward, and ways to encode and decode them by hand.

    Args:
        order_layer_uuid: the layer's key.
        vice_stream: taken and not needed: the codec's lane has streams of its own.
        engine: the engine; None: a new one.

    Attributes:
        forward_calls, backward_calls: of functions that ``async_funcs`` names, by this layer.
    """

    def __init__(
        self,
        order_layer_uuid: LayerKey,
        vice_stream: object = None,
        *,
        engine: Engine | None = None,
    ) -> None:
        self.order_layer_uuid = order_layer_uuid
        self.engine = new_engine([]) if engine is None else engine
        self._scope = LayerScope(self)
        self._saved: dict[EntryReference, int] = {}  # and elements of the first tensor of each
        self._planned: list[EntryReference] = []
        self.forward_calls, self.backward_calls = Calls(), Calls()

    @property
    def seconds(self) -> float:
        """How long the layer's forward takes, as measured; 0 until then."""
        key = str(self.order_layer_uuid)
        return self.engine.lock.run(self.engine.durations.seconds, key, 1) or 0.0

    def begin_span(self) -> Span | None:
        """The forward is about to be launched; a span if it is to be measured."""
        device = torch.accelerator.current_accelerator(check_available=True)
        if device is None:
            return None
        return self.engine.start_span(str(self.order_layer_uuid), 1, device)[1]

    def end_span(self, span: Span | None) -> None:
        """It has been launched."""
        if span is not None:
            self.engine.lock.run(self.engine.durations.stop, span)

    def push_start(self) -> None:
        """A forward begins."""
        self.forward_calls.begin()
        self._saved = {one: count for one, count in self._saved.items() if one() is not None}
        self._scope = LayerScope(self)

    def push(self, tensor: torch.Tensor) -> Handle:
        """Save a tensor. :meth:`pop` takes what this returns."""
        return self._scope.pack(tensor)

    def note(self, handle: Handle, tensor: torch.Tensor) -> None:
        """A tensor was saved."""
        if isinstance(handle, native.Handle) and not handle.stays:
            self._saved.setdefault(handle.entry.reference, tensor.numel())

    def pop_start(self) -> None:
        """Backward begins: what no window took is brought back as it is demanded."""
        self.backward_calls.begin()

    def pop(self, packed: Handle | torch.Tensor) -> torch.Tensor:
        """The tensor again, ordered before what the caller does next.

        Raises:
            TypeError: `packed` is neither what :meth:`push` returned nor a tensor, which comes back
                as it is.
        """
        if isinstance(packed, torch.Tensor):
            return packed
        if not isinstance(packed, Handle):
            raise TypeError(
                f"pop(): found {type(packed).__name__}, expected what push() returned for the "
                "tensor"
            )
        return unpack(packed)

    def plan(
        self, max_numel: float, filter_state: TensorState = TensorState.NORMAL
    ) -> list[EntryReference]:
        """Tensors in a state, in the order of saving, of fewer than `max_numel` elements in all.

        Args:
            max_numel: elements that may be encoded (or decoded) beside the operator that comes.
            filter_state: NORMAL: those that wait to be encoded; COMPRESS: those that are away
                and not on their way back.

        Returns:
            What :meth:`pack` and :meth:`unpack` take.
        """
        self._planned = self.engine.lock.run(self._plan, max_numel, filter_state)
        return self._planned

    def _plan(self, max_numel: float, filter_state: TensorState) -> list[EntryReference]:
        chosen, total = [], 0
        windows = self.engine.windows
        waiting = {entry.reference for entry in windows.queue.pending} if windows else set()
        for reference, count in self._saved.items():
            entry = reference()
            if entry is None or total + count >= max_numel:
                continue
            away = entry.away is not None and entry.state in (
                native.State.LEAVING,
                native.State.AWAY,
            )
            if away if filter_state is TensorState.COMPRESS else reference in waiting:
                chosen.append(reference)
                total += count
        return chosen

    def pack(
        self,
        shares: Mapping[EntryReference, object] | Iterable[object] | None = None,
        statistic: bool = False,
    ) -> None:
        """Start encoding, beside what the caller launches next.

        Args:
            shares: what :meth:`plan` chose, or a part of it: in a list, as the keys of a mapping,
                or each in a pair with anything. None, or a context's ``share_memorys``: all that
                was planned last.
            statistic: taken and not needed.

        Raises:
            TypeError: an element is nothing that :meth:`plan` chose.
        """
        if shares is not None and not isinstance(shares, SharedBuffers):
            self._planned = [chosen(one) for one in shares]
        if self.engine.windows is not None:
            self.engine.lock.run(self.engine.windows.queue.start_now, self._taken())

    def pack_done(self) -> None:
        """The current stream waits for these encodes; their storages are free then."""
        self.engine.lock.run(self._wait_sent)

    def _wait_sent(self) -> None:
        for entry in self._taken():
            if entry.departure is not None and entry.state is native.State.LEAVING:
                entry.departure.wait()

    def unpack(self, choices: Sequence[EntryReference]) -> None:
        """Start decoding, beside what the caller launches next."""
        self._planned = list(choices)
        if self.engine.windows is not None:
            self.engine.lock.run(self.engine.windows.bring, self._taken())

    def unpack_done(self) -> None:
        """The current stream waits for these decodes. (Whoever pops a tensor waits for its own.)"""
        self.engine.lock.run(self._wait_back)

    def _wait_back(self) -> None:
        for entry in self._taken():
            if entry.arrival is not None:
                entry.arrival.wait()

    def _taken(self) -> list[Entry]:
        entries = [reference() for reference in self._planned]
        return [entry for entry in entries if entry is not None]


class LayerScope(HookScope):
    """Hooks that tell a layer's manager, which may own them, what it saves."""

    __slots__ = ("_manager",)

    def __init__(self, manager: LayerActivationManager) -> None:
        super().__init__(manager.engine, str(manager.order_layer_uuid))
        self._manager = ref(manager)

    def pack(self, tensor: torch.Tensor) -> Handle:
        handle: Handle = super().pack(tensor)
        manager = self._manager()
        if manager is not None:
            manager.note(handle, tensor)
        return handle


def chosen(share: object) -> EntryReference:
    """What was chosen, alone or with what is to be done with it."""
    first = share[0] if isinstance(share, tuple) and share else share
    if not isinstance(first, native.EntryReference):
        raise TypeError(
            f"pack(shares): found {type(first).__name__}, expected what plan(max_numel) returned, "
            "or some of it"
        )
    return first


def new_engine(filters: list[Filter]) -> Engine:
    """An engine that encodes what passes all filters."""

    def filtered(tensor: torch.Tensor, info: TensorInfo) -> Action:
        return Action.ENCODE if all(accepts(tensor) for accepts in filters) else Action.KEEP

    return Windows().engine(
        Policy(action=Action.ENCODE, fn=filtered if filters else None), None, None
    )
