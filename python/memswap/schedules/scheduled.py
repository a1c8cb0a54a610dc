"""ScheduledModules: modules whose saved activations move by a schedule, whichever it is.

``chain``, ``swap_modules`` and ``manage_pipeline`` each make a schedule and return this. A schedule
is asked when a module's forward begins, and answers with the scope of that call.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from memswap.engine.autograd import in_backward
from memswap.groups import Groups
from memswap.hooks.blocks import Blocks
from memswap.hooks.managed import Managed
from memswap.hooks.report import Report
from memswap.hooks.units import UnitCall, persistent_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from torch import nn

    from memswap._C import Batch
    from memswap.engine.engine import Engine
    from memswap.engine.transfers import Pool
    from memswap.planning.policy import Policy


class Schedule(ABC):
    """When what some modules save leaves, and when it comes back."""

    #: Whether a compiled graph ends where a module is called: see `ModuleHooks.add`.
    in_compiled_code: ClassVar[bool] = True

    engines: Mapping[str, Engine]
    """What saves, by what its modules have in common; a single one has no name."""
    paused: bool = False
    """Whether forwards that begin now are left alone."""

    @abstractmethod
    def begin(
        self, name: str, inputs: tuple[Any, Any], depth: Callable[[Collection[str]], int]
    ) -> UnitCall | None:
        """A module's forward begins. None: nothing of it moves.

        Args:
            name: of the module.
            inputs: ``(args, kwargs)`` of its forward.
            depth: how many calls of modules with these names the thread is in, this one included.
        """

    def settle(self) -> None:
        """No forward begins any more: order everything after the transfers under way."""
        for engine in self.engines.values():
            engine.settle()


class BatchSchedule(Schedule):
    """A schedule over groups: what one call of a module saves is a batch, and moves as a whole.

    Args:
        modules: each has a group, by its name.
        policy: which saved tensors move, and how.
        pool: where they go; see :class:`memswap.saved_tensors`.
    """

    def __init__(self, modules: Mapping[str, nn.Module], policy: Policy, pool: Pool | None) -> None:
        groups = Groups(policy, pool=pool)
        self.engines = {"": groups.engine}
        self._engine = groups.engine
        self._modules = tuple(modules.values())
        #: Serialises what threads say of their forwards and backwards.
        self.turns = threading.RLock()
        self._groups = {name: groups.new(name) for name in modules}

    @abstractmethod
    def opens(self, name: str) -> bool:
        """Whether this forward of a module is the first of a pass. `turns` is held."""

    @abstractmethod
    def began(self, name: str, batch: Batch) -> None:
        """A batch is new: note it, and have it tell its backward. `turns` is held."""

    @abstractmethod
    def ended(self, name: str, batch: Batch) -> None:
        """The forward that a batch has collected is over."""

    def begin(
        self, name: str, inputs: tuple[Any, Any], depth: Callable[[Collection[str]], int]
    ) -> UnitCall | None:
        """A module's forward begins. None: the schedule is paused, or autograd records nothing."""
        if self.paused or not torch.is_grad_enabled() or in_backward():
            return None
        with self.turns:
            if self.opens(name):
                lasting = persistent_tensors(self._modules)
                self._engine.lock.run(self._engine.set_persistent, lasting)
            batch = self._groups[name].begin()
            self.began(name, batch)
        return UnitCall(self._engine, name, partial(self.ended, name, batch), batch)


class ScheduledModules(Managed):
    """Modules under a schedule: statistics, a report, pause and resume, and the way to end it.

    Args:
        modules: what is managed, by name.
        schedule: when what they save moves.
        door: the function that was called, as messages name it.

    Attributes:
        schedule: when what they save moves: a :class:`~memswap.schedules.chain.LayersAhead`,
            :class:`~memswap.schedules.towers.Towers` or :class:`~memswap.schedules.pipeline.Slots`.
        units: names of the modules, in the order given.
    """

    def __init__(self, modules: Mapping[str, nn.Module], schedule: Schedule, door: str) -> None:
        super().__init__(schedule.engines)
        self.schedule = schedule
        self.units = tuple(modules)
        self._description = Blocks.given(dict(modules)).description
        self._add(modules, door, in_compiled_code=schedule.in_compiled_code)

    def _of_what(self) -> str:
        return f"{super()._of_what()} under {self.schedule!r}"

    def report(self) -> Report:
        """What is managed, and the statistics as a text table, bytes in MiB.

        Of towers one table after another, each under its name.
        """
        return super().report().below(self._description)

    def pause(self) -> None:
        """Forwards that begin now are left alone. Graphs that are alive go on as they were."""
        self.schedule.paused = True

    def resume(self) -> None:
        """What forwards save moves again."""
        self.schedule.paused = False

    def remove(self) -> None:
        """Take the hooks off the modules. Graphs that are alive can still run backward.

        Raises:
            TransferError: backward has met a frame that is not what was encoded (broken memory).
        """
        self._hooks.remove()
        self.schedule.settle()
        super().remove()

    def _begin(
        self, key: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> UnitCall | None:
        return self.schedule.begin(key, (args, kwargs), self._hooks.depth)
