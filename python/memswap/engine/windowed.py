"""WindowedEngine: the engine whose encodes and decodes wait for windows."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from memswap._native import native
from memswap.engine.autograd import in_backward
from memswap.engine.engine import Engine
from memswap.engine.entry import RESIZED, State
from memswap.engine.hook_scope import HookScope

if TYPE_CHECKING:
    from collections.abc import Hashable

    from memswap._C import EntryReference, Iteration, StorageRef
    from memswap.engine.action import Decider
    from memswap.engine.entry import Entry
    from memswap.engine.expectations import Expectation
    from memswap.engine.lane import Ticket
    from memswap.engine.transfer import Pool, Route
    from memswap.engine.windows import Pending, WindowQueue, WindowStats


#: What an encode frees of a tensor of which no frame has been seen.
FIRST_GAIN = 1 / 3


class Deferred(NamedTuple):
    """An encode that waits for a window."""

    entry: EntryReference
    nbytes: int
    gain: float
    stream: Hashable
    sender: native.FrameSender
    route: Route
    expectation: Expectation


class Observer(Protocol):
    """Who wants to know what is started, to measure it."""

    def begin_iteration(self) -> None:
        """What follows belongs to a new forward."""

    def begin(self) -> None:
        """What follows is submitted in one go."""

    def submitted(self, stream: tuple[int, int, int], nbytes: int, encoded: bool) -> None:
        """An encode (or a decode) was put on a lane's stream: (stream id, device, type)."""


class WindowedEngine(Engine):
    """An engine whose lanes get encodes and decodes when a window opens (see [Note: Windows]).

    Where a lane does not work ahead of the host (a CPU) there is nothing to run beside, and
    everything is done at once as in any engine.
    """

    def __init__(
        self,
        policy: Decider,
        pool: Pool | None,
        window_bytes: int | None,
        queue: WindowQueue,
        observer: Observer | None = None,
    ) -> None:
        super().__init__(policy, pool, window_bytes)
        self.looks_ahead = False  # that is for a window: `look_ahead`
        self.queue = queue
        self.observer = observer
        self._inside = threading.local()  # explicit windows that the thread is in
        self._demanded: Iteration | None = None  # whose storage was demanded last
        self._works_ahead = False  # whether codec work was ever put off
        if observer is not None:
            observer.begin_iteration()

    # --- windows ----------------------------------------------------------------------------------

    def open_window(self, seconds: float) -> None:
        """An operator of so many seconds is about to be launched on the current stream."""
        if self.in_window:
            return  # whoever opened a window explicitly has counted what is inside
        with self.lock:
            self._observe()
            if self.directed:
                self.note_window(seconds)
            iteration = self._demanded if in_backward() else self.iteration
            if iteration is not None and self._works_ahead:
                iteration.open_window(seconds * self.queue.decode_rate)
            self.queue.open(seconds, self)

    @property
    def in_window(self) -> bool:
        """Whether the thread is in an explicit window."""
        return getattr(self._inside, "depth", 0) > 0

    def enter_window(self, seconds: float) -> None:
        """The same for several operators, up to :meth:`leave_window`, which the thread calls."""
        self.open_window(seconds)
        self._inside.depth = getattr(self._inside, "depth", 0) + 1

    def leave_window(self) -> None:
        self._inside.depth -= 1
        if not self._inside.depth:
            with self.lock:
                self.queue.close(self)

    def end_forward(self) -> None:
        """The managed part of a forward is over."""
        with self.lock:
            self._observe()
            self.queue.end_forward(self)

    def hurry(self, entry: Entry) -> None:
        """Start an encode now if it still waits: its room is needed."""
        if entry.storage is not None and entry.state is State.RESIDENT:
            self._observe()
            self.queue.start_now((entry.reference,), self)

    def window_stats(self) -> WindowStats:
        with self.lock:
            return self.queue.stats()

    def reset_stats(self) -> None:
        with self.lock:
            super().reset_stats()
            self.queue.reset_stats()

    def settle(self) -> None:
        """As in any engine; encodes that wait stay undone."""
        with self.lock:
            self.queue.clear()
        super().settle()

    def _observe(self) -> None:
        if self.observer is not None:
            self.observer.begin()

    # --- instead of at once -----------------------------------------------------------------------

    def begin_iteration(self) -> None:
        with self.lock:
            before = self.iteration
            super().begin_iteration()
            if self.iteration is not before:
                self.queue.begin_iteration()
                if self.observer is not None:
                    self.observer.begin_iteration()

    def send_encode(
        self,
        entry: Entry,
        storage: StorageRef,
        sender: native.FrameSender,
        route: Route,
        expectation: Expectation,
    ) -> bool:
        """Promise an encode. There may turn out to be no room when it starts."""
        if not sender.works_ahead:
            return super().send_encode(entry, storage, sender, route, expectation)
        self._works_ahead = True
        entry.storage = storage
        stream = stream_key(route.device)
        sizes = route.expectations.sizes(expectation.key)
        gain = FIRST_GAIN if sizes is None else 1 - sizes[0] / entry.nbytes
        deferred = Deferred(entry.reference, entry.nbytes, gain, stream, sender, route, expectation)
        self._observe()
        self.queue.defer(deferred, self)
        return True

    def look_ahead(self, iteration: Iteration, index: int) -> None:
        """A storage is demanded: what comes next is wanted."""
        first = not iteration.began_backward
        self._demanded = iteration
        entries = iteration.demand(index)
        waits, window_bytes = entries, iteration.window_bytes
        if iteration.returns_as_planned:  # copies take no processors, and start in time
            window_bytes = iteration.least_window_bytes  # a plan asks for little ahead
            waits = [one for one in entries if on_device(one.away)]
            self._prefetch(one for one in entries if not on_device(one.away))
        self._observe()
        if first:
            self.queue.begin_backward(self)
        self.queue.want(waits, window_bytes, self)

    # --- windows.CodecWork
    # ---------------------------------------------------------------------------

    def start(self, pending: Pending) -> Ticket | None:
        """Start an encode now, on its own stream. None: there was no room, and the entry stays."""
        assert isinstance(pending, Deferred)
        entry, sender, route = pending.entry(), pending.sender, pending.route
        if entry is None or entry.storage is None:
            return None
        if entry.lost_memory:
            self.ledger.keep(RESIZED, entry.nbytes)
            return None
        storage, entry.storage = entry.storage, None
        reason: str | None = None
        if super().send_encode(entry, storage, sender, route, pending.expectation):
            self._notice(sender.lane, entry.nbytes, encoded=True)
        else:
            planned = pending.expectation.most_nbytes is not None
            if not planned:
                reason = self.refuse(sender, entry)
            elif entry.iteration is not None:
                entry.iteration.unfit = True
            if planned or not sender.stays_on_device:  # raw, if there is room for that
                reason = self._swap(entry, storage, route)
        if reason is None:
            return entry.departure
        entry.storage = storage
        self.ledger.keep(reason, entry.nbytes)
        return None

    def fetch(self, entry: Entry) -> bool:
        """Start bringing an entry back, unless it is not away. Whether that was done."""
        try:
            fetched = super().fetch(entry)
        except torch.OutOfMemoryError:
            return False  # the demand itself will ask again, when there may be room
        if fetched and isinstance(entry.away, native.FrameForm):
            self._notice(entry.away.lane, entry.nbytes, encoded=False)
        return fetched

    def _notice(self, lane: native.CodecLane, nbytes: int, encoded: bool) -> None:
        if self.observer is not None and isinstance(lane, native.StreamCodecLane):
            stream = lane.encode_stream if encoded else lane.decode_stream
            self.observer.submitted(stream, nbytes, encoded)

    def on_stream(self, stream: Hashable) -> bool:
        """Whether a tensor's stream is current now, and takes work outside a capture."""
        device = stream[0] if isinstance(stream, tuple) else None
        if device is None or stream_key(device) != stream:
            return False
        return device.type != "cuda" or not torch.cuda.is_current_stream_capturing()


def on_device(away: native.AwayForm | None) -> bool:
    """Whether an away form is a frame on the device."""
    return isinstance(away, native.FrameForm) and not away.swapped


def stream_key(device: torch.device) -> tuple[torch.device, int]:
    """What the current stream of a device compares equal to."""
    return device, torch.accelerator.current_stream(device).stream_id


def innermost() -> WindowedEngine | None:
    """The windowed engine whose hooks are installed innermost on this thread, if there is one."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    while hooks is not None:
        scope = getattr(hooks[0], "__self__", None)
        if not isinstance(scope, HookScope):
            return None
        if isinstance(scope.engine, WindowedEngine):
            return scope.engine
        hooks = scope.outer
    return None
