"""Engine: what becomes of the tensors that autograd saves.

From pack to unpack, in the order of the code: a tensor is offered to :meth:`HookScope.pack`; its
storage is looked up or becomes an :class:`Entry`; the policy and the timeline say whether it stays;
a way is taken, and its lane sends the bytes to a pool or encodes them. In backward, the handle that
pack returned demands the storage from :meth:`Engine.demand`, which brings it back, or finds it on
its way already, and asks for what comes next.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from memswap._native import native
from memswap.engine import recipes
from memswap.engine.action import ENCODE, KEEP, RECOMPUTE, SWAP, Action, Decider, TensorInfo
from memswap.engine.compiled import uncompiled_methods
from memswap.engine.entry import NEVER_FREED, PLANNED, Entry
from memswap.engine.expectations import Key
from memswap.engine.pools import PAGEABLE, Endurance, HostPool
from memswap.engine.stats import Stats, snapshot
from memswap.engine.transfer import Routes
from memswap.engine.windows import WindowStats

if TYPE_CHECKING:
    from memswap._C import SavedView, StorageRef
    from memswap.engine.director import Director
    from memswap.engine.durations import Durations
    from memswap.engine.handle import Handle
    from memswap.engine.transfer import Pool, Route

#: When what leaves is sent, and when it comes back (csrc/engine/engine.h).
Schedule = native.Schedule

# For who asks once per tensor.
BATCHES = Schedule.BATCHES


class Engine(native.Engine):
    """One engine: a policy, routes, a timeline and the entries that are alive.

    Nothing in it is shared with another engine. Hooks may be called from any thread; `lock`
    serialises the bookkeeping, and no transfer ever waits for it.

    What every save and every demand does is native (csrc/engine/engine.h). This class decides about
    a new storage where neither a table nor a plan says what happens to it, opens what storages are
    sent by, and begins iterations.

    Args:
        policy: who decides which saved tensors move.
        pool: where they go; None: a default pool of each device.
        window_bytes: how much is brought back ahead of backward; None: by what is saved.
        schedule: when what leaves is sent, and when it comes back.
    """

    recipes: native.Recipes | None
    """What is known of the operators that made storages; None: nothing is recomputed."""
    observer: Durations | None
    """Who measures operators and the codec, for windows; None: nobody."""
    knows_operators: bool
    """Whether `recipes` hears of operators, which takes time with each. A director switches it."""

    def __init__(
        self,
        policy: Decider,
        pool: Pool | None,
        window_bytes: int | None,
        schedule: native.Schedule = Schedule.ITERATIONS,
    ) -> None:
        super().__init__(window_bytes, schedule)
        self.recipes = None
        self.knows_operators = True
        self.observer = None
        self._director: Director | None = None
        self.policy = policy
        self._routes = Routes(pool)
        self._since = Endurance(pool)

    @property
    def policy(self) -> Decider:
        """Who decides which saved tensors move. What needs no question is native data."""
        return self._policy

    @policy.setter
    def policy(self, policy: Decider) -> None:
        self._policy = policy
        self._open_recipes()
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
        self._open_recipes()

    def _open_recipes(self) -> None:
        """Know operators if the policy or a plan may ask for it."""
        if recipes.wants_recipes(self._policy, self.directed):
            self._know_operators()

    def _know_operators(self) -> None:
        """Hear of operators from the next scope on."""
        if self.recipes is None:
            self.recipes = recipes.open_recipes(self, self._policy.operators)

    # --- the life of an iteration -----------------------------------------------------------------

    def begin_iteration(self) -> None:
        """What is saved from now on belongs to a new forward. (A batch is one by itself.)"""
        if self.schedule is BATCHES:
            return
        with self.lock:
            if self.iteration.count:
                self._since.count()
                ended, self.iteration = self.iteration, self.timeline.begin()
                if self.recipes is not None:
                    self.recipes.begin_iteration()
                leaving_bytes = ended.leaving_bytes
                if self.director is not None:
                    leaving_bytes = self.director.begin(self.iteration) or leaving_bytes
                self._routes.begin_iteration(leaving_bytes, ended.nbytes)
                if self.windows is not None:
                    self.windows.begin_iteration()
                for route in self.open_routes():
                    if failure := route.take_failure():
                        self.ledger.tell_once(
                            "file",
                            "a file could not take saved activations, which are in host memory "
                            f"instead: {failure}",
                        )
                    if why := route.take_pageable():
                        self.ledger.tell_once("pageable", PAGEABLE.format(why))

    # --- windows (Schedule.WINDOWS; [Note: Windows] in csrc/engine/window_queue.h) ---------------

    def open_window(self, seconds: float) -> None:
        """An operator of so many seconds is about to be launched on the current stream."""
        with self.lock:
            self._of_windows().open(seconds)

    def enter_window(self, seconds: float) -> None:
        """The same for several operators, up to :meth:`leave_window`, which the thread calls."""
        with self.lock:
            self._of_windows().enter(seconds)

    def leave_window(self) -> None:
        """The operators of the last :meth:`enter_window` have been launched."""
        with self.lock:
            self._of_windows().leave()

    @property
    def in_window(self) -> bool:
        """Whether the thread is between :meth:`enter_window` and :meth:`leave_window`."""
        with self.lock:
            return self._of_windows().inside

    def end_forward(self) -> None:
        """The managed part of a forward is over."""
        with self.lock:
            self._of_windows().end_forward()

    def window_stats(self) -> WindowStats:
        """What became of the work that waited for windows; all zeros where none does."""
        with self.lock:
            return WindowStats() if self.windows is None else WindowStats(**self.windows.counts)

    def _of_windows(self) -> native.Windows:
        if self.windows is None:
            raise RuntimeError(f"an engine of {self.schedule} has no windows; expected WINDOWS")
        return self.windows

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
            if self.windows is not None:
                self.windows.reset_counts()

    def settle(self) -> None:
        """Order everything after the transfers under way, and drop the storages they hold.

        Encodes that wait for a window stay undone.
        """
        if self.windows is not None:
            with self.lock:
                self.windows.clear()
        self._routes.settle()

    def set_overflow_room(self, route: Route, nbytes: int | None) -> None:
        """What a plan has set aside for overflows of frames; it counts as resident from here on."""
        route.overflow_room = nbytes
        rooms = (one.overflow_room for one in self.open_routes())
        self.ledger.set_reserved(sum(room or 0 for room in rooms))

    def open_routes(self) -> list[Route]:
        """The routes of the devices that were seen so far."""
        return self._routes.open_routes()

    def describe_pools(self) -> list[str]:
        """What was taken of host memory, and what a file takes of its drive's life."""
        pools = {id(one.pool): one.pool for one in self.open_routes() if one.copies}
        lines = [one.describe() for one in pools.values() if isinstance(one, HostPool)]
        written = sum(one.written_bytes() for one in pools.values())
        return [*lines, *self._since.line(written, "a forward, by all who use this pool")]

    def check_decodes(self) -> None:
        """Wait for decodes under way; raise TransferError if a frame was not what was encoded."""
        self._routes.check_decodes()

    # --- pack -------------------------------------------------------------------------------------

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
        return self._admit(tensor, view, scope, route, action or self._default_action(route))

    def _default_action(self, route: Route) -> Action:
        """What a policy without an action of its own means for a device."""
        action = route.default_action
        if action is not RECOMPUTE:
            return action
        if not self.policy.recipes or self.schedule is BATCHES:
            return route.without_recipe
        self._know_operators()
        return action

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
        free = self.policy.action is None and self.policy.fn is None
        learns = self.recipes is not None and (action is RECOMPUTE or free)
        if action is RECOMPUTE:
            action = route.without_recipe
        chosen = None
        if director is not None:
            insists = scope.action is not None  # who packs
            chosen = director.choose(tensor, scope.unit, scope.ordinal, nbytes, action, insists)
            recomputes = chosen is RECOMPUTE
            action = route.without_recipe if recomputes else chosen or action
        learns = learns and director is not None and director.learns_recipes()
        verdict = self.iteration.admit(nbytes, action is ENCODE, scope.group)
        if action is KEEP:
            verdict = "policy" if chosen is None else PLANNED
        elif chosen is not None and verdict != NEVER_FREED:
            verdict = None
        if verdict is None and action is SWAP and not (recomputes or learns):
            self._note_swap(route)
        entry, storage = self.make_entry(tensor, view)
        recomputes = recomputes and verdict is None
        if (recomputes or learns) and self._becomes_recipe(
            entry, storage, view, scope, tensor.dtype, action, leaves=recomputes
        ):
            if director is not None:
                self.saved(entry)
            return scope.join(entry, view)
        if verdict is None:
            key = Key(scope.unit, scope.ordinal, nbytes, tensor.dtype)
            verdict = self.leave(entry, storage, route.order(action, key))
        del storage  # its ticket's share is the last one
        handle: Handle
        if verdict is not None:
            self.ledger.keep(verdict, nbytes)
            handle = native.kept_handle(tensor, entry)
        else:
            handle = scope.join(entry, view)
        if director is not None:
            self.saved(entry)
        return handle

    # --- sending ----------------------------------------------------------------------------------

    def _note_swap(self, route: Route) -> None:
        """Storages of a device are swapped: the table answers from now on.

        Of a stream that captures a graph, nothing leaves.
        """
        asks = self.director is not None or self.policy.fn is not None or route.captures
        if not asks and self.schedule is not BATCHES:
            self.set_device(route.device, route.default_action.value, route.swap)

    def _becomes_recipe(
        self,
        entry: Entry,
        storage: StorageRef,
        view: SavedView,
        scope: native.HookScope,
        dtype: torch.dtype,
        otherwise: Action,
        leaves: bool,
    ) -> bool:
        """Whether an entry's storage leaves as a recipe. If not, the recipe may be on trial.

        `leaves`: whether it leaves if it can; a director that learns is told its recipe instead.
        """
        director = self.director
        if self.recipes is None or self.schedule is BATCHES:
            return False
        most_extra = recipes.MOST_EXTRA
        if director is not None:
            most_extra = 0.0  # a plan knows of no storage that only a recipe keeps
        elif otherwise is ENCODE:
            most_extra = recipes.MOST_EXTRA_BESIDE_FRAMES
        answer = self.recipes.offer(storage, view, scope, dtype, most_extra, leaves)
        if isinstance(answer, tuple):
            entry.leave(*answer)
            self.departing.add(entry)
            return True
        if isinstance(answer, native.ProvenRecipe):
            assert director is not None  # nobody else asks
            director.recipe(entry, answer)
            return False
        entry.trial = answer
        if leaves and director is not None:
            director.no_recipe(entry)
        return False


uncompiled_methods(Engine)
