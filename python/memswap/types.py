"""Types of what memswap returns, for annotations and ``isinstance``; nobody makes one by hand.

What the packages :mod:`memswap.parallel` and :mod:`memswap.optimizers` return is named there.
"""

from memswap.activations import Manager
from memswap.engine.stats import Count, Stats, WindowStats
from memswap.planning.plan import Plan, PlannedStorage, PlannedUnit
from memswap.schedules.scheduled import ScheduledModules
from memswap.windows import Window

__all__ = [
    "Count",
    "Manager",
    "Plan",
    "PlannedStorage",
    "PlannedUnit",
    "ScheduledModules",
    "Stats",
    "Window",
    "WindowStats",
]
