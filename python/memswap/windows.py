"""Windows: encodes and decodes run beside matrix products and collectives (docs/windows.md)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn

from memswap.engine.autograd import top_hooks
from memswap.engine.engine import Engine, Schedule
from memswap.engine.hook_scope import HookScope
from memswap.engine.units import parse_bytes

if TYPE_CHECKING:
    from memswap._C import Span
    from memswap.engine.transfers import Pool
    from memswap.planning.policy import Policy

_RANGE = re.compile(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?")

Shape = Sequence[int]
Cost = Callable[[str, tuple[Shape, ...]], float]


@dataclass(frozen=True, slots=True)
class Windows:
    """Under which operators encodes and decodes run, and what becomes of those that fit nowhere.

    Args:
        under: modules besides the managed ones whose operators open windows (layers whose own
            activations stay, for example), or None.
        operators: module types that open windows besides those that have a weight matrix of their
            own (``nn.Linear`` and its like): attention that is a function of q, k and v.
        seconds: ``seconds("matmul", ((..., k), (k, n)))``: what an operator takes, for as long as
            it has not been measured. None: until then nothing is hidden under it.
        leftovers: what becomes of encodes that still wait at the end of a forward. ``"start"``:
            they start then, as loss and logits come next, and with them the peak of memory.
            ``"keep"``: they go on waiting, for windows of the next microbatch, and what none took
            when its backward begins stays as it is.
        max_pending_bytes: bytes that may wait; beyond that the oldest encodes start without a
            window. An int, a size such as ``"256MiB"``, or ``"auto"``: an eighth of what a forward
            encodes, and at least 64 MiB.

    Raises:
        TypeError: an element of ``under`` is no module, of ``operators`` no type of module, or
            ``seconds`` cannot be called.
        ValueError: ``leftovers`` or ``max_pending_bytes`` is none of the above.
    """

    under: nn.Module | Sequence[nn.Module] | None = None
    operators: tuple[type[nn.Module], ...] = ()
    seconds: Cost | None = None
    leftovers: Literal["start", "keep"] = "start"
    max_pending_bytes: int | str = "auto"

    def __post_init__(self) -> None:
        several = self.under is None or isinstance(self.under, (nn.Module, Iterable))
        for module in self.modules_under() if several else (self.under,):
            if not isinstance(module, nn.Module):
                raise TypeError(
                    f"Windows(under=...): found {type(module).__name__}, expected nn.Modules"
                )
        if not isinstance(self.operators, tuple) or not all(
            isinstance(kind, type) and issubclass(kind, nn.Module) for kind in self.operators
        ):
            raise TypeError(
                f"Windows(operators={self.operators!r}): expected a tuple of module types"
            )
        if self.seconds is not None and not callable(self.seconds):
            raise TypeError(
                f"Windows(seconds={self.seconds!r}): expected seconds(op, shapes) -> float"
            )
        if self.leftovers not in ("start", "keep"):
            raise ValueError(f"Windows(leftovers={self.leftovers!r}): expected 'start' or 'keep'")
        self.pending_bound()

    def modules_under(self) -> tuple[nn.Module, ...]:
        """The modules of ``under``; none where nothing was named."""
        if self.under is None:
            return ()
        return (self.under,) if isinstance(self.under, nn.Module) else tuple(self.under)

    def pending_bound(self) -> int | None:
        """``max_pending_bytes`` in bytes; None: automatic."""
        auto = self.max_pending_bytes == "auto"
        if auto:
            return None
        return parse_bytes(self.max_pending_bytes, "Windows(max_pending_bytes=...)", auto=True)

    def engine(self, policy: Policy, pool: Pool | None, prefetch_bytes: int | None) -> Engine:
        """A new engine that goes by these options.

        Args:
            policy: who decides which saved tensors move.
            pool: where they go; None: a default pool of each device.
            prefetch_bytes: how much is brought back ahead of backward; None: by what is saved.
        """
        engine = Engine(policy, pool, prefetch_bytes, Schedule.WINDOWS)
        windows = engine.windows
        assert windows is not None  # of that schedule
        windows.queue.max_pending_bytes = self.pending_bound()
        windows.queue.leftovers_start = self.leftovers == "start"
        return engine


class Window:
    """A stretch of time that is good for encoding and decoding; a context manager.

    Made by :func:`window` or :meth:`Manager.window`. It may be entered again, also in backward.

    Args:
        engine: whose encodes and decodes run in it; None: it does nothing.
        seconds: how long the device will be busy; None: measured in the first steps.
        name: under which it is measured.
    """

    def __init__(self, engine: Engine | None, seconds: float | None, name: str) -> None:
        if seconds is None and not name:
            raise ValueError(
                "window(): expected seconds=..., or name=... under which they are measured"
            )
        if seconds is not None and not isinstance(seconds, (int, float)):
            raise TypeError(
                f"window(seconds={seconds!r}): found {type(seconds).__name__}, expected seconds "
                "such as 250e-6"
            )
        if seconds is not None and not (isfinite(seconds) and seconds >= 0):
            raise ValueError(f"window(seconds={seconds!r}): expected 0 or more seconds")
        self._engine = engine
        self._seconds = seconds
        self._key = f"window {name}"
        self._spans: list[Span | None] = []

    def __enter__(self) -> Window:
        engine = self._engine
        if engine is None or torch.compiler.is_compiling():
            return self
        seconds = self._seconds
        if seconds is None:
            device = torch.accelerator.current_accelerator(check_available=True)
            if device is not None:
                seconds, span = engine.start_span(self._key, 1, device)
                self._spans.append(span)
        engine.enter_window(seconds or 0.0)
        return self

    def __exit__(self, *raised: object) -> None:
        engine = self._engine
        if engine is None or torch.compiler.is_compiling():
            return
        span = self._spans.pop() if self._spans else None
        if span is not None:
            engine.lock.run(engine.durations.stop, span)
        engine.leave_window()


def window(seconds: float | None = None, *, name: str = "") -> Window:
    """A window around a collective or a kernel of one's own, in a managed forward.

    ::

        with memswap.window(seconds=250e-6):
            torch.distributed.all_to_all_single(out, x)

    What waits and takes no longer is encoded or decoded meanwhile. It belongs to the innermost
    ``manage(..., windows=...)`` whose layer is running; outside of them it does nothing. One made
    in forward may be entered again in backward (``ctx.window = memswap.window(...)``).

    Args:
        seconds: how long the device will be busy with it. None: measured in the first steps.
        name: under which it is measured; windows of one name take the same time.

    Raises:
        ValueError: neither seconds nor a name, or seconds that are negative or not finite.
    """
    compiling = torch.compiler.is_compiling()  # a compiled layer is a window as a whole
    return Window(None if compiling else _innermost(), seconds, name)


def _innermost() -> Engine | None:
    """The engine with windows whose hooks are the innermost of this thread, if there is one."""
    hooks = top_hooks(True)
    while hooks is not None:
        scope = getattr(hooks[0], "__self__", None)
        if not isinstance(scope, HookScope):
            return None
        if scope.engine.windows is not None:
            return scope.engine
        hooks = scope.outer
    return None


# --- layers ---------------------------------------------------------------------------------------


def parse_layers(spec: str) -> list[tuple[int, int]]:
    """Ranges ``(first, last)`` of a text such as ``"0"`` or ``"1-4,7"``, as written.

    Raises:
        TypeError: it is no text.
        ValueError: it is empty, an element is no number or range, or a range runs backwards.
    """
    if not isinstance(spec, str):
        raise TypeError(f"layers: found {type(spec).__name__}, expected a text such as '1-4,7'")
    ranges = []
    for element in spec.split(","):
        match = _RANGE.fullmatch(element)
        if match is None:
            raise ValueError(
                f"layers={spec!r}: found {element.strip()!r}, expected numbers and ranges such as "
                "'0' or '1-4,7'"
            )
        first = int(match[1])
        last = first if match[2] is None else int(match[2])
        if last < first:
            raise ValueError(
                f"layers={spec!r}: {first}-{last} runs backwards; write {last}-{first}"
            )
        ranges.append((first, last))
    return ranges


def select_layers(
    layers: Sequence[nn.Module] | Mapping[str, nn.Module], spec: str
) -> dict[str, nn.Module]:
    """Some of a model's layers by number, for :func:`manage`.

    ``manage(select_layers(model.layers, "1-4,7"))`` manages five of them, under the names that
    they have among all: numbers count from 0, as indices do, and ranges include their ends.

    Raises:
        TypeError: these are no layers, or see :func:`parse_layers`.
        ValueError: see :func:`parse_layers`.
        IndexError: there are fewer layers.
    """
    if not isinstance(layers, Iterable):
        raise TypeError(
            f"select_layers(): found {type(layers).__name__}, expected layers, such as model.layers"
        )
    named = dict(layers) if isinstance(layers, Mapping) else dict(numbered(layers))
    names = list(named)
    chosen: dict[str, nn.Module] = {}
    for first, last in parse_layers(spec):
        if last >= len(names):
            raise IndexError(
                f"layers={spec!r}: there is no layer {last}; the {len(names)} layers are numbered "
                f"0 to {len(names) - 1}"
            )
        for name in names[first : last + 1]:
            chosen[name] = named[name]
    return chosen


def numbered(layers: Iterable[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    if isinstance(layers, nn.Sequential | nn.ModuleList):
        yield from layers.named_children()
    else:
        for number, layer in enumerate(layers):
            yield str(number), layer


def check_windows(windows: Windows | None) -> None:
    """Raise TypeError for what are no windows."""
    if windows is not None and not isinstance(windows, Windows):
        raise TypeError(
            f"manage(windows={windows!r}): found {type(windows).__name__}, expected "
            "memswap.Windows(...) or None"
        )
