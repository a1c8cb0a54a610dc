"""Engine: what becomes of the tensors that autograd saves. It is native (csrc/engine/engine.h).

What native code cannot know stands here (csrc/engine/engine_host.h): a function of the user's, how
a device's lanes and pools are opened, and what begins with an iteration.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from memswap._native import native
from memswap.engine import recipes
from memswap.engine.action import TensorInfo
from memswap.engine.compiled import uncompiled_methods
from memswap.engine.pools import Endurance
from memswap.engine.stats import Stats, WindowStats, snapshot
from memswap.engine.training import before_optimizer_steps
from memswap.engine.transfers import OpenTransfers

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from memswap.engine.action import Action
    from memswap.engine.director import Director
    from memswap.engine.transfers import Pool, Transfers
    from memswap.planning.policy import Policy

#: When what leaves is sent, and when it comes back (csrc/engine/engine.h).
Schedule = native.Schedule


class Engine(native.Engine):
    """One engine: a policy, what it sends by, a timeline and the entries that are alive.

    Nothing in it is shared with another engine. Hooks may be called from any thread; `lock`
    serialises the bookkeeping, and no transfer ever waits for it. A thread takes it once: to call
    what takes it by itself while one has it raises RuntimeError.

    What every save and every demand does is native, and so is what is done with a storage: a plan
    says it, or else the policy's table. This class is asked where the policy has a function, opens
    what storages are sent by, and begins iterations.

    Args:
        policy: who decides which saved tensors move.
        pool: where they go; None: a default pool of each device.
        prefetch_bytes: how much is brought back ahead of backward; None: by what is saved.
        schedule: when what leaves is sent, and when it comes back.
    """

    knows_operators: bool
    """Whether `recipes` hears of operators, which takes time with each. A director switches it."""

    def __init__(
        self,
        policy: Policy,
        pool: Pool | None,
        prefetch_bytes: int | None,
        schedule: native.Schedule = Schedule.ITERATIONS,
    ) -> None:
        super().__init__(prefetch_bytes, schedule)
        self._in_batches = schedule is Schedule.BATCHES  # `schedule` makes an enum each time
        self.knows_operators = True
        self._director: Director | None = None
        self.policy = policy
        self._transfers = OpenTransfers(pool)
        self._since = Endurance(pool)
        before_optimizer_steps(self._read_before_edits)

    @property
    def policy(self) -> Policy:
        """Who decides which saved tensors move. All but a function of the user's is native data."""
        return self._policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        self._policy = policy
        asks, operators = policy.fn is not None, list(policy.operators)
        self.set_policy(
            (policy.min_bytes, policy.action, asks, policy.recipes, operators, recipes.PROOFS)
        )
        self._want_recipes()

    @property
    def director(self) -> Director | None:
        """Who watches and directs what leaves, under a memory budget; None: the policy alone."""
        return self._director

    @director.setter
    def director(self, director: Director | None) -> None:
        self._director = director
        self.planning.set_directed(director is not None)
        self._want_recipes()

    def _want_recipes(self) -> None:
        """Know operators if the policy or a plan may ask for it."""
        if recipes.wants_recipes(self._policy, self.planning.directed):
            self.open_recipes()

    def _read_before_edits(self, optimizer: Optimizer) -> None:
        """A graph that is alive may read a parameter once more: its recipes are run now."""
        if self.recipes is not None:
            edited = [one for group in optimizer.param_groups for one in group["params"]]
            self.recipes.before_edits(edited)

    # --- the life of an iteration -----------------------------------------------------------------

    def begin_iteration(self) -> None:
        """A new forward begins, and saves from now on. The caller has the lock.

        (A batch is an iteration by itself.)
        """
        if self._in_batches or not self.iteration.size:
            return
        self._since.count()
        ended = self.iteration
        self.next_iteration()
        if self.recipes is not None:
            self.recipes.begin_iteration()
        leaving_bytes = ended.leaving_bytes
        opened = self.open_transfers()
        for transfers in opened:
            transfers.trim_outputs()  # before the director looks at what is there
        if self._director is not None:
            planned_bytes = self.planning.extend_streak()
            if planned_bytes is None:  # something is not as it was the last time
                planned_bytes = self._director.begin(self.iteration)
            leaving_bytes = planned_bytes or leaving_bytes
        for transfers in opened:
            transfers.begin(leaving_bytes, ended.nbytes)
        if self.windows is not None:
            self.windows.begin_iteration()
        self.tell_of_pools()

    def tell_of_pools(self) -> None:
        """Warn, once, of a file that failed, and of host memory that could not be pinned."""
        for transfers in self.open_transfers():
            for reason, words in transfers.complaints("saved activations, which are"):
                self.ledger.tell_once(reason, words)

    # --- windows (Schedule.WINDOWS; [Note: Windows] in csrc/engine/window_queue.h) ---------------

    def open_window(self, seconds: float) -> None:
        """An operator of so many seconds is about to be launched on the current stream."""
        self.lock.run(self._of_windows().open, seconds)

    def enter_window(self, seconds: float) -> None:
        """Several operators are about to be launched, up to the thread's :meth:`leave_window`."""
        self.lock.run(self._of_windows().enter, seconds)

    def leave_window(self) -> None:
        """The operators of the last :meth:`enter_window` have been launched."""
        self.lock.run(self._of_windows().leave)

    @property
    def durations(self) -> native.Durations:
        """How long operators take, which windows go by. The lock serialises its calls."""
        return self._of_windows().durations

    def start_span(
        self, key: str, amount: float, device: torch.device
    ) -> tuple[float | None, native.Span | None]:
        """An operator is about to be launched: how long it takes, and its span if it is measured.

        Args:
            key: of the operator.
            amount: by which its time is scaled.
            device: that it runs on.

        Returns:
            Seconds, or None where they are not known yet; the span that `Durations.stop` takes.
        """
        return self.lock.run(self._start_span, key, amount, device)

    def _start_span(
        self, key: str, amount: float, device: torch.device
    ) -> tuple[float | None, native.Span | None]:
        return self.durations.seconds(key, amount), self.durations.start(key, amount, device)

    @property
    def in_window(self) -> bool:
        """Whether the thread is between :meth:`enter_window` and :meth:`leave_window`."""
        windows = self._of_windows()
        return self.lock.run(lambda: windows.inside)

    def end_forward(self) -> None:
        """The managed part of a forward is over."""
        self.lock.run(self._of_windows().end_forward)

    def window_stats(self) -> WindowStats:
        """What became of the work that waited for windows; all zeros where none does."""
        return WindowStats() if self.windows is None else self.lock.run(self._window_stats)

    def _window_stats(self) -> WindowStats:
        queue = self._of_windows().queue
        return WindowStats(**queue.counts, pending_bytes=queue.pending_bytes)

    def _of_windows(self) -> native.Windows:
        if self.windows is None:
            raise RuntimeError(f"an engine of {self.schedule} has no windows; expected WINDOWS")
        return self.windows

    def take_reports(self) -> None:
        """Notice what is gone by now, and what encoders have reported. The caller has the lock."""
        self.departing.notice_gone()
        self.learn()

    def stats(self) -> Stats:
        found = self.lock.run(self._counted)
        self.tell()
        return found

    def _counted(self) -> Stats:
        self.take_reports()
        return snapshot(self.ledger, self.recipes)

    def reset_stats(self) -> None:
        self.lock.run(self._reset_stats)
        self.tell()

    def _reset_stats(self) -> None:
        self.take_reports()
        self.ledger.reset()
        if self.recipes is not None:
            self.recipes.reset_runs()
        if self.windows is not None:
            self.windows.queue.reset_counts()

    def settle(self) -> None:
        """Order everything after the transfers under way, and drop the storages they hold.

        Encodes that wait for a window stay undone.
        """
        if self.windows is not None:
            self.lock.run(self.windows.queue.clear)
        self._transfers.settle()

    def set_overflow_room(self, transfers: Transfers, nbytes: int | None) -> None:
        """What a plan has set aside for overflows of frames; it counts as resident from here on."""
        if nbytes == transfers.overflow_room:
            return
        transfers.set_overflow_room(nbytes)
        rooms = (one.overflow_room for one in self.open_transfers())
        self.ledger.set_reserved(sum(room or 0 for room in rooms))

    def open_transfers(self) -> list[Transfers]:
        """The transfers of the devices that were seen so far."""
        return self._transfers.all()

    def describe_pools(self) -> list[str]:
        """The host memory and the disk that were taken, and how much of a drive's life."""
        pools = self._transfers.pools()
        lines = [one.describe() for one in pools]
        lines += [line for one in self.open_transfers() for line in one.describe_overflow()]
        written = sum(one.written_bytes() for one in pools)
        return [*lines, *self._since.line(written, "a forward, by all who use this pool")]

    def check_decodes(self) -> None:
        """Wait for decodes under way; raise TransferError if a frame was not what was encoded."""
        self._transfers.check_decodes()

    # --- what native code asks (csrc/engine/engine_host.h), beside the director ------------------

    def decide(
        self, tensor: torch.Tensor, unit: str, nbytes: int, storage_nbytes: int
    ) -> Action | None:
        """The action that the policy's function names for a storage; None: what suits the device.

        The lock is not held meanwhile.

        Args:
            tensor: that is saved.
            unit: name of the unit that saves it.
            nbytes: of the tensor.
            storage_nbytes: of the storage behind it.
        """
        return self.policy.decide(tensor, TensorInfo(unit, nbytes, storage_nbytes))

    def transfers(self, device: torch.device, form: native.Form | None = None) -> Transfers | None:
        """The transfers of a device, opened when they are first asked for; None: its storages stay.

        Native code asks once for each device, and once for each form.

        Args:
            device: whose storages leave.
            form: in which they are about to leave; None: nobody knows yet.
        """
        transfers = self._transfers.to(device)
        if transfers is not None and form is not None:
            transfers.open(form)
        return transfers


uncompiled_methods(Engine)
