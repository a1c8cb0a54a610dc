"""Lightning's Trainer: a callback, and MEMSWAP_LIGHTNING, which adds it without a line of code.

Trainer(..., callbacks=[MemswapCallback(budget="70%")])

MEMSWAP_LIGHTNING=1 python train.py
MEMSWAP_LIGHTNING="budget=70%, action=swap" python train.py
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from memswap.integrations.training import ManagedTraining

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

    from memswap.hooks.report import Report


class MemswapCallback(ManagedTraining, Callback):
    """Manages the module that a Trainer fits, from the begin of `fit()` to its end.

    Its end is also an exception, an early stop, or Ctrl-C. The repeated blocks are looked for in
    the whole module, wherever it holds its network.

    Args:
        policy: as in :func:`memswap.manage`, like all others: ``budget``, ``pool``,
            ``prefetch_bytes``, ``windows``, ``group``; and ``optimizer``, ``optimizer_pool``,
            ``live``: see :class:`ManagedTraining`. :meth:`from_config` takes plain values.
    """

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Manage the module: it is on its device now, and wrapped or sharded.

        Raises:
            ValueError: somebody else manages it, or what :func:`memswap.manage` refuses.
        """
        self.begin(pl_module, optimizers=trainer.optimizers)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        """Log what was moved, as often as the Trainer logs, and show it, if that was asked for."""
        if trainer.local_rank == 0:
            self.stepped()
        if trainer.loggers and trainer.global_step % trainer.log_every_n_steps == 0:
            for logger in trainer.loggers:
                logger.log_metrics(self.metrics(), step=trainer.global_step)

    def _tell(self, report: Report) -> None:
        rank_zero_info("%s", report)  # in Lightning's log, which is shown

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Take the hooks off."""
        self.end()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take the hooks off; :meth:`report` keeps what was done."""
        self.end()
