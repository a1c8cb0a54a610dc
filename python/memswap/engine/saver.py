"""Saver: what becomes of the tensors that autograd saves.

From pack to unpack, in the order of the code: a tensor is offered to :meth:`Visit.pack`; its
storage is looked up or becomes an :class:`Entry`; the policy and the timeline say whether it stays;
a way is taken, and its lane sends the bytes to a pool or encodes them. In backward, the handle that
pack returned demands the storage from :meth:`Saver.demand`, which brings it back, or finds it on
its way already, and asks for what comes next.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, NoReturn, Protocol

import torch

from memswap._native import native
from memswap.engine import recipes
from memswap.engine.action import ENCODE, KEEP, RECOMPUTE, SWAP, Action, Decider, TensorInfo
from memswap.engine.entry import Entry, Stay
from memswap.engine.handle import Handle, Kept, Moved
from memswap.engine.stats import Ledger, Stats
from memswap.engine.timeline import NEVER_FREED, PLANNED, Timeline
from memswap.engine.transfer import Routes
from memswap.errors import TransferError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from weakref import ref

    from typing_extensions import Self

    from memswap._C import FrameWatch, SavedView, StorageRef, WeakStorage
    from memswap.engine.director import Director
    from memswap.engine.expectations import Expectation, Expectations
    from memswap.engine.timeline import Passage
    from memswap.engine.transfer import Pool, Route, Sender


class _Encoding(NamedTuple):
    """An encode whose report has not arrived yet."""

    expectations: Expectations
    expectation: Expectation
    watch: FrameWatch
    entry: ref[Entry]


class Place(Protocol):
    """Where a storage was saved: what its frame is expected to be like depends on it."""

    @property
    def unit(self) -> str:
        """The unit that saved it."""

    @property
    def ordinal(self) -> int:
        """Which of the unit's storages it is."""


class Saver(native.Saver):
    """One engine: a policy, routes, a timeline and the entries that are alive.

    Nothing in it is shared with another saver. Hooks may be called from any thread; `lock`
    serialises the bookkeeping, and no transfer ever waits for it.

    The steps of every save and every demand that need no decision are native (csrc/bind/saver.cpp).
    """

    # Native members, by what they are in Python.
    ledger: Ledger
    passage: Passage
    director: Director | None
    """Who watches and directs what leaves, under a memory budget; None: the policy alone."""
    persistent: dict[int, WeakStorage]
    """Storages of parameters and buffers. A weak storage keeps its key from being reused."""
    backward: Passage | None
    """Whose backward runs, for a director."""
    watched: bool
    """The director hears of each mark, whatever a passage's script says."""

    def __new__(cls, *arguments: object, **options: object) -> Self:
        return super().__new__(cls, ledger=Ledger(), encoding=deque())

    recipes: native.Recipes | None
    """What is known of the operators that made storages; None: nothing is recomputed."""

    def __init__(self, policy: Decider, pool: Pool | None, window_bytes: int | None) -> None:
        self.recipes = None
        self.policy = policy
        self.timeline = Timeline(window_bytes)
        self.passage = self.timeline.begin()
        self._routes = Routes(pool)

    @property
    def policy(self) -> Decider:
        """Who decides which saved tensors move. What needs no question is native data."""
        return self._policy

    @policy.setter
    def policy(self, policy: Decider) -> None:
        self._policy = policy
        if self.recipes is None and recipes.wants_recipes(policy):
            self.recipes = recipes.open_recipes(self, policy.operators)
        action = "ask" if policy.fn is not None else policy.action and policy.action.value
        self.set_policy(policy.min_bytes, action)

    # --- the life of a passage ------------------------------------------------------------------

    def begin_passage(self) -> None:
        """What is saved from now on belongs to a new forward."""
        with self.lock:
            if self.passage.count:
                ended, self.passage = self.passage, self.timeline.begin()
                if self.recipes is not None:
                    self.recipes.begin_iteration()
                leaving_bytes = ended.leaving_bytes
                if self.director is not None:
                    leaving_bytes = self.director.begin(self.passage) or leaving_bytes
                self._routes.begin_passage(leaving_bytes, ended.nbytes)

    def route(self, device: torch.device) -> Route | None:
        """How storages leave a device; None where they stay."""
        return self._routes.to(device)

    def stats(self) -> Stats:
        with self.lock:
            self.departing.notice_gone()
            self._learn()
            stats = self.ledger.snapshot()
            known = self.recipes
            if known is None:
                return stats
            return replace(
                stats,
                recipe_storages=known.storages,
                recipe_bytes=known.nbytes,
                recipe_runs=known.runs,
            )

    def reset_stats(self) -> None:
        with self.lock:
            self.departing.notice_gone()
            self._learn()
            self.ledger.reset()
            if self.recipes is not None:
                self.recipes.reset_counts()

    def settle(self) -> None:
        """Order everything after the transfers under way, and drop the storages they hold."""
        self._routes.settle()

    def set_overflow_room(self, route: Route, nbytes: int | None) -> None:
        """What a plan has set aside for overflows of frames; it counts as resident from here on."""
        route.overflow_room = nbytes
        rooms = (one.overflow_room for one in self.open_routes())
        self.ledger.set_reserved(sum(room or 0 for room in rooms))

    def open_routes(self) -> list[Route]:
        """The routes of the devices that were seen so far."""
        return self._routes.open_routes()

    def check_decodes(self) -> None:
        """Wait for decodes under way; raise TransferError if a frame was not what was encoded."""
        self._routes.check_decodes()

    # --- pack -------------------------------------------------------------------------------------

    def save_new(self, tensor: torch.Tensor, view: SavedView, visit: native.Visit) -> Handle:
        """The handle of a storage that is new, and about which the native table says nothing.

        Before it come csrc/bind/save.cpp's reasons to stay, and storages that are known already.
        """
        policy, director = self.policy, self.director
        # Most policies have no function: spare them the TensorInfo.
        action = visit.action or policy.action
        if policy.fn is not None and visit.action is None:
            info = TensorInfo(visit.unit, view.nbytes, view.storage_nbytes)
            action = policy.decide(tensor, info)
        if action is KEEP and director is None:
            return self._stay(tensor, view, "policy")
        route = self._routes.of(tensor, view)
        if route is None:
            return self._stay(tensor, view, "host memory beside an accelerator")
        if route.captures and torch.cuda.is_current_stream_capturing():
            return self.keep(tensor, view, "stream capture")
        if self.passage.began_backward:
            self.begin_passage()
        self.departing.notice_some()
        if self.encoding:
            self._learn()
        visit.ordinal += 1
        return self._admit(tensor, view, visit, route, action or route.default_action)

    def _admit(
        self,
        tensor: torch.Tensor,
        view: SavedView,
        visit: native.Visit,
        route: Route,
        action: Action,
    ) -> Handle:
        """A new entry, which leaves unless the plan or the timeline has a reason why it stays."""
        nbytes = view.storage_nbytes
        director = self.director
        recomputes = action is RECOMPUTE and director is None
        if action is RECOMPUTE:
            action = route.without_recipe
        chosen = None
        if director is not None:
            insists = visit.action is not None  # who packs
            chosen = director.choose(tensor, visit.unit, visit.ordinal, nbytes, action, insists)
            action = chosen or action
        verdict = self.passage.admit(nbytes, action is ENCODE, visit.group)
        if action is KEEP:
            verdict = "policy" if chosen is None else PLANNED
        elif chosen is not None and verdict is not NEVER_FREED:
            verdict = None
        recomputes = recomputes and verdict is None
        if verdict is None and action is SWAP and not recomputes and not self.shares_batches:
            sender = route.swap
            # Once: the table then answers. Of a stream that captures a graph, nothing leaves.
            if director is None and self.policy.fn is None and not route.captures:
                self.set_device(route.device, route.default_action.value, sender)
            sent = self.swap(tensor, view, sender)
            if isinstance(sent, Moved):
                if director is not None:
                    director.saved(sent.entry)
                return sent
            entry = sent
            verdict = self._refused(route.swap, entry, route)
        else:
            storage = native.StorageRef(tensor)
            entry = Entry(self, view, storage)
            self.passage.place(entry)
            if recomputes and self._becomes_recipe(
                entry, storage, view, visit, tensor.dtype, action
            ):
                return self.moved(entry, view)
            if verdict is None:
                verdict = self.depart(entry, storage, route, action, visit, tensor.dtype)
        handle: Handle
        if verdict is not None:
            self.ledger.keep(verdict, nbytes)
            handle = Kept(tensor, entry)
        else:
            handle = self.moved(entry, view)
        if director is not None:
            director.saved(entry)
        return handle

    def keep_as_planned(self, tensor: torch.Tensor, entry: Entry, reason: str | None) -> Kept:
        """A tensor stays: as planned (None), or for a reason."""
        self.ledger.keep(PLANNED if reason is None else reason, entry.nbytes)
        return Kept(tensor, entry)

    def keep_refused(self, tensor: torch.Tensor, entry: Entry) -> Kept:
        """A tensor stays because its pool has no room."""
        route = self._routes.to(tensor.device)
        assert route is not None  # it was tried
        self.ledger.keep(self._refused(route.swap, entry, route), entry.nbytes)
        return Kept(tensor, entry)

    def hurry(self, entry: Entry) -> None:
        """Its room is needed: start what has waited until now. Nothing waits here."""

    def depart(
        self,
        entry: Entry,
        storage: StorageRef,
        route: Route,
        action: Action,
        place: Place,
        dtype: torch.dtype,
    ) -> str | None:
        """Start sending an entry's storage away. None, or the reason why it stays."""
        if action is SWAP:
            return self._swap(entry, storage, route)
        return self._encode(entry, storage, route, action, place, dtype)

    def _becomes_recipe(
        self,
        entry: Entry,
        storage: StorageRef,
        view: SavedView,
        visit: native.Visit,
        dtype: torch.dtype,
        otherwise: Action,
    ) -> bool:
        """Whether an entry's storage leaves as a recipe. If not, the recipe may be on trial."""
        if self.recipes is None or self.shares_batches:
            return False
        answer = self.recipes.offer(
            storage,
            view,
            visit,
            dtype,
            recipes.MOST_EXTRA_BESIDE_FRAMES if otherwise is ENCODE else recipes.MOST_EXTRA,
        )
        if not isinstance(answer, tuple):
            entry.trial = answer
            return False
        entry.leave(*answer)
        self.departing.add(entry)
        return True

    def _swap(self, entry: Entry, storage: StorageRef, route: Route) -> str | None:
        """Start swapping an entry's storage. None, or the reason why it stays."""
        if not entry.swap(route.swap, storage):
            return self._refused(route.swap, entry, route)
        self.departing.add(entry)
        return None

    def _encode(
        self,
        entry: Entry,
        storage: StorageRef,
        route: Route,
        action: Action,
        place: Place,
        dtype: torch.dtype,
    ) -> str | None:
        """Start encoding an entry's storage. None, or the reason why it stays."""
        sender, director = route.encoding(action), self.director
        most_nbytes = None if director is None else director.frame_nbytes(entry)
        if sender is None:
            reason = "no codec"
        else:
            expectation = route.expectations.of(
                place.unit, place.ordinal, entry.nbytes, dtype, most_nbytes
            )
            if not expectation.pays:
                reason = "does not shrink"
            elif self.send_encode(entry, storage, sender, route, expectation):
                return None
            elif most_nbytes is None or not sender.works_ahead:
                reason = self._refused(sender, entry, route)
        if director is not None and most_nbytes is not None and route.works_ahead:
            director.unfit()  # the plan has no room for it where it is
            return self._swap(entry, storage, route)
        return reason if action is ENCODE else self._swap(entry, storage, route)

    def send_encode(
        self,
        entry: Entry,
        storage: StorageRef,
        sender: native.FrameSender,
        route: Route,
        expectation: Expectation,
    ) -> bool:
        """Start encoding. Whether there was room."""
        expectations = route.expectations
        sent = sender.send(storage, *expectation.options)
        if sent is None and expectation.trial:
            expectation = expectations.settled(expectation)
            sent = sender.send(storage, *expectation.options)
        if sent is None:
            return False
        frame, departure = sent
        entry.leave(frame, departure)
        self.departing.add(entry)
        made = _Encoding(expectations, expectation, frame.watch(), entry.reference)
        # Where nothing works ahead an encode has ended, unless it failed.
        if sender.works_ahead or made.watch.report() is not None:
            self.encoding.append(made)
        return True

    def _refused(self, sender: Sender, entry: Entry, route: Route) -> str:
        """A sender has no room: the reason in the statistics. In full it is told once."""
        if self.director is not None and sender is route.swap:
            self.director.no_room()
        self.ledger.tell_once(
            sender.short_of,
            f"a storage of {entry.nbytes} bytes stays on {route.device}: {sender.why_refused()}. "
            "Training goes on with less memory saved.",
        )
        return sender.short_of

    def _learn(self) -> None:
        """Take in what encoders have reported by now, in the order of their encodes."""
        encoding = self.encoding
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

    def moved(self, entry: Entry, view: SavedView) -> Moved:
        """The handle of a save whose storage leaves."""
        return Moved(entry, view)

    def _stay(self, tensor: torch.Tensor, view: SavedView, reason: str) -> Kept:
        """Keep a tensor for good, but know its storage: once, however often it is saved."""
        self.ledger.keep(reason, view.storage_nbytes)
        return Kept(tensor, Stay(self.ledger, view))

    # --- unpack -----------------------------------------------------------------------------------

    def lost(self, error: native.TransferError) -> NoReturn:
        """The bytes that a demand has waited for did not come."""
        raise TransferError(f"a saved tensor cannot be brought back: {error}") from error

    def look_ahead(self, passage: Passage, index: int) -> None:
        """A storage is demanded: what comes next is brought back."""
        self._prefetch(passage.demand(index))

    def _prefetch(self, entries: Iterable[Entry]) -> None:
        try:
            for entry in entries:
                self.fetch(entry)
        except torch.OutOfMemoryError:
            return  # the demand itself will ask again, when there may be room

    def fetch(self, entry: Entry) -> bool:
        """Start bringing an entry back, unless it is not away. Whether that was done."""
        return entry.fetch_ahead()  # may be out of memory
