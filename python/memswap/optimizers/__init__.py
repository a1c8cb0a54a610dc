"""Optimizers whose state is away between steps: the door, what it returns, and what it raises."""

from memswap.optimizers.managed import (
    ManagedOptimizer,
    OptimizerStatistics,
    OptimizerStepError,
    manage_optimizer,
    managed_optimizer,
)

__all__ = [
    "ManagedOptimizer",
    "OptimizerStatistics",
    "OptimizerStepError",
    "manage_optimizer",
    "managed_optimizer",
]
