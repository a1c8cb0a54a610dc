"""Engine: what becomes of the tensors that autograd saves.

From pack to unpack, in the order of the code: a tensor is offered to :meth:`HookScope.pack`; its
storage is looked up or becomes an :class:`Entry`; the policy and the timeline say whether it stays;
a way is taken, and its lane sends the bytes to a pool or encodes them. In backward, the handle that
pack returned demands the storage from :meth:`Engine.demand`, which brings it back, or finds it on
its way already, and asks for what comes next.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from memswap._native import native
from memswap.engine import recipes
from memswap.engine.action import ENCODE, KEEP, RECOMPUTE, SWAP, Action, Decider, TensorInfo
from memswap.engine.compiled import uncompiled_methods
from memswap.engine.entry import NEVER_FREED, PLANNED, Entry
from memswap.engine.stats import Stats, snapshot
from memswap.engine.transfer import Routes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from memswap._C import EntryReference, FrameWatch, Iteration, SavedView, StorageRef
    from memswap.engine.director import Director
    from memswap.engine.expectations import Expectation, Expectations
    from memswap.engine.handle import Handle
    from memswap.engine.transfer import Pool, Route, Sender


class _Encoding(NamedTuple):
    """An encode whose report has not arrived yet."""

    expectations: Expectations
    expectation: Expectation
    watch: FrameWatch
    entry: EntryReference


class Place(Protocol):
    """Where a storage was saved: what its frame is expected to be like depends on it."""

    @property
    def unit(self) -> str:
        """The unit that saved it."""

    @property
    def ordinal(self) -> int:
        """Which of the unit's storages it is."""


class Engine(native.Engine):
    """One engine: a policy, routes, a timeline and the entries that are alive.

    Nothing in it is shared with another engine. Hooks may be called from any thread; `lock`
    serialises the bookkeeping, and no transfer ever waits for it.

    What every save and every demand does is native (csrc/engine/engine.h). It asks this class, its
    host (csrc/engine/host.h), about what a table or a plan does not say.
    """

    recipes: native.Recipes | None
    """What is known of the operators that made storages; None: nothing is recomputed."""

    def __init_subclass__(cls) -> None:
        uncompiled_methods(cls)

    def __init__(self, policy: Decider, pool: Pool | None, window_bytes: int | None) -> None:
        super().__init__(window_bytes)
        self.set_host(self)
        self.recipes = None
        self.policy = policy
        self._director: Director | None = None
        self._routes = Routes(pool)
        self._encoding: deque[_Encoding] = deque()

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

    @property
    def director(self) -> Director | None:
        """Who watches and directs what leaves, under a memory budget; None: the policy alone."""
        return self._director

    @director.setter
    def director(self, director: Director | None) -> None:
        self._director = director
        self.directed = director is not None

    # --- the life of an iteration -----------------------------------------------------------------

    def begin_iteration(self) -> None:
        """What is saved from now on belongs to a new forward."""
        with self.lock:
            if self.iteration.count:
                ended, self.iteration = self.iteration, self.timeline.begin()
                if self.recipes is not None:
                    self.recipes.begin_iteration()
                leaving_bytes = ended.leaving_bytes
                if self.director is not None:
                    leaving_bytes = self.director.begin(self.iteration) or leaving_bytes
                self._routes.begin_iteration(leaving_bytes, ended.nbytes)
                for route in self.open_routes():
                    if failure := route.take_failure():
                        self.ledger.tell_once(
                            "file",
                            "a file could not take saved activations, which are in host memory "
                            f"instead: {failure}",
                        )

    def route(self, device: torch.device) -> Route | None:
        """How storages leave a device; None where they stay."""
        return self._routes.to(device)

    def stats(self) -> Stats:
        with self.lock:
            self.departing.notice_gone()
            self.learn()
            return snapshot(self.ledger, self.recipes)

    def reset_stats(self) -> None:
        with self.lock:
            self.departing.notice_gone()
            self.learn()
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

    def save(self, tensor: torch.Tensor, view: SavedView, scope: native.HookScope) -> Handle:
        """A plain tensor's handle. The lock is held."""
        handle: Handle = scope.save(tensor, view)
        return handle

    def decide(self, tensor: torch.Tensor, view: SavedView, scope: native.HookScope) -> Handle:
        """The handle of a storage that is new, and about which table and plan say nothing."""
        policy, director = self.policy, self.director
        # Most policies have no function: spare them the TensorInfo.
        action = scope.action or policy.action
        if policy.fn is not None and scope.action is None:
            info = TensorInfo(scope.unit, view.nbytes, view.storage_nbytes)
            action = policy.decide(tensor, info)
        if action is KEEP and director is None:
            return scope.stay(tensor, view, "policy")
        route = self._routes.to(tensor.device)
        if route is None:
            return scope.stay(tensor, view, "host memory beside an accelerator")
        if route.captures and torch.cuda.is_current_stream_capturing():
            return scope.keep(tensor, view, "stream capture")
        if self.iteration.began_backward:
            self.begin_iteration()
        self.departing.notice_some()
        self.learn()
        scope.ordinal += 1
        return self._admit(tensor, view, scope, route, action or route.default_action)

    def _admit(
        self,
        tensor: torch.Tensor,
        view: SavedView,
        scope: native.HookScope,
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
            insists = scope.action is not None  # who packs
            chosen = director.choose(tensor, scope.unit, scope.ordinal, nbytes, action, insists)
            action = chosen or action
        verdict = self.iteration.admit(nbytes, action is ENCODE, scope.group)
        if action is KEEP:
            verdict = "policy" if chosen is None else PLANNED
        elif chosen is not None and verdict != NEVER_FREED:
            verdict = None
        recomputes = recomputes and verdict is None
        if verdict is None and action is SWAP and not recomputes and not self.shares_batches:
            sender = route.swap
            # Once: the table then answers. Of a stream that captures a graph, nothing leaves.
            if director is None and self.policy.fn is None and not route.captures:
                self.set_device(route.device, route.default_action.value, sender)
            entry, moved = self.swap(tensor, view, sender)
            if not moved:
                verdict = self.refuse(sender, entry)
        else:
            entry, storage = self.make_entry(tensor, view)
            if recomputes and self._becomes_recipe(
                entry, storage, view, scope, tensor.dtype, action
            ):
                return self.join(entry, view)
            if verdict is None:
                verdict = self.depart(entry, storage, route, action, scope, tensor.dtype)
            del storage  # its ticket's share is the last one
        handle: Handle
        if verdict is not None:
            self.ledger.keep(verdict, nbytes)
            handle = native.kept_handle(tensor, entry)
        else:
            handle = self.join(entry, view)
        if director is not None:
            self.saved(entry)
        return handle

    def hurry(self, entry: Entry) -> None:
        """Its room is needed: start what has waited until now. Nothing waits here."""

    # --- sending ----------------------------------------------------------------------------------

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
        scope: native.HookScope,
        dtype: torch.dtype,
        otherwise: Action,
    ) -> bool:
        """Whether an entry's storage leaves as a recipe. If not, the recipe may be on trial."""
        if self.recipes is None or self.shares_batches:
            return False
        answer = self.recipes.offer(
            storage,
            view,
            scope,
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
            return self.refuse(route.swap, entry)
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
        sender, iteration = route.encoding(action), entry.iteration
        most_nbytes = None if iteration is None else iteration.frame_nbytes(entry.index)
        if sender is None:
            reason = "no codec"
        else:
            expectation = route.expectations.of(
                place.unit, place.ordinal, entry.nbytes, dtype, most_nbytes
            )
            if expectation.fault:
                reason = self._distrusted(expectation, entry, route)
            elif not expectation.pays:
                reason = "does not shrink"
            elif self.send_encode(entry, storage, sender, route, expectation):
                return None
            elif most_nbytes is None or not sender.works_ahead:
                reason = self.refuse(sender, entry)
        if iteration is not None and most_nbytes is not None and route.works_ahead:
            iteration.unfit = True  # the plan has no room for it where it is
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
            self._encoding.append(made)
            self.awaits_reports = True
        return True

    def refuse(self, sender: Sender, entry: Entry) -> str:
        """A sender has no room: the reason in the statistics. In full it is told once."""
        return self.refused(sender.short_of, sender.why_refused(), entry)

    def _distrusted(self, expectation: Expectation, entry: Entry, route: Route) -> str:
        """The codec must not encode such a tensor: the reason, which is told in full once."""
        self.ledger.tell_once(
            f"codec fault {expectation.dtype} {expectation.shape}",
            f"a storage of {entry.nbytes} bytes on {route.device} is not encoded: "
            f"{expectation.fault}. Training goes on with less memory saved.",
        )
        return "codec failed its check"

    def learn(self) -> None:
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
                entry.count_away()
        self.awaits_reports = False

    def join(self, entry: Entry, view: SavedView) -> Handle:
        """The handle of a save whose storage leaves."""
        return native.moved_handle(entry, view)

    # --- unpack -----------------------------------------------------------------------------------

    def look_ahead(self, iteration: Iteration, index: int) -> None:
        """A storage is demanded: what comes next is brought back."""
        self._prefetch(iteration.demand(index))

    def _prefetch(self, entries: Iterable[Entry]) -> None:
        try:
            for entry in entries:
                self.fetch(entry)
        except torch.OutOfMemoryError:
            return  # the demand itself will ask again, when there may be room

    def fetch(self, entry: Entry) -> bool:
        """Start bringing an entry back, unless it is not away. Whether that was done."""
        return entry.fetch_ahead()  # may be out of memory


uncompiled_methods(Engine)
