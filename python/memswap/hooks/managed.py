"""Counted: what has engines and says what they did; Managed: what `manage` and its kin return."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from memswap.engine.recipes import describe_recipes
from memswap.engine.stats import Stats, added, describe
from memswap.engine.units import format_bytes
from memswap.hooks.module_hooks import ModuleHooks, Scope, hooks_on
from memswap.hooks.report import Report, report

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import nn

    from memswap.engine.engine import Engine

RemovableT = TypeVar("RemovableT", bound="Removable")


class Removable(ABC):
    """What takes itself off at the end of a ``with`` block."""

    def __enter__(self: RemovableT) -> RemovableT:
        return self

    def __exit__(self, *raised: object) -> None:
        self.remove()

    @abstractmethod
    def remove(self) -> None:
        """Take the hooks off the modules. Graphs that are alive can still run backward."""


class Counted:
    """What has engines: statistics and a report.

    Args:
        engines: what saves, by what its modules have in common; a single one has no name.
    """

    def __init__(self, engines: Mapping[str, Engine]) -> None:
        self._engines = dict(engines)
        self._engine = next(iter(self._engines.values()))  # the only one, but for towers

    def _of_what(self) -> str:
        """What this is for, as it is shown behind its name."""
        return ""

    def __repr__(self) -> str:
        return f"<memswap {type(self).__name__}{self._of_what()}: {describe(self._counted())}>"

    def _counted(self) -> Stats:
        return added(engine.stats() for engine in self._engines.values())

    def stats(self) -> Stats:
        """What was done since this began or :meth:`reset_stats`.

        Of several engines the sum, also of their peaks: a bound where they take turns.
        """
        return self._counted()

    def reset_stats(self) -> None:
        """Start counting anew."""
        for engine in self._engines.values():
            engine.reset_stats()

    def report(self) -> Report:
        """The statistics as a text table, bytes in MiB; as the last line of a cell, as HTML.

        Of several engines one after another, each under its name.
        """
        if "" in self._engines:
            made = report(self.stats())
        else:
            made = report({name: engine.stats() for name, engine in self._engines.items()})
        engines = self._engines.values()
        lines = [line for one in engines for line in describe_recipes(one.recipes)]
        lines += [line for one in engines for line in one.describe_pools()]
        return made.below(*dict.fromkeys(lines))

    def line(self) -> str:
        """What was done so far in one line, for a progress bar: ``bar.set_postfix_str(...)``."""
        stats = self.stats()
        return (
            f"memswap: {format_bytes(stats.moved_bytes)} moved, peak "
            f"{format_bytes(stats.peak_resident_bytes)} here and "
            f"{format_bytes(stats.peak_away_bytes)} away, waited {stats.exposed_wait_s:.2f} s"
        )


class Managed(Counted, Removable):
    """Modules under engines: statistics, a report, and the way to end it, also by ``with``."""

    def __init__(self, engines: Mapping[str, Engine]) -> None:
        super().__init__(engines)
        self._hooks = ModuleHooks()

    @abstractmethod
    def _begin(
        self, key: Any, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Scope | None:
        """A module's forward begins: what is to be done in this call, or None."""

    def _add(
        self, modules: Mapping[Any, nn.Module], caller: str, *, in_compiled_code: bool = True
    ) -> None:
        """Put the hooks on modules, by their keys; see `ModuleHooks.add`."""
        check_unmanaged(modules.values(), caller)
        for key, module in modules.items():
            self._hooks.add(module, key, self._begin, in_compiled_code=in_compiled_code)

    def _of_what(self) -> str:
        modules = len(self._hooks)
        return f" of {modules} module(s)" if modules else " of no modules any more"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a memswap {type(self).__name__} cannot be copied or pickled: it belongs to the "
            "modules that it manages. Their copies are not managed; keep it outside of the model."
        )

    def remove(self) -> None:
        """Take the hooks off the modules. Graphs that are alive can still run backward.

        Raises:
            TransferError: backward has met a frame that is not what was encoded (broken memory).
        """
        self._hooks.remove()
        for engine in self._engines.values():
            engine.settle()
        for engine in self._engines.values():
            engine.check_decodes()


def check_unmanaged(modules: Iterable[nn.Module], caller: str) -> None:
    """Raise ValueError if a module has a manager: its numbers would mean nothing beside another."""
    for module in modules:
        for owner, hooks, key in hooks_on(module):
            if isinstance(owner, Managed) and owner._hooks is hooks:
                raise ValueError(
                    f"{caller}: this {type(module).__name__} is managed already, as {key!r} of "
                    f"{owner!r}. Expected modules that are not: call remove() on that one first "
                    "(or use it in a `with` block), or pass other modules"
                )
