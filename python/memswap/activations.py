"""saved_tensors and manage: the two doors to having saved activations encoded or swapped."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from memswap._warn import warn
from memswap.engine.autograd import in_backward
from memswap.engine.compiled import uncompiled
from memswap.engine.engine import Engine
from memswap.engine.hook_scope import HookScope, OpenBlocks, current_scope
from memswap.engine.stats import Stats, WindowStats
from memswap.engine.transfers import check_pool
from memswap.engine.uncopied import Uncopied
from memswap.engine.units import format_bytes, parsed_prefetch
from memswap.errors import MemswapError
from memswap.hooks.blocks import Blocks, compiles_what_it_wraps, find_blocks, named_units
from memswap.hooks.managed import Counted, Managed
from memswap.hooks.module_hooks import ModuleHooks
from memswap.hooks.operators import OperatorWindows
from memswap.hooks.report import Report
from memswap.hooks.units import (
    CompiledCall,
    Iterations,
    ModelCall,
    PlainCall,
    UnitCall,
    bytes_of,
    nothing,
    persistent_tensors,
    records,
)
from memswap.hooks.unseen import Unseen
from memswap.optimizers.device_budget import open_account
from memswap.optimizers.managed import ManagedOptimizer, check_optimizer, manage_optimizer
from memswap.planning.agreement import check_group, group_of
from memswap.planning.budgets import check_one_device, is_device_budget, parsed
from memswap.planning.device import DevicePlan
from memswap.planning.director import BudgetDirector
from memswap.planning.policy import Policy, answers_unknown, checked_policy, names_nothing
from memswap.planning.rates import Rates
from memswap.planning.worth import Worth
from memswap.reports.step_report import write_step_report
from memswap.windows import Window, Windows, check_windows

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.optim import Optimizer

    from memswap.engine.transfers import Pool
    from memswap.hooks.module_hooks import Scope
    from memswap.planning.account import DeviceAccount
    from memswap.planning.plan import Plan
    from memswap.planning.step import Step


logger = logging.getLogger("memswap")


class saved_tensors(Uncopied, Counted):  # noqa: N801  (used like torch.autograd.graph.save_on_cpu)
    """Encode or swap what autograd saves inside a ``with`` block, and bring it back in backward.

    Works like :class:`torch.autograd.graph.save_on_cpu`: backward may run inside or outside the
    block, at any time, any number of times. The block may be entered again and nested.

    Args:
        policy: which tensors move, and how; default ``Policy()``: everything of 64 KiB or more, as
            suits its device.
        pool: where swapped tensors go. Default: a :class:`HostPool` of pinned memory for tensors
            on an accelerator, a :class:`DiskPool` for tensors on a CPU without one. On a CPU, a
            :class:`HostPool` that is given holds the frames of encoded tensors.
        prefetch_bytes: bytes that may be on their way back ahead of their use, and that stay at
            the end of the forward because backward needs them at once; an int, a size such as
            ``"256MiB"``, ``0`` for none, or ``"auto"``: an eighth of what a forward swaps and a
            thirty-second of what it encodes, and at least its largest storage; with ``windows=``,
            as many as the last backward needed for decodes to be ready in time.

    Raises:
        InplaceEditError: in backward, if a saved tensor was edited in place.
        TransferError: in backward, if the pool cannot give bytes back (a disk that fails); in one
            of the next two forwards, if an accelerator met a frame that is not what was encoded.
        NotImplementedError: if ``pool`` cannot serve the tensors' device in this version.
    """

    @answers_unknown
    def __init__(
        self,
        policy: Policy | None = None,
        *,
        pool: Pool | None = None,
        prefetch_bytes: int | str = "auto",
    ) -> None:
        check_pool(pool)
        super().__init__(
            {"": Engine(checked_policy(policy), pool, parsed_prefetch(prefetch_bytes))}
        )
        self._open = OpenBlocks()

    @uncompiled
    def __enter__(self) -> saved_tensors:
        if not in_backward():
            self._engine.lock.run(self._engine.begin_iteration)
        self._open.enter(HookScope(self._engine, ""))
        return self

    @uncompiled
    def __exit__(self, *raised: object) -> None:
        self._open.leave()


class Manager(Managed):
    """What :func:`manage` returns: its statistics, its report, and the way to end it.

    Args:
        blocks: the modules, by name, and the models whose forwards begin iterations.
        policy: which saved tensors move, and how.
        pool: where swapped ones go; None: a default pool of each device.
        prefetch_bytes: how much is brought back ahead of backward; None: by what is saved.
        budget: bytes, a share, ``"auto"`` or ``"device:..."``; None: no plan is made.
        rates: of the machine, to plan with; None: they are measured.
        group: of ranks that plan together; None: this rank plans for itself.
        windows: what encodes and decodes wait for; None: for nothing.
        account: of a device budget, which watches the device's allocator.
        optimizer: whose state is away between steps, and ends with this manager.
        compares: the models whose plain steps are compared where little is freed; empty: none are.
    """

    def __init__(
        self,
        blocks: Blocks,
        policy: Policy,
        pool: Pool | None,
        prefetch_bytes: int | None,
        budget: int | str | None = None,
        rates: Rates | None = None,
        group: Any = None,
        windows: Windows | None = None,
        account: DeviceAccount | None = None,
        optimizer: ManagedOptimizer | None = None,
        compares: tuple[nn.Module, ...] = (),
    ) -> None:
        make = Engine if windows is None else windows.engine
        super().__init__({"": make(policy, pool, prefetch_bytes)})
        self._units = dict(blocks.units)
        self._description = blocks.description
        self._budget = budget
        self._director: BudgetDirector | None = None
        if budget is not None:
            self._director = self._engine.director = BudgetDirector(
                self._engine, policy, pool, budget, rates, group, self._units, account
            )
        self._account, self._optimizer = account, optimizer
        self._worth: Worth | None = None
        if compares:
            self._worth = Worth(self._engine, partial(bytes_of, compares), not blocks.models)
        self._iterations = Iterations(
            self._engine,
            self._units.values(),
            blocks.models,
            nothing if self._worth is None else self._worth.begins,
        )
        self._models = ModuleHooks()
        self._compiled = ""  # what is to be said of a model that is compiled as a whole
        self._add(self._units, "manage()", in_compiled_code=False)
        for model in blocks.models:
            self._models.add(model, None, self._begin_model, in_compiled_code=False)
        self._unseen = Unseen(self._units.values(), "manage()")
        logger.info("%s", self._description)
        self._operators: OperatorWindows | None = None
        if windows is not None:
            self._operators = OperatorWindows(self._engine, self._units, windows)

    def __repr__(self) -> str:
        managed = super().__repr__()
        if self._budget is None:
            return managed
        planned = "no plan yet" if self.plan is None else "planned"
        return f"{managed[:-1]}, budget {self._budget_as_asked()}, {planned}>"

    def _budget_as_asked(self) -> str:
        return self._budget if isinstance(self._budget, str) else format_bytes(self._budget or 0)

    @property
    def units(self) -> tuple[str, ...]:
        """Names of the managed units, in the order given."""
        return tuple(self._units)

    @property
    def plan(self) -> Plan | None:
        """What happens to each saved storage under the budget, why, and what it costs.

        None without a budget, and in the first steps, which learn. ``print(manager.plan)`` shows a
        table with a line per unit; under a budget for the whole device it is a
        :class:`memswap.planning.device.DevicePlan`, which ends with what is on the device at the
        peak, by kind. Where ``manage(model)`` was left all choices and has declined, because what
        moved freed little and took time, it is a plan by which all of it stays, in one line, and
        :attr:`Plan.declined` says what moving took (docs/choosing.md).
        """
        if self._worth is not None:
            return self._worth.declined
        plan = None if self._director is None else self._director.plan
        if self._account is not None and isinstance(plan, DevicePlan):
            return replace(plan, measured_device_bytes=self._account.measured_bytes)
        return plan

    @property
    def optimizer(self) -> ManagedOptimizer | None:
        """The optimizer's manager, where `manage` was given one."""
        return self._optimizer

    def wait_for_plan(self) -> Plan | None:
        """Wait for the plan that the steps so far lead to, and return the plan in force.

        Planning runs beside training, and no step waits for it: how many steps go by until a plan
        is in force depends on how long they take. Benchmarks and tests call this between two steps
        to have the plan in the next one. Without a budget it does nothing. Ranks that plan together
        wait for one another here: all of them call it, after steps whose graphs none of them keeps;
        they follow a plan a few forwards after all of them have it.

        Raises:
            BudgetError: no plan meets the budget; the message states the smallest one that can be
                met.
        """
        if self._director is not None:
            self._director.wait()
            self._engine.tell()
        return self.plan

    @property
    def learnt(self) -> tuple[Step, Rates] | None:
        """The step and the rates that the plan was made of; None where there is no plan.

        For `memswap.planning`, and for files that ``python -m memswap plan --load`` reads.
        """
        director = self._director
        if director is None or director.step is None or director.rates is None:
            return None
        return director.step, director.rates

    def stats(self) -> Stats:
        """What was done since this began or :meth:`reset_stats`."""
        if self._director is not None:
            self._director.look()
        return super().stats()

    def reset_stats(self) -> None:
        """Start counting anew."""
        if self._director is not None:
            self._director.look()
        if self._worth is not None:
            self._engine.lock.run(self._worth.look)
        super().reset_stats()
        if self._worth is not None:
            self._engine.lock.run(self._worth.counts_anew)

    def remove(self) -> None:
        """Take the hooks off the modules. Graphs that are alive can still run backward.

        State of an optimizer that was given comes back to the device, all of it.

        Raises:
            TransferError: backward has met a frame that is not what was encoded (broken memory), or
                state cannot be read back.
        """
        self._unseen.end()
        if self._account is not None:
            self._account.remove()
        if self._optimizer is not None:
            self._optimizer.remove()
        self._models.remove()
        if self._worth is not None:
            self._worth.remove()
        if self._operators is not None:
            self._operators.remove()
        if self._director is not None:
            self._director.end()
        super().remove()
        self._engine.tell()

    def window(self, seconds: float | None = None, *, name: str = "") -> Window:
        """A window of this manager's, wherever it is entered; see :func:`memswap.window`."""
        engine = None if self._engine.windows is None else self._engine
        return Window(engine, seconds, name)

    def window_stats(self) -> WindowStats:
        """What became of the work that waited for windows; all zeros without ``windows=...``."""
        return self._engine.window_stats()

    def report(self) -> Report:
        """What is managed, what is planned, and the statistics as a text table, bytes in MiB.

        As the last line of a notebook's cell it is shown as HTML.
        """
        optimizer = "" if self._optimizer is None else self._optimizer.report()
        said = (optimizer, self._description, self._compiled, *self._describe_budget())
        return super().report().below(*filter(None, said))

    def _describe_budget(self) -> list[str]:
        """What came of the budget, in a few lines; none without one, unless everything stays."""
        if self._budget is None:
            return [] if self.plan is None else [self.plan.why_declined()]
        if self.plan is None:
            planning = self._director is not None and self._director.planning
            why = "it is being made beside training" if planning else "the first steps learn"
            return [f"budget {self._budget_as_asked()}: no plan yet, {why}"]
        return self.plan.summary().splitlines()

    def trace(self, folder: str | Path) -> list[Path]:
        """Write what a step of this training is without memswap, and as it is planned.

        Args:
            folder: where the files go; it is made if it is missing.

        Returns:
            The files: ``trace.json``, which https://ui.perfetto.dev and chrome://tracing open, and
            ``memory.png`` where matplotlib is installed; under a budget for the whole device also
            ``device.png``, with everything on the device by kind.

        Raises:
            MemswapError: there is no plan: without a budget nothing is measured, and the first
                steps under one lead to it.
        """
        plan, learnt = self.plan, self.learnt
        if plan is None or learnt is None:
            found = "no budget" if self._budget is None else "no plan yet"
            raise MemswapError(
                f"Manager.trace: found {found}, expected a training whose steps were measured: use "
                'manage(model, budget="auto") or another budget, train for five steps or so, call '
                "wait_for_plan(), and then this"
            )
        written = write_step_report(plan, *learnt, Path(folder))
        if len(written) == 1:
            logger.warning("no picture: matplotlib is not installed (pip install matplotlib)")
        logger.info("written: %s", ", ".join(map(str, written)))
        return written

    def _begin(
        self, key: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Scope:
        self._unseen.seen(self._units.values())
        if records():
            self._iterations.unit_called(key, (args, kwargs), self._outermost)
            worth = self._worth
            if worth is not None and not worth.over and self._is_plain(worth, (args, kwargs)):
                return PlainCall(self._iterations.unit_left, worth.left)
        return UnitCall(self._engine, key, self._iterations.unit_left)

    def _is_plain(self, worth: Worth, inputs: object) -> bool:
        """Whether the iteration in which a unit is called is as without memswap."""
        if self._hooks.compiled():
            self._engine.lock.run(worth.end)  # hooks that come and go would have it compiled again
        self._iterations.plain = self._engine.lock.run(worth.plain, inputs)
        return self._iterations.plain

    def _outermost(self) -> bool:
        """Whether the call that begins is inside no other unit's, nor inside the model's."""
        return self._hooks.depth() == 1 and not self._models.depth()

    def _begin_model(
        self, key: None, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> CompiledCall | ModelCall | None:
        """A forward of the model whose blocks these are."""
        if not records():
            return None
        if self._models.depth() == 1:
            self._iterations.begin()
        compiled = self._models.compiled() or compiles_what_it_wraps(module)
        if not compiled:
            return ModelCall(self._engine)
        if self._worth is not None:
            self._worth.end()
        if isinstance(current_scope(), CompiledCall):
            return None
        self._unseen.end()
        self._engine.set_persistent(persistent_tensors([module]))
        declines = self._director is None and names_nothing(self._engine.policy)
        if not self._compiled:
            self._compiled = _DECLINED if declines else _AT_ONCE
            if declines:
                warn(f"memswap: {_DECLINED}")
            else:
                logger.info("%s", _AT_ONCE)
        return CompiledCall(self._engine, self._iterations.unit_left, declines)


#: What is said of a model that torch.compile compiles as a whole: where what it saves stays, and
#: where it moves. See [Note: One graph].
_DECLINED = (
    "the model is compiled as a whole, so what it saves stays where it is: torch.compile asks for "
    "all tensors of a graph when its backward begins, and moving them would not lower that peak. "
    "Compile the layers one by one (layer.compile()), and what they save moves. "
    "Policy(action='swap') has a graph's tensors away between its forward and its backward."
)
_AT_ONCE = (
    "the model is compiled as a whole: what a graph saves is away between its forward and its "
    "backward, and comes back all at once. The peak of that backward stays, and frames on the "
    "device raise it. Compile the layers one by one, and what they save comes back one by one."
)


@answers_unknown
def manage(
    modules: nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module],
    policy: Policy | None = None,
    *,
    optimizer: Optimizer | None = None,
    pool: Pool | None = None,
    budget: int | str | None = None,
    rates: Rates | None = None,
    group: ProcessGroup | str | None = None,
    prefetch_bytes: int | str = "auto",
    windows: Windows | None = None,
) -> Manager:
    """Encode or swap the saved activations of a model's layers, in an order that is learnt.

    ``manage(model)`` finds the layers itself: the elements of the largest list two or more of which
    are of one class, or else what a transformers model names in ``_no_split_modules``, or else the
    model as one unit; :meth:`Manager.report` says what was found. A model inside DDP, FSDP,
    torch.compile or PEFT may be given as it is called. What a model saves that is compiled as a
    whole stays, unless ``policy`` names an action (docs/integrations.md). Each forward of the model
    begins an iteration. Of layers that are given by themselves, it is the first one's call, unless
    with what the same forward has computed.

    Adds forward hooks to each module and nothing else: no wrapper, no renamed parameter, no change
    of the module's type. Training code stays as it is. (Until a module has run, the gradient of one
    parameter is watched: modules that train although their hooks are never called, because
    torch.compile compiled them before, are warned of.)

    Args:
        modules: a model; or its layers, in any order: a ``ModuleList``, ``ModuleDict`` or
            ``Sequential``, a sequence, or a mapping from names to modules. Each has a ``forward``
            that is called (a list in a list has none). Policies know layers by their names in the
            model (``"layers.0"``), the mapping's, or ``"0"``, ``"1"``, ...; one that is managed as
            a whole (``manage([layer])``, or a model without repeated blocks) is ``"0"``.
        policy: which tensors move; default ``Policy()``.
        optimizer: its state is away between its steps as well, as with
            :func:`memswap.manage_optimizer` (:attr:`Manager.optimizer` is what that returns). Under
            a budget for the whole device, as much of it stays as is best.
        pool: where they go; see :class:`saved_tensors`.
        budget: None: everything that the policy selects moves, from the first step on, whatever it
            costs; but a model that is given as a whole, without an action, a function, a pool or
            windows, is compared with its own plain step where little is freed, and may be left as
            it is (docs/choosing.md, "Without a budget"). A number of bytes or a size such as
            ``"24GiB"``: the most bytes of saved activations on the device at any moment, by
            memswap's own account (:attr:`Stats.peak_resident_bytes`: storages that the managed
            modules saved, frames and what is on its way included; not parameters, gradients, or
            what an operator allocates for itself). A share such as ``"70%"``: of these bytes at
            their peak in the same step if nothing moves; each shape of input has its own.
            ``"auto"``: as few as cost at most 1 % of a step's time; on a CPU, where the calling
            thread encodes, that is little. ``"device:70GiB"`` or ``"device:90%"``: the most bytes
            of the device at any moment, by its own allocator (of a CPU: the process' resident
            memory): weights, gradients, the optimizer's state, activations, and what operators
            allocate for themselves, which is learnt. docs/device-budget.md. The first three steps
            learn and run as without a budget; :attr:`Manager.plan` is made beside the next ones and
            followed once it is there. docs/choosing.md helps to choose, docs/planning.md says what
            is learnt when.
        rates: of the machine; default: :func:`memswap.profile`, measured once per machine.
        group: ranks that plan together, from the slowest one's times, so that they have the same
            plan; ``"world"``: all ranks of torch.distributed, or this one alone where it is not
            initialized. All of them must train in step. Under a budget for the whole device each
            rank's own is met, whatever the others have. Default: each for itself.
        prefetch_bytes: see :class:`saved_tensors`.
        windows: hide encoding and decoding under matrix products and collectives; see
            :class:`Windows`. None: each starts as soon as it can. On a CPU, where whoever asks does
            the work, it makes no difference. Under a budget the plan says what is encoded, and
            until when: what still waits where its room is needed starts there.

    Raises:
        TypeError: an element is no module or has no ``forward``, or ``policy``, ``pool``,
            ``rates``, ``group`` or ``windows`` is of another kind.
        ValueError: no modules, one of them twice, a ``budget`` that cannot be read, or modules on
            several devices under one budget; an optimizer that is managed already.
        NotImplementedError: a ``pool`` that cannot serve the modules' device in this version; a
            budget for a whole device that does not tell its memory.
        BudgetError: a budget for the whole device is less than its weights and gradients; or later,
            when a step would begin with its plan and none meets the budget; the message states the
            smallest one that can be met.
    """
    check_windows(windows)
    if rates is not None and not isinstance(rates, Rates):
        raise TypeError(
            f"manage(rates={rates!r}): found {type(rates).__name__}, expected memswap.Rates(...), "
            "what memswap.profile() returns, or None"
        )
    check_group(group)
    if optimizer is not None:
        check_optimizer(optimizer, "manage(optimizer=...)")
    whole = is_device_budget(budget)
    if budget is not None and not whole:
        budget = parsed(budget, "manage(budget=...)")
    whole_model = isinstance(modules, nn.Module) and not isinstance(
        modules, (nn.ModuleList, nn.ModuleDict, nn.Sequential)
    )
    if whole_model:
        named_units(modules)
        blocks = find_blocks(modules)
    else:
        blocks = Blocks.given(named_units(modules))
    check_pool(pool)
    for module in blocks.units.values():
        for parameter in module.parameters():
            check_pool(pool, parameter.device)
    if budget is not None:
        check_one_device(blocks.units.values())
    policy, ahead = checked_policy(policy), parsed_prefetch(prefetch_bytes)
    left_all = budget is None and pool is None and windows is None and names_nothing(policy)
    compares = (modules,) if whole_model and left_all else ()
    account, managed = None, None
    if whole:
        roots = [modules] if isinstance(modules, nn.Module) else list(blocks.units.values())
        account, managed = open_account(str(budget), roots, optimizer, pool)
    elif optimizer is not None:
        managed = manage_optimizer(optimizer, pool=pool)
    return Manager(
        blocks,
        policy,
        pool,
        ahead,
        budget,
        rates,
        group_of(group),
        windows,
        account,
        managed,
        compares,
    )
