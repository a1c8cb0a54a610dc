"""One number for a device: layers and an optimizer under `manage(budget="device:70GiB")`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

from memswap.optimizers import MOST_ROOM, ManagedOptimizer
from memswap.planning.account import DeviceAccount
from memswap.planning.device import device_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch.optim import Optimizer
    from torch.utils.hooks import RemovableHandle


#: The share of a budget that an optimizer's step has for state that comes and goes. Two
#: parameters' state takes more where they are long.
ROOM_SHARE = 1 / 64


class StreamedState:
    """The state of a managed optimizer, as a :class:`DeviceAccount` asks for it."""

    def __init__(self, managed: ManagedOptimizer) -> None:
        self._managed = managed

    def sizes(self) -> tuple[int, ...]:
        """Bytes of each parameter's state; none where all of it comes back before a step."""
        return self._managed.sizes() if self._managed.chunked else ()

    def here_bytes(self) -> int:
        """Of what stays, bytes that are on the device now."""
        return self._managed.staying_bytes()

    def chunks_bytes(self) -> int:
        """The most that came and went at a time in the last step."""
        return self._managed.statistics().peak_bytes if self._managed.chunked else 0

    @property
    def coded(self) -> bool:
        """Whether what is away is encoded where it is."""
        return self._managed.encodes

    def keep(self, nbytes: int) -> None:
        """From here on so many bytes stay on the device, and no more."""
        self._managed.keep(nbytes)


class DeviceBudget:
    """A device's account, with the hooks that tell it of the optimizer's steps.

    Args:
        budget: ``"device:70GiB"`` or ``"device:90%"``.
        device: one device.
        parameters: those of the model now, and its buffers.
        optimizer: None: nobody gave one.
        manage: manages the optimizer, in so many bytes of the device in a step.

    Raises:
        ValueError: the budget cannot be read, or is more than the device has.
        BudgetError: it is less than weights and gradients take.
        NotImplementedError: the device's allocator tells nobody how much it has handed out.
    """

    def __init__(
        self,
        budget: str,
        device: torch.device,
        parameters: Callable[[], Iterable[torch.Tensor]],
        optimizer: Optimizer | None,
        manage: Callable[[Optimizer, int], ManagedOptimizer],
    ) -> None:
        nbytes = device_bytes(budget, total_bytes(device))
        self.managed: ManagedOptimizer | None = None
        self._handles: list[RemovableHandle] = []
        if optimizer is None:
            self.account = DeviceAccount(device, nbytes, parameters, None, keeps_gradients=False)
            return
        # Before the first account: a budget that cannot be met leaves the optimizer as it is.
        DeviceAccount(device, nbytes, parameters, None)
        # Hooks run in their order: this one before the state's first chunk comes,
        self._handles.append(optimizer.register_step_pre_hook(self._before_step))
        try:
            self.managed = manage(optimizer, min(int(nbytes * ROOM_SHARE), MOST_ROOM))
        except Exception:
            self._handles.pop().remove()
            raise
        # and this one after the last one has left.
        self._handles.append(optimizer.register_step_post_hook(self._after_step))
        state = StreamedState(self.managed)
        self.account = DeviceAccount(device, nbytes, parameters, state)

    def remove(self) -> None:
        """Hear of no steps any more."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.account.before_step()

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.account.after_step()


def total_bytes(device: torch.device) -> int:
    """All memory that a device has; of a CPU, the machine's.

    Raises:
        NotImplementedError: its backend does not tell.
    """
    if device.type == "cpu":
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        _, total = torch.get_device_module(device).mem_get_info(device)
    except (AttributeError, RuntimeError) as error:
        raise NotImplementedError(
            f'manage(budget="device:..."): the backend of {device} does not say how much memory '
            f"the device has: {error}"
        ) from error
    return int(total)
