"""swap_modules: the activations of all modules whose names match a pattern."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from math import inf
from time import perf_counter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from memswap._native import native
from memswap.engine.action import TensorInfo
from memswap.engine.engine import Engine
from memswap.engine.pools import DiskPool
from memswap.engine.transfers import check_pool
from memswap.hooks.managed import Counted, check_unmanaged
from memswap.hooks.units import Iterations, UnitCall, records
from memswap.hooks.unseen import Unseen
from memswap.planning.policy import Policy, Restricted, checked_policy
from memswap.planning.profile import remembered
from memswap.schedules.scheduled import Schedule, ScheduledModules

if TYPE_CHECKING:
    from types import FrameType

    from memswap.engine.transfers import Pool, Transfers

Check = Callable[[torch.Tensor], bool]

#: Most and fewest bytes of the copy that measures a link; some hundred microseconds on a fast one.
MOST_LINK_BYTES, FEWEST_LINK_BYTES = 8 << 20, 64 << 10

#: Share of a step's time that backward takes; with recompute it is 3/4.
BACKWARD_SHARE = 2 / 3

#: Layers that are there at once: the one in use and the one that comes next.
PRESENT_LAYERS = 2


class _Inputs(threading.local):
    """Storages of the inputs of the modules that a thread is in, by the modules' names."""

    def __init__(self) -> None:
        self.keys: dict[str, frozenset[int]] = {}

    def has(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether a tensor is in the storage that a module was called with."""
        return native.storage_key(tensor) in self.keys.get(name, ())


class _InputCall(UnitCall):
    """One call of a module; what it was called with is known for as long as it runs."""

    __slots__ = ("_around", "_here", "_keys")

    def __init__(
        self, engine: Engine, name: str, ended: Callable[[], object], here: _Inputs, inputs: Any
    ) -> None:
        super().__init__(engine, name, ended)
        args, kwargs = inputs
        found = kwargs.get("hidden_states", args[0] if args else None)
        if found is None:
            found = next((one for one in kwargs.values() if isinstance(one, torch.Tensor)), None)
        keys = {native.storage_key(found)} if isinstance(found, torch.Tensor) else set()
        self._here, self._keys = here, frozenset(keys - {0})
        self._around = here.keys.get(name)

    def enter(self, call: FrameType | None = None) -> None:
        self._here.keys[self.unit] = self._keys
        super().enter(call)

    def leave(self, output: object = None) -> None:
        self._forget()
        super().leave()

    def abandon(self) -> None:
        self._forget()
        super().abandon()

    def _forget(self) -> None:
        if self._around is None:
            self._here.keys.pop(self.unit, None)
        else:
            self._here.keys[self.unit] = self._around


class Tower(Counted):
    """Modules whose names differ in their number alone: an engine, an order, and bytes to prefetch.

    Two layers are there at once, as they saved last, or more where the link is too slow: what it
    cannot carry during a backward stays, so that backward need not wait for it.

    Args:
        units: the modules, by name.
        policy: which saved tensors move, and how.
        pool: where they go; None: a default pool of each device.
        prefetch: whether bytes come back ahead of their use.
        inputs: notes what modules are called with; None: nobody asks.

    Attributes:
        link_bytes_per_s: what the link to the pool carried when it was measured; None before.
    """

    def __init__(
        self,
        units: Mapping[str, nn.Module],
        policy: Policy,
        pool: Pool | None,
        prefetch: bool,
        inputs: _Inputs | None,
    ) -> None:
        self.engine = Engine(policy, pool, None if prefetch else 0)
        super().__init__({"": self.engine})
        self.units = tuple(units)
        self.link_bytes_per_s: float | None = None
        self._modules = tuple(units.values())
        self._iterations = Iterations(self.engine, self._modules)
        self._unseen = Unseen(self._modules, "swap_modules()")
        self._inputs = inputs
        self._prefetch = prefetch
        self._began_s: float | None = None

    def _of_what(self) -> str:
        return f" of {len(self.units)} module(s)"

    @property
    def prefetch_bytes(self) -> int | None:
        """Bytes that are there at once in backward; None until a step has been seen."""
        return self.engine.timeline.prefetch_bytes

    def seen(self) -> None:
        """One of its modules runs."""
        self._unseen.seen(self._modules)

    def begin(self, name: str, inputs: tuple[Any, Any], outermost: Callable[[], bool]) -> UnitCall:
        """A module's forward begins; its scope.

        Args:
            name: of the module.
            inputs: ``(args, kwargs)`` of its forward.
            outermost: whether this call is inside no other module's of this tower.
        """
        if records():
            before = self.engine.iteration
            self._iterations.unit_called(name, inputs, outermost)
            if self._prefetch and self.engine.iteration is not before:
                now_s = perf_counter()
                if self._began_s is not None and before.began_backward:
                    self._set_prefetch(before.sizes, now_s - self._began_s)
                self._began_s = now_s
        ended = self._iterations.unit_left
        if self._inputs is None:
            return UnitCall(self.engine, name, ended)
        return _InputCall(self.engine, name, ended, self._inputs, inputs)

    def settle(self) -> None:
        """None of its modules will be seen."""
        self._unseen.end()

    def _set_prefetch(self, sizes: Sequence[int], step_s: float) -> None:
        links = [one for one in self.engine.open_transfers() if one.copies]
        if not links:
            return  # frames that stay on the device come over no link
        if self.link_bytes_per_s is None:
            self.link_bytes_per_s = min(link_speed(one) for one in links)
        total = sum(sizes)
        two_layers = PRESENT_LAYERS * total // len(self.units)
        carried = self.link_bytes_per_s * step_s * BACKWARD_SHARE
        wanted = max(two_layers, total - carried, *sizes)
        self.engine.timeline.prefetch_bytes = int(min(wanted, total))


class Towers(Schedule):
    """The schedule of :func:`swap_modules`: each tower learns its order, and what to prefetch.

    Storages leave as soon as they are saved and come back one by one, so no group collects them.

    Attributes:
        towers: by what the names of their modules have in common.
    """

    in_compiled_code = False

    def __init__(self, towers: Mapping[str, Tower]) -> None:
        self.towers: Mapping[str, Tower] = MappingProxyType(dict(towers))
        self.engines = {tag: tower.engine for tag, tower in self.towers.items()}
        self._tower_of = {name: tower for tower in towers.values() for name in tower.units}

    def __repr__(self) -> str:
        return f"Towers({', '.join(map(repr, self.towers))})"

    def begin(
        self, name: str, inputs: tuple[Any, Any], depth: Callable[[Collection[str]], int]
    ) -> UnitCall | None:
        tower = self._tower_of[name]
        tower.seen()
        return None if self.paused else tower.begin(name, inputs, lambda: depth(tower.units) == 1)

    def settle(self) -> None:
        for tower in self.towers.values():
            tower.settle()
        super().settle()


def link_speed(transfers: Transfers) -> float:
    """Bytes per second that come back over the lane to a pool; infinite where that cannot be tried.

    What :func:`memswap.profile` has measured, as plans go by; where it has not run, a small copy
    here and now. That takes nothing from the system: a part of what the pool has free is enough for
    it, or nothing is measured.
    """
    device, pool = transfers.device, transfers.pool
    known = remembered(device, pool.path if isinstance(pool, DiskPool) else None)
    if known is not None and known.h2d_bytes_per_s:
        return known.h2d_bytes_per_s
    nbytes = min(pool.statistics().largest_free_bytes // 4, MOST_LINK_BYTES)
    block = pool.native.allocate(nbytes) if nbytes >= FEWEST_LINK_BYTES else None
    if block is None:
        return inf
    try:
        with torch._C._DisableTorchDispatch():  # modes are for what the model does
            there = native.StorageRef(torch.zeros(nbytes, dtype=torch.uint8, device=device))
        transfers.lane.send(there, block).synchronize()
        begin_s = perf_counter()
        transfers.lane.fetch(block)[1].synchronize()
    except (torch.OutOfMemoryError, native.TransferError):
        return inf
    return nbytes / (perf_counter() - begin_s)


def swap_modules(
    model: nn.Module | Mapping[str, nn.Module],
    plan: str | Sequence[str],
    *,
    check: Check | None = None,
    only_input: bool = False,
    prefetch: bool = True,
    policy: Policy | None = None,
    pool: Pool | None = None,
) -> ScheduledModules:
    """Swap (or encode) what modules save whose names match a plan.

    Modules whose names differ in their first number alone (``"layers.0"``, ``"layers.1"``) are one
    tower; each tower has its own order and prefetches for itself. Adds forward hooks to the modules
    and nothing else. Any number of microbatches may be in flight, and any number of models at once.

    Args:
        model: the model, or several by name; their names come first in the modules' names then.
        plan: patterns on whole module names: ``*`` any characters, ``?`` any one, ``{*}`` any
            number, ``{a-b}`` a number from a to b.
        check: ``check(tensor) -> bool``: whether a saved tensor may move; beside the policy.
        only_input: move a module's input alone (the keyword ``hidden_states``, or the first
            argument). Meant for modules that recompute everything else in backward.
        prefetch: whether bytes come back ahead of their use. Two layers of a tower are there at
            once; more where the link, which is measured, carries less than backward demands.
        policy: which saved tensors move, and how; default ``Policy()``. Its patterns are for the
            modules' names.
        pool: where they go, for all towers; see :class:`memswap.saved_tensors`.

    Returns:
        Statistics, pause and resume, and the way to end it; ``schedule.towers`` has the towers by
        name.

    Raises:
        ValueError: no module matches a pattern, or a pattern is none.
        TypeError: ``model``, ``plan``, ``check`` or ``policy`` is of another kind.
    """
    checked = checked_policy(policy)
    if check is not None and not callable(check):
        raise TypeError(f"swap_modules(check={check!r}): expected check(tensor) -> bool or None")
    check_pool(pool)
    matched = matching(model, plan)
    for module in matched.values():
        for parameter in module.parameters():
            check_pool(pool, parameter.device)
    inputs = _Inputs() if only_input else None

    def allows(tensor: torch.Tensor, info: TensorInfo) -> bool:
        if inputs is not None and not inputs.has(info.unit, tensor):
            return False
        return check is None or check(tensor)

    restricted = Restricted(checked, allows)
    by_tag: dict[str, dict[str, nn.Module]] = {}
    for name, module in matched.items():
        by_tag.setdefault(tag(name), {})[name] = module
    units = {name: module for several in by_tag.values() for name, module in several.items()}
    check_unmanaged(units.values(), "swap_modules()")  # before parameters are watched
    towers = Towers(
        {
            name: Tower(several, restricted, pool, prefetch, inputs)
            for name, several in by_tag.items()
        }
    )
    return ScheduledModules(units, towers, "swap_modules()")


def matching(
    model: nn.Module | Mapping[str, nn.Module], plan: str | Sequence[str]
) -> dict[str, nn.Module]:
    """The modules that match, by name, in the model's order."""
    patterns: tuple[Any, ...] = (plan,)
    if not isinstance(plan, str):
        patterns = tuple(plan) if isinstance(plan, Iterable) else ()
    if not patterns or not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError(
            f"swap_modules(plan=...): found {type(plan).__name__}, expected a pattern of names or "
            "several: swap_modules(model, 'layers.*')"
        )
    named: dict[str, nn.Module] = {}
    if isinstance(model, nn.Module):
        named.update(model.named_modules())
    elif isinstance(model, Mapping) and all(isinstance(m, nn.Module) for m in model.values()):
        for prefix, one in model.items():
            named.update(one.named_modules(prefix=prefix))
    else:
        raise TypeError(
            f"swap_modules(): found {type(model).__name__}, expected an nn.Module, or several by "
            "name"
        )
    found: dict[str, nn.Module] = {}
    for pattern in patterns:
        compiled = compiled_pattern(pattern)
        names = [name for name in named if name and compiled(name)]
        if not names:
            known = [repr(name) for name in named if name]
            some = ", ".join([*known[:5], "..."] if len(known) > 5 else known) or "none"
            raise ValueError(
                f"swap_modules(): no module matches {pattern!r}; named modules of the model: "
                f"{some}. Patterns are for whole names."
            )
        found.update({name: named[name] for name in names})
    return {name: module for name, module in named.items() if name in found}


def compiled_pattern(pattern: str) -> Callable[[str], bool]:
    """Whether a name matches a pattern of :func:`swap_modules`."""
    ranges: list[tuple[int, int] | None] = []
    regex = ""
    for piece in re.split(r"(\{[^{}]*\}|\*|\?)", pattern):
        if piece == "*":
            regex += ".*"
        elif piece == "?":
            regex += "."
        elif piece.startswith("{"):
            bounds = re.fullmatch(r"\{(?:\*|(\d+)-(\d+))\}", piece)
            if bounds is None:
                raise ValueError(
                    f"swap_modules(): found {piece!r} in the pattern {pattern!r}; expected {{*}} "
                    "for any number or {a-b} for a range of them"
                )
            low, high = bounds.groups()
            ranges.append(None if low is None else (int(low), int(high)))
            regex += r"(\d+)"
        else:
            regex += re.escape(piece)
    compiled = re.compile(regex)

    def matches(name: str) -> bool:
        found = compiled.fullmatch(name)
        return found is not None and all(
            bound is None or bound[0] <= int(number) <= bound[1]
            for number, bound in zip(found.groups(), ranges, strict=True)
        )

    return matches


def tag(name: str) -> str:
    """A module's name with its first number replaced by ``*``: what its tower is called."""
    parts = name.split(".")
    for index, part in enumerate(parts):
        if part.isdigit():
            return ".".join([*parts[:index], "*", *parts[index + 1 :]])
    return name
