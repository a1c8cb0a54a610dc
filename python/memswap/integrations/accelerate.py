"""accelerate: `prepare`, and a manager of what was prepared.

model, optimizer, loader, manager = prepare(accelerator, model, optimizer, loader, budget="70%")
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from memswap.activations import manage
from memswap.integrations.states import OptimizerStates
from memswap.integrations.training import check_terms, layers_of
from memswap.planning.policy import answers_unknown

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch.distributed import ProcessGroup

    from memswap.engine.action import Action
    from memswap.engine.transfers import Pool
    from memswap.planning.policy import Policy
    from memswap.windows import Windows


@answers_unknown
def prepare(
    accelerator: Accelerator,
    *objects: Any,
    policy: Policy | None = None,
    budget: int | str | None = None,
    pool: Pool | None = None,
    prefetch_bytes: int | str = "auto",
    windows: Windows | None = None,
    group: ProcessGroup | str | None = None,
    optimizer: bool | str | Action | None = None,
    optimizer_pool: Pool | None = None,
) -> tuple[Any, ...]:
    """``accelerator.prepare(*objects)``, and manages the models among them.

    Models are managed as they are afterwards: on their device, inside DDP or FSDP, sharded by
    FSDP2, compiled. Models without trainable parameters are left alone.

    Args:
        accelerator: the accelerator of this training.
        objects: what `prepare` takes: models, optimizers, loaders, schedulers.
        policy: as in :func:`memswap.manage`, like all others.
        budget: the most bytes of saved activations on the device, or a share of them.
        pool: where swapped tensors go.
        prefetch_bytes: bytes that may be on their way back ahead of their use.
        windows: hide encoding and decoding under matrix products and collectives.
        group: ranks whose plans under a budget are one; ``"world"``: all ranks of the training.
        optimizer: whether the state of the optimizers among the objects is away between steps
            (:func:`memswap.manage_optimizer`): True as suits the device, or ``"swap"``,
            ``"encode"``, ``"encode_swap"`` or an :class:`memswap.Action`.
        optimizer_pool: where that state goes.

    Returns:
        What `prepare` returns for each object, in their order, and behind them one
        :class:`memswap.types.Manager`. Call its `remove()` when training ends, or use it in a
        ``with`` block.

    Raises:
        TypeError: the first argument is no accelerator.
        ValueError: no object is a model that trains, or what :func:`memswap.manage` refuses.
    """
    if not callable(getattr(accelerator, "prepare", None)):
        raise TypeError(
            f"memswap.integrations.accelerate.prepare: found {type(accelerator).__name__}, "
            "expected an accelerate.Accelerator first: prepare(accelerator, model, ...)"
        )
    check_terms(policy, budget, pool, prefetch_bytes, windows, group)
    states = OptimizerStates(optimizer, optimizer_pool)
    if not any(map(_trains, objects)):
        raise ValueError(
            "memswap.integrations.accelerate.prepare: found no model with trainable parameters "
            "among the objects, expected one; use accelerator.prepare for the others"
        )
    prepared = accelerator.prepare(*objects)
    prepared = prepared if len(objects) > 1 else (prepared,)
    models = [one for one in prepared if _trains(one)]
    manager = manage(
        layers_of(models),
        policy,
        budget=budget,
        pool=pool,
        prefetch_bytes=prefetch_bytes,
        windows=windows,
        group=group,
    )
    try:
        states.begin(one for one in prepared if hasattr(one, "param_groups"))
    except BaseException:
        manager.remove()
        raise
    return (*prepared, manager)


def _trains(found: Any) -> bool:
    return isinstance(found, nn.Module) and any(one.requires_grad for one in found.parameters())
