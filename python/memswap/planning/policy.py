"""Policy: for a tensor that autograd saves, which action."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import Any, ParamSpec, TypeVar

import torch

from memswap.engine.action import Action, TensorInfo
from memswap.engine.units import parse_bytes
from memswap.planning.budgets import parsed

_OPERATOR = re.compile(r"\w+::\w+")

_P = ParamSpec("_P")
_R = TypeVar("_R")

PolicyFunction = Callable[[torch.Tensor, TensorInfo], Action]


def answers_unknown(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Have a function answer a keyword that it does not have with what to write instead.

    Raises:
        TypeError: by what it returns, of such a keyword.
    """
    parameters = inspect.signature(function).parameters.values()
    known = [one.name for one in parameters if one.kind is not one.VAR_POSITIONAL]

    @functools.wraps(function)
    def answering(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        for name, value in kwargs.items():
            if name not in known:
                caller = function.__name__
                if caller == "__init__":
                    caller = type(args[0]).__name__
                write = f"one of {', '.join(one for one in known if one != 'self')}"
                if "policy" in known and name in Policy.__dataclass_fields__:
                    write = f"policy=memswap.Policy({name}={value!r})"
                raise TypeError(f"{caller}(): found {name}={value!r}, expected {write}")
        return function(*args, **kwargs)

    return answering


@dataclass(frozen=True, slots=True, init=False)
class Policy:
    """Decides for each saved storage; the first rule that applies wins.

    1. A storage of fewer than ``min_bytes`` (bytes, or such as ``"1MiB"``) stays: short copies cost
       more than they free.
    2. A unit whose name matches ``exclude``, or, where ``include`` is given, none of its patterns,
       keeps its tensors. Patterns are :mod:`fnmatch` patterns on unit names.
    3. ``fn(tensor, info)``, where given, returns the :class:`Action`. It must not edit, keep or
       save the tensor.
    4. ``action``. None: what suits the device. Tensors in host memory are recomputed
       (``Action.RECOMPUTE``) where that has proven to give the same bits and else encoded where
       they are (``Action.ENCODE``), or swapped where a :class:`DiskPool` was given; those of an
       accelerator are swapped (``Action.SWAP``). Its name will do: ``Policy(action="swap")``. With
       ``Action.RECOMPUTE`` what has no recipe is encoded or swapped like this; so is everything in
       checkpoint regions, which recompute nothing by the tensor.

    What an action cannot do for a tensor (no room, no codec for the device, a tensor that does not
    shrink) leaves the tensor where it is; :attr:`Stats.kept` says how often and why.

    Args:
        action: what is done with what nothing above decides (4).
        min_bytes: a size: storages of fewer bytes stay (1).
        include: patterns of units whose tensors move (2); none: of all units.
        exclude: patterns of units whose tensors stay (2).
        fn: ``fn(tensor, info)``, with a :class:`TensorInfo`, returns an :class:`Action` (3).
        operators: names of operators of your own (``"mylib::gated_silu"``) that
            ``Action.RECOMPUTE`` may run again, beside those that memswap knows (docs/recompute.md).
            They are as cheap as a pointwise operator, and the same inputs give the same bits.
        recipes: whether ``action=None`` may recompute (docs/recompute.md): on a CPU, and under a
            budget, where the plan chooses for each tensor. False turns that off.

    Raises:
        TypeError: ``action`` is no :class:`Action` and no name, ``fn`` is not callable, a pattern
            is no str, ``recipes`` is no bool.
        ValueError: no action has that name, ``min_bytes`` is neither a number of bytes nor a size
            such as ``"64KiB"``, or an operator's name is not of the form ``"namespace::name"``.
    """

    action: Action | None
    min_bytes: int
    include: tuple[str, ...]
    exclude: tuple[str, ...]
    fn: PolicyFunction | None
    operators: tuple[str, ...]
    recipes: bool

    @answers_unknown
    def __init__(
        self,
        action: Action | str | None = None,
        min_bytes: int | str = "64KiB",
        include: str | Iterable[str] = (),
        exclude: str | Iterable[str] = (),
        fn: PolicyFunction | None = None,
        operators: str | Iterable[str] = (),
        recipes: bool = True,
    ) -> None:
        if action is not None:
            action = named_action(action)
        if fn is not None and not callable(fn):
            raise TypeError(f"Policy(fn={fn!r}): expected fn(tensor, info) -> Action")
        if not isinstance(recipes, bool):
            raise TypeError(f"Policy(recipes={recipes!r}): expected True or False")
        values = {
            "action": action,
            "min_bytes": parse_bytes(min_bytes, "Policy(min_bytes=...)"),
            "include": strings(include, "include", "fnmatch patterns"),
            "exclude": strings(exclude, "exclude", "fnmatch patterns"),
            "fn": fn,
            "operators": checked_operators(operators),
            "recipes": recipes,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def covers(self, unit: str) -> bool:
        """Whether tensors of this unit may move at all."""
        if any(fnmatchcase(unit, pattern) for pattern in self.exclude):
            return False
        return not self.include or any(fnmatchcase(unit, pattern) for pattern in self.include)

    def decide(self, tensor: torch.Tensor, info: TensorInfo) -> Action | None:
        """The action for a tensor of a covered unit that is not too small. None: as above."""
        if self.fn is None:
            return self.action
        return checked(self.fn(tensor, info), "Policy(fn=...) returned")


class Restricted(Policy):
    """A policy for those tensors alone that pass a test; the others stay."""

    __slots__ = ()

    def __init__(self, policy: Policy, allows: Callable[[torch.Tensor, TensorInfo], bool]) -> None:
        def decide(tensor: torch.Tensor, info: TensorInfo) -> Any:
            return policy.decide(tensor, info) if allows(tensor, info) else Action.KEEP

        values = {one.name: getattr(policy, one.name) for one in fields(Policy)}
        super().__init__(**{**values, "fn": decide})

    def decide(self, tensor: torch.Tensor, info: TensorInfo) -> Action | None:
        assert self.fn is not None
        return self.fn(tensor, info)  # the policy's answer, which it has checked


def strings(found: object, name: str, what: str) -> tuple[str, ...]:
    """One text or several, as a tuple.

    Args:
        found: what was given.
        name: of the argument, for messages.
        what: was expected, for messages.

    Raises:
        TypeError: it is something else.
    """
    if isinstance(found, Iterable):
        several = (found,) if isinstance(found, str) else tuple(found)
        if all(isinstance(one, str) for one in several):
            return several
    raise TypeError(f"Policy({name}={found!r}): expected {what}: a str or several")


def checked_operators(operators: object) -> tuple[str, ...]:
    """Names of operators, one or several, as a tuple."""
    checked = strings(operators, "operators", "names of operators")
    for name in checked:
        if not _OPERATOR.fullmatch(name):
            raise ValueError(
                f"Policy(operators=...): {name!r} is no operator's name; expected "
                'namespace::name, without an overload, such as "mylib::gated_silu"'
            )
    return checked


def named_action(
    action: object, caller: str = "Policy", actions: Iterable[Action] = Action
) -> Action:
    """An action, which may be given by its name, of those that the caller knows.

    Args:
        action: an action, or its name.
        caller: for messages.
        actions: that the caller knows.

    Raises:
        TypeError: it is neither an action nor a text.
        ValueError: the caller does not know it.
    """
    names = [one.value for one in actions]
    name = action.value if isinstance(action, Action) else action
    if not isinstance(name, str):
        raise TypeError(
            f"{caller}(action=...): found {action!r}, expected a memswap.Action or its name"
        )
    if name not in names:
        raise ValueError(f"{caller}(action={name!r}): expected one of {', '.join(names)}")
    return Action(name)


def checked(action: object, where: str) -> Action:
    """``action`` if it is one, else an error."""
    if not isinstance(action, Action):
        raise TypeError(f"{where}: found {action!r}, expected a memswap.Action")
    return action


def checked_policy(policy: Policy | None) -> Policy:
    """The policy, or the default one.

    Raises:
        TypeError: it is none.
    """
    if policy is None:
        return Policy()
    if not isinstance(policy, Policy):
        raise TypeError(no_policy(policy))
    return policy


def names_nothing(policy: Policy) -> bool:
    """Whether a policy leaves it to memswap how storages move."""
    return policy.action is None and policy.fn is None


def no_policy(found: object) -> str:
    """What to say of something that is no policy."""
    shown = repr(found) if isinstance(found, (int, float, str)) else type(found).__name__
    return f"policy: found {shown}, expected a memswap.Policy ({policy_hint(found)}) or None"


def policy_hint(found: object) -> str:
    """What to write instead of something that is no policy."""
    if isinstance(found, torch.optim.Optimizer):
        return "for an optimizer: optimizer=..."
    if isinstance(found, Action):
        return f"for this action: memswap.Policy(action=memswap.{found})"
    if isinstance(found, str) and found.lower() in [one.value for one in Action]:
        return f"for this action: memswap.Policy(action={found.lower()!r})"
    if isinstance(found, (int, str)) and not isinstance(found, bool):
        with suppress(ValueError):
            parsed(found)
            return f"for a budget: budget={found!r}"
    return "for an action alone: memswap.Policy(action=...)"
