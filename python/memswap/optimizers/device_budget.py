"""One number for a device: layers and an optimizer under `manage(budget="device:70GiB")`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING
from weakref import ref

import torch

from memswap.hooks.units import persistent_tensors
from memswap.optimizers.managed import MOST_ROOM, ManagedOptimizer, manage_optimizer
from memswap.planning.account import DeviceAccount
from memswap.planning.budgets import device_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn
    from torch.optim import Optimizer

    from memswap.engine.transfers import Pool


#: The share of a budget that an optimizer's step has for state that comes and goes. Two
#: parameters' state takes more where they are long.
ROOM_SHARE = 1 / 64


def open_account(
    budget: str, roots: Sequence[nn.Module], optimizer: Optimizer | None, pool: Pool | None
) -> tuple[DeviceAccount, ManagedOptimizer | None]:
    """What watches a device, told of the optimizer's steps by hooks; and the managed optimizer.

    Args:
        budget: ``"device:70GiB"`` or ``"device:90%"``.
        roots: the model's modules, whose parameters and buffers are its weights.
        optimizer: None: nobody gave one.
        pool: where its state goes.

    Raises:
        ValueError: the budget cannot be read, or is more than the device has, or the modules have
            no parameters on a device.
        BudgetError: it is less than weights and gradients take.
        NotImplementedError: the device's allocator tells nobody how much it has handed out.
    """
    devices = [one.device for root in roots for one in root.parameters() if not one.is_meta]
    if not devices:
        raise ValueError(f"manage(budget={budget!r}): these modules have no parameters on a device")
    # A graph leads to the account, by its engine, and a module may hold that graph.
    alive = [ref(root) for root in roots]

    def parameters() -> list[torch.Tensor]:
        return persistent_tensors(root for one in alive if (root := one()) is not None)

    nbytes = device_bytes(budget, total_bytes(devices[0]))
    # Before anything is done to the optimizer: a budget that cannot be met leaves it as it is.
    account = DeviceAccount(devices[0], nbytes, parameters, keeps_gradients=optimizer is not None)
    if optimizer is None:
        return account, None
    # Hooks run in their order: this one before the state's first chunk comes,
    account.handles.append(optimizer.register_step_pre_hook(account.before_step))
    try:
        room = min(int(nbytes * ROOM_SHARE), MOST_ROOM)
        account.state = manage_optimizer(optimizer, pool=pool, room=room)
    except Exception:
        account.remove()
        raise
    # and this one after the last one has left.
    account.handles.append(optimizer.register_step_post_hook(account.after_step))
    return account, account.state


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
