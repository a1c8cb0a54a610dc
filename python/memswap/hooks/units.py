"""Units: what one call of a managed module is, and which calls belong to one iteration."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy

from memswap._native import native
from memswap.engine.action import Action
from memswap.engine.autograd import (
    computed_from,
    in_backward,
    nbytes_of,
    next_node_number,
    plain_parts,
    tensors_in,
)
from memswap.engine.hook_scope import HookScope, can_save, current_scope

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import FrameType

    from torch import nn

    from memswap._C import Batch
    from memswap.engine.engine import Engine


def nothing() -> None:
    pass


class UnitCall(HookScope):
    """The scope of one call of a unit; to who listens a range, ``memswap::layers.0``.

    That is torch.profiler, and `torch.cuda.memory._record_memory_history` with annotations.

    Args:
        engine: what saves.
        name: of the unit.
        ended: is called when the call has ended, unless it raised or was interrupted.
        batch: of a group, that saves here; None: no group does.
    """

    __slots__ = ("ended", "range")

    def __init__(
        self, engine: Engine, name: str, ended: Callable[[], object], batch: Batch | None = None
    ) -> None:
        super().__init__(engine, name, batch=batch)
        self.ended = ended
        self.range: torch.profiler.record_function | None = None

    def enter(self, call: FrameType | None = None) -> None:
        if native.observed():
            self.range = torch.profiler.record_function(f"memswap::{self.unit}")
            self.range.__enter__()
        super().enter(call)
        around = self.outer and getattr(self.outer[0], "__self__", None)
        if isinstance(around, CompiledCall) and around.engine is self.engine:
            self.outer = around.outer  # what this one keeps is not offered once more

    def leave(self, output: object = None) -> None:
        super().leave()
        self.ended()
        self._over()

    def abandon(self) -> None:
        super().abandon()
        self._over()

    def _over(self) -> None:
        # Autograd holds this, by its pack hook, for as long as there is anything that was saved
        # here. A module that keeps what it computed would be held by its own graph, where Python's
        # collector does not look.
        self.ended = nothing
        range, self.range = self.range, None
        if range is not None:
            range.__exit__(None, None, None)


class CompiledCall(UnitCall):
    """The scope of one call of a model that torch.compile compiles as a whole.

    See [Note: Compiled as without] in engine/compiled.py.

    [Note: One graph]
    A compiled graph is one node of autograd: it saves when its forward is over, and torch runs all
    of its unpack hooks before its backward begins (pytorch #148222). So whatever moved is back at
    the peak, with its frames beside it where these are on the device, and nothing hides the copies.
    What a policy that names no action would move therefore stays. One that names one is obeyed:
    bytes that are away between forward and backward make room for what runs in between, such as
    another model, or the next microbatch. Under a budget the plan knows when all came back.

    Args:
        engine: what saves.
        ended: is called when the call has ended, unless it raised or was interrupted.
        declines: whether what is saved stays.
    """

    __slots__ = ()

    def __init__(self, engine: Engine, ended: Callable[[], object], declines: bool) -> None:
        super().__init__(engine, "compiled", ended)
        if declines:
            self.action, self.why_kept = Action.KEEP, "compiled as a whole"


class PlainCall:
    """The scope of one call of a unit in an iteration that is as without memswap.

    Args:
        ended: is called when the call has ended, unless it raised or was interrupted.
        left: is given what the call returned.
    """

    __slots__ = ("_ended", "_left")

    def __init__(self, ended: Callable[[], object], left: Callable[[object], object]) -> None:
        self._ended = ended
        self._left = left

    def enter(self, call: FrameType | None) -> None:
        pass

    def leave(self, output: object = None) -> None:
        self._ended()
        self._left(output)

    def abandon(self) -> None:
        pass


class ModelCall:
    """The scope of one call of the model around the units: recipes know what it computes.

    What the first unit saves is often an embedding that the model has looked up before.
    """

    __slots__ = ("_engine", "_recipes")

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._recipes: native.Recipes | None = None

    def enter(self, call: FrameType | None) -> None:
        if self._engine.recipes is not None and self._engine.knows_operators:
            self._recipes = self._engine.recipes
            self._recipes.enter()

    def leave(self, output: object = None) -> None:
        recipes, self._recipes = self._recipes, None
        if recipes is not None:
            recipes.leave()

    def abandon(self) -> None:
        self.leave()


class Around:
    """Parameters and buffers that models have beside their units.

    [Note: Weights of the model around]
    A recipe may read them for as long as their memory is the one that they had when the units were
    given. What is gathered for the model's forward (FSDP2, ZeRO) has other memory by the time that
    the first unit is called, and may be gone when the recipe runs.

    Args:
        models: around the units.
        units: whose own parameters and buffers are looked at when they are called.
    """

    def __init__(self, models: Iterable[nn.Module], units: Iterable[nn.Module]) -> None:
        inside = {module for unit in units for module in unit.modules()}
        self._modules = tuple(
            dict.fromkeys(
                module for model in models for module in model.modules() if module not in inside
            )
        )
        self._storages = [StorageWeakRef(part.untyped_storage()) for part in self._with_memory()]

    def _with_memory(self) -> list[torch.Tensor]:
        """All of them, as they are now, but for those without memory of their own.

        A parameter of a lazy module has none until that was called, which may be behind the units.
        """
        return [
            part
            for part in persistent_tensors(self._modules, recurse=False)
            if not is_lazy(part) and part.layout is torch.strided
        ]

    def tensors(self) -> list[torch.Tensor]:
        """Those whose memory is the one that they had."""
        if not self._storages:
            return []
        known = {one.cdata for one in self._storages if not one.expired()}
        return [part for part in self._with_memory() if part.untyped_storage()._cdata in known]


class Iterations:
    """Finds out, from the calls of units, where an iteration of their engine begins.

    Args:
        engine: that saves what the units save.
        modules: whose parameters and buffers are no activations.
        models: around them.
        begins: is called where a forward begins, before the engine's iteration does.
    """

    def __init__(
        self,
        engine: Engine,
        modules: Iterable[nn.Module],
        models: Iterable[nn.Module] = (),
        begins: Callable[[], object] = nothing,
    ) -> None:
        self._engine = engine
        self._begins = begins
        self._modules = tuple(modules)
        self._around = Around(models, self._modules)
        #: Whether nothing is saved in this iteration, so that its backward is not seen.
        self.plain = False
        self._called: dict[str, None] = {}  # the units of this iteration, by their first calls
        self._first_node = 0  # of autograd: when the first one was called
        self._end_node = 0  # the next one, when the last call ended

    def begin(self) -> None:
        """A forward begins."""
        self._engine.lock.run(self._begin)

    def _begin(self) -> None:
        self._begins()
        self._engine.begin_iteration()
        self.plain = False
        self._called.clear()
        self._first_node = self._end_node = 0

    def unit_called(self, name: str, inputs: object, outermost: Callable[[], bool]) -> None:
        """A unit is called in a forward that autograd records: it may begin an iteration.

        Args:
            name: of the unit.
            inputs: what it is called with.
            outermost: whether this call is inside no other unit's, nor inside the model's.
        """
        self._engine.lock.run(self._unit_called, name, inputs, outermost)

    def _unit_called(self, name: str, inputs: object, outermost: Callable[[], bool]) -> None:
        engine = self._engine
        several = len(self._called) > (0 if self.plain else 1)
        repeats = several and name == next(iter(self._called))
        if engine.iteration.began_backward or (
            repeats and outermost() and not self._lead_to(inputs)
        ):
            self._begin()
        around = current_scope()
        if not self._called and not (isinstance(around, CompiledCall) and around.engine is engine):
            lasting = persistent_tensors(self._modules) + self._around.tensors()
            engine.set_persistent(lasting)
            self._first_node = next_node_number()
        self._called[name] = None

    def unit_left(self) -> None:
        """The call of a unit has ended."""
        self._end_node = next_node_number()

    def _lead_to(self, inputs: object) -> bool:
        """Whether some inputs were computed from what the units of this iteration have returned.

        Layers that are called in a loop, because they are shared, serve one backward: it is no
        other forward that begins there.
        """
        return computed_from(tensors_in(inputs), self._first_node, self._end_node)


def records() -> bool:
    """Whether a forward that begins now is one that autograd records and memswap may save for."""
    return torch.is_grad_enabled() and not in_backward() and can_save()


def persistent_tensors(modules: Iterable[nn.Module], recurse: bool = True) -> list[torch.Tensor]:
    """Parameters and buffers as they are now (sharding may have replaced them), by their parts.

    Each once, as modules have registered them. A class may yield others by a `parameters` of its
    own, and is not asked: forwards call this, and such a method may raise (torch's RemoteModule) or
    do more than answer (a sharded module of memswap's lays its shards out). Nothing is lost by it:
    a leaf that requires grad and an `nn.Parameter` stay whoever has them (`pack_plain` in
    csrc/bind/hooks.cpp), and any other tensor that a module holds stays as soon as it was seen that
    sending it has freed nothing.

    Args:
        modules: whose they are.
        recurse: with those of modules inside these.
    """
    found: dict[int, torch.Tensor] = {}
    seen: set[nn.Module] = set()
    waiting: list[nn.Module | None] = list(modules)
    while waiting:
        module = waiting.pop()
        if module is None or module in seen:
            continue
        seen.add(module)
        for tensors in (module._parameters, module._buffers):
            for tensor in tensors.values():
                if tensor is not None:
                    found[id(tensor)] = tensor
        if recurse:
            waiting += module._modules.values()
    return [part for tensor in found.values() for part in plain_parts(tensor)]


def bytes_of(modules: Iterable[nn.Module]) -> int:
    """Bytes of the parameters and buffers of modules, as they are now."""
    return sum(nbytes_of(one) for one in persistent_tensors(modules) if not is_lazy(one))
