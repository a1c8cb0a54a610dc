"""swap_modules: the activations of all modules whose names match a pattern."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from math import inf
from time import perf_counter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from memswap._native import native
from memswap.activations import Manager, checked_policy
from memswap.engine.action import TensorInfo
from memswap.engine.pools import DiskPool
from memswap.engine.stats import Count, Stats
from memswap.engine.transfer import check_pool
from memswap.engine.uncopied import Uncopied
from memswap.hooks.blocks import Blocks
from memswap.hooks.managed import Removable, check_unmanaged
from memswap.hooks.module_hooks import ModuleHooks, Scope
from memswap.planning.policy import Policy, Restricted
from memswap.planning.profile import remembered

if TYPE_CHECKING:
    from types import FrameType

    from memswap.engine.transfer import Pool, Route

Check = Callable[[torch.Tensor], bool]

#: Most and fewest bytes of the copy that measures a link; some hundred microseconds on a fast one.
MOST_LINK_BYTES, FEWEST_LINK_BYTES = 8 << 20, 64 << 10

#: Share of a step's time that backward takes; with recompute it is 3/4.
BACKWARD_SHARE = 2 / 3

#: Layers that are there at once: the one in use and the one that comes next.
WINDOW_LAYERS = 2


class Inputs:
    """Storages of the inputs of the modules that a thread is in: hooks that note them."""

    def __init__(self) -> None:
        self._hooks = ModuleHooks()
        self._here = _Here()

    def watch(self, unit: str, module: nn.Module) -> None:
        """Note what a module is called with."""
        self._hooks.add(module, unit, self._begin)

    def remove(self) -> None:
        """Note nothing any more."""
        self._hooks.remove()

    def has(self, unit: str, tensor: torch.Tensor) -> bool:
        """Whether a tensor is in the storage that a module was called with."""
        return native.storage_key(tensor) in self._here.keys.get(unit, ())

    def _begin(
        self, unit: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Scope:
        found = kwargs.get("hidden_states", args[0] if args else None)
        if found is None:
            found = next((one for one in kwargs.values() if isinstance(one, torch.Tensor)), None)
        keys = {native.storage_key(found)} if isinstance(found, torch.Tensor) else set()
        return _Input(self._here.keys, unit, frozenset(keys - {0}))


class _Here(threading.local):
    def __init__(self) -> None:
        self.keys: dict[str, frozenset[int]] = {}


class _Input:
    """What one call of a module was called with, for as long as it runs."""

    def __init__(self, here: dict[str, frozenset[int]], unit: str, keys: frozenset[int]) -> None:
        self._here, self._unit = here, unit
        self._keys = keys
        self._around = here.get(unit)

    def enter(self, call: FrameType | None) -> None:
        self._here[self._unit] = self._keys

    def leave(self, output: object) -> None:
        self.abandon()

    def abandon(self) -> None:
        if self._around is None:
            self._here.pop(self._unit, None)
        else:
            self._here[self._unit] = self._around


class Tower(Manager):
    """The manager of one tower: modules whose names differ in their number alone.

    Its window is two layers, as they saved last, or more where the link is too slow: what it cannot
    carry during a backward stays, so that backward need not wait for it.
    """

    def __init__(
        self,
        units: Mapping[str, nn.Module],
        policy: Restricted,
        pool: Pool | None,
        prefetch: bool,
    ) -> None:
        super().__init__(Blocks.given(dict(units)), policy, pool, None if prefetch else 0)
        self._prefetch = prefetch
        self._began_s: float | None = None
        self._link_bytes_per_s: float | None = None

    @property
    def window_bytes(self) -> int | None:
        """Bytes that are there at once in backward; None until a step has been seen."""
        return self._engine.timeline.window_bytes

    @property
    def link_bytes_per_s(self) -> float | None:
        """What the link to the pool carried when it was measured; None before."""
        return self._link_bytes_per_s

    def _note(self, name: str, inputs: object) -> None:
        before = self._engine.iteration
        super()._note(name, inputs)
        if self._prefetch and self._engine.iteration is not before:
            now_s = perf_counter()
            if self._began_s is not None and before.began_backward:
                self._set_window(before.sizes, now_s - self._began_s)
            self._began_s = now_s

    def _set_window(self, sizes: Sequence[int], step_s: float) -> None:
        engine = self._engine
        links = [route for route in engine.open_routes() if route.copies]
        if not links:
            return  # frames that stay on the device come over no link
        if self._link_bytes_per_s is None:
            self._link_bytes_per_s = min(link_speed(route) for route in links)
        total = sum(sizes)
        two_layers = WINDOW_LAYERS * total // len(self._units)
        carried = self._link_bytes_per_s * step_s * BACKWARD_SHARE
        window = max(two_layers, total - carried, *sizes)
        engine.timeline.window_bytes = int(min(window, total))


def link_speed(route: Route) -> float:
    """Bytes per second that come back over a route's lane; infinite where that cannot be tried.

    What :func:`memswap.profile` has measured, as plans go by; where it has not run, a small copy
    here and now. That takes nothing from the system: a part of what the pool has free is enough for
    it, or nothing is measured.
    """
    known = remembered(route.device, route.pool.path if isinstance(route.pool, DiskPool) else None)
    if known is not None and known.h2d_bytes_per_s:
        return known.h2d_bytes_per_s
    nbytes = min(route.pool.statistics().largest_free_bytes // 4, MOST_LINK_BYTES)
    block = route.pool.native.allocate(nbytes) if nbytes >= FEWEST_LINK_BYTES else None
    if block is None:
        return inf
    try:
        with torch._C._DisableTorchDispatch():  # modes are for what the model does
            there = native.StorageRef(torch.zeros(nbytes, dtype=torch.uint8, device=route.device))
        route.lane.send(there, block).synchronize()
        begin_s = perf_counter()
        route.lane.fetch(block)[1].synchronize()
    except (torch.OutOfMemoryError, native.TransferError):
        return inf
    return nbytes / (perf_counter() - begin_s)


class ModuleSwap(Uncopied, Removable):
    """What :func:`swap_modules` returns: its towers, their statistics, and the way to end it."""

    def __init__(self, towers: Mapping[str, Tower], inputs: Inputs | None) -> None:
        self.towers: Mapping[str, Tower] = MappingProxyType(dict(towers))
        self._inputs = inputs

    @property
    def units(self) -> tuple[str, ...]:
        """Names of all modules that are swapped."""
        return tuple(name for tower in self.towers.values() for name in tower.units)

    def stats(self) -> Stats:
        """What was done for all towers. Peaks are sums, so a bound where towers take turns."""
        return added(tower.stats() for tower in self.towers.values())

    def reset_stats(self) -> None:
        """Start counting anew."""
        for tower in self.towers.values():
            tower.reset_stats()

    def __repr__(self) -> str:
        return f"<memswap ModuleSwap: {dict(self.towers)!r}>"

    def report(self) -> str:
        """The statistics of each tower as a text table, bytes in MiB."""
        return "\n\n".join(f"{tag}\n{tower.report()}" for tag, tower in self.towers.items())

    def remove(self) -> None:
        """Take the hooks off the modules. Graphs that are alive can still run backward."""
        if self._inputs is not None:
            self._inputs.remove()
        for tower in self.towers.values():
            tower.remove()


def swap_modules(
    model: nn.Module | Mapping[str, nn.Module],
    plan: str | Sequence[str],
    *,
    check: Check | None = None,
    only_input: bool = False,
    prefetch: bool = True,
    policy: Policy | None = None,
    pool: Pool | None = None,
) -> ModuleSwap:
    """Swap (or encode) what modules save whose names match a plan.

    Modules whose names differ in their first number alone (``"layers.0"``, ``"layers.1"``) are one
    tower; each tower has its own order and its own window. Adds forward hooks to the modules and
    nothing else. Any number of microbatches may be in flight, and any number of models at once.

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
    check_unmanaged(matched.values(), "swap_modules()")
    inputs = Inputs() if only_input else None
    if inputs is not None:
        for name, module in matched.items():
            inputs.watch(name, module)
    by_tag: dict[str, dict[str, nn.Module]] = {}
    for name, module in matched.items():
        by_tag.setdefault(tag(name), {})[name] = module

    def allows(tensor: torch.Tensor, info: TensorInfo) -> bool:
        if inputs is not None and not inputs.has(info.unit, tensor):
            return False
        return check is None or check(tensor)

    restricted = Restricted(checked, allows)
    return ModuleSwap(
        {name: Tower(units, restricted, pool, prefetch) for name, units in by_tag.items()}, inputs
    )


def matching(
    model: nn.Module | Mapping[str, nn.Module], plan: str | Sequence[str]
) -> dict[str, nn.Module]:
    """The modules that match, by name, in the model's order."""
    patterns: tuple[Any, ...] = (plan,)
    if not isinstance(plan, str):
        patterns = tuple(plan) if isinstance(plan, Iterable) else ()
    if not patterns or not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError(f"swap_modules(plan={plan!r}): expected a pattern of names or several")
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


def added(snapshots: Iterable[Stats]) -> Stats:
    """Several statistics as one."""
    total: dict[str, Any] = {}
    kept: dict[str, Count] = {}
    for stats in snapshots:
        for one in fields(stats):
            if one.name != "kept":
                total[one.name] = total.get(one.name, 0) + getattr(stats, one.name)
        for reason, count in stats.kept.items():
            so_far = kept.get(reason, Count())
            kept[reason] = Count(so_far.tensors + count.tensors, so_far.bytes + count.bytes)
    return Stats(**total, kept=MappingProxyType(dict(sorted(kept.items()))))
