"""Saver: the pair of hooks that joins autograd to the engine.

From pack to unpack, in the order of the code: a tensor is offered to :meth:`Visit.pack`; its
storage is looked up or becomes an :class:`Entry`; the policy and the timeline say whether it stays;
a way is taken, and its lane sends the bytes to a pool or encodes them. In backward, the handle that
pack returned demands the storage from :meth:`Saver.demand`, which brings it back, or finds it on
its way already, and asks for what comes next.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from memswap._native import native
from memswap.engine.action import Action, Decider, TensorInfo
from memswap.engine.entry import Entry, State, Stay
from memswap.engine.handle import Given, Handle, Kept, Moved, Parts, Passed, unpack
from memswap.engine.stats import Ledger, Stats
from memswap.engine.timeline import NEVER_FREED, PLANNED, Timeline
from memswap.engine.transfer import Routes
from memswap.errors import TransferError

if TYPE_CHECKING:
    from memswap._C import FrameWatch, SavedView, StorageRef, WeakStorage
    from memswap.engine.director import Director
    from memswap.engine.expectations import Expectation, Expectations
    from memswap.engine.timeline import Passage
    from memswap.engine.transfer import Pool, Route, Way

    HookPair = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]

_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_push_hooks = torch._C._autograd._push_saved_tensors_default_hooks
_pop_hooks = torch._C._autograd._pop_saved_tensors_default_hooks
_hooks_disabled = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message
_graph_task = torch._C._current_graph_task_id


class _Encoding(NamedTuple):
    """An encode whose report has not arrived yet."""

    expectations: Expectations
    expectation: Expectation
    watch: FrameWatch
    entry: ref[Entry]


class Saver:
    """One engine: a policy, routes, a timeline and the entries that are alive.

    Nothing in it is shared with another saver. Hooks may be called from any thread; `lock`
    serialises the bookkeeping, and no transfer ever waits for it.
    """

    def __init__(self, policy: Decider, pool: Pool | None, window_bytes: int | None) -> None:
        self.policy = policy
        self.lock = threading.RLock()  # reentrant: an entry may die wherever Python collects
        self.ledger = Ledger()
        self.timeline: Timeline[Entry] = Timeline(window_bytes)
        self.passage: Passage[Entry] = self.timeline.begin()
        #: Storages of parameters and buffers. A weak storage keeps its key from being reused.
        self.persistent: dict[int, WeakStorage] = {}
        #: Who watches and directs what leaves, under a memory budget; None: the policy alone.
        self.director: Director | None = None
        self._routes = Routes(pool)
        #: Entries by the address of their storage. Dead ones are swept out once a passage; until
        #: then they find nobody, whatever their address is used for.
        self._entries: dict[int, ref[Entry] | ref[Stay]] = {}
        self._leaving: deque[ref[Entry]] = deque()  # in the order of their sends
        self._lingering: deque[ref[Entry]] = deque()  # sent, and held by somebody
        self._encoding: deque[_Encoding] = deque()  # in the order of their encodes

    # --- the life of a passage ------------------------------------------------------------------

    def begin_passage(self) -> None:
        """What is saved from now on belongs to a new forward."""
        with self.lock:
            self._sweep()
            if self.passage.sizes:
                ended, self.passage = self.passage, self.timeline.begin()
                leaving_bytes = ended.leaving_bytes
                if self.director is not None:
                    leaving_bytes = self.director.begin(self.passage) or leaving_bytes
                self._routes.begin_passage(leaving_bytes, sum(ended.sizes))

    def route(self, device: torch.device) -> Route | None:
        """How storages leave a device; None where they stay."""
        return self._routes.to(device)

    def stats(self) -> Stats:
        with self.lock:
            self._sweep()
            self._notice_gone(looks=len(self._lingering))
            self._learn()
            return self.ledger.snapshot()

    def reset_stats(self) -> None:
        with self.lock:
            self._notice_gone(looks=len(self._lingering))
            self._learn()
            self.ledger.reset()

    def settle(self) -> None:
        """Order everything after the transfers under way, and drop the storages they hold."""
        self._routes.settle()

    def check_decodes(self) -> None:
        """Wait for decodes under way; raise TransferError if a frame was not what was encoded."""
        self._routes.check_decodes()

    # --- pack -------------------------------------------------------------------------------------

    def save(self, tensor: torch.Tensor, view: SavedView, visit: Visit) -> Handle | str:
        """The handle of a plain tensor, or the reason why it should stay."""
        nbytes: int = view.storage_nbytes
        known = self._known(view)
        if known is not None:
            self.ledger.deduplicated_tensors += 1
            self.ledger.deduplicated_bytes += view.nbytes
            return Kept(tensor, known) if known.away is None else Moved(known, view)
        if nbytes < self.policy.min_bytes:
            return "small"
        if not visit.covered:
            return "policy"
        if _graph_task() != -1:
            return "saved in backward"
        policy = self.policy
        director = self.director
        action = visit.action
        if action is None:
            action = policy.action
            if policy.fn is not None:  # most have none: spare them the TensorInfo
                action = policy.decide(tensor, TensorInfo(visit.unit, view.nbytes, nbytes))
        if action is Action.KEEP and director is None:
            return self._stay(tensor, view, "policy")
        route = self._routes.to(tensor.device)
        if route is None:
            return self._stay(tensor, view, "host memory beside an accelerator")
        if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
            return "stream capture"
        if self.passage.began_backward:
            self.begin_passage()
        self._notice_gone()
        if self._encoding:
            self._learn()
        if action is None:
            action = route.default_action
        visit.ordinal += 1
        chosen = None
        if director is not None:
            chosen = director.choose(tensor, visit.unit, visit.ordinal, nbytes, action)
            if visit.action is not None:
                chosen = None  # who packs insists
            action = chosen or action
        verdict = self.passage.admit(nbytes, action is Action.ENCODE, visit.group)
        if action is Action.KEEP:
            verdict = "policy" if chosen is None else PLANNED
        elif chosen is not None and verdict is not NEVER_FREED:
            verdict = None
        storage = native.StorageRef(tensor)
        entry = Entry(self, view, storage)
        self.passage.place(entry)
        self._entries[view.key] = entry.reference
        if verdict is None:
            if action is Action.SWAP:
                verdict = self._swap(entry, storage, route)
            else:
                verdict = self._encode(entry, storage, route, action, visit, tensor.dtype)
        handle: Handle
        if verdict is not None:
            self.ledger.keep(verdict, nbytes)
            handle = Kept(tensor, entry)
        else:
            self._leaving.append(entry.reference)
            handle = Moved(entry, view)
        if director is not None:
            director.saved(entry)
        return handle

    def _swap(self, entry: Entry, storage: StorageRef, route: Route) -> str | None:
        """Start swapping an entry's storage. None, or the reason why it stays."""
        way = route.swap
        sent = way.send(storage, None)
        if sent is None:
            return self._refused(way, entry, route)
        entry.leave(way, *sent)
        return None

    def _encode(
        self,
        entry: Entry,
        storage: StorageRef,
        route: Route,
        action: Action,
        visit: Visit,
        dtype: torch.dtype,
    ) -> str | None:
        """Start encoding an entry's storage. None, or the reason why it stays."""
        way = route.encoding(action)
        if way is None:
            reason = "no codec"
        else:
            expectations = route.expectations
            expectation = expectations.of(visit.unit, visit.ordinal, entry.nbytes, dtype)
            if expectation.pays:
                sent = way.send(storage, expectation)
                if sent is None and expectation.trial:
                    expectation = expectations.settled(expectation)
                    sent = way.send(storage, expectation)
                if sent is not None:
                    entry.leave(way, *sent)
                    made = _Encoding(expectations, expectation, sent[0].watch(), entry.reference)
                    # Where nothing works ahead an encode has ended, unless it failed.
                    if way.works_ahead or made.watch.report() is not None:
                        self._encoding.append(made)
                    return None
                reason = self._refused(way, entry, route)
            else:
                reason = "does not shrink"
        return reason if action is Action.ENCODE else self._swap(entry, storage, route)

    def _refused(self, way: Way, entry: Entry, route: Route) -> str:
        """A way has no room: the reason in the statistics. In full it is told once."""
        self.ledger.tell_once(
            way.short_of,
            f"a storage of {entry.nbytes} bytes stays on {route.device}: {way.why_refused()}. "
            "Training goes on with less memory saved.",
        )
        return way.short_of

    def _learn(self) -> None:
        """Take in what encoders have reported by now, in the order of their encodes."""
        encoding = self._encoding
        while encoding:
            made = encoding[0]
            report = made.watch.report()
            if report is None:
                return
            encoding.popleft()
            made.expectations.learn(made.expectation, report)
            ledger = self.ledger
            ledger.encoded_storages += 1
            ledger.encoded_bytes += made.expectation.key.nbytes
            ledger.frame_bytes += report.frame_nbytes
            entry = made.entry()
            if entry is not None:
                entry.count_held()

    def _stay(self, tensor: torch.Tensor, view: SavedView, reason: str) -> Kept:
        """Keep a tensor for good, but know its storage: once, however often it is saved."""
        nbytes: int = view.storage_nbytes
        stay = Stay(self.ledger, nbytes, view.version)
        self._entries[view.key] = ref(stay)
        self.ledger.keep(reason, nbytes)
        return Kept(tensor, stay)

    def _known(self, view: SavedView) -> Entry | Stay | None:
        """The live entry of this very storage with this very content."""
        reference = self._entries.get(view.key)
        entry = None if reference is None else reference()
        if entry is None or entry.version != view.version or entry.fetched:
            return None
        return entry

    def forget_identity(self, entry: Entry) -> None:
        """The storage that the entry was known by is gone; its address may be used again."""
        key = entry.identity.key
        if self._entries.get(key) is entry.reference:
            del self._entries[key]

    def _sweep(self) -> None:
        """Forget entries that died."""
        for key in [key for key, reference in self._entries.items() if reference() is None]:
            del self._entries[key]

    def _notice_gone(self, looks: int = 3) -> None:
        """Account for storages that went away since the last look, oldest first.

        A storage that was sent and is still held, by the forward or by the user, lingers. `looks`
        bounds the lingering ones that are looked at, so that each save pays for a few.
        """
        leaving, lingering = self._leaving, self._lingering
        for _ in range(min(looks, len(lingering))):
            reference = lingering.popleft()
            entry = reference()
            if entry is not None and entry.state is State.LEAVING and not entry.gone():
                lingering.append(reference)
        while leaving:
            entry = leaving[0]()
            if entry is not None and entry.state is State.LEAVING and not entry.gone():
                if not entry.sent():
                    return
                if not entry.gone():
                    lingering.append(leaving[0])
            leaving.popleft()

    # --- unpack -----------------------------------------------------------------------------------

    def demand(self, entry: Entry) -> StorageRef:
        """The storage of an entry, ordered before what the caller does next."""
        with self.lock:
            self.ledger.fold_retired()
            if self._encoding:
                self._learn()
            director = self.director
            if director is not None:
                director.demanding(entry)
            storage, late = entry.bring()
            arrival = entry.remains.arrival
            if late:
                self.ledger.stalls += 1
            if entry.passage is not None:
                self._prefetch(entry.passage.demand(entry.index))
        if arrival is not None:
            begin = perf_counter()
            try:
                arrival.wait()
            except native.TransferError as error:
                raise TransferError(f"a saved tensor cannot be brought back: {error}") from error
            self.ledger.exposed_wait_s += perf_counter() - begin
        if director is not None:
            director.demanded(entry)
        return storage

    def demand_kept(self, entry: Entry) -> None:
        """A storage that stayed is demanded: what comes next may have to come back."""
        with self.lock:
            passage = entry.passage
            if passage is None:
                return
            self.ledger.fold_retired()
            director = self.director
            if director is not None:
                director.demanding(entry)
            index = entry.index
            if (
                index in passage.held
                and not passage.was_demanded(index)
                and entry.held_by_handles_only()
            ):
                passage.held.discard(index)  # next time it would be freed, so it may leave
            self._prefetch(passage.demand(index))
            if director is not None:
                director.demanded(entry)

    def _prefetch(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            way = entry.way
            if entry.away is None or way is None or not way.works_ahead:
                continue
            if entry.storage is not None or not entry.gone():
                continue
            try:
                entry.fetch()
            except torch.OutOfMemoryError:
                return  # the demand itself will ask again, when there may be room


class Visit:
    """One installation of a saver's hooks: a ``with`` block, or one call of a unit.

    Args:
        action: what to do with all that is packed, instead of what the policy says.
        group: storages of one group come back in the order in which they were saved
            (`Passage.admit`).
    """

    __slots__ = ("action", "covered", "group", "ordinal", "outer", "pushed", "saver", "unit")

    def __init__(
        self, saver: Saver, unit: str, action: Action | None = None, group: int | None = None
    ) -> None:
        self.saver = saver
        self.unit = unit
        self.action = action
        self.group = group
        self.covered = action is not None or saver.policy.covers(unit)
        self.ordinal = -1  # of the storage that was considered last
        self.outer: HookPair | None = None
        self.pushed = False

    def enter(self) -> None:
        """Install the hooks, unless saving here is somebody else's business.

        [Note: Composition] PyTorch applies only the innermost pair of hooks. What a visit does not
        move it therefore hands to the pair that was installed before. Inside a region of
        torch.utils.checkpoint the visit steps aside altogether: the region saves nothing but its
        inputs, which the hooks outside it see. Where saved-tensor hooks are disabled (torch.func),
        tensors stay.
        """
        if not torch.is_grad_enabled() or _hooks_disabled() is not None:
            return
        outer = _top_hooks(True)
        if outer is not None and getattr(outer[0], "__module__", "") == "torch.utils.checkpoint":
            return
        self.outer = outer
        _push_hooks(self.pack, unpack)
        self.pushed = True

    def innermost(self) -> bool:
        """Whether leaving now would take off these hooks, or none."""
        top = _top_hooks(True)
        return not self.pushed or (top is not None and top[0] == self.pack)

    def leave(self) -> None:
        if self.pushed:
            self.pushed = False
            _pop_hooks()

    def pack(self, tensor: torch.Tensor) -> Handle:
        """The pack hook. Never raises for want of memory or support; the tensor stays then."""
        saver = self.saver
        ledger = saver.ledger
        view = native.capture(tensor)
        if view is None:
            return self._pack_unusual(tensor)
        with saver.lock:
            ledger.fold_retired()
            ledger.offered_tensors += 1
            ledger.offered_bytes += view.nbytes
            if view.of_leaf or view.key in saver.persistent or is_frozen_parameter(tensor):
                outcome: Handle | str = "parameter"
            elif view.private_format:
                outcome = "private format"
            else:
                outcome = saver.save(tensor, view, self)
            if isinstance(outcome, str):
                ledger.keep(outcome, view.storage_nbytes)
                outcome = Kept(tensor, None)
        return self._or_outer(tensor, outcome)

    def _or_outer(self, tensor: torch.Tensor, handle: Handle) -> Handle:
        """What stays goes to the outer hooks if there are any (see [Note: Composition])."""
        if self.outer is None or type(handle) is not Kept:
            return handle
        pack_hook, unpack_hook = self.outer
        return Passed(pack_hook(tensor), unpack_hook)

    def _pack_unusual(self, tensor: torch.Tensor) -> Handle:
        """A tensor that a storage alone does not describe: by its parts, or kept."""
        if (
            self.outer is None
            and is_traceable_wrapper_subclass(tensor)
            and not tensor.is_nested  # a ragged size cannot be rebuilt from the parts alone
            and not is_parameter(tensor)
        ):
            names, context = tensor.__tensor_flatten__()
            inner = {name: getattr(tensor, name) for name in names}
            parts = {
                name: self.pack(part) if isinstance(part, torch.Tensor) else Given(part)
                for name, part in inner.items()
            }
            return Parts(tensor, parts, context)
        with self.saver.lock:
            ledger = self.saver.ledger
            ledger.offered_tensors += 1
            ledger.keep("not a plain tensor", 0)
        return self._or_outer(tensor, Kept(tensor, None))


def is_parameter(tensor: torch.Tensor) -> bool:
    """A parameter, frozen or not, another leaf that requires grad, or a view of one of them.

    For tensors without a native view, which knows leaves by itself (`SavedView.of_leaf`).
    """
    base = tensor._base
    owner = tensor if base is None else base
    return (owner.requires_grad and owner.is_leaf) or is_frozen_parameter(tensor)


def is_frozen_parameter(tensor: torch.Tensor) -> bool:
    """A parameter or a view of one, known by its type: a frozen one is like any other leaf."""
    base = tensor._base
    owner = tensor if base is None else base
    # The type is asked first because isinstance on Parameter runs a metaclass.
    return type(owner) is not torch.Tensor and isinstance(owner, torch.nn.Parameter)


def current_visit() -> Visit | None:
    """The visit whose hooks this thread would save through now, if they are memswap's."""
    top = _top_hooks(True)
    owner = None if top is None else getattr(top[0], "__self__", None)
    return owner if isinstance(owner, Visit) else None


def in_backward() -> bool:
    """Whether this thread runs a backward pass now."""
    return bool(_graph_task() != -1)


def plain_parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors that have the bytes: a wrapper subclass's parts, or the tensor itself."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for part in (getattr(tensor, name) for name in names):
        if isinstance(part, torch.Tensor):
            yield from plain_parts(part)
