"""Managed: what `manage` and its kin return."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from memswap.module_hooks import ModuleHooks, Scope, hooks_on

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from types import TracebackType

    from torch import nn

    from memswap.engine.saver import Saver
    from memswap.engine.stats import Stats

RemovableT = TypeVar("RemovableT", bound="Removable")


class Removable(ABC):
    """What takes itself off at the end of a ``with`` block."""

    def __enter__(self: RemovableT) -> RemovableT:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.remove()

    @abstractmethod
    def remove(self) -> None:
        """Take the hooks off the modules. Graphs that are alive can still run backward."""


class Managed(Removable):
    """Modules under a saver: statistics, a report, and the way to end it, also by ``with``."""

    def __init__(self, saver: Saver) -> None:
        self._saver = saver
        self._hooks = ModuleHooks()

    @abstractmethod
    def _begin(
        self, key: Any, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Scope | None:
        """A module's forward begins: what is to be done in this call, or None."""

    def _add(self, modules: Mapping[Any, nn.Module], caller: str) -> None:
        """Put the hooks on modules, by their keys."""
        check_unmanaged(modules.values(), caller)
        for key, module in modules.items():
            self._hooks.add(module, key, self._begin)

    def __repr__(self) -> str:
        modules = len(self._hooks)
        where = f"{modules} module(s)" if modules else "no modules any more"
        return f"<memswap {type(self).__name__} of {where}: {self._saver.ledger}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a memswap {type(self).__name__} cannot be copied or pickled: it belongs to the "
            "modules that it manages. Their copies are not managed; keep it outside of the model."
        )

    def stats(self) -> Stats:
        """What was done since this began or :meth:`reset_stats`."""
        return self._saver.stats()

    def reset_stats(self) -> None:
        """Start counting anew."""
        self._saver.reset_stats()

    def report(self) -> str:
        """The statistics as a text table, bytes in MiB."""
        return report(self.stats())

    def remove(self) -> None:
        """Take the hooks off the modules. Graphs that are alive can still run backward.

        Raises:
            TransferError: backward has met a frame that is not what was encoded (broken memory).
        """
        self._hooks.remove()
        self._saver.settle()
        self._saver.check_decodes()


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


def report(stats: Stats) -> str:
    """Statistics as a text table, bytes in MiB."""
    rows = [
        ("offered by autograd", stats.offered_tensors, stats.offered_bytes),
        ("same storage again", stats.deduplicated_tensors, stats.deduplicated_bytes),
        *((f"kept: {reason}", count.tensors, count.bytes) for reason, count in stats.kept.items()),
        ("moved", stats.moved_storages, stats.moved_bytes),
        ("  of these, encoded", stats.encoded_storages, stats.encoded_bytes),
        ("  their frames", "", stats.frame_bytes),
        *(
            [
                ("  of these, as recipes", stats.recipe_storages, stats.recipe_bytes),
                ("  operators run again", stats.recipe_runs, ""),
            ]
            if stats.recipe_storages
            else []
        ),
        ("really freed", "", stats.freed_bytes),
        ("returned", stats.returned_storages, stats.returned_bytes),
        ("  of these, not ahead of backward", stats.stalls, ""),
        ("peak resident", "", stats.peak_resident_bytes),
        ("peak away", "", stats.peak_away_bytes),
    ]
    if not stats.offered_tensors:
        return (
            "nothing yet: none of these modules has run with gradients enabled, unless in code "
            "that torch.compile had compiled before: it leaves out hooks that are added later"
        )
    lines = [f"{'':<42}{'tensors':>10}{'MiB':>12}"]
    for label, tensors, nbytes in rows:
        mebibytes = f"{nbytes / 2**20:.1f}" if isinstance(nbytes, int) else ""
        lines.append(f"{label:<42}{tensors:>10}{mebibytes:>12}")
    lines.append(f"{'host blocked, seconds':<42}{stats.exposed_wait_s:>22.3f}")
    return "\n".join(lines)
