"""transformers' Trainer, and the trainers of TRL, which are such: one callback.

Trainer(model=model, args=args, ..., callbacks=[MemswapCallback(budget="70%")])
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from memswap.integrations.training import ManagedTraining

if TYPE_CHECKING:
    from types import FrameType

    from torch import nn
    from transformers import TrainerControl, TrainerState, TrainingArguments


class MemswapCallback(ManagedTraining, TrainerCallback):
    """Manages the model that a Trainer trains, from the begin of `train()` to its end.

    Trainer tells no callback that training raised: the hooks go then when the model runs the next
    time or is trained again, or at once at the end of ``with MemswapCallback(...) as callback:``
    around `train()`.

    Args:
        policy: as in :func:`memswap.manage`, like all others: ``budget``, ``pool``,
            ``prefetch_bytes``, ``windows``, ``group``; and ``optimizer``, ``optimizer_pool``,
            ``live``: see :class:`ManagedTraining`. :meth:`from_config` takes plain values.
    """

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        """Manage the model, and the optimizer if that was asked for.

        Raises:
            ValueError: TRL's `activation_offloading` is on, somebody else manages the model, or
                what :func:`memswap.manage` refuses.
        """
        if getattr(args, "activation_offloading", False):
            raise ValueError(
                "MemswapCallback: found activation_offloading=True, which moves the same tensors; "
                "expected one of the two: set activation_offloading=False or leave the callback out"
            )
        if model is None:
            raise ValueError("MemswapCallback: found no model, expected the one that is trained")
        self.begin(model, _is_train, token=state, optimizers=[optimizer])

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Show what was done so far, if that was asked for."""
        if state.is_local_process_zero:
            self.stepped()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Put what was moved beside the loss, in `state.log_history`."""
        if logs is not None and "loss" in logs and state.log_history:
            state.log_history[-1].update(self.metrics())

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Take the hooks off; :meth:`report` keeps what was done."""
        self.end()


def _is_train(frame: FrameType) -> bool:
    return (
        frame.f_code.co_name == "train"
        and frame.f_globals.get("__name__") == "transformers.trainer"
    )
