"""DeviceAccount: watches everything on a device, for plans under one number ([Note: One number]).

[Note: Reading the allocator]
The allocator has one peak, which others read as well. It is begun anew while a step is learnt, at
each mark, and once when a plan is first followed; from then on it is only read. So what a user
reads (`torch.accelerator.max_memory_allocated`) is that of the steps under the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

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
    from memswap._C import Iteration, WorkspaceRecord

#: When a forward begins, less may be there than when its step was learnt, as a share of the budget,
#: before it is learnt again, in so many forwards one after another; each time twice as many.
SHRUNK_SHARE, SHRUNK_FORWARDS = 1 / 100, 16


class State(Protocol):
    """An optimizer's state, of which some may be away between steps."""

    def sizes(self) -> tuple[int, ...]:
        """Bytes of each parameter's state that may be away, in the order in which they stay."""

    def here_bytes(self) -> int:
        """Of them, bytes that are on the device now."""

    def chunks_bytes(self) -> int:
        """The most that came and went at a time in the last step."""

    @property
    def coded(self) -> bool:
        """Whether what is away is encoded where it is."""

    def keep(self, nbytes: int) -> None:
        """From here on so many bytes stay on the device, and no more."""


class DeviceAccount:
    """What is on a device, by its own allocator.

    Args:
        device: one device.
        nbytes: most bytes on it.
        parameters: those of the model now, and its buffers.
        state: of the optimizer; None: nobody gave one.
        keeps_gradients: False: those of parameters with a hook behind their gradient may be used up
            in backward, as optimizers for single parameters do it.
    """

    def __init__(
        self,
        device: torch.device,
        nbytes: int,
        parameters: Callable[[], Iterable[torch.Tensor]],
        state: State | None,
        keeps_gradients: bool = True,
    ) -> None:
        self.nbytes = nbytes
        self._gauge = native.MemoryGauge(device)
        self._on_cpu = device.type == "cpu"
        self._granularity = 1 if self._on_cpu else GRANULARITY_BYTES
        self._parameters = parameters
        self._keeps_gradients = keeps_gradients
        self._state = state
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
        here = 0 if self._state is None else self._state.here_bytes()
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
        if self._state is not None and stays != self._stays:
            self._state.keep(stays)
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
        here = 0 if self._state is None else self._state.here_bytes()
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

    def before_step(self) -> None:
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

    def after_step(self) -> None:
        """`optimizer.step()` has ended."""
        self._steps_open = max(self._steps_open - 1, 0)
        if self._steps_open:
            return
        _ = self.measured_bytes
        state = self._state
        if state is None or not self._learns:
            return
        if self._forwards == self._forwards_then:  # its closure has called no forward
            # State that stays was there throughout, and is planned by itself.
            peak = self._gauge.peak - min(self._stays, state.here_bytes())
            self._step_peak = max(peak, self._step_peak or 0)
            self._step_chunks = state.chunks_bytes()
        self._gauge.begin()

    def terms(self) -> DeviceTerms:
        """What plans have to meet."""
        state = None
        if self._state is not None and self._step_peak is not None:
            others = [plan for plan in self._followed if plan.knows_step]
            state = StateTerms(
                sizes=self._state.sizes(),
                step_peak_bytes=self._step_peak,
                step_state_bytes=self._step_chunks,
                forwards=self._forwards_per_step,
                most_bytes=self._stays if others else None,
                coded=self._state.coded,
            )
        spare = SPARE_SHARE_OF_CPU if self._on_cpu else SPARE_SHARE
        return DeviceTerms(self.nbytes, self.weights_bytes, self.gradients_bytes, state, spare)
