"""ManagedTraining: a manager for as long as a training runs, whoever runs its loop.

[Note: A loop that raised]
Some loops tell a callback that they begin and that they end, but not that they raised. A training
that has begun therefore knows the call of its loop, and looks whether that is still on the stack
when the model has run the next time (torch takes no hook off a module that begins to run), and when
another training of the same model begins: if it is not, the hooks go. A call that ended may have
left its place to the next one, so a loop is also known by an object that is made for each. Whoever
wants the hooks gone at once uses the training in a ``with`` block.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterable, Sequence
from traceback import walk_stack
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import ref

import torch
import torch.distributed as dist

from memswap.activations import manage
from memswap.engine.transfers import check_pool
from memswap.engine.units import parsed_prefetch
from memswap.hooks.blocks import find_blocks, unwrapped
from memswap.hooks.managed import Removable
from memswap.hooks.module_hooks import AtEnd, ModuleHooks, hooks_on
from memswap.hooks.report import Report
from memswap.integrations.live import LiveLine
from memswap.integrations.options import from_config
from memswap.integrations.states import OptimizerStates
from memswap.planning.agreement import check_group
from memswap.planning.budgets import is_device_budget, parsed
from memswap.planning.policy import answers_unknown, checked_policy
from memswap.windows import check_windows

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import FrameType

    from torch import nn
    from torch.distributed import ProcessGroup

    from memswap.activations import Manager
    from memswap.engine.action import Action
    from memswap.engine.transfers import Pool
    from memswap.planning.policy import Policy
    from memswap.windows import Windows

logger = logging.getLogger("memswap")

TrainingT = TypeVar("TrainingT", bound="ManagedTraining")


class ManagedTraining(Removable):
    """Manages a model from the begin of its training to the end; used again for the next one.

    Args:
        policy: as in :func:`memswap.manage`, like all others.
        budget: the most bytes of saved activations on the device, or a share of them; or of
            everything on the device (``"device:70GiB"``), with the state of the training's
            optimizer if it has one.
        pool: where swapped tensors go.
        prefetch_bytes: bytes that may be on their way back ahead of their use.
        windows: hide encoding and decoding under matrix products and collectives.
        group: ranks whose plans under a budget are one; ``"world"``: all ranks of the training.
        optimizer: whether the optimizer's state is away between steps
            (:func:`memswap.manage_optimizer`): True as suits the device, or ``"swap"``,
            ``"encode"``, ``"encode_swap"`` or an :class:`memswap.Action`. It stays away after the
            training, for as long as there is the optimizer.
        optimizer_pool: where that state goes.
        live: whether a line below the progress bars says what was done so far; needs tqdm.
    """

    @answers_unknown
    def __init__(
        self,
        policy: Policy | None = None,
        *,
        budget: int | str | None = None,
        pool: Pool | None = None,
        prefetch_bytes: int | str = "auto",
        windows: Windows | None = None,
        group: ProcessGroup | str | None = None,
        optimizer: bool | str | Action | None = None,
        optimizer_pool: Pool | None = None,
        live: bool = False,
    ) -> None:
        super().__init__()
        check_terms(policy, budget, pool, prefetch_bytes, windows, group)
        self._states = OptimizerStates(optimizer, optimizer_pool)
        self._options: dict[str, Any] = {
            "policy": policy,
            "budget": budget,
            "pool": pool,
            "prefetch_bytes": prefetch_bytes,
            "windows": windows,
            "group": group,
        }
        self._live: LiveLine | None = LiveLine() if live else None
        self._manager: Manager | None = None
        self._loop: _Loop | None = None
        self._guard: _Guard | None = None
        self._report = Report(("no training has begun",), ())

    @classmethod
    def from_config(cls: type[TrainingT], config: Mapping[str, Any]) -> TrainingT:
        """One from the plain values of a configuration file.

        Args:
            config: any of ``budget``, ``action``, ``min_bytes``, ``include``, ``exclude``,
                ``prefetch_bytes``, ``group`` (``"world"``) and ``optimizer``:
                ``{"budget": "70%", "optimizer": "swap"}``.

        Raises:
            ValueError: another option, or a value that `manage` or `Policy` refuses.
        """
        return cls(**from_config(config))

    @property
    def manager(self) -> Manager | None:
        """What `manage` returned; None while no training runs."""
        return self._manager

    def begin(
        self,
        model: nn.Module | Sequence[nn.Module],
        loop: Callable[[FrameType], bool] | None = None,
        token: object = None,
        optimizers: Iterable[Any] = (),
    ) -> None:
        """A training of this model begins; one that was running has ended.

        Args:
            model: the model as it is called; or its parts, of which each runs by itself.
            loop: says which call on this thread's stack is the training's; the outermost counts.
                None: whoever runs the training tells its end in every case.
            token: an object that this loop has and no other.
            optimizers: those of this training, as they are or wrapped.

        Raises:
            ValueError: somebody else manages this model, what :func:`memswap.manage` refuses, or
                no optimizer where its state is to be away.
        """
        self.end()
        parts = [model] if isinstance(model, torch.nn.Module) else list(model)
        running = None if loop is None else _Loop.running(loop, token)
        for part in parts:
            for guard in _guards(part):
                guard.look(running)
        optimizers = list(optimizers)
        whole = is_device_budget(self._options["budget"])
        handed_on = self._states.under_one_budget(optimizers) if whole else None
        self._manager = manage(layers_of(parts), optimizer=handed_on, **self._options)
        self._loop = running
        if running is not None:
            self._guard = _Guard(self)
            self._guard.watch(unwrapped(parts[0]))
        try:
            if handed_on is None:
                self._states.begin(optimizers)
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """The training has ended, or it raised: takes the hooks off the model, keeps the report.

        Raises:
            TransferError: backward has met a frame that is not what was encoded (broken memory).
        """
        manager, self._manager = self._manager, None
        guard, self._guard = self._guard, None
        if guard is not None:
            guard.remove()
        if manager is not None:
            self._report = self._reported(manager)
            self._tell(self._report)
            self._states.end()
            if self._live is not None:
                self._live.close()
            manager.remove()

    def report(self) -> Report:
        """What was done in the training that runs, or in the last one."""
        return self._report if self._manager is None else self._reported(self._manager)

    def _tell(self, report: Report) -> None:
        """Say what was done, when a training has ended: once, on the first of several ranks."""
        if not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0:
            logger.info("%s", report)

    def _reported(self, manager: Manager) -> Report:
        return manager.report().below(*reversed(self._states.report()))

    def metrics(self) -> dict[str, float]:
        """What was done since the training began, for its log: MiB, and seconds.

        Returns:
            Empty while no training runs.
        """
        if self._manager is None:
            return {}
        stats = self._manager.stats()
        states = self._states
        away = {"memswap_optimizer_away_mib": states.away_bytes() / 2**20} if states.managed else {}
        return {
            **away,
            "memswap_moved_mib": stats.moved_bytes / 2**20,
            "memswap_peak_resident_mib": stats.peak_resident_bytes / 2**20,
            "memswap_peak_away_mib": stats.peak_away_bytes / 2**20,
            "memswap_blocked_s": stats.exposed_wait_s,
        }

    def stepped(self) -> None:
        """A step has ended: the live line, if there is one, says what was done so far."""
        if self._live is not None and self._manager is not None:
            self._live.show(self._manager.line())

    def has_ended(self, another: _Loop | None = None) -> bool:
        """Whether the loop is over although nobody said so: see [Note: A loop that raised].

        Args:
            another: a loop that runs now, and trains the same model.
        """
        if self._manager is None or self._loop is None:
            return False
        return not self._loop.runs() or (another is not None and not self._loop.is_that(another))

    def remove(self) -> None:
        """The same as :meth:`end`, in the word that managers have for it."""
        self.end()


class _Loop:
    """The call of a training loop, which is not held: it holds the graph of its last step."""

    def __init__(self, frame: FrameType, token: object) -> None:
        self._name = (id(frame), frame.f_code)
        self._thread = threading.get_ident()
        self._token = None if token is None else ref(token)

    @classmethod
    def running(cls, is_loop: Callable[[FrameType], bool], token: object) -> _Loop | None:
        """The outermost call on this thread's stack that is one."""
        found = [frame for frame, _ in walk_stack(sys._getframe(1)) if is_loop(frame)]
        return cls(found[-1], token) if found else None

    def is_that(self, other: _Loop) -> bool:
        """Whether the other one is the same call."""
        return self._name == other._name and self._token == other._token

    def runs(self) -> bool:
        """Whether it is on the stack; other threads cannot tell, and are told that it is."""
        if threading.get_ident() != self._thread:
            return True
        stack = walk_stack(sys._getframe(1))
        return any((id(frame), frame.f_code) == self._name for frame, _ in stack)


class _Guard:
    """Looks at the end of each call of a model whether the loop still runs."""

    def __init__(self, training: ManagedTraining) -> None:
        self._training: ManagedTraining | None = training
        self._hooks = ModuleHooks()

    def watch(self, model: nn.Module) -> None:
        self._hooks.add(model, None, self._begin, in_compiled_code=False)

    def remove(self) -> None:
        self._training = None
        self._hooks.remove()

    def look(self, another: _Loop | None = None) -> None:
        """End a training whose loop has ended."""
        if self._training is not None and self._training.has_ended(another):
            self._training.end()

    def _begin(
        self, key: None, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> AtEnd:
        return AtEnd(lambda output: self.look())


def check_terms(
    policy: Policy | None,
    budget: int | str | None,
    pool: Pool | None,
    prefetch_bytes: int | str,
    windows: Windows | None,
    group: ProcessGroup | str | None,
) -> None:
    """Raise what `manage` would raise of these: before a model is loaded, and not after.

    Args:
        policy: as `manage` takes it, like the others.
        budget: bytes, a share, ``"auto"`` or ``"device:..."``.
        pool: where swapped tensors go.
        prefetch_bytes: a size, or ``"auto"``.
        windows: what encodes and decodes wait for.
        group: of ranks that plan together.

    Raises:
        TypeError: one of them is of another kind.
        ValueError: one of them cannot be read.
    """
    checked_policy(policy)
    check_pool(pool)
    check_windows(windows)
    check_group(group)
    parsed_prefetch(prefetch_bytes)
    if budget is not None and not is_device_budget(budget):
        parsed(budget, "budget")


def layers_of(models: Sequence[nn.Module]) -> nn.Module | dict[str, nn.Module]:
    """What `manage` is to be given for one model, or for several under one manager.

    Raises:
        ValueError: no model.
    """
    if not models:
        raise ValueError("memswap: found no model, expected one or several to manage")
    if len(models) == 1:
        return models[0]
    return {
        f"{place}.{name}": unit
        for place, model in enumerate(models)
        for name, unit in find_blocks(model).units.items()
    }


def _guards(model: nn.Module) -> list[_Guard]:
    return [owner for owner, _, _ in hooks_on(unwrapped(model)) if isinstance(owner, _Guard)]
