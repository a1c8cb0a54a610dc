"""MindSpeed's activation compression by its own names, on memswap's engine.

What a user of ``mindspeed.core.memory.compress`` wrote keeps working::

    ctx = GlobalContext(GlobalContextConfig(filter_funcs=[eligible]))
    key = (uuid, ctx.get_absolute_order(is_first_step))
    ctx.pack_start(key)
    with CompressHook(key, ctx):
        output = layer(hidden)
    output.register_hook(lambda gradient: ctx.unpack_start(key))

Beneath there is one :class:`WindowedSaver` per context: nothing is resized in place, no function of
torch is replaced, and whatever nobody calls costs time at most. A layer is one window, as long as
it was measured to take; whoever calls ``plan``, ``pack`` and ``unpack`` around single operators
decides by hand instead. New code says ``memswap.manage(layers, windows=memswap.Windows())``.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from memswap.compat.mindspeed.layers import (
    Filter,
    LayerActivationManager,
    LayerKey,
    LayerVisit,
    new_saver,
)
from memswap.engine.autograd import in_backward
from memswap.operators import BACKWARD_PRODUCTS
from memswap.planning.cost_model import A2
from memswap.windows import parse_layers

if TYPE_CHECKING:
    from types import TracebackType

    from memswap.engine.durations import Span
    from memswap.engine.handle import Handle
    from memswap.engine.stats import Stats
    from memswap.engine.timeline import Passage
    from memswap.engine.visit import Visit
    from memswap.engine.windows import WindowStats
    from memswap.planning.cost_model import Hardware

#: Operators whose time can be estimated.
ASYNC_FUNCS = ("matmul", "allgather", "all2all")


class ContextState(enum.Enum):
    """Which pass is running."""

    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(slots=True)
class GlobalContextConfig:
    """What a context goes by.

    Args:
        moe_average_token_nums, num_experts: taken and not needed: frames fit what each step brings.
        filter_funcs: a tensor is compressed if all of them return True.
        async_funcs: operators that the caller puts windows around: ``"matmul"``, ``"allgather"``,
            ``"all2all"``. None is replaced.

    Raises:
        TypeError: a filter cannot be called.
        ValueError: an unknown name in ``async_funcs``.
    """

    moe_average_token_nums: int = 0
    num_experts: int = 0
    filter_funcs: list[Filter] = field(default_factory=list)
    async_funcs: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        for function in self.filter_funcs:
            if not callable(function):
                raise TypeError(f"filter_funcs: found {function!r}, expected fn(tensor) -> bool")
        for name in self.async_funcs:
            checked_name(name)


class GlobalContext:
    """The state of one model's compression. Not process-wide: each has an engine of its own.

    Args:
        config: see :class:`GlobalContextConfig`.
        simulation: the hardware behind :meth:`estimate_time`
            (:mod:`memswap.planning.cost_model`); an Atlas A2 unless told otherwise.

    Attributes:
        config, simulation: as given.
        statistic: taken and not needed: every encode reports its statistics, without waiting.
        share_memorys: always empty: there are no buffers to share.
        layer_activation_managers: by key, as they were seen.
    """

    def __init__(self, config: GlobalContextConfig, simulation: Hardware = A2) -> None:
        self.config = config
        self.simulation = simulation
        self.statistic = False
        self.share_memorys: list[object] = []
        self.layer_activation_managers: dict[LayerKey, LayerActivationManager] = {}
        self.state = ContextState.FORWARD
        self.saver = new_saver(config.filter_funcs)
        self._order = 0
        self._orders_per_step: int | None = None
        self._passage: Passage | None = None
        self._keys: set[LayerKey] = set()  # since the forward began
        self._opener: LayerKey | None = None

    def get_absolute_order(self, is_first_step: bool) -> int:
        """The number of a layer's call within its step, counted in the first one.

        A step that has more or fewer calls gets other numbers: tensors are then known by other
        keys, which costs some bytes for a while.
        """
        if is_first_step:
            self._order += 1
            return self._order
        if self._orders_per_step is None:
            self._orders_per_step, self._order = max(self._order, 1), 0
        self._order = self._order % self._orders_per_step + 1
        return self._order

    def filters(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is to be compressed."""
        return all(function(tensor) for function in self.config.filter_funcs)

    def push(self, order_layer_uuid: LayerKey, tensor: torch.Tensor) -> Handle:
        """Save a tensor for a layer's backward. :meth:`pop` takes what this returns."""
        return self.manager(order_layer_uuid).push(tensor)

    def pop(self, order_layer_uuid: LayerKey, packed: Handle) -> torch.Tensor:
        """The tensor again."""
        return self.manager(order_layer_uuid).pop(packed)

    def pack_start(self, order_layer_uuid: LayerKey) -> None:
        """A layer's forward begins: what waits is encoded under it."""
        manager = self.manager(order_layer_uuid)
        if not torch.is_grad_enabled() or in_backward():
            return  # an evaluation, or a layer that is computed again
        self.state = ContextState.FORWARD
        saver = self.saver
        with saver.lock:
            again = order_layer_uuid == self._opener and len(self._keys) > 1
            if saver.passage.began_backward or again:
                saver.begin_passage()
            if saver.passage is not self._passage:
                self._passage, self._opener = saver.passage, order_layer_uuid
                self._keys.clear()
            self._keys.add(order_layer_uuid)
        manager.push_start()
        seconds = manager.seconds
        saver.open_window(seconds)
        if not seconds:  # not measured yet: as there, what the layers before saved goes under this
            with saver.lock:
                saver.queue.start_now([one.entry for one in saver.queue.pending], saver)

    def unpack_start(self, order_layer_uuid: LayerKey) -> None:
        """A layer's backward begins: what comes next is decoded under it."""
        self.state = ContextState.BACKWARD
        manager = self.manager(order_layer_uuid)
        manager.pop_start()
        self.saver.open_window(manager.seconds * BACKWARD_PRODUCTS)

    def estimate_time(self, fn_name: str, *args: Any, **kwargs: Any) -> float:
        """Seconds of an operator of :data:`ASYNC_FUNCS` with these arguments, by data sheet.

        ``matmul(input, other)``, ``_all_gather_base(output, input, group)`` or
        ``all_to_all_single(output, input, ..., group)``, by position or by keyword.

        Raises:
            ValueError: an unknown name, fewer than two tensors, shapes that cannot be multiplied,
                or a collective whose rates are not known.
        """
        checked_name(fn_name)
        tensors = [one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)]
        if len(tensors) < 2:
            raise ValueError(
                f"estimate_time({fn_name!r}): found {len(tensors)} tensor(s) among the arguments, "
                "expected the operator's two"
            )
        hardware = self.simulation
        if fn_name == "matmul":
            left, right = (kwargs.get("input", tensors[0]), kwargs.get("other", tensors[-1]))
            return hardware.matmul_s(left.shape, right.shape, left.dtype)
        ranks = group_size(*args, *kwargs.values())
        if fn_name == "allgather":
            return hardware.all_gather_s(max(tensor.nbytes for tensor in tensors), ranks)
        return hardware.all_to_all_s(kwargs.get("input", tensors[-1]).nbytes, ranks)

    def end_forward(self) -> None:
        """The last layer is done. Without this call, what waits when backward begins stays."""
        self.saver.end_forward()

    def stats(self) -> Stats:
        """What was done so far."""
        return self.saver.stats()

    def window_stats(self) -> WindowStats:
        """What became of the work that waited for windows."""
        return self.saver.window_stats()

    def manager(self, key: LayerKey) -> LayerActivationManager:
        """What manages the tensors of a layer."""
        managers = self.layer_activation_managers
        if key not in managers:
            managers[key] = LayerActivationManager(key, saver=self.saver)
        return managers[key]


class CompressHook:
    """A layer's forward, as a context manager: what autograd saves inside is the layer's.

    Args:
        order_layer_uuid: the key that ``ctx.pack_start`` was called with.
        ctx: the context.
    """

    def __init__(self, order_layer_uuid: LayerKey, ctx: GlobalContext) -> None:
        self._manager = ctx.manager(order_layer_uuid)
        self._entered: list[tuple[Visit, Span | None]] = []

    def __enter__(self) -> CompressHook:
        span = self._manager.begin_span()
        visit = LayerVisit(self._manager)
        visit.enter()
        self._entered.append((visit, span))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        visit, span = self._entered.pop()
        visit.leave()
        self._manager.end_span(span)


def layer_numbers(spec: str, num_layers: int) -> tuple[int, ...]:
    """The layers of ``--compress-activation``: numbers from 1, ``"0"`` alone for all of them.

    Raises:
        ValueError, TypeError: see :func:`memswap.select_layers`.
        IndexError: there is no such layer.
    """
    ranges = parse_layers(spec)
    if ranges == [(0, 0)]:
        return tuple(range(1, num_layers + 1))
    for first, last in ranges:
        if first < 1 or last > num_layers:
            raise IndexError(
                f"layers={spec!r}: found {first}-{last}, expected numbers from 1 to {num_layers}, "
                "or '0' alone for all"
            )
    return tuple(sorted({n for first, last in ranges for n in range(first, last + 1)}))


def checked_name(name: str) -> None:
    """Raises unless it is the name of an operator of :data:`ASYNC_FUNCS`."""
    if name not in ASYNC_FUNCS:
        raise ValueError(f"async_funcs: found {name!r}, expected one of {', '.join(ASYNC_FUNCS)}")


def group_size(*arguments: object) -> int:
    """Ranks of the process group among some arguments; without one, of the default group."""
    if not torch.distributed.is_available():
        return 1
    for argument in arguments:
        if isinstance(argument, torch.distributed.ProcessGroup):
            return int(argument.size())
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
