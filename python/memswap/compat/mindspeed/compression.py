"""MindSpeed's activation compression by its own names, on memswap's engine.

What a user of ``mindspeed.core.memory.compress`` wrote keeps working::

    ctx = GlobalContext(GlobalContextConfig(filter_funcs=[eligible]))
    key = (uuid, ctx.get_absolute_order(is_first_step))
    ctx.pack_start(key)
    with CompressHook(key, ctx):
        output = layer(hidden)
    output.register_hook(lambda gradient: ctx.unpack_start(key))

Beneath there is one :class:`Engine` per context: nothing is resized in place, and whatever
nobody calls costs time at most. Functions that ``async_funcs`` names are windows
(:mod:`~memswap.compat.mindspeed.async_functions`); a layer that calls none of them is one window as
a whole, as long as it was measured to take. Whoever calls ``plan``, ``pack`` and ``unpack`` around
single operators decides by hand instead. New code says
``memswap.manage(layers, windows=memswap.Windows())``.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch

from memswap._warn import warn
from memswap.compat.mindspeed.async_functions import FUNCTIONS, Call, checked_name
from memswap.compat.mindspeed.layers import (
    Filter,
    LayerActivationManager,
    LayerKey,
    LayerScope,
    SharedBuffers,
    new_engine,
)
from memswap.compat.mindspeed.simulation import SimulationA2, SimulationBase
from memswap.engine.autograd import in_backward
from memswap.engine.hook_scope import pop_hooks, push_hooks
from memswap.hooks.operators import BACKWARD_PRODUCTS
from memswap.windows import parse_layers

if TYPE_CHECKING:
    from memswap._C import Iteration, Span, WindowQueue
    from memswap.engine.handle import Handle
    from memswap.engine.stats import Stats, WindowStats


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
        async_funcs: functions under which tensors are encoded and decoded, wherever the process
            calls them while the context lives: ``"matmul"`` (``torch.matmul``, ``Tensor.matmul``),
            ``"allgather"`` (``torch.distributed._all_gather_base``, ``all_gather_into_tensor``),
            ``"all2all"`` (``torch.distributed.all_to_all_single``).

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
        simulation: what a function takes before it has been measured; an Atlas A2's data sheet
            unless told otherwise.

    Attributes:
        config: as given.
        simulation: as given.
        statistic: taken and not needed: every encode reports its statistics, without waiting.
        share_memorys: always empty: there are no buffers to share.
        layer_activation_managers: by key, as they were seen.
        context_state: which pass a selected layer was last in.

    Raises:
        TypeError: `simulation` is of another kind.
    """

    def __init__(
        self, config: GlobalContextConfig, simulation: SimulationBase | None = None
    ) -> None:
        if simulation is not None and not isinstance(simulation, SimulationBase):
            raise TypeError(
                f"GlobalContext(simulation=...): found {type(simulation).__name__}, expected "
                "SimulationA2(), SimulationA3(), or SimulationBase(hardware)"
            )
        self.config = config
        self.simulation = SimulationA2() if simulation is None else simulation
        self.statistic = False
        self.share_memorys = SharedBuffers()
        self.layer_activation_managers: dict[LayerKey, LayerActivationManager] = {}
        self.context_state = ContextState.FORWARD
        filtering = config.filter_funcs or type(self).filters is not GlobalContext.filters
        self.engine = new_engine([_filter_of(self)] if filtering else [])
        self._order = 0
        self._orders_per_step: int | None = None
        self._iteration: Iteration | None = None
        self._keys: set[LayerKey] = set()  # since the forward began
        self._opener: LayerKey | None = None
        self._running: LayerActivationManager | None = None
        self._warned = False
        for name in config.async_funcs:
            FUNCTIONS.wrap(name, self)

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

    def pop(self, order_layer_uuid: LayerKey, tensor: Handle | torch.Tensor) -> torch.Tensor:
        """The tensor again.

        Args:
            order_layer_uuid: the key of its layer.
            tensor: what :meth:`push` returned. A tensor comes back as it is: whoever kept it
                instead has kept its memory as well, which is told once.

        Raises:
            TypeError: it is neither.
        """
        if isinstance(tensor, torch.Tensor) and not self._warned:
            self._warned = True
            warn(
                "GlobalContext.pop(key, tensor): a tensor that is itself kept until backward keeps "
                "its memory: nothing is resized in place here. Keep what push(key, tensor) "
                "returns (from a pack hook: `return ctx.push(key, tensor)`), and give that to "
                "pop(key, ...), which returns the tensor"
            )
        return self.manager(order_layer_uuid).pop(tensor)

    def pack_start(self, order_layer_uuid: LayerKey) -> None:
        """A layer's forward begins: what waits is encoded under it."""
        manager = self.manager(order_layer_uuid)
        if not torch.is_grad_enabled() or in_backward():
            return  # an evaluation, or a layer that is computed again
        self.context_state = ContextState.FORWARD
        engine = self.engine
        engine.lock.run(self._layer_begins, order_layer_uuid)
        manager.push_start()
        self._running = manager
        if manager.forward_calls.latest:
            return  # of functions that are windows themselves
        seconds = manager.seconds
        engine.open_window(seconds)
        if not seconds:
            self._start_waiting()

    def _layer_begins(self, order_layer_uuid: LayerKey) -> None:
        engine = self.engine
        again = order_layer_uuid == self._opener and len(self._keys) > 1
        if engine.iteration.began_backward or again:
            engine.begin_iteration()
        if engine.iteration is not self._iteration:
            self._iteration, self._opener = engine.iteration, order_layer_uuid
            self._keys.clear()
        self._keys.add(order_layer_uuid)

    def unpack_start(self, order_layer_uuid: LayerKey) -> None:
        """A layer's backward begins: what comes next is decoded under it."""
        self.context_state = ContextState.BACKWARD
        manager = self.manager(order_layer_uuid)
        manager.pop_start()
        self._running = manager
        if not manager.backward_calls.latest:
            self.engine.open_window(manager.seconds * BACKWARD_PRODUCTS)

    @contextlib.contextmanager
    def window(self, call: Call) -> Iterator[None]:
        """A window as long as a call of one of ``async_funcs``, which the caller makes inside."""
        running, engine = self._running, self.engine
        if running is not None:
            (running.backward_calls if in_backward() else running.forward_calls).add()
        seconds, span = None, None
        if not engine.in_window:
            seconds, span = engine.start_span(call.key, call.amount, call.device)
        measured = seconds is not None
        if seconds is None:
            with contextlib.suppress(ValueError):  # the function itself will say what is wrong
                seconds = self.estimate_time(call.name, *call.args, **call.kwargs)
        engine.enter_window(seconds or 0.0)
        try:
            if not measured and not in_backward():
                self._start_waiting()
            yield
        finally:
            engine.leave_window()
            if span is not None:
                engine.lock.run(engine.durations.stop, span)

    def _start_waiting(self) -> None:
        """Nobody has measured what runs now. As there, what was saved before goes under it."""
        if self.engine.windows is not None:
            self.engine.lock.run(self._start_pending, self.engine.windows.queue)

    def _start_pending(self, queue: WindowQueue) -> None:
        queue.start_now(queue.pending)

    def estimate_time(self, fn_name: str, *args: Any, **kwargs: Any) -> float:
        """Seconds of a call of one of ``async_funcs``: ``simulation.time_cost(fn_name, ...)``.

        Args:
            fn_name: of the function.
            *args: what it is called with.
            **kwargs: the same by name.
        """
        return self.simulation.time_cost(fn_name, *args, **kwargs)

    def end_forward(self) -> None:
        """The last layer is done. Without this call, what waits when backward begins stays."""
        self.engine.end_forward()

    def stats(self) -> Stats:
        """What was done so far."""
        return self.engine.stats()

    def window_stats(self) -> WindowStats:
        """What became of the work that waited for windows."""
        return self.engine.window_stats()

    def manager(self, key: LayerKey) -> LayerActivationManager:
        """What manages the tensors of a layer."""
        managers = self.layer_activation_managers
        if key not in managers:
            managers[key] = LayerActivationManager(key, engine=self.engine)
        return managers[key]


class CompressHook(torch.autograd.graph.saved_tensors_hooks):  # type: ignore[misc]
    """A layer's forward, as a context manager: what autograd saves inside is the layer's.

    A subclass may override :meth:`pack_hook` and :meth:`unpack_hook` and call these.

    Args:
        order_layer_uuid: the key that ``ctx.pack_start`` was called with.
        ctx: the context.
    """

    def __init__(self, order_layer_uuid: LayerKey, ctx: GlobalContext) -> None:
        # Not super's, which would store these bound methods and so make a circle.
        self.order_layer_uuid = order_layer_uuid
        self.ctx = ctx
        self._manager = ctx.manager(order_layer_uuid)
        self._entered: list[tuple[LayerScope, Span | None, bool]] = []

    def pack_hook(self, tensor: torch.Tensor) -> Any:
        """What autograd is to hold instead of a tensor."""
        if not self._entered:
            return self._manager.push(tensor)
        handle: Handle = self._entered[-1][0].pack(tensor)
        return handle

    def unpack_hook(self, packed: Any) -> torch.Tensor:
        """The tensor again, from what :meth:`pack_hook` returned."""
        return self.ctx.pop(self.order_layer_uuid, packed)

    def __enter__(self) -> CompressHook:
        span = self._manager.begin_span()
        scope = LayerScope(self._manager)
        scope.enter()
        kind = type(self)
        overridden = scope.pushed and (
            kind.pack_hook is not CompressHook.pack_hook
            or kind.unpack_hook is not CompressHook.unpack_hook
        )
        if overridden:  # in front of the scope's own, which stay where others look for them
            push_hooks(self.pack_hook, self.unpack_hook)
        self._entered.append((scope, span, overridden))
        return self

    def __exit__(self, *raised: object) -> None:
        scope, span, overridden = self._entered.pop()
        if overridden:
            pop_hooks()
        scope.leave()
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


def _filter_of(ctx: GlobalContext) -> Filter:
    """Whether a context accepts a tensor; a function that does not keep it alive."""
    reference = ref(ctx)

    def accepts(tensor: torch.Tensor) -> bool:
        owner = reference()
        return owner is None or owner.filters(tensor)

    return accepts
