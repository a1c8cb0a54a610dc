"""DeviceAccount: watches everything on a device, for plans under one number ([Note: One number]).

[Note: Reading the allocator]
The allocator has one peak, which others read as well. It is begun anew while a step is learnt, at
each mark, and once when a plan is first followed; from then on it is only read. So what a user
reads (`torch.accelerator.max_memory_allocated`) is that of the steps under the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch

from memswap._native import native
from memswap.engine.autograd import plain_parts
from memswap.engine.units import format_bytes
from memswap.errors import BudgetError
from memswap.planning.device import (
    GRANULARITY_BYTES,
    GROWN_SHARE,
    SPARE_SHARE,
    SPARE_SHARE_OF_CPU,
    DevicePlan,
    DeviceTerms,
    StateTerms,
)

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from memswap._C import Iteration, WorkspaceRecord
    from memswap.optimizers.managed import ManagedOptimizer

#: When a forward begins, less may be there than when its step was learnt, as a share of the budget,
#: before it is learnt again, in so many forwards one after another; each time twice as many.
SHRUNK_SHARE, SHRUNK_FORWARDS = 1 / 100, 16


class DeviceAccount:
    """What is on a device, by its own allocator.

    Args:
        device: one device.
        nbytes: most bytes on it.
        parameters: those of the model now, and its buffers.
        keeps_gradients: False: those of parameters with a hook behind their gradient may be used up
            in backward, as optimizers for single parameters do it.
    """

    def __init__(
        self,
        device: torch.device,
        nbytes: int,
        parameters: Callable[[], Iterable[torch.Tensor]],
        keeps_gradients: bool = True,
    ) -> None:
        self.nbytes = nbytes
        #: Of the optimizer, some of which may be away; None: nobody gave one.
        self.state: ManagedOptimizer | None = None
        #: Of the hooks that tell of the optimizer's steps.
        self.handles: list[RemovableHandle] = []
        self._gauge = native.MemoryGauge(device)
        self._on_cpu = device.type == "cpu"
        self._granularity = 1 if self._on_cpu else GRANULARITY_BYTES
        self._parameters = parameters
        self._keeps_gradients = keeps_gradients
        self._record: native.Workspace | None = None
        self._stays = 0
        self._followed: list[DevicePlan] = []
        self._measured: int | None = None
        self._step_peak: int | None = None
        self._step_chunks = 0
        self._forwards = self._forwards_then = 0
        self._forwards_per_step = 1
        self._steps_open = 0  # of a class whose step calls its base's, which has hooks too: two
        self._learns = True
        self._shrunk, self._patience = 0, SHRUNK_FORWARDS
        weights, gradients = self.weights_bytes, self.gradients_bytes
        if weights + gradients > nbytes:
            raise BudgetError(
                f"a budget of {format_bytes(nbytes)} ({nbytes} bytes) for everything on the device "
                f"cannot be met: weights take {format_bytes(weights)} and their "
                f"gradients {format_bytes(gradients)}. Raise the budget, or spread the "
                "weights over several devices with memswap.parallel.shard",
                weights + gradients,
            )

    def remove(self) -> None:
        """Hear of no steps any more."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    # --- what is there ----------------------------------------------------------------------------

    @property
    def weights_bytes(self) -> int:
        """Of parameters and buffers, each storage once."""
        seen: dict[int, int] = {}
        for tensor in self._parameters():
            for part in plain_parts(tensor):
                if part.device.type != "meta" and part.layout is torch.strided:
                    seen[native.storage_key(part)] = part.untyped_storage().nbytes()
        return sum(seen.values())

    @property
    def gradients_bytes(self) -> int:
        """Of the gradients of all parameters that have one in training, and keep it."""
        return sum(
            part.numel() * part.element_size()
            for tensor in self._parameters()
            if tensor.requires_grad
            and (self._keeps_gradients or not tensor._post_accumulate_grad_hooks)
            for part in plain_parts(tensor)
        )

    @property
    def measured_bytes(self) -> int | None:
        """The most on the device since a plan is followed."""
        if self._measured is not None:
            self._measured = max(self._measured, self._gauge.peak)
        return self._measured

    @property
    def over_bytes(self) -> int:
        """By how much that exceeds the budget."""
        return max((self.measured_bytes or 0) - self.nbytes, 0)

    # --- a forward begins -------------------------------------------------------------------------

    def baseline(self, present: Callable[[int], int]) -> int:
        """What is on the device beside saved activations and state that is planned.

        Args:
            present: bytes of the device that saved storages take now, each rounded up to
                multiples of its argument.
        """
        here = 0 if self.state is None else self.state.staying_bytes()
        there: int = self._gauge.now - here
        return there - present(self._granularity)

    def begin(self, plans: list[DevicePlan], learns: bool) -> None:
        """A forward begins.

        Args:
            plans: those that are followed.
            learns: whether some kind of step has none.
        """
        self._forwards += 1
        self._steps_open = 0  # one that raised has not ended
        self._learns = learns
        self.follow(plans)
        if self._record is not None:
            self._record.arrive()
        if learns:
            self._gauge.begin()

    def follow(self, plans: list[DevicePlan]) -> None:
        """These plans are followed from here on."""
        if not self.follows_others(plans):
            _ = self.measured_bytes
            return
        self._followed = list(plans)
        stays = min((plan.state_stays_bytes for plan in plans), default=self._stays)
        if self.state is not None and stays != self._stays:
            self.state.keep(stays)
            self._stays = stays
        self._measured = None
        if plans:
            self._gauge.begin()
            self._measured = self._gauge.now

    def follows_others(self, plans: list[DevicePlan]) -> bool:
        """Whether these are other plans than those that were followed."""
        return [id(one) for one in plans] != [id(one) for one in self._followed]

    def relearns(self, workspace: WorkspaceRecord, baseline_bytes: int) -> bool:
        """Whether what is there when a forward begins is not what was there in the learnt one."""
        more = baseline_bytes - workspace.baseline_nbytes
        if more > GROWN_SHARE * self.nbytes:
            self._shrunk = 0
            return True
        self._shrunk = self._shrunk + 1 if -more > SHRUNK_SHARE * self.nbytes else 0
        if self._shrunk < self._patience:
            return False
        self._shrunk, self._patience = 0, 2 * self._patience
        return True

    def step_is_new(self, plans: list[DevicePlan]) -> bool:
        """Whether the optimizer has made its first steps since these were made without one."""
        return self._step_peak is not None and any(not plan.knows_step for plan in plans)

    # --- a step is learnt -------------------------------------------------------------------------

    def record(self, iterations: Iterable[Iteration], baseline_bytes: int) -> native.Workspace:
        """Have what is there taken down in the iteration that begins, mark by mark.

        Args:
            iterations: those in flight, with the one that begins.
            baseline_bytes: what `baseline` returned.
        """
        here = 0 if self.state is None else self.state.staying_bytes()
        trained = [one for one in self._parameters() if one.requires_grad and one.is_leaf]
        self._record = native.Workspace(
            self._gauge, trained, self._granularity, here, baseline_bytes
        )
        for one in iterations:
            self._record.watch(one)
        self._record.arrive()
        return self._record

    def end(self, record: native.Workspace) -> None:
        """The iteration is over."""
        if record is self._record:
            record.end()
            self._record = None

    # --- the optimizer steps ----------------------------------------------------------------------

    def before_step(self, *hook: object) -> None:
        """`optimizer.step()` begins."""
        self._steps_open += 1
        if self._steps_open > 1:
            return
        if self._record is not None:
            self.end(self._record)
        _ = self.measured_bytes
        self._forwards_per_step = max(self._forwards - self._forwards_then, 1)
        self._forwards_then = self._forwards
        if self._learns:
            self._gauge.begin()

    def after_step(self, *hook: object) -> None:
        """`optimizer.step()` has ended."""
        self._steps_open = max(self._steps_open - 1, 0)
        if self._steps_open:
            return
        _ = self.measured_bytes
        state = self.state
        if state is None or not self._learns:
            return
        if self._forwards == self._forwards_then:  # its closure has called no forward
            # State that stays was there throughout, and is planned by itself.
            peak = self._gauge.peak - min(self._stays, state.staying_bytes())
            self._step_peak = max(peak, self._step_peak or 0)
            self._step_chunks = state.peak_bytes
        self._gauge.begin()

    def terms(self) -> DeviceTerms:
        """What plans have to meet."""
        state = None
        if self.state is not None and self._step_peak is not None:
            others = [plan for plan in self._followed if plan.knows_step]
            state = StateTerms(
                sizes=self.state.sizes() if self.state.chunked else (),
                step_peak_bytes=self._step_peak,
                step_state_bytes=self._step_chunks,
                forwards=self._forwards_per_step,
                most_bytes=self._stays if others else None,
                coded=self.state.encodes,
            )
        spare = SPARE_SHARE_OF_CPU if self._on_cpu else SPARE_SHARE
        return DeviceTerms(self.nbytes, self.weights_bytes, self.gradients_bytes, state, spare)
